"""The StatefulLoader: annbatch's Loader that knows how far its consumer is.

A sampler can't know what was trained on: a loader takes one load request and yields many batches of it, which are
counted here.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from annbatch import Loader
from annbatch.utils import convert

from annbatch_distributed import checks
from annbatch_distributed.callers import calling_trainer, check_not_dispatched
from annbatch_distributed.checks import Tally
from annbatch_distributed.integers import BOUND, integer
from annbatch_distributed.loader import trainer as lightning
from annbatch_distributed.loader.ahead import ahead
from annbatch_distributed.loader.delivered import Delivered
from annbatch_distributed.loader.inside import (
    data_in,
    data_sets_of,
    iterated,
    options_of,
    preloads_to_gpu,
    take_data_of,
)
from annbatch_distributed.loader.planned import PlannedLoader
from annbatch_distributed.loader.steps import Steps
from annbatch_distributed.ranks.worker import current_worker
from annbatch_distributed.sampler import DistributedSampler
from annbatch_distributed.state import Position

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from concurrent.futures import Executor
    from typing import Self

    from annbatch_distributed.checks import Gather, Reading, Timeout
    from annbatch_distributed.loader.workers import WorkerDataLoader
    from annbatch_distributed.masks import AnyMask
    from annbatch_distributed.ranks import Membership

__all__ = ["StatefulLoader"]


class StatefulLoader(PlannedLoader):
    """An annbatch Loader that can be saved in the middle of an epoch, and resumed there.

    It takes the arguments of :class:`annbatch.Loader`. Its ``batch_sampler`` must be a :class:`DistributedSampler`;
    :meth:`from_collection` makes both.

    Under ``remainder="pad"``, a batch has the key ``"repeated"``: for each of its rows, whether some rank reads it for
    the second time in this epoch, as a boolean array.

    ``len()`` is the number of batches of the whole epoch, also while one is resumed, as Lightning and torch expect it;
    those that are left are ``loader.sampler.n_batches(loader.n_obs)``.

    Parameters
    ----------
    batch_sampler
        Which rows this rank reads.
    trainer
        Lightning's ``Trainer`` that the loader is read for, if it is neither ``dist_info`` nor known as who asks for
        batches: in a thread, say. States count the batches that it has processed.
    read_ahead
        How many load requests are read at once, each in a thread, while the batches of another one are trained on, and
        so are held beside it. 1 hides reading behind a training that takes about as long; more hide the latency of
        object storage. 0 reads where a batch is asked for, as annbatch does. Batches, states and errors are the same.
    kwargs
        Those of :class:`annbatch.Loader`.

    Raises
    ------
    TypeError
        If ``batch_sampler``, ``read_ahead`` or ``trainer`` are of another type.
    ValueError
        If ``read_ahead`` is negative, or more than 0 with ``preload_to_gpu=True``, as its threads would use the device.

    Examples
    --------
    >>> import anndata as ad
    >>> import numpy as np
    >>> from annbatch.samplers import RandomSampler
    >>> from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
    >>> def make_loader():
    ...     sampler = RandomSampler(chunk_size=4, preload_nchunks=2, batch_size=4)
    ...     distributed = DistributedSampler(sampler, dist_info=Rank(0, 2), seed=0)
    ...     loader = StatefulLoader(
    ...         batch_sampler=distributed, return_index=True, preload_to_gpu=False
    ...     )
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

    def __init__(
        self,
        *,
        batch_sampler: DistributedSampler,
        read_ahead: int = 0,
        trainer: Any = None,  # noqa: ANN401 Lightning's, which isn't imported
        **kwargs: Any,  # noqa: ANN401 annbatch's own
    ) -> None:
        if not isinstance(batch_sampler, DistributedSampler):
            raise TypeError(
                f"StatefulLoader needs a DistributedSampler as its batch_sampler, got {batch_sampler!r}. In a single "
                "process, wrap it: DistributedSampler(sampler, dist_info=Rank(0, 1), seed=...)."
            )
        self._given = {"read_ahead": read_ahead, **kwargs}
        read_ahead = integer("read_ahead", read_ahead, least=0, below=BOUND)
        # what frameworks are set to can hold for a thread only, so that batches are theirs where they are taken
        self._to_be = kwargs.pop("to", None) if read_ahead else None
        super().__init__(batch_sampler=batch_sampler, read_ahead=read_ahead, **kwargs)
        if read_ahead and preloads_to_gpu(self):
            raise ValueError(
                f"read_ahead={read_ahead} reads in a thread, from which preload_to_gpu=True would use the GPU, "
                "while the training uses it as well. Pass preload_to_gpu=False, and move batches in the training step."
            )
        if trainer is not None:
            batch_sampler._job.train_by(trainer)
        # the pass of this loader that was begun last, and whether another is about to begin
        self._pass: Delivered | None = None
        self._is_new = False
        self._steps = Steps()
        # threads that loaders of a mixture share to read ahead
        self._readers: Executor | None = None

    @classmethod
    def from_loader(
        cls,
        loader: Loader[Any, Any],
        *,
        batch_sampler: DistributedSampler | None = None,
        **options: Any,  # noqa: ANN401 annbatch's own, too
    ) -> Self:
        """Make one of an annbatch ``Loader`` that has its data sets already.

        Nothing is opened or copied. Data sets that are added to one of them later on are not added to the other.

        Parameters
        ----------
        loader
            Any :class:`annbatch.Loader`, or a :class:`StatefulLoader`.
        batch_sampler
            Which rows this rank reads. None takes the sampler of ``loader``.
        options
            Other arguments of :class:`StatefulLoader`, such as ``read_ahead``. Those that aren't given are as in
            ``loader``.

        Raises
        ------
        TypeError
            If ``loader`` is no loader, or a subclass, whose methods would be lost; or as :class:`StatefulLoader` does.

        Examples
        --------
        >>> import anndata as ad
        >>> import numpy as np
        >>> from annbatch import Loader
        >>> from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
        >>> loader = Loader(batch_size=4, chunk_size=4, preload_nchunks=2, preload_to_gpu=False)
        >>> loader = loader.add_adata(ad.AnnData(np.arange(48.0).reshape(48, 1)))
        >>> sampler = DistributedSampler(loader.batch_sampler, dist_info=Rank(1, 2), seed=0)
        >>> rank_1 = StatefulLoader.from_loader(
        ...     loader, batch_sampler=sampler, return_index=True
        ... )
        >>> next(iter(rank_1))["index"].tolist()
        [24, 25, 26, 27]
        """
        if type(loader) not in {Loader, StatefulLoader, cls}:
            raise TypeError(
                f"from_loader takes an annbatch Loader, got {loader!r} of type {type(loader).__name__}, whose methods "
                "would be lost: make that a subclass of StatefulLoader instead."
            )
        sampler = loader.batch_sampler if batch_sampler is None else batch_sampler
        if not isinstance(sampler, DistributedSampler):
            raise TypeError(
                f"from_loader needs a DistributedSampler, got {sampler!r}. Wrap the sampler of the loader: "
                "from_loader(loader, batch_sampler=DistributedSampler(loader.batch_sampler, dist_info=...))."
            )
        given = loader._given if isinstance(loader, StatefulLoader) else options_of(loader)
        made = cls(batch_sampler=sampler, **given | options)
        made._check_layouts(data_in(loader))
        of_passes = vars(made).keys() - vars(Loader(preload_to_gpu=False)).keys() - {"_names"}
        take_data_of(loader, into=made, without=of_passes)
        return made

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
        """Which epoch to resume or begin: see :attr:`DistributedSampler.next_epoch`."""
        return self._sampler.next_epoch

    def __len__(self) -> int:
        """Return how many batches the epoch has on this rank, those included that were done before a resume."""
        return self._sampler.batches_done + self._sampler.n_batches(self.n_obs)

    def __iter__(self) -> Generator[Any]:
        """Return the batches of a pass, which begins with the first: what is left of a resumed epoch, or else all.

        A loader has one pass at a time: to begin another ends the one before.

        Returns
        -------
        An iterator of batches as :class:`annbatch.Loader` yields them, with the key ``"repeated"`` under
        ``remainder="pad"``.

        Raises
        ------
        ValueError
            If the mask has the names of the cells in another order, a state is of other data sets, or a worker of a
            ``DataLoader`` would read with ``preload_to_gpu=True``.
        RuntimeError
            While iterating, if another pass was begun since.
        """
        if current_worker() is not None and preloads_to_gpu(self):
            raise ValueError(
                "A worker of a DataLoader reads with preload_to_gpu=True, and torch can't pass on from one process to "
                "another what cupy has on the GPU. Pass preload_to_gpu=False, and move batches in the training step."
            )
        self._check_cells()
        # whoever keeps the states of workers asks for one before the first batch
        self._is_new = True
        return self._batches()

    def _batches(self) -> Generator[Any]:
        sampler = self._sampler
        steps = self._begin_steps()
        # in this thread, which may be the only one that a framework tells its rank
        requests = sampler.sample(self.n_obs)
        requests.on_end = None  # the pass is as far as its consumer is, and that is said here
        begun = sampler._job.progress.begun
        assert begun is not None
        self._pass = pass_ = Delivered(begun)
        self._is_new = False
        read = ahead(map(pass_.ask, requests), self.read, self._read_ahead, self._readers)
        with iterated(self), closing(requests), closing(read) as batches:
            for batch in batches:
                if self._to_be is not None:
                    batch["X"] = convert(batch["X"], preload_to_gpu=False, to=self._to_be)
                repeats = pass_.deliver(batch["index"])
                steps.deliver()  # before it is yielded: whoever saves a state has this batch
                if steps.n_yielded == begun.n_due:
                    sampler._job.progress.end(begun)  # a consumer who knows the number doesn't come to ask for more
                yield batch if repeats is None else {**batch, "repeated": repeats}
                del batch  # else it would be held until the next one is read
                if self._pass is not pass_:
                    raise RuntimeError(_ENDED)
            sampler._job.progress.end(begun)

    def _begin_steps(self) -> Steps:
        """Let a trainer do what is due before a pass, and return the steps of that."""
        job = self._sampler._job
        trainer = job.trainer or calling_trainer()
        if is_trained := lightning.trains_on(trainer, self):
            lightning.restore(trainer)
            if lightning.overfits(trainer) and not job.progress.position.resumes:
                job.progress.go_to(Position(0))
            lightning.check_all_are_asked_for(trainer, len(self))
        self._steps = Steps(trainer if is_trained else None, is_told=self._steps.is_told)
        return self._steps

    def step_done(self) -> None:
        """Say that the step of the batch that was yielded last is done.

        A batch counts as done when it is yielded, unless this is called after each step. A state that is saved within a
        step, by a signal's handler or after an error, then leads to the batch of that step.

        Examples
        --------
        >>> import anndata as ad
        >>> import numpy as np
        >>> from annbatch.samplers import RandomSampler
        >>> from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
        >>> sampler = DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 2), seed=0)
        >>> loader = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False)
        >>> loader = loader.add_adata(ad.AnnData(np.zeros((48, 1))))
        >>> for step, batch in enumerate(loader):
        ...     if step == 3:
        ...         break
        ...     loader.step_done()
        >>> loader.state_dict()["segments"]
        [[2, 1, 3]]
        """
        self._steps.done()

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
            If it isn't known; or if the pass that was begun last is not one of this loader, but of another one with the
            same sampler.
        """
        if batches_done is None:
            return self._state(None)
        batches_done = integer("batches_done", batches_done, least=0, below=BOUND)
        return self._state(self._sampler._job.progress.position_at(batches_done, self._sampler._job.n_lanes))

    def _state(self, position: Position | None) -> dict[str, Any]:
        state = self._sampler._job.state(self._position() if position is None else position)
        return state | {"identity": state["identity"] | {"data sets": data_sets_of(self)}}

    def _position(self) -> Position:
        """How far this loader's consumer is."""
        progress, worker = self._sampler._job.progress, current_worker()
        last = None if self._is_new and worker is not None else self._last()
        if last is not None:
            return last.begun.position_after(self._steps.n_done)
        position = progress.next_position(worker, self._sampler._job.n_lanes)
        return replace(position, worker=progress.part(worker, position))

    def _last(self) -> Delivered | None:
        """What this loader has delivered of the pass that was begun last; None if none was since a position was set."""
        progress = self._sampler._job.progress
        if progress.workers_may_read if progress.begun is None else progress.begun.is_by_workers:
            raise RuntimeError(_NOT_KNOWN)
        if progress.begun is not None and (self._pass is None or self._pass.begun is not progress.begun):
            raise RuntimeError(
                "The pass that was begun last is not one of this loader, but of another loader with the same sampler, "
                "or of sampler.sample(...). Give each loader a sampler of its own."
            )
        return None if progress.begun is None else self._pass

    def check_epoch_read(
        self, read: Tally | None = None, *, timeout: Timeout = 300.0, gather: Gather | None = None
    ) -> str:
        """Check that all ranks together have read in the last pass what was planned.

        See :meth:`DistributedSampler.check_epoch_read`.

        Parameters
        ----------
        read
            The rows of each batch that this process was given in the pass. None takes the rows of the batches that the
            loader has yielded: their ``"index"``, or without ``return_index=True`` what was asked of annbatch. They are
            known where the loader itself is iterated over. Where the workers of a ``DataLoader`` do so, what
            :meth:`to_dataloader` returns knows them.
        timeout, gather
            As for :meth:`DistributedSampler.check_ranks_agree`.

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
        reading = partial(self._reading, read=read)
        return checks.epoch_read(self._sampler._job.agreeing, reading, timeout=timeout, gather=gather)

    def _reading(self, place: Membership, read: Tally | None = None) -> Reading:
        """Return what this process says of its last pass."""
        last = self._last() if read is None else None
        return self._sampler._job.reading(place, self.n_obs, (read or Tally()) if last is None else last.read)

    def leave_out(self, rows: AnyMask | Sequence[int]) -> None:
        """Leave rows out of what is left of the epoch, on every rank.

        Batches are those that they would have been, without these rows; their number stays. A pass that is under way
        ends: iterate anew for the batches that are left. States say what was left out, and :meth:`check_ranks_agree`
        compares it. The next epoch has the rows again, unless ``sampler.mask`` is assigned one without them.

        Parameters
        ----------
        rows
            Row numbers, or what else a mask can be: a slice, a boolean for each row of the collection, :class:`Rows`.
            At most 1,000 ranges of consecutive rows can be left out of an epoch.

        Raises
        ------
        ValueError
            If a batch would have no row left, the epoch has been read to its end, or there are too many ranges: the
            loader is then as it was.

        Examples
        --------
        >>> import anndata as ad
        >>> import numpy as np
        >>> from annbatch.samplers import SequentialSampler
        >>> from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
        >>> sampler = DistributedSampler(SequentialSampler(4, 1, 4), dist_info=Rank(0, 2))
        >>> loader = StatefulLoader(
        ...     batch_sampler=sampler, return_index=True, preload_to_gpu=False
        ... )
        >>> loader = loader.add_adata(ad.AnnData(np.zeros((16, 1))))
        >>> loader.leave_out([2, 5])
        >>> [batch["index"].tolist() for batch in loader]
        [[0, 1, 3], [4, 6, 7]]
        """
        self._sampler._job.leave_out(rows, self.n_obs, self._position())
        self._pass = None

    def to_dataloader(self, *, num_workers: int = 0, **options: Any) -> WorkerDataLoader:  # noqa: ANN401 torch's own
        """Return a ``DataLoader`` of torch whose workers read the batches, with the epoch and the state in front.

        Lightning, accelerate and a plain loop find its ``set_epoch``, ``state_dict``, ``load_state_dict``, ``len()``
        and ``sampler``, which torch's own hides. Its state counts the batches that came out of the workers.

        Parameters
        ----------
        num_workers
            How many processes read for this rank; 0 reads in this one.
        options
            Further ones of torch's ``DataLoader``, but for those that would divide the rows once more. If not given,
            ``multiprocessing_context`` is ``"spawn"``, since threads of zarrs don't survive a fork, and
            ``persistent_workers`` is True. Spawned workers import the script, which therefore begins its work under
            ``if __name__ == "__main__":``.

        Raises
        ------
        TypeError
            If an option would divide the rows once more, or have batches come out of order.

        Examples
        --------
        >>> import anndata as ad
        >>> import numpy as np
        >>> from annbatch.samplers import RandomSampler
        >>> from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
        >>> sampler = DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 2), seed=0)
        >>> loader = StatefulLoader(
        ...     batch_sampler=sampler, return_index=True, preload_to_gpu=False
        ... )
        >>> loader = loader.add_adata(ad.AnnData(np.arange(48.0).reshape(48, 1)))
        >>> batches = loader.to_dataloader(num_workers=0)
        >>> batches.set_epoch(1)
        >>> taken = next(iter(batches))
        >>> batches.state_dict()["epoch"], batches.state_dict()["segments"]
        (1, [[2, 1, 1]])
        """
        from annbatch_distributed.loader.workers import WorkerDataLoader

        return WorkerDataLoader(self, num_workers=num_workers, **options)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Resume where a state was saved, on every rank: see :meth:`DistributedSampler.load_state_dict`.

        Add all data sets before, in the order that they had, so that a state that doesn't fit is refused here, and not
        when the next pass begins.
        """
        with lightning.errors_explained(self._sampler._job.trainer or calling_trainer()):
            self._sampler._job.load(state, strict=strict, n_obs=self.n_obs or None, data_sets=data_sets_of(self))


_ENDED = (
    "Another pass over this loader was begun, or leave_out called, which has ended this one: a loader has one pass at "
    "a time. For a look at batches in the middle of an epoch, make another loader, with a sampler of its own."
)
_NOT_KNOWN = (
    "The workers of a DataLoader take the batches, so that it isn't known here which were trained on. Make it with "
    "loader.to_dataloader(num_workers=...), and ask its state_dict(); or use torchdata's StatefulDataLoader. To check "
    "what was read, make a Tally, add each batch['index'] to it, and pass it."
)
