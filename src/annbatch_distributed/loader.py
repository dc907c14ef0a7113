"""The StatefulLoader: annbatch's Loader that knows how far its consumer is.

A sampler can't know what was trained on: a loader takes one load request and yields many batches of it. Here the
batches are counted as they are yielded, and the marks of load requests are kept as they are taken, so that a batch can
say which of its rows are repeats.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from annbatch import Loader
from annbatch.abc import Sampler

from annbatch_distributed.callers import check_not_dispatched
from annbatch_distributed.sampler import DistributedSampler
from annbatch_distributed.workers import current

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    import numpy.typing as npt
    from annbatch.types import LoadRequest

    from annbatch_distributed.progress import Begun


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
        repeats: deque[npt.NDArray[np.bool_]] = deque()
        for n_yielded, batch in enumerate(super().__iter__(), start=1):
            if begun is None:  # it has just begun its pass
                begun, repeats = self._sampler.begun, self._recorder.repeats
                assert begun is not None
            if n_yielded == begun.n_due:
                self._sampler.finish(begun)  # a consumer who knows the number doesn't come to ask for more
            self._counted = begun, n_yielded  # before it is yielded: whoever saves a state has been given this batch
            yield {**batch, "repeated": repeats.popleft()} if repeats else batch
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

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on where a state was saved, on every rank: see :meth:`DistributedSampler.load_state_dict`."""
        self._sampler.load_state_dict(state, strict=strict)


class _Recorder(Sampler):
    """A sampler that does what another one does, and keeps the marks of repeats of the pass that was begun last."""

    def __init__(self, sampler: DistributedSampler) -> None:
        self._recorded = sampler
        self.repeats: deque[npt.NDArray[np.bool_]] = deque()

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
        self.repeats = deque()
        return self._marked(requests, self.repeats)

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        return self.sample(n_obs)

    @staticmethod
    def _marked(requests: Iterator[LoadRequest], repeats: deque[npt.NDArray[np.bool_]]) -> Iterator[LoadRequest]:
        for request in requests:
            marks: Any = request.get("repeated")
            if marks is not None:
                repeats.extend(marks[split] for split in request["splits"])
            yield request
