"""The EpochLoader: what is the same of all loaders with one sampler, whatever they read.

It begins passes, counts the batches that its consumer has taken, and says how far an epoch is. A batch is done when it
is yielded, unless the loop calls ``step_done()`` after each step, or Lightning's ``Trainer`` counts: a state that is
saved within a step, by a signal or an error, then leads to its batch.

A sampler can't know which batches were trained on: a loader takes one load request and yields many batches of it. One
load request is read at a time, here or in a thread that prefetches. The rows of each batch that was yielded are added
up, for the check at the end of an epoch.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import pandas as pd
from annbatch.compat import IterableDataset  # type: ignore[attr-defined]  # not exported; torch's, if there is torch

from annbatch_distributed import checks
from annbatch_distributed.checks import Description, Gather, Read, Reading, Tally, Timeout
from annbatch_distributed.loader.prefetch import prefetch
from annbatch_distributed.plan import EpochPlan
from annbatch_distributed.planner import StepSelection
from annbatch_distributed.ranks import Deferred, DistInfo, Placement
from annbatch_distributed.ranks.worker import current_worker
from annbatch_distributed.rows import BOUND, integer
from annbatch_distributed.sampler import DistributedSampler
from annbatch_distributed.state import Position
from annbatch_distributed.stream import Marks, Pass, Request

if TYPE_CHECKING:
    from annbatch_distributed.integrations.lightning import Training
    from annbatch_distributed.loader.workers import WorkerDataLoader


class StepCounter:
    """Numbers of batches of one pass: those that were yielded, and those that are done."""

    def __init__(self, training: Training | None = None, *, is_told: bool = False) -> None:
        self.n_yielded = 0
        self._training = training
        self._is_told, self._n_told = is_told, 0

    def next(self, training: Training | None) -> StepCounter:
        """Return the counter of the next pass: a loop that has called ``step_done()`` will do so again."""
        return StepCounter(training, is_told=self._is_told)

    def count(self) -> None:
        """Count a batch that is about to be yielded."""
        self.n_yielded += 1
        if self._training is not None:
            self._training.note_step()

    def done(self) -> None:
        """Note that the step of the batch that was yielded last is done."""
        self._is_told, self._n_told = True, self.n_yielded

    @property
    def is_training(self) -> bool:
        """True if Lightning counts the steps."""
        return self._training is not None

    @property
    def n_done(self) -> int:
        """Number of batches that are done."""
        if self._is_told:
            return self._n_told
        return self.n_yielded - (self._training is not None and self._training.is_within_step)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_training": None}  # a trainer stays in its process


class EpochLoader(IterableDataset, ABC):  # type: ignore[type-arg]  # without torch, it has no parameters
    """A loader whose epochs can be saved and resumed, on any number of ranks; :class:`StatefulLoader` is one.

    Parameters
    ----------
    sampler
        Sampler of the rows that this rank reads.
    read_ahead
        Number of load requests to prefetch.
    """

    def __init__(self, sampler: DistributedSampler, read_ahead: int) -> None:
        self._sampler = sampler
        self._read_ahead = integer("read_ahead", read_ahead, least=0, below=BOUND)
        # the pass of this loader that was begun last, and the rows of its batches that were yielded
        self._pass: Pass | None = None
        self._read = Tally()
        # a pass whose iterator is in use, also in its last step
        self._open: Pass | None = None
        self._steps = StepCounter()

    @property
    def read_ahead(self) -> int:
        """Number of load requests that are prefetched."""
        return self._read_ahead

    # The data, which a subclass has

    @property
    @abstractmethod
    def n_obs(self) -> int:
        """Number of cells of the collection, over all ranks."""

    @property
    @abstractmethod
    def n_var(self) -> int:
        """Number of genes."""

    @property
    @abstractmethod
    def _cells(self) -> tuple[pd.Index[Any], ...] | None:
        """Names of the cells of each dataset; None if they aren't known of all."""

    @property
    @abstractmethod
    def _collection(self) -> dict[str, Any]:
        """Identity of the datasets and their cells, as JSON."""

    @abstractmethod
    def _annotated(self, cells: pd.DataFrame, columns: str | Sequence[str] | None) -> pd.DataFrame:
        """Return a table of rows with the dataset and the name of each cell, and its columns of ``obs``."""

    @abstractmethod
    def _read_request(self, request: Request) -> Generator[Any]:
        """Read a load request, and yield its batches."""

    @abstractmethod
    def _finish(self, batch: Any, marks: Marks) -> Any:  # noqa: ANN401 whatever was read
        """Return a batch that is about to be yielded, in the form in which its consumer gets it."""

    @abstractmethod
    def rows_in(self, batch: object) -> npt.NDArray[Any] | None:
        """Return the rows of a batch, if it has them; a ``collate_fn`` may have made anything of it."""

    @abstractmethod
    def _iterated(self) -> AbstractContextManager[None]:
        """Let nobody add datasets meanwhile."""

    @abstractmethod
    def preloads_to_gpu(self) -> bool:
        """Return True if batches are moved to a GPU where they are read."""

    # Epochs

    @property
    def sampler(self) -> DistributedSampler:
        """The sampler, where frameworks look for an object whose ``set_epoch`` they can call."""
        return self._sampler

    @property
    def batch_sampler(self) -> DistributedSampler:
        """The sampler."""
        return self._sampler

    def _check_cells(self) -> None:
        """Raise if a state is of other datasets, or the mask was made for cells in another order."""
        self._sampler.check_cells(self._cells, self._collection)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, on every rank: see :meth:`DistributedSampler.set_epoch`.

        Raises
        ------
        RuntimeError
            If accelerate calls it, for a ``DataLoader`` that it has prepared and would shard once more.
        """
        _check_not_dispatched()
        self._sampler.set_epoch(epoch)

    @property
    def next_epoch(self) -> int:
        """The epoch to resume or begin: see :attr:`DistributedSampler.next_epoch`."""
        return self._sampler.next_epoch

    def __len__(self) -> int:
        """Return the number of batches of the epoch on this rank, those included that were done before a resume.

        In a loop over the loader, it belongs to the epoch that the loop reads, also in the last step.
        """
        self._check_cells()
        if self._open is not None and self._open is self._sampler.last_pass:
            return self._open.position.done + self._open.n_due
        return self.batches_done + self._sampler.n_batches(self.n_obs)

    @property
    def batches_done(self) -> int:
        """Number of batches of the epoch that are done before the next pass: 0 unless an epoch is resumed."""
        return self._sampler.batches_done

    def end(self, ended: Pass) -> None:
        """Take note that the last batch of a pass is about to be yielded."""
        self._sampler.end(ended)
        if self._steps.is_training:  # Lightning leaves its loop there, and asks for the length of the next epoch
            self._open = None

    @contextmanager
    def opened(self, begun: Pass) -> Iterator[None]:
        """Note that the iterator of a pass is in use."""
        self._open = begun
        try:
            yield
        finally:
            if self._open is begun:
                self._open = None

    def plan(self) -> EpochPlan:
        """Return every rank's rows and batches of the next pass: see :meth:`DistributedSampler.plan`.

        Examples
        --------
        >>> import anndata as ad
        >>> import numpy as np
        >>> from annbatch.samplers import RandomSampler
        >>> from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
        >>> sampler = DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 2), seed=0)
        >>> loader = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False, read_ahead=1)
        >>> loader = loader.add_adata(ad.AnnData(np.zeros((50, 1))))
        >>> loader.plan()
        <EpochPlan of epoch 0: 2 ranks, 48 rows of 50, up to 6 batches each, 2 dropped>
        """
        self._sampler.check_cells(self._cells)
        plan = self._sampler.plan(self.n_obs)
        held = None if plan.rows_per_request is None else plan.rows_per_request * (1 + self._read_ahead)
        return replace(plan, rows_per_request=held, cells=self._cells)

    def cells_of(
        self,
        steps: StepSelection,
        columns: str | Sequence[str] | None = None,
        ranks: int | Sequence[int] | None = None,
        epoch: int | None = None,
    ) -> pd.DataFrame:
        """Return which cells each rank has read in some steps of an epoch, or will read; nothing is read for it.

        Parameters
        ----------
        steps, ranks, epoch
            As for :meth:`DistributedSampler.rows_of`.
        columns
            Which columns of ``obs``; None for all that the loader has.

        Returns
        -------
        A table with the columns ``step``, ``rank``, ``row`` (of the collection), ``dataset`` (its number), ``cell``
        (its name, None where the data set has no names) and the columns of ``obs``, in the order of the batches. A
        column of ``obs`` that has one of these five names gets the suffix ``_obs``.

        Raises
        ------
        KeyError
            If the loader has no such column of ``obs``.
        IndexError, ValueError
            As for :meth:`DistributedSampler.rows_of`.

        Examples
        --------
        >>> import anndata as ad
        >>> import numpy as np
        >>> import pandas as pd
        >>> from annbatch.samplers import SequentialSampler
        >>> from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
        >>> sampler = DistributedSampler(SequentialSampler(2, 1, 2), dist_info=Rank(0, 2))
        >>> loader = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False)
        >>> obs = pd.DataFrame({"donor": [*"aabb"]}, index=[*"wxyz"])
        >>> loader = loader.add_adata(ad.AnnData(np.zeros((4, 1)), obs=obs))
        >>> loader.cells_of(0, "donor")
           step  rank  row  dataset cell donor
        0     0     0    0        0    w     a
        1     0     0    1        0    x     a
        2     0     1    2        0    y     b
        3     0     1    3        0    z     b
        """
        self._check_cells()
        return self._annotated(self._sampler.rows_of(self.n_obs, steps, ranks, epoch), columns)

    def cells_at(
        self,
        position: Position,
        steps: StepSelection,
        columns: str | Sequence[str] | None,
        ranks: int | Sequence[int] | None,
    ) -> pd.DataFrame:
        """Return which cells each rank has in some steps of the epoch of a position, as :meth:`cells_of` does."""
        return self._annotated(self._sampler.rows_in_epoch(self.n_obs, position, steps, ranks), columns)

    # Reading

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
            If the mask has the names of the cells in another order, or a state is of other datasets.
        RuntimeError
            If a worker of a ``DataLoader`` asks that :meth:`to_dataloader` hasn't made; or, while iterating, if another
            pass was begun since.
        """
        return self.iterate()

    def iterate(self, readers: Executor | None = None) -> Generator[Any]:
        """Return the batches of a pass, prefetched by threads that several loaders share, or by threads of its own."""
        if current_worker() is not None:
            raise RuntimeError(
                "A StatefulLoader can't be read by the workers of a DataLoader that it knows nothing of: its epoch and "
                "state would be lost. Make the DataLoader with loader.to_dataloader(num_workers=...)."
            )
        self._check_cells()
        return self._batches(readers)

    def batches_in_worker(self, position: Position) -> Generator[Any]:
        """Return this worker's part of the batches of a pass that the process of the rank has begun."""
        self._sampler.go_to(position)
        return self._batches_of(self._sampler.begin(self.n_obs, position, current_worker()))

    def _batches(self, readers: Executor | None) -> Generator[Any]:
        is_left = True
        while is_left:  # once more each time that the ranks change
            steps = self._begin_steps()
            # in this thread, which may be the only one that a framework tells its rank
            begun = self._sampler.begin(self.n_obs)
            with self.opened(begun), closing(self._batches_of(begun, readers)) as batches:
                for batch in batches:
                    steps.count()  # before it is yielded: a consumer who saves a state has this batch
                    if steps.n_yielded == begun.n_due:
                        self.end(begun)  # a consumer who knows the number doesn't ask for more
                    yield batch
                    del batch  # else it would be held until the next one is read
                    if self._sampler.has_cut(begun):
                        break
                else:
                    self._sampler.end(begun)
            is_left = self._sampler.has_left(begun)

    def _begin_steps(self) -> StepCounter:
        """Begin to count the steps of a pass, as a training that reads it has it."""
        # the room above this one, so it is imported here; it imports nothing of Lightning
        from annbatch_distributed.integrations.lightning import training_on

        training = training_on(self, self._sampler.framework_object)
        if training is not None:
            # overfit_batches reads the first batches of epoch 0 in every epoch
            if training.overfits and not self._sampler.batches_done:
                self._sampler.go_to(Position())
            training.check_all_are_read(len(self), self._sampler.batches_done)
        self._steps = self._steps.next(training)
        return self._steps

    def _batches_of(self, begun: Pass, readers: Executor | None = None) -> Generator[Any]:
        """Read the batches of a pass, in threads that prefetch if there are any."""
        self._pass, self._read = begun, Tally()
        # batches come out in the order of requests and splits, however many requests are prefetched
        due: deque[Callable[[Any], Any]] = deque()

        def requests() -> Iterator[Request]:
            """Yield load requests, and note how to finish each of their batches."""
            while True:
                self._sampler.check_rank(begun)
                try:
                    request = begun.take()
                except StopIteration:
                    return
                due.extend(map(partial(partial, self._yielded, request), request.splits, request.marks()))
                yield request

        read = prefetch(requests(), self._read_request, self._read_ahead, readers)
        with self._iterated(), closing(begun), closing(read) as batches:
            for batch in batches:
                yield due.popleft()(batch)
                del batch
                # the consumer has the other pass's batches by now, and would count these as its own
                self._sampler.check_is_last(begun)

    def _yielded(self, request: Request, split: npt.NDArray[Any], marks: Marks, batch: Any) -> Any:  # noqa: ANN401 whatever was read
        """Return a batch that is about to be yielded, and add its rows to those that were read."""
        index = self.rows_in(batch)
        self._read.add(request.rows_at(split) if index is None else index)
        return self._finish(batch, marks)

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

    # States

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
            Number of batches of this epoch that every rank has done. None takes the number that was yielded, or told by
            :meth:`step_done`.

        Raises
        ------
        RuntimeError
            If the pass that was begun last is not one of this loader, but one of its :meth:`to_dataloader`, whose
            ``state_dict()`` knows; or one of another loader with the same sampler.
        """
        if batches_done is not None:
            batches_done = integer("batches_done", batches_done, least=0, below=BOUND)
        elif (last := self._own_pass()) is not None:
            batches_done = last.done_after(self._steps.n_done)
        return self._sampler.state_at(batches_done, self._collection)

    def _own_pass(self) -> Pass | None:
        """Return the pass that was begun last, if this loader knows how far it is; None if none was begun."""
        last = self._sampler.last_pass
        if last is not None and last.is_by_workers:
            raise RuntimeError(
                "The workers of a DataLoader take the batches, so that it isn't known here which were trained on. Ask "
                "what loader.to_dataloader(num_workers=...) has returned: its state_dict() and check_epoch_read() know."
            )
        if last is not None and last is not self._pass:
            raise RuntimeError(
                "The pass that was begun last is not one of this loader, but of another loader with the same sampler, "
                "or of sampler.sample(...). Give each loader a sampler of its own."
            )
        return last

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Resume where a state was saved, on every rank: see :meth:`DistributedSampler.load_state_dict`.

        Add all datasets before, in the order that they had, so that a state that doesn't fit is refused here, and not
        when the next pass begins.
        """
        from annbatch_distributed.integrations.lightning import errors_explained

        with errors_explained(self._sampler.framework_object):
            self._sampler.resume(state, strict=strict, n_obs=self.n_obs or None, collection=self._collection)

    def reshard(self, dist_info: DistInfo | Deferred | None = None, *, batches_done: int | None = None) -> None:
        """Change the rank and the world size within an epoch: see :meth:`DistributedSampler.reshard`.

        An open iterator continues with the batches of the new rank. Batches whose step isn't done are read
        again, by the ranks that they are assigned to then.

        Parameters
        ----------
        dist_info
            Source of the new rank and world size, as for :class:`DistributedSampler`. None asks the same source again.
        batches_done
            Number of batches of this epoch that every rank has done, as for :meth:`state_dict`. None takes the number
            of this process.

        Raises
        ------
        TypeError, ValueError
            If the epoch can't be resumed on this number of ranks, or ``dist_info`` is none. The loader is then as it
            was.

        Examples
        --------
        >>> import anndata as ad
        >>> import numpy as np
        >>> from annbatch.samplers import RandomSampler
        >>> from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
        >>> sampler = DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 3), seed=0)
        >>> loader = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False)
        >>> loader = loader.add_adata(ad.AnnData(np.zeros((48, 1))))
        >>> for step, batch in enumerate(loader):  # 3 ranks have 4 batches each
        ...     if step == 1:  # the third one is lost
        ...         loader.reshard(Rank(0, 2))
        >>> step + 1
        5
        """
        self._sampler.reshard_at(self.state_dict(batches_done=batches_done), dist_info)

    # Checks

    def check_ranks_agree(self, *, timeout: Timeout = 300.0, gather: Gather | None = None) -> None:
        """Check that all ranks of the job have the same configuration, and as many rows of as many data sets in order.

        See :meth:`DistributedSampler.check_ranks_agree`, which knows the number of rows only.
        """
        checks.ranks_agree(self._sampler.agreeing, self._description, timeout=timeout, gather=gather)

    def _description(self, place: Placement) -> Description:
        """Return what this process says of its sampler and its datasets."""
        self._sampler.check_cells(self._cells)
        return self._sampler.describe(place, self.n_obs, self._collection)

    def check_epoch_read(
        self, read: Read | None = None, *, timeout: Timeout = 300.0, gather: Gather | None = None
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
        return checks.epoch_read(self._sampler.agreeing, reading, timeout=timeout, gather=gather)

    def _reading(self, place: Placement, read: Read | None = None) -> Reading:
        """Return what this process says of its last pass."""
        if read is None:
            read = self._read if self._own_pass() is not None else Tally()
        return self._sampler.reading(place, self.n_obs, read)

    def read_of_last_pass(self) -> tuple[Pass, Read]:
        """Return the pass that was begun last, and the rows of its batches that were yielded."""
        last = self._own_pass()
        assert last is not None
        return last, self._read


def common_n_var(loaders: Mapping[str, EpochLoader]) -> int:
    """Return the number of genes of some loaders, by name; a ValueError if they have different ones."""
    numbers = {name: loader.n_var for name, loader in loaders.items()}
    if len({*numbers.values()}) > 1:
        each = ", ".join(f"{name} {number}" for name, number in numbers.items())
        raise ValueError(f"There is no common number of genes: {each}. Ask the loader of each of them for its n_var.")
    return next(iter(numbers.values()))


def _check_not_dispatched() -> None:
    """Raise a RuntimeError if accelerate calls, for a ``DataLoader`` that it has prepared.

    It would read an ``IterableDataset`` on rank 0 alone and cut up the batches, or read on every rank and keep a part
    of them. Rows would silently be missing. accelerate passes nothing that it could be known by, but for who calls.
    """
    # frame 0 is this function, 1 is set_epoch, 2 is who calls that
    caller = sys._getframe(2)
    if caller.f_globals.get("__name__") != "accelerate.data_loader":
        return
    arrived = type(caller.f_locals.get("self")).__name__
    raise RuntimeError(
        "A StatefulLoader must be iterated over as it is: it reads this rank's shard of the rows. Here accelerate's "
        f"{arrived}, which comes from accelerator.prepare(DataLoader(loader)), is about to shard its batches once "
        "more, and rows would never be read. Leave the DataLoader out, and iterate over the StatefulLoader itself; "
        "prepare(loader) returns it unchanged."
    )
