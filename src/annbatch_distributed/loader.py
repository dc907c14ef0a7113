"""The StatefulLoader: annbatch's Loader that knows how far its consumer is.

A sampler can't know what was trained on: a loader takes one load request and yields many batches of it. Here the
batches are counted as they are yielded, and the marks of load requests are kept as they are taken, so that a batch can
say which of its rows are repeats.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from annbatch import Loader
from annbatch.abc import Sampler

from annbatch_distributed.callers import check_not_dispatched
from annbatch_distributed.progress import brief
from annbatch_distributed.requests import batches_of
from annbatch_distributed.sampler import DistributedSampler
from annbatch_distributed.tally import Tally
from annbatch_distributed.workers import current

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    import numpy.typing as npt
    from annbatch.types import LoadRequest

    from annbatch_distributed.progress import Begun
    from annbatch_distributed.ranks.exchange import Gather


class StatefulLoader(Loader[Any, Any]):
    """An annbatch Loader that can be saved in the middle of an epoch, and go on there.

    It takes the arguments of :class:`annbatch.Loader`. Its ``batch_sampler`` must be a :class:`DistributedSampler`.

    Under ``remainder="pad"``, a batch has the key ``"repeated"``: for each of its rows, whether some rank reads it for
    the second time in this epoch, as a boolean array.

    ``len()`` is the number of batches of the whole epoch, also while one is resumed, as Lightning and torch expect it;
    those that are left are ``loader.sampler.n_batches(loader.n_obs)``.

    Raises
    ------
    TypeError
        If ``batch_sampler`` is not a :class:`DistributedSampler`.

    Examples
    --------
    >>> import anndata as ad
    >>> import numpy as np
    >>> from annbatch.samplers import RandomSampler
    >>> from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
    >>> def make_loader():
    ...     sampler = RandomSampler(chunk_size=4, preload_nchunks=2, batch_size=4)
    ...     distributed = DistributedSampler(sampler, dist_info=Rank(0, 2), seed=0)
    ...     loader = StatefulLoader(batch_sampler=distributed, return_index=True, preload_to_gpu=False)
    ...     return loader.add_adata(ad.AnnData(np.arange(48.0).reshape(48, 1)))
    >>> loader = make_loader()
    >>> whole = [batch["index"].tolist() for batch in loader]
    >>> loader.set_epoch(0)
    >>> batches = iter(loader)
    >>> trained_on = [next(batches)["index"].tolist() for _ in range(3)]
    >>> state = loader.state_dict()
    >>> after_a_restart = make_loader()
    >>> after_a_restart.load_state_dict(state)
    >>> trained_on + [batch["index"].tolist() for batch in after_a_restart] == whole
    True
    """

    def __init__(self, *, batch_sampler: DistributedSampler, **kwargs: Any) -> None:  # noqa: ANN401 annbatch's own
        if not isinstance(batch_sampler, DistributedSampler):
            msg = (
                f"StatefulLoader needs a DistributedSampler as its batch_sampler, got {batch_sampler!r}. In a single "
                "process, wrap it: DistributedSampler(sampler, dist_info=Rank(0, 1), seed=...)."
            )
            raise TypeError(msg)
        self._recorder = _Recorder(batch_sampler)
        super().__init__(batch_sampler=self._recorder, **kwargs)
        self._sampler = batch_sampler
        self._counted: tuple[Begun | None, int] = None, 0
        # what was yielded of which pass
        self._read: tuple[Begun | None, Tally] = None, Tally()

    @property
    def batch_sampler(self) -> DistributedSampler:
        """The sampler."""
        return self._sampler

    @property
    def sampler(self) -> DistributedSampler:
        """The sampler, where frameworks look for something whose ``set_epoch`` they can call."""
        return self._sampler

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next pass belongs to, on every rank: see :meth:`DistributedSampler.set_epoch`.

        Raises
        ------
        RuntimeError
            If accelerate calls it, for a ``DataLoader`` that it has prepared and would share out once more.
        """
        check_not_dispatched()
        self._sampler.set_epoch(epoch)

    @property
    def next_epoch(self) -> int:
        """Which epoch to go on with: see :attr:`DistributedSampler.next_epoch`."""
        return self._sampler.next_epoch

    def __len__(self) -> int:
        """Return how many batches the epoch has on this rank, those included that were done before a resume."""
        return self._sampler.batches_done + self._sampler.n_batches(self.n_obs)

    def __iter__(self) -> Iterator[Any]:
        """Return the batches of a pass, which begins with the first: what is left of a resumed epoch, or else all.

        Returns
        -------
        An iterator of batches as :class:`annbatch.Loader` yields them, with the key ``"repeated"`` under
        ``remainder="pad"``.
        """
        if current() is not None:  # whoever keeps the states of workers asks for one before the first batch
            self._counted = None, 0
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        begun: Begun | None = None
        recorded: deque[_Recorded] = deque()
        read = Tally()
        for n_yielded, batch in enumerate(super().__iter__(), start=1):
            if begun is None:  # it has just begun its pass
                begun, recorded = self._sampler.begun, self._recorder.recorded
                assert begun is not None
                self._read = begun, read
            asked, repeats = recorded.popleft()
            index: npt.NDArray[Any] | None = batch["index"]
            read.add(asked if index is None else index)
            if n_yielded == begun.n_due:
                self._sampler.finish(begun)  # a consumer who knows the number doesn't come to ask for more
            self._counted = begun, n_yielded  # before it is yielded: whoever saves a state has been given this batch
            yield batch if repeats is None else {**batch, "repeated": repeats}
        if begun is None:  # there was nothing left
            self._counted = self._sampler.begun, 0

    def state_dict(self, *, batches_done: int | None = None) -> dict[str, Any]:
        """Return how far the epoch is: see :meth:`DistributedSampler.state_dict`.

        Parameters
        ----------
        batches_done
            How many batches of this epoch every rank has done. None takes the number that was yielded, which is known
            where the loader itself is iterated over, and not where the workers of a ``DataLoader`` do so.

        Raises
        ------
        RuntimeError
            If it isn't known.
        """
        if batches_done is not None:
            return self._sampler.state_dict(batches_done=batches_done)
        if self._sampler.is_with_workers:
            msg = (
                "The workers of a DataLoader take the batches, so that it isn't known here how many were trained on. "
                "Pass it as state_dict(batches_done=...), or use torchdata's StatefulDataLoader, which knows."
            )
            raise RuntimeError(msg)
        begun, n_yielded = self._counted
        if begun is None or begun is not self._sampler.begun:  # something was set, loaded or begun since
            begun, n_yielded = None, 0
        return self._sampler.state_after(begun, n_yielded)

    def check_ranks_agree(self, *, timeout: float = 300.0, gather: Gather | None = None) -> None:
        """Check that all ranks of the job have the same configuration, and as many rows of as many data sets in order.

        Every process of the job calls it, best of all once before training: see
        :meth:`DistributedSampler.check_ranks_agree`, which knows the number of rows only.

        Parameters
        ----------
        timeout, gather
            As for :meth:`DistributedSampler.check_ranks_agree`.

        Raises
        ------
        ValueError, TimeoutError, RuntimeError
            As for :meth:`DistributedSampler.check_ranks_agree`.
        """
        shapes = shapes_of(self)
        rows = brief(", ".join(str(n_rows) for n_rows, _ in shapes))
        more = {
            "data sets": len(shapes),
            "rows of each data set": rows or "none",
            "n_var": shapes[0][1] if shapes else 0,
        }
        self._sampler.check_agreement(self.n_obs, more, timeout=timeout, gather=gather)

    def check_epoch_read(
        self, read: Tally | None = None, *, timeout: float = 300.0, gather: Gather | None = None
    ) -> str:
        """Check that all ranks together have read in the last pass what was planned.

        Every process of the job calls it, at the end of an epoch and before ``set_epoch``: see
        :meth:`DistributedSampler.check_epoch_read`.

        Parameters
        ----------
        read
            The rows of each batch that this process was given in the pass. None takes those of the batches that the
            loader has yielded: their ``"index"``, or without ``return_index=True`` what was asked of annbatch. They are
            known where it is iterated over, and not where the workers of a ``DataLoader`` do so.
        timeout, gather
            As for :meth:`DistributedSampler.check_ranks_agree`.

        Raises
        ------
        RuntimeError
            If the rows aren't known.

        Examples
        --------
        >>> import anndata as ad
        >>> import numpy as np
        >>> from annbatch.samplers import RandomSampler
        >>> from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
        >>> sampler = DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 1), seed=0)
        >>> loader = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False)
        >>> loader = loader.add_adata(ad.AnnData(np.zeros((48, 1))))
        >>> n_batches = sum(1 for _ in loader)
        >>> loader.check_epoch_read()
        'epoch 0: 1 rank has read 48 rows in 12 batches, as planned. Each of the 48 rows was read once'
        """
        if read is None:
            if self._sampler.is_with_workers:
                msg = (
                    "The workers of a DataLoader take the batches, so that it isn't known here which rows were read. "
                    "Make a Tally, add each batch['index'] to it, and pass it."
                )
                raise RuntimeError(msg)
            begun, read = self._read
            if begun is not self._sampler.begun:  # that of another loader, or of no loader
                read = Tally()
        return self._sampler.check_epoch_read(self.n_obs, read, timeout=timeout, gather=gather)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on where a state was saved, on every rank: see :meth:`DistributedSampler.load_state_dict`."""
        self._sampler.load_state_dict(state, strict=strict)


def shapes_of(loader: Loader[Any, Any]) -> list[tuple[int, int]]:
    """Return the rows and columns of each data set of a loader, in order."""
    # annbatch has no public way to them; tests/test_loader.py notices if they are kept elsewhere
    return [(int(n_rows), int(n_var)) for n_rows, n_var in loader._shapes]


class _Recorded(NamedTuple):
    """What the sampler says of a batch."""

    rows: npt.NDArray[np.integer[Any]]
    """Which rows it has."""
    repeats: npt.NDArray[np.bool_] | None
    """For each of them, whether it is a repeat; None if nothing is said."""


class _Recorder(Sampler):
    """A sampler that does what another one does, and keeps what it says of the batches of the pass begun last."""

    def __init__(self, sampler: DistributedSampler) -> None:
        self._recorded = sampler
        self.recorded: deque[_Recorded] = deque()

    @property
    def batch_size(self) -> int | None:
        return self._recorded.batch_size

    @property
    def shuffle(self) -> bool:
        return self._recorded.shuffle

    def n_batches(self, n_obs: int) -> int:
        return self._recorded.n_batches(n_obs)

    def validate(self, n_obs: int) -> None:
        self._recorded.validate(n_obs)

    def sample(self, n_obs: int) -> Iterator[LoadRequest]:
        requests = self._recorded.sample(n_obs)
        self.recorded = deque()
        return self._record(requests, self.recorded)

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        return self.sample(n_obs)

    @staticmethod
    def _record(requests: Iterator[LoadRequest], recorded: deque[_Recorded]) -> Iterator[LoadRequest]:
        for request in requests:
            marks: Any = request.get("repeated")
            for split, rows in zip(request["splits"], batches_of(request), strict=True):
                recorded.append(_Recorded(rows, None if marks is None else marks[split]))
            yield request
