"""The EpochLoader: the epoch, the iterations, the state and the checks of a loader with one sampler.

An iteration takes load requests from the sampler, which may be prefetched or read by workers, and yields their batches.
Only the loader can count batches: it takes one load request and yields many batches of it. It adds up the rows of each
yielded batch, for the check at the end of an epoch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from typing import Any

import numpy.typing as npt
import pandas as pd
from annbatch.compat import IterableDataset  # type: ignore[attr-defined]  # not exported; torch's, if there is torch

from annbatch_distributed import checks
from annbatch_distributed.checks import Description, Gather, Read, Reading, Tally, Timeout
from annbatch_distributed.core.epochs import StepSelection
from annbatch_distributed.core.masks import AnyNames, check_names
from annbatch_distributed.core.request import Marks, Request
from annbatch_distributed.core.state import Position, check_identity
from annbatch_distributed.core.stream import Pass
from annbatch_distributed.core.units import EachRow
from annbatch_distributed.core.values import BOUND, integer, plural
from annbatch_distributed.core.worker import current_worker
from annbatch_distributed.cursor import Cursor
from annbatch_distributed.loader.accelerate import reported
from annbatch_distributed.loader.callers import refuse_dispatch
from annbatch_distributed.loader.lightning import errors_explained, training_on
from annbatch_distributed.loader.prefetch import prefetched
from annbatch_distributed.loader.steps import StepCounter
from annbatch_distributed.loader.waiting import Waits
from annbatch_distributed.ranks import DistInfo, Placement
from annbatch_distributed.reports import EpochPlan
from annbatch_distributed.sampler import DistributedSampler, cursor_of
from annbatch_distributed.weights import Weights

#: Columns of the tables of cells, of all kinds of loaders.
_COLUMNS = frozenset(("step", "source", "rank", "row", "set", "is_control", "dataset", "cell"))


def column_of(name: Any) -> Any:  # noqa: ANN401 a name of any type
    """Return the column of a table of cells for a column of ``obs``, whose name may be one of the table's own.

    >>> column_of("donor"), column_of("set")
    ('donor', 'set_obs')
    """
    return f"{name}_obs" if name in _COLUMNS else name


def shown(title: str, about: Mapping[str, object]) -> str:
    """Format an object as AnnData does: a title, and a line for each property.

    >>> print(shown("StatefulLoader: 40 cells x 2 genes", {"rank": "0 of 2"}))
    StatefulLoader: 40 cells x 2 genes
        rank: 0 of 2
    """
    return "\n".join([title, *(f"    {name}: {value}" for name, value in about.items())])


class EpochLoader(Waits, IterableDataset, ABC):  # type: ignore[type-arg]  # without torch, it has no parameters
    """Base class of :class:`StatefulLoader` and :class:`AlignedLoader`.

    Parameters
    ----------
    sampler
        Sampler of the rows that this rank reads.
    prefetch
        Number of load requests to prefetch.
    """

    def __init__(self, sampler: DistributedSampler, prefetch: int) -> None:
        self._sampler = sampler
        self._prefetch = integer("prefetch", prefetch, least=0, below=BOUND)
        # the last pass of this loader, and the rows of its yielded batches
        self._pass: Pass | None = None
        self._read: Tally | None = Tally()
        # the pass whose iterator is in use, its last step included
        self._open: Pass | None = None
        self._steps = StepCounter()

    @property
    def prefetch(self) -> int:
        """Number of load requests to prefetch."""
        return self._prefetch

    # The data, from a subclass

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
    def _cells(self) -> tuple[AnyNames, ...] | None:
        """Names of the cells of each dataset; None if a dataset has no names."""

    @property
    @abstractmethod
    def _collection(self) -> dict[str, Any]:
        """Identity of the datasets and their cells, as JSON."""

    @abstractmethod
    def _annotated(self, cells: pd.DataFrame, columns: str | Sequence[str] | None) -> pd.DataFrame:
        """Return a table of rows with the dataset, name and columns of ``obs`` of each cell."""

    @abstractmethod
    def _rows_in(self, batch: object) -> npt.NDArray[Any] | None:
        """Return the rows of a batch; None if it has none, as after a ``collate_fn``."""

    @abstractmethod
    def _preloads_to_gpu(self) -> bool:
        """Return True if the reader moves batches to a GPU."""

    @abstractmethod
    def _read_request(self, request: Request) -> Generator[Any]:
        """Read a load request, and yield its batches."""

    @abstractmethod
    def _finish(self, batch: Any, marks: Marks) -> Any:  # noqa: ANN401 whatever was read
        """Return a batch in the form in which the consumer gets it."""

    @abstractmethod
    def _iterated(self) -> AbstractContextManager[None]:
        """Return a context in which no datasets can be added."""

    # Epochs

    @property
    def sampler(self) -> DistributedSampler:
        """Sampler of the loader; frameworks call its ``set_epoch``."""
        return self._sampler

    @property
    def _cursor(self) -> Cursor:
        return cursor_of(self._sampler)

    @property
    def batch_sampler(self) -> DistributedSampler:
        """Sampler of the loader, under annbatch's name for it."""
        return self._sampler

    def _check_cells(self) -> None:
        """Raise if the loaded state is of different datasets, or the mask of cells in a different order."""
        cursor, place = self._cursor, self._cursor.clock.place
        if place.done and not place.finished:
            saved = {name: cursor.saved.get(name) for name in ("datasets", "cells")}
            check_identity(saved, self._collection)
        self._check_names()

    def _check_names(self) -> None:
        """Raise if an argument has the names of the cells in a different order."""
        cursor = self._cursor
        if cursor.names and (cells := self._cells) is not None:
            for what, own in cursor.names.items():
                check_names(what, own, cells)
            cursor.names = {}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, on every rank.

        If the sampler shuffles, each epoch has its own order, which is the same whenever it is set. Setting the epoch
        of a loaded state resumes it at the loaded position, until the epoch has ended.

        Parameters
        ----------
        epoch
            Number of the epoch, from 0 on.

        Raises
        ------
        ValueError
            If ``epoch`` is negative, or earlier than the epoch of a state that was just loaded.
        RuntimeError
            If Accelerate calls it, for a ``DataLoader`` whose batches it would shard a second time.

        See Also
        --------
        DistributedSampler.set_epoch

        Examples
        --------
        >>> first = []
        >>> for epoch in range(2):
        ...     loader.set_epoch(epoch)
        ...     first.append(next(iter(loader))["index"].tolist())
        >>> first
        [[9, 14, 8, 11], [6, 4, 5, 17]]
        """
        refuse_dispatch()
        self._sampler.set_epoch(epoch)

    @property
    def next_epoch(self) -> int:
        """Epoch to resume or to begin, as :attr:`DistributedSampler.next_epoch`."""
        return self._sampler.next_epoch

    def __len__(self) -> int:
        """Return the number of batches of the whole epoch on this rank.

        Batches that were done before a resume are included. Within a loop over the loader, it is the length of the
        epoch that the loop reads.
        """
        self._check_cells()
        if self._open is not None and self._open is self._cursor.last:
            return self._open.position.done + self._open.n_due
        return self.batches_done + self._sampler.n_batches(self.n_obs)

    @property
    def batches_done(self) -> int:
        """Number of batches of the epoch that were done before the last resume; 0 without one.

        Read it before the loop, as it is 0 again when the last batch is taken.
        """
        return self._sampler.batches_done

    @property
    def _shape(self) -> str:
        """Numbers of cells and genes, for messages."""
        if not self.n_obs:
            return "no cells yet"
        n_selected = self._cursor.epochs.config.mask.count(self.n_obs)
        selected = f"{n_selected:,} of " if n_selected < self.n_obs else ""
        return f"{selected}{plural(self.n_obs, 'cell')} x {plural(self.n_var, 'gene')}"

    @property
    def _batches_about(self) -> str:
        """Batches and prefetching, for messages; without asking for the rank."""
        config, is_known = self._cursor.epochs.config, self._cursor.rank_source.is_known
        size = (self._sampler.batch_size if is_known else config.batch_size) or 0
        units = config.units
        noun = "draw" if isinstance(units, Weights) else "row" if isinstance(units, EachRow) else "set"
        each = f"{plural(size, noun)} each, remainder={config.remainder!r}"
        return f"{each}, prefetching {plural(self._prefetch, 'load request')}"

    def _about(self) -> dict[str, str]:
        """Return what a user wants to know of the loader at a glance, by name; without asking for the rank."""
        about = {"rank": self._rank_about, "batches": self._batches_about, "epoch": self._epoch_about}
        return about | self._waited_about

    @property
    def _rank_about(self) -> str:
        is_known = self._cursor.rank_source.is_known
        return f"{self._sampler.rank} of {self._sampler.world_size}" if is_known else "not known yet"

    @property
    def _epoch_about(self) -> str:
        cursor = self._cursor
        if cursor.clock.place.finished:
            return f"{cursor.clock.place.epoch}, all batches done"
        position, n_more = cursor.clock.next, 0
        if self._pass is not None and self._pass is cursor.last:
            position, n_more = self._pass.position, self._steps.n_done
        if not cursor.rank_source.is_known or not self.n_obs:
            return str(position.epoch)
        try:
            n_batches = str(len(self))
        except (RuntimeError, ValueError) as error:  # such as a mask that selects too few rows
            n_batches = f"an unknown number of ({error})"
        return f"{position.epoch}, {position.done + n_more} of {n_batches} batches done"

    def __repr__(self) -> str:
        return shown(f"{type(self).__name__}: {self._shape}", self._about())

    def _end(self, ended: Pass) -> None:
        """Note that the last batch of a pass is about to be yielded."""
        self._cursor.end(ended)
        if self._steps.is_training:  # Lightning leaves its loop here, and asks for the length of the next epoch
            self._open = None

    def _has_yielded_all(self) -> bool:
        """Return True if this rank has no batch left in the last pass; under ``"keep"``, other ranks may have one."""
        last = self._cursor.last
        return last is not None and self._steps.n_yielded == last.n_due

    @contextmanager
    def _opened(self, current: Pass) -> Iterator[None]:
        """Note in this context that the iterator of a pass is in use."""
        self._open = current
        try:
            yield
        finally:
            if self._open is current:
                self._open = None

    def plan(self) -> EpochPlan:
        """Return the rows and batches of every rank in the next iteration.

        Returns
        -------
        EpochPlan
            The plan of :meth:`DistributedSampler.plan`, with the number of rows in memory under ``prefetch``.

        Examples
        --------
        >>> loader.plan()
        <EpochPlan of epoch 0: 2 ranks, 48 rows of 50, up to 6 batches each, 2 dropped>
        """
        self._check_names()
        # the current load request, and each one that is prefetched
        return self._sampler.plan(self.n_obs)._for_loader(1 + self._prefetch, self._cells)

    def cells_of(
        self,
        steps: StepSelection,
        columns: str | Sequence[str] | None = None,
        ranks: int | Sequence[int] | None = None,
        epoch: int | None = None,
    ) -> pd.DataFrame:
        """Return the cells of each rank in some steps of an epoch, as a table.

        It works for steps in the past and in the future, and reads no data.

        Parameters
        ----------
        steps
            Number of a step, a slice of steps, or a list of steps, as for :meth:`DistributedSampler.rows_of`.
        columns
            Name or names of columns of ``obs``. None takes all that the loader has (default).
        ranks
            Rank or ranks to list. None lists all ranks (default).
        epoch
            Number of the epoch. None takes the epoch that was set, loaded or iterated over last (default).

        Returns
        -------
        pandas.DataFrame
            One line for each cell, in the order of the batches. The columns are the integers ``step``, ``rank``,
            ``row`` (in the collection) and ``dataset`` (its number), the name ``cell`` (None if the dataset has no
            names), and the columns of ``obs``. A column of ``obs`` that is named as a column of these tables (also
            ``source``, ``set`` or ``is_control``) gets the suffix ``_obs``.

        Raises
        ------
        KeyError
            If the loader has no such column of ``obs``.
        IndexError, ValueError
            As for :meth:`DistributedSampler.rows_of`.

        Examples
        --------
        >>> loader.cells_of(0, "donor", ranks=1)
           step  rank  row  dataset     cell donor
        0     0     1   42        0  cell 42     e
        1     0     1   43        0  cell 43     e
        2     0     1   24        0  cell 24     c
        3     0     1   27        0  cell 27     c
        """
        return self._cells_of(steps, columns, ranks, epoch)

    def _cells_of(
        self,
        steps: StepSelection,
        columns: str | Sequence[str] | None,
        ranks: int | Sequence[int] | None,
        epoch: int | None,
        n_workers: int | None = None,
    ) -> pd.DataFrame:
        """Return the table of :meth:`cells_of`, for a pass that ``n_workers`` will read, if none has begun."""
        self._check_cells()
        epoch = None if epoch is None else integer("epoch", epoch, least=0, below=BOUND)
        position = self._cursor.of_epoch(epoch, n_workers)
        self._cursor.planned(self.n_obs, position)
        return self._cells_at(position, steps, columns, ranks)

    def _cells_at(
        self,
        position: Position,
        steps: StepSelection,
        columns: str | Sequence[str] | None,
        ranks: int | Sequence[int] | None,
    ) -> pd.DataFrame:
        """Return the table of :meth:`cells_of` for the epoch of a position."""
        return self._annotated(self._cursor.epochs.rows(self.n_obs, position, steps, ranks), columns)

    # Reading

    def __iter__(self) -> Generator[Any]:
        """Return an iterator over the batches of the epoch.

        After a resume, it yields the remaining batches. A loader has one iterator at a time: taking the first batch of
        a new one ends the previous one.

        Yields
        ------
        dict
            Batch, with the keys that :class:`StatefulLoader` lists; of an :class:`AlignedLoader`, a dict with the batch
            of each modality.

        Raises
        ------
        ValueError
            If the mask has the names of the cells in a different order, or the loaded state is of different datasets.
        RuntimeError
            If a worker of a ``DataLoader`` that :meth:`to_dataloader` hasn't made iterates. While iterating, if a newer
            iterator exists.
        """
        return reported(self._timed(self._iterate()), self._has_yielded_all)

    def _iterate(self, readers: Executor | None = None) -> Generator[Any]:
        """Iterate over a pass; ``readers`` are threads that several loaders share to prefetch."""
        if current_worker() is not None:
            raise RuntimeError(
                "A DataLoader that you make yourself can't iterate over a StatefulLoader in its workers, because the "
                "epoch and the state would be lost. Make the DataLoader with loader.to_dataloader(num_workers=...)."
            )
        self._check_cells()
        return self._batches(partial(self._batches_of, readers=readers))

    def _batches_in_worker(self, position: Position) -> Generator[Any]:
        """Return this worker's batches of a pass that begins at a position."""
        self._cursor.go_to(position)
        return self._batches_of(self._cursor.begin(self.n_obs, position))

    def _batches(self, read: Callable[[Pass], Generator[Any]], n_workers: int = 1) -> Generator[Any]:
        """Yield the batches of a pass; ``read`` reads them, here or in ``n_workers`` workers."""
        has_rest = True
        while has_rest:  # once more after each reshard()
            steps = self._begin_steps()
            # in this thread, since some frameworks give the rank to one thread only
            current = self._pass = self._cursor.begin(self.n_obs, self._cursor.next(n_workers))
            self._read = Tally()
            with self._opened(current), closing(read(current)) as batches:
                for batch in batches:
                    steps.count()  # before the yield: a consumer that saves a state has this batch
                    if current.is_over_after(steps.n_yielded):
                        self._end(current)  # a consumer that knows the number doesn't ask for more
                    yield batch
                    del batch  # else it would stay in memory until the next one is read
                    if self._cursor.clock.was_interrupted(current):
                        break
                    # after a newer pass has begun, its step counter would count these batches
                    self._cursor.check_is_last(current)
                else:
                    self._cursor.end(current)
            has_rest = self._cursor.clock.has_rest(current)

    def _batches_of(self, current: Pass, readers: Executor | None = None) -> Generator[Any]:
        """Read the batches of a pass, with prefetching if ``prefetch`` is above 0."""
        # one function per batch, in the order of requests and splits, in which batches come out of any prefetching
        due: deque[Callable[[Any], Any]] = deque()

        def requests() -> Iterator[Request]:
            """Yield load requests, and append a function to ``due`` for each of their batches."""
            while True:
                self._cursor.check_rank(current.placement)
                try:
                    request = current.take()
                except StopIteration:
                    return
                due.extend(map(partial(partial, self._yielded, request), request.splits, request.marks()))
                yield request

        read = prefetched(requests(), self._read_request, self._prefetch, readers)
        with self._iterated(), closing(current), closing(read) as batches:
            for batch in batches:
                yield due.popleft()(batch)
                del batch

    def _yielded(self, request: Request, split: npt.NDArray[Any], marks: Marks, batch: Any) -> Any:  # noqa: ANN401 whatever was read
        """Add the rows of a batch to the rows read, and return the batch as its consumer gets it."""
        index = self._rows_in(batch)
        self._note_read(request.rows_at(split) if index is None else index)
        return self._finish(batch, marks)

    def _note_read(self, rows: npt.NDArray[Any] | None) -> None:
        """Add the rows of a batch to the rows read; None if they aren't known."""
        if rows is None:
            self._read = None
        elif self._read is not None:
            self._read.add(rows)

    def _begin_steps(self) -> StepCounter:
        """Return the step counter of the next pass, after the checks of a Lightning training."""
        training = training_on(self, self._cursor.rank_source.framework_object)
        if training is not None:
            # overfit_batches reads the first batches of epoch 0 in every epoch
            if training.overfits and not self._sampler.batches_done:
                self._cursor.go_to(Position())
            training.check_all_are_read(len(self), self._sampler.batches_done)
        self._steps = self._steps.next(training)
        return self._steps

    # States

    def step_done(self) -> None:
        """Mark the step of the last yielded batch as done.

        Without this method, a batch counts as done as soon as it is yielded. Call it after each step if the state may
        be saved within a step, in a signal handler or after an error. The state then resumes with the batch of that
        step.

        Examples
        --------
        >>> for step, batch in enumerate(loader):
        ...     if step == 3:  # stopped within the fourth step
        ...         break
        ...     loader.step_done()
        >>> loader.load_state_dict(loader.state_dict())
        >>> loader.batches_done
        3
        """
        self._steps.done()

    def state_dict(self, *, batches_done: int | None = None) -> dict[str, Any]:
        """Return the position in the epoch, the same on every rank.

        Parameters
        ----------
        batches_done
            Number of batches of this epoch that every rank has done. None takes the number of batches that were
            yielded, or marked by :meth:`step_done` (default).

        Returns
        -------
        dict
            State for :meth:`load_state_dict`, on any number of ranks. It can be written as JSON.

        Raises
        ------
        RuntimeError
            If another loader with the same sampler was iterated over last.
        ValueError
            As for :meth:`DistributedSampler.state_dict`.

        See Also
        --------
        DistributedSampler.state_dict

        Examples
        --------
        >>> batches = iter(loader)
        >>> _ = next(batches), next(batches)
        >>> state = loader.state_dict()
        >>> state["epoch"]
        0
        """
        return self._cursor.state(self._position_after(batches_done), self._collection)

    def _position_after(self, batches_done: int | None, n_workers: int = 1) -> Position:
        """Return the position after some batches; by default, after the done batches of the last pass.

        ``n_workers`` will read the next pass, if there is no last one.
        """
        if batches_done is not None:
            batches_done = integer("batches_done", batches_done, least=0, below=BOUND)
        elif (last := self._own_pass()) is not None:
            batches_done = last.done_after(self._steps.n_done)
        return self._cursor.position_after(batches_done, self.n_obs, n_workers)

    def _own_pass(self) -> Pass | None:
        """Return the last pass, if this loader counts its batches; None if there is none."""
        last = self._cursor.last
        if last is not None and last is not self._pass:
            raise RuntimeError(
                "The last iteration was not over this loader, but over a different loader with the same sampler, or "
                "sampler.sample(...). Give each loader its own sampler."
            )
        return last

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Resume from a saved state, on every rank and on any number of ranks.

        Add all datasets first, in the same order as in the saved job. A state of different datasets then raises here,
        and not when the next iteration begins.

        Parameters
        ----------
        state
            State that :meth:`state_dict` has returned on any rank.
        strict
            True to raise if a setting that determines the batches has changed (default). False resumes without
            comparing settings, so rows may be read twice or never.

        Raises
        ------
        TypeError, ValueError
            As for :meth:`DistributedSampler.load_state_dict`. The loader is then unchanged.

        See Also
        --------
        DistributedSampler.load_state_dict

        Examples
        --------
        >>> batches = iter(loader)
        >>> _ = next(batches), next(batches)
        >>> state = loader.state_dict()
        >>> loader.load_state_dict(state)  # usually in a new process
        >>> loader.batches_done, len([batch for batch in loader])
        (2, 4)
        """
        with errors_explained(self._cursor.rank_source.framework_object):
            self._cursor.resume(state, strict=strict, n_obs=self.n_obs or None, collection=self._collection)

    def reshard(self, dist_info: DistInfo | None = None, *, batches_done: int | None = None) -> None:
        """Change the rank and the world size within an epoch, without a restart.

        A running iterator continues with the batches of the new rank. Batches whose step isn't done are read again, by
        the ranks to which they are then assigned.

        Parameters
        ----------
        dist_info
            Source of the new rank and world size, as for :class:`DistributedSampler`. None asks the same source again
            (default).
        batches_done
            Number of batches of this epoch that every rank has done, as for :meth:`state_dict`. None takes the number
            of this process (default).

        Raises
        ------
        TypeError, ValueError
            If the epoch can't be resumed on this number of ranks, or ``dist_info`` is invalid. The loader is then
            unchanged.

        See Also
        --------
        DistributedSampler.reshard

        Examples
        --------
        >>> for step, batch in enumerate(loader):  # 2 ranks have 6 batches each
        ...     if step == 1:  # rank 1 has failed
        ...         loader.reshard(Rank(0, 1))
        >>> step + 1
        10
        """
        self._reshard(self._position_after(batches_done), dist_info)

    def _reshard(self, position: Position, dist_info: DistInfo | None) -> None:
        self._cursor.reshard(position, dist_info, self._collection)

    # Checks

    def check_ranks_agree(self, *, timeout: Timeout = 300.0, gather: Gather | None = None) -> None:
        """Check that all ranks have the same configuration and the same datasets.

        Unlike :meth:`DistributedSampler.check_ranks_agree`, it compares the shape of each dataset and the names of
        some of its cells.

        Parameters
        ----------
        timeout, gather
            As for :meth:`DistributedSampler.check_ranks_agree`.

        Raises
        ------
        ValueError
            On every rank, if ranks differ. The message lists all differences.
        TimeoutError
            If a process doesn't call it within ``timeout`` seconds.

        Examples
        --------
        ``gather`` returns the strings of all ranks. This one makes up rank 1, with a different seed:

        >>> def gather(text):
        ...     other = text.replace('"rank": 0', '"rank": 1')
        ...     return [text, other.replace('"seed": 0', '"seed": 1')]
        >>> loader.check_ranks_agree(gather=gather)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: The ranks of this job don't agree:
          seed: 0 on rank 0; 1 on rank 1
        ...
        """
        checks.ranks_agree(self._cursor, self._description, timeout=timeout, gather=gather)

    def _description(self, job: Placement) -> Description:
        """Return the description of this process's sampler and datasets."""
        self._check_names()
        return Description.of_next(job, self._cursor, self.n_obs, self._collection)

    def check_epoch_read(
        self, read: Read | None = None, *, timeout: Timeout = 300.0, gather: Gather | None = None
    ) -> str:
        """Check that all ranks together have read the rows of the plan.

        It is about the last iteration, so call it before the next :meth:`set_epoch`.

        Parameters
        ----------
        read
            Rows of each batch that this process has read, as integer arrays. None takes the ``"index"`` of each batch
            that this loader has yielded, or the requested rows without ``return_index=True`` (default). If workers
            read, it needs ``return_index=True``.
        timeout, gather
            As for :meth:`DistributedSampler.check_ranks_agree`.

        Returns
        -------
        str
            Summary of the rows that were read.

        Raises
        ------
        ValueError
            On every rank, if a rank has read other rows than planned. The message lists all differences.
        TimeoutError
            If a process doesn't call it within ``timeout`` seconds.

        See Also
        --------
        DistributedSampler.check_epoch_read

        Examples
        --------
        >>> loader.reshard(Rank(0, 1))  # this process is the only rank
        >>> for batch in loader:
        ...     pass
        >>> for sentence in loader.check_epoch_read().split(". "):
        ...     print(sentence)
        epoch 0: 1 rank has read 48 rows in 12 batches, as planned
        Each of the 48 rows was read once; 2 of the 50 are dropped in this epoch
        """
        reading = partial(self._reading, read=read)
        return checks.epoch_read(self._cursor, reading, timeout=timeout, gather=gather)

    def _reading(self, job: Placement, read: Read | None = None) -> Reading:
        """Return the rows that this process has read in its last pass, with their description."""
        if read is None:
            read = self._read if self._own_pass() is not None else Tally()
        return Reading.of(job, self._cursor, self.n_obs, read)

    def _read_of_last_pass(self) -> tuple[Pass, Tally | None]:
        """Return the last pass, and the rows of its yielded batches."""
        last = self._own_pass()
        assert last is not None
        return last, self._read


def common_n_var(loaders: Mapping[str, EpochLoader]) -> int:
    """Return the number of genes of some loaders; a ValueError if they have different numbers."""
    numbers = {name: loader.n_var for name, loader in loaders.items()}
    if len({*numbers.values()}) > 1:
        each = ", ".join(f"{name} {number}" for name, number in numbers.items())
        raise ValueError(f"n_var must be the same for all loaders, got {each}. Use the n_var of a single loader.")
    return next(iter(numbers.values()))
