"""The WorkerDataLoader: a PyTorch ``DataLoader`` of a loader, with its epoch and its state.

PyTorch's ``DataLoader`` hides the ``set_epoch``, ``state_dict`` and ``sampler`` of its dataset. This subclass has them,
and counts the batches that the workers have delivered, not the batches that they have prefetched. An inner
``DataLoader`` reads, and its workers get the position of each pass through shared memory.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from itertools import batched, chain, islice, starmap
from multiprocessing import get_start_method
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from annbatch_distributed.checks import Gather, Read, Timeout
from annbatch_distributed.core.epochs import StepSelection
from annbatch_distributed.core.lanes import Segment
from annbatch_distributed.core.state import MOST_SEGMENTS, Position
from annbatch_distributed.core.stream import Pass
from annbatch_distributed.core.values import integer
from annbatch_distributed.core.worker import current_worker
from annbatch_distributed.loader.accelerate import reported
from annbatch_distributed.loader.callers import refuse_evaluation, refuse_skipping
from annbatch_distributed.loader.epoch_loader import EpochLoader, shown
from annbatch_distributed.loader.waiting import Waits
from annbatch_distributed.ranks import DistInfo
from annbatch_distributed.reports import EpochPlan
from annbatch_distributed.sampler import DistributedSampler, cursor_of

if TYPE_CHECKING:
    import pandas as pd


#: Options of PyTorch's DataLoader that would select or reorder rows, each with its harmless value, which Lightning
#: passes when it makes a copy for predictions.
_REFUSED = {
    "batch_size": None,
    "shuffle": False,
    "sampler": None,
    "batch_sampler": None,
    "drop_last": False,
    "in_order": True,
}


class _Part(IterableDataset[Any]):
    """Dataset of the workers: each worker's part of the pass that the process of the rank has begun."""

    def __init__(self, loader: EpochLoader) -> None:
        self._loader = loader
        # shared by the process of the rank and its workers, persistent ones included
        self._numbers = torch.zeros(2 + 3 * MOST_SEGMENTS, dtype=torch.int64).share_memory_()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        if get_spawning_popen() is None:
            return state
        # A spawned worker reads its pickled arguments from a pipe. If it dies before it has emptied the pipe, the rank
        # hangs while it writes more than the pipe holds. So the loader goes into a file, and its path into the pipe.
        with tempfile.NamedTemporaryFile(prefix="annbatch-distributed-", delete=False) as file:
            ForkingPickler(file).dump(state.pop("_loader"))
        weakref.finalize(self, Path(file.name).unlink, missing_ok=True)
        return state | {"_path": file.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_path" in state:
            path = Path(state.pop("_path"))
            state["_loader"] = pickle.loads(path.read_bytes())
            path.unlink()  # each worker has its own file
        vars(self).update(state)

    def write(self, position: Position) -> None:
        """Write the position of the next pass, for the workers."""
        # [epoch, n_segments, n_lanes, n_workers, done, n_lanes, ...], at the front of the tensor
        numbers = [position.epoch, len(position.segments), *chain(*position.segments)]
        self._numbers[: len(numbers)] = torch.tensor(numbers)

    def __iter__(self) -> Iterator[Any]:
        if current_worker() is None:
            return self._loader._iterate()
        epoch, n_segments, *numbers = self._numbers.tolist()
        segments = tuple(starmap(Segment, islice(batched(numbers, 3), n_segments)))
        return self._loader._batches_in_worker(Position(epoch, segments))


class WorkerDataLoader(Waits, DataLoader[Any]):
    """PyTorch ``DataLoader`` with an epoch and a state.

    :meth:`.StatefulLoader.to_dataloader` makes it.

    Parameters
    ----------
    dataset
        Loader whose batches the workers read.
    num_workers
        Number of worker processes (default 0, which reads in this process).
    options
        Other options of PyTorch's ``DataLoader``.

    Examples
    --------
    >>> batches = loader.to_dataloader(num_workers=0)
    >>> for batch in batches:
    ...     break
    >>> state = batches.state_dict()
    >>> batches.load_state_dict(state)  # usually in a new process
    >>> batches.batches_done, len(batches)
    (1, 6)
    """

    # Accelerate uses an object with these attributes unchanged, and saves its state in save_state;
    # tests/frameworks/test_accelerate.py fails if Accelerate renames them
    _is_accelerate_prepared = use_stateful_dataloader = True

    def __init__(self, dataset: EpochLoader, *, num_workers: int = 0, **options: Any) -> None:  # noqa: ANN401 torch's own
        num_workers = integer("num_workers", num_workers, least=0)
        if refused := [name for name, value in _REFUSED.items() if options.pop(name, value) not in (None, value)]:
            raise TypeError(
                f"to_dataloader takes all options of PyTorch's DataLoader except {', '.join(_REFUSED)}, got "
                f"{', '.join(refused)}. Leave them out: the sampler of the loader makes the batches."
            )
        if num_workers and dataset._preloads_to_gpu():
            raise ValueError(
                f"preload_to_gpu must be False under num_workers={num_workers}, because PyTorch can't pass CuPy arrays "
                "between processes. Make the loader with preload_to_gpu=False, and move batches in the training step."
            )
        if num_workers:
            # threads of zarrs don't survive a fork, and a new worker takes seconds to import
            options = {"multiprocessing_context": "spawn", "persistent_workers": True} | options
        self._loader = dataset
        super().__init__(dataset, batch_size=None, num_workers=num_workers, **options)
        self._options = {"batch_size": None, "num_workers": num_workers, **options}
        self._make_parts()

    def _make_parts(self) -> None:
        """Make the workers and the memory that is shared with them."""
        self._part = _Part(self._loader)
        self._workers = self._make_workers()
        # the number of changes of the sampler before these workers were started
        self._n_changes: int | None = None

    def _make_workers(self) -> DataLoader[Any]:
        return DataLoader(self._part, **self._options)

    def __getstate__(self) -> dict[str, Any]:
        # a copy, as in a rank that a trainer spawns, has its own workers; and a loader that holds the trainer must be
        # pickled with it, and not in the file of a worker
        return {name: value for name, value in vars(self).items() if name not in ("_part", "_workers", "_n_changes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._make_parts()

    @property  # type: ignore[override]  # torch has an attribute
    def dataset(self) -> EpochLoader:
        """Loader whose batches the workers read.

        Raises
        ------
        RuntimeError
            If Accelerate's ``skip_first_batches`` asks for it, as Hugging Face's ``Trainer`` does on a resume.
        """
        refuse_skipping()
        return self._loader

    @dataset.setter
    def dataset(self, value: EpochLoader) -> None:
        vars(self)["dataset"] = value  # Lightning copies a DataLoader from these attributes

    @property  # type: ignore[override]  # torch has one of its own
    def sampler(self) -> DistributedSampler:
        """Sampler of the loader; frameworks call its ``set_epoch``."""
        return self._loader.sampler

    @sampler.setter
    def sampler(self, value: object) -> None:
        """Ignore the sampler that PyTorch makes."""

    @property
    def next_epoch(self) -> int:
        """Epoch to resume or to begin, as :attr:`.DistributedSampler.next_epoch`."""
        return self._loader.next_epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, as :meth:`.StatefulLoader.set_epoch`."""
        self._loader.set_epoch(epoch)

    @property
    def batches_done(self) -> int:
        """Number of batches of the epoch that were done before a resume; else 0."""
        return self._loader.batches_done

    def __len__(self) -> int:
        """Return the number of batches of the whole epoch on this rank."""
        return len(self._loader)

    @property
    def n_obs(self) -> int:
        """Number of cells of the collection, over all ranks."""
        return self._loader.n_obs

    @property
    def n_var(self) -> int:
        """Number of genes."""
        return self._loader.n_var

    def __repr__(self) -> str:
        about = self._loader._about() | {"workers": str(self.num_workers)} | self._waited_about
        return shown(f"{type(self).__name__}: {self._loader._shape}", about)

    def plan(self) -> EpochPlan:
        """Return the plan of the next iteration, as :meth:`.StatefulLoader.plan`."""
        return self._loader.plan()

    def cells_of(
        self,
        steps: StepSelection,
        columns: str | Sequence[str] | None = None,
        ranks: int | Sequence[int] | None = None,
        epoch: int | None = None,
    ) -> pd.DataFrame:
        """Return the cells of some steps, as :meth:`.StatefulLoader.cells_of`."""
        return self._loader._cells_of(steps, columns, ranks, epoch, self._n_readers)

    def check_ranks_agree(self, *, timeout: Timeout = 300.0, gather: Gather | None = None) -> None:
        """Compare the ranks, as :meth:`.StatefulLoader.check_ranks_agree`."""
        self._loader.check_ranks_agree(timeout=timeout, gather=gather)

    def __iter__(self) -> Generator[Any]:  # type: ignore[override]  # torch names its own class
        """Return an iterator over the batches of the epoch.

        After a resume, it yields the remaining batches.

        Raises
        ------
        RuntimeError
            If the script has no ``__name__`` guard and workers are spawned. If Hugging Face's ``Trainer`` evaluates
            unless ``remainder="drop"``, since it would count some cells more than others. While iterating, if a newer
            iterator exists.
        """
        refuse_evaluation(self.sampler.remainder)
        return reported(self._timed(self._iterate()), self._loader._has_yielded_all)

    def _iterate(self, readers: Executor | None = None) -> Generator[Any]:  # noqa: ARG002 workers read
        if not self.num_workers:
            yield from self._workers
            return
        _check_guard(self._workers)
        self._loader._check_cells()
        yield from self._loader._batches(self._collected, self.num_workers)

    def _collected(self, current: Pass) -> Generator[Any]:
        """Yield the batches of a pass that the workers read."""
        cursor = cursor_of(self.sampler)
        # persistent workers keep their copy of the sampler, and Ctrl-C in a terminal ends them
        if self._n_changes not in (None, cursor.n_changes) or _have_died(self._workers):
            self._workers = self._make_workers()
        self._n_changes = cursor.n_changes
        self._part.write(current.position)
        for batch in self._workers:
            cursor.check_rank(current.placement)
            self._loader._note_read(self._loader._rows_in(batch))
            yield batch
            del batch

    def check_epoch_read(
        self, read: Read | None = None, *, timeout: Timeout = 300.0, gather: Gather | None = None
    ) -> str:
        """Check that all ranks together have read the rows of the plan.

        It is :meth:`.StatefulLoader.check_epoch_read` for rows that workers have read. Unless ``read``
        is passed, the loader needs ``return_index=True``, so that batches have their rows.
        """
        return self._loader.check_epoch_read(read, timeout=timeout, gather=gather)

    def step_done(self) -> None:
        """Mark the last step as done, as :meth:`.StatefulLoader.step_done`."""
        self._loader.step_done()

    @property
    def _n_readers(self) -> int:
        """Number of processes that read batches of this rank."""
        return self.num_workers or 1

    def state_dict(self, *, batches_done: int | None = None) -> dict[str, Any]:
        """Return the position in the epoch, as :meth:`.StatefulLoader.state_dict`.

        Parameters
        ----------
        batches_done
            Number of batches of this epoch that every rank has done. None takes the number of batches that the workers
            have delivered, or that were marked by :meth:`step_done` (default).

        Returns
        -------
        dict
            State for :meth:`load_state_dict`, on any number of ranks and workers.
        """
        position = self._loader._position_after(batches_done, self._n_readers)
        return cursor_of(self.sampler).state(position, self._loader._collection)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Resume from a saved state, as :meth:`.StatefulLoader.load_state_dict`."""
        self._loader.load_state_dict(state, strict=strict)

    def reshard(self, dist_info: DistInfo | None = None, *, batches_done: int | None = None) -> None:
        """Change rank and world size, as :meth:`.StatefulLoader.reshard`.

        New workers read the next batch.
        """
        self._loader._reshard(self._loader._position_after(batches_done, self._n_readers), dist_info)


def _have_died(workers: DataLoader[Any]) -> bool:
    """Return True if persistent workers were started and one of them has ended."""
    # a private attribute; tests/test_workers.py fails if PyTorch renames it
    iterator: Any = workers._iterator
    return iterator is not None and not all(worker.is_alive() for worker in iterator._workers)


def _check_guard(workers: DataLoader[Any]) -> None:
    """Raise a RuntimeError if workers are spawned and the script that they import has no guard.

    They would run the script again: for example, join the job as ranks that exist already, and hang.
    """
    context: Any = workers.multiprocessing_context
    method = get_start_method() if context is None else context.get_start_method()
    script = getattr(sys.modules["__main__"], "__file__", None)  # a notebook has none
    if method == "fork" or script is None or not Path(script).is_file():
        return
    if "__name__" not in Path(script).read_text(errors="ignore"):
        raise RuntimeError(
            f"{script} has no guard. Spawned workers import the script and would run it again. Put its code into a "
            'function, and call the function under if __name__ == "__main__".'
        )
