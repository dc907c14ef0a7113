"""The WorkerDataLoader: torch's ``DataLoader`` around a StatefulLoader, where frameworks find its epoch and its state.

torch's ``DataLoader`` hides ``set_epoch``, ``state_dict`` and the sampler of what it loads. Here they are in front, and
batches are counted as they come out of the workers, whatever was fetched ahead. It is one of torch's for whoever asks;
what reads is another one inside, whose workers are told where each pass begins.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import batched, chain, islice, starmap
from multiprocessing import get_start_method
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from annbatch_distributed import checks
from annbatch_distributed.checks import Gather, Read, Reading, Tally, Timeout
from annbatch_distributed.lanes import Segment
from annbatch_distributed.plan import EpochPlan
from annbatch_distributed.planner import StepSelection
from annbatch_distributed.ranks import Deferred, DistInfo, Placement
from annbatch_distributed.ranks.worker import current_worker
from annbatch_distributed.rows import integer
from annbatch_distributed.sampler import DistributedSampler
from annbatch_distributed.state import MOST_SEGMENTS, Position
from annbatch_distributed.stream import Pass

if TYPE_CHECKING:
    import pandas as pd

    from annbatch_distributed.loader.epochs import EpochLoader


#: What torch would divide rows by, or collect batches out of order with, and with which value it doesn't, as Lightning
#: passes it on to another one that it makes to predict.
_REFUSED = {
    "batch_size": None,
    "shuffle": False,
    "sampler": None,
    "batch_sampler": None,
    "drop_last": False,
    "in_order": True,
}


class _Part(IterableDataset[Any]):
    """What each worker reads: its part of the pass that the process of the rank has begun."""

    def __init__(self, loader: EpochLoader) -> None:
        self._loader = loader
        # shared by the process of the rank and its workers, those that persist included
        self._numbers = torch.zeros(3 + 3 * MOST_SEGMENTS, dtype=torch.int64).share_memory_()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        if get_spawning_popen() is None:
            return state
        # A worker that is spawned gets what is pickled through a pipe, and the rank waits in it for ever if the worker
        # has died before it has read more than the pipe holds. A file says where the loader is.
        with tempfile.NamedTemporaryFile(prefix="annbatch-distributed-", delete=False) as file:
            ForkingPickler(file).dump(state.pop("_loader"))
        weakref.finalize(self, Path(file.name).unlink, missing_ok=True)
        return state | {"_path": file.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_path" in state:
            path = Path(state.pop("_path"))
            state["_loader"] = pickle.loads(path.read_bytes())
            path.unlink()  # another worker has a file of its own
        vars(self).update(state)

    def write(self, position: Position) -> None:
        """Tell the workers where the pass begins."""
        # [epoch, pass, n_segments, n_lanes, n_workers, done, n_lanes, ...], which fills the front of the tensor
        numbers = [position.epoch, position.passes, len(position.segments), *chain(*position.segments)]
        self._numbers[: len(numbers)] = torch.tensor(numbers)

    def __iter__(self) -> Iterator[Any]:
        if current_worker() is None:
            return iter(self._loader)
        epoch, passes, n_segments, *numbers = self._numbers.tolist()
        segments = tuple(starmap(Segment, islice(batched(numbers, 3), n_segments)))
        return self._loader.batches_in_worker(Position(epoch, passes, segments))


class WorkerDataLoader(DataLoader[Any]):
    """What :meth:`.StatefulLoader.to_dataloader` returns: a ``DataLoader`` of torch, as frameworks ask for one.

    Parameters
    ----------
    dataset
        The loader whose batches the workers read.
    num_workers
        How many worker processes, at least 0.
    options
        Any further ones of torch's ``DataLoader``.
    """

    #: accelerate takes it as it is, and has its state in ``save_state``; tests/frameworks/test_accelerate.py notices if
    #: it goes by other names.
    _is_accelerate_prepared = use_stateful_dataloader = True

    def __init__(self, dataset: EpochLoader, *, num_workers: int = 0, **options: Any) -> None:  # noqa: ANN401 torch's own
        num_workers = integer("num_workers", num_workers, least=0)
        if refused := [name for name, value in _REFUSED.items() if options.pop(name, value) not in (None, value)]:
            raise TypeError(
                f"to_dataloader takes the options of torch's DataLoader but for {', '.join(_REFUSED)}, got "
                f"{', '.join(refused)}. The loader makes the batches: give its sampler a batch_size."
            )
        if num_workers and dataset.preloads_to_gpu():
            raise ValueError(
                f"num_workers={num_workers} reads in other processes, and torch can't pass on what cupy has on the "
                "GPU from one process to another. Make the loader with preload_to_gpu=False, and move batches in the "
                "training step."
            )
        if num_workers:
            # zarrs's threads don't survive a fork, and a worker that is started anew takes seconds to import
            options = {"multiprocessing_context": "spawn", "persistent_workers": True} | options
        self._loader = dataset
        super().__init__(dataset, batch_size=None, num_workers=num_workers, **options)
        self._part = _Part(dataset)
        self._make_workers = partial(DataLoader[Any], self._part, batch_size=None, num_workers=num_workers, **options)
        self._workers = self._make_workers()
        # the pass that was begun last, and what its batches had, if they say which rows that is
        self._pass: Pass | None = None
        self._read: Tally | None = None
        # how often the sampler had been changed when these workers were started
        self._n_changes: int | None = None

    @property  # type: ignore[override]  # torch has an attribute
    def dataset(self) -> EpochLoader:
        """The loader.

        Raises
        ------
        RuntimeError
            If accelerate's ``skip_first_batches`` asks for it, as the ``Trainer`` of Hugging Face does.
        """
        _check_not_skipped()
        return self._loader

    @dataset.setter
    def dataset(self, value: EpochLoader) -> None:
        vars(self)["dataset"] = value  # where Lightning looks for what to make another one of

    @property  # type: ignore[override]  # torch has one of its own
    def sampler(self) -> DistributedSampler:
        """The sampler, where frameworks look for something whose ``set_epoch`` they can call."""
        return self._loader.sampler

    @sampler.setter
    def sampler(self, value: object) -> None:
        """Leave out the one that torch makes, of which nothing is read."""

    @property
    def next_epoch(self) -> int:
        """Which epoch to resume or begin: see :attr:`.DistributedSampler.next_epoch`."""
        return self._loader.next_epoch

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next pass belongs to, on every rank: see :meth:`.DistributedSampler.set_epoch`."""
        self._loader.set_epoch(epoch)

    @property
    def batches_done(self) -> int:
        """Number of batches of the epoch that are done before the next pass."""
        return self._loader.batches_done

    def __len__(self) -> int:
        """Return how many batches the epoch has on this rank, those included that were done before a resume."""
        return len(self._loader)

    @property
    def n_obs(self) -> int:
        """Number of cells of the collection, over all ranks."""
        return self._loader.n_obs

    @property
    def n_var(self) -> int:
        """Number of genes."""
        return self._loader.n_var

    def plan(self) -> EpochPlan:
        """Return every rank's rows and batches in this epoch: see :meth:`.StatefulLoader.plan`."""
        return self._loader.plan()

    def cells_of(
        self,
        steps: StepSelection,
        columns: str | Sequence[str] | None = None,
        ranks: int | Sequence[int] | None = None,
        epoch: int | None = None,
    ) -> pd.DataFrame:
        """Return which cells each rank has read in some steps, or will read: see :meth:`.StatefulLoader.cells_of`."""
        return self._loader.cells_of(steps, columns, ranks, epoch)

    def check_ranks_agree(self, *, timeout: Timeout = 300.0, gather: Gather | None = None) -> None:
        """Check that all ranks have the same configuration: see :meth:`.StatefulLoader.check_ranks_agree`."""
        self._loader.check_ranks_agree(timeout=timeout, gather=gather)

    def __iter__(self) -> Generator[Any]:  # type: ignore[override]  # torch names its own class
        """Return the batches of a pass, which begins with the first: what is left of a resumed epoch, or else all.

        Raises
        ------
        RuntimeError
            If spawned workers would run a script without a guard again. While iterating, if another iteration was begun
            since, as workers that persist can't go back to this one. Or if Hugging Face's ``Trainer`` evaluates, which
            would count some cells more than others.
        """
        _check_not_evaluated(self.sampler)
        # without workers, the loader itself counts its batches
        if not self.num_workers:
            yield from self._workers
            return
        loader, sampler = self._loader, self._loader.sampler
        _check_guard(self._workers)
        is_left = True
        while is_left:  # once more each time that the ranks change
            loader._check_cells()
            steps = loader._begin_steps()
            # persistent workers can't learn of a change, and control-C in a terminal ends them
            if self._n_changes not in (None, sampler.n_changes) or _have_died(self._workers):
                self._workers = self._make_workers()
            self._n_changes = sampler.n_changes
            begun = self._pass = sampler.begin_by_workers(loader.n_obs, self.num_workers)
            self._part.write(begun.position)
            self._read = Tally()
            with loader.opened(begun):
                for batch in self._workers:
                    sampler.check_rank(begun)
                    sampler.check_is_last(begun)
                    index = loader.rows_in(batch)
                    if index is None:
                        self._read = None
                    elif self._read is not None:
                        self._read.add(index)
                    steps.count()  # before it is yielded: a consumer who saves a state has this batch
                    if steps.n_yielded == begun.n_due:
                        loader.end(begun)
                    yield batch
                    if sampler.has_cut(begun):
                        break
                    sampler.check_is_last(begun)
                else:
                    sampler.end(begun)
            is_left = sampler.has_left(begun)

    def check_epoch_read(
        self, read: Read | None = None, *, timeout: Timeout = 300.0, gather: Gather | None = None
    ) -> str:
        """Check that all ranks together have read in the last pass what was planned.

        See :meth:`.StatefulLoader.check_epoch_read`, with whose ``return_index=True`` the batches say which rows they
        are.
        """
        reading = partial(self._reading, read=read)
        return checks.epoch_read(self.sampler.agreeing, reading, timeout=timeout, gather=gather)

    def _reading(self, place: Placement, read: Read | None = None) -> Reading:
        if read is None and self._own_pass() is not None:
            return self.sampler.reading(place, self._loader.n_obs, self._read)
        return self._loader._reading(place, read)

    def read_of_last_pass(self) -> tuple[Pass, Read | None]:
        """Return the pass that was begun last, and the rows of its batches, if they say which these are."""
        last = self._own_pass()
        if last is None:
            return self._loader.read_of_last_pass()
        return last, self._read

    def step_done(self) -> None:
        """Say that the step of the batch that was yielded last is done: see :meth:`.StatefulLoader.step_done`."""
        self._loader.step_done()

    def _own_pass(self) -> Pass | None:
        """Return the pass that was begun last if its workers read it; None if the loader itself knows how far it is."""
        last = self.sampler.last_pass
        if last is None or not last.is_by_workers:
            return None
        if last is not self._pass:
            raise RuntimeError(
                "The pass that was begun last is not one of this DataLoader, but of another one around the same "
                "loader. Give each a loader and a sampler of its own."
            )
        return last

    def state_dict(self, *, batches_done: int | None = None) -> dict[str, Any]:
        """Return how far the epoch is: see :meth:`.StatefulLoader.state_dict`.

        Parameters
        ----------
        batches_done
            Number of batches of this epoch that every rank has done. None takes the number that came out of the
            workers, or told by :meth:`step_done`.

        Raises
        ------
        RuntimeError
            If the loader has begun another pass since, so that it isn't known which of them the state is to be about.
        """
        last = self._own_pass()
        if batches_done is None and last is not None:
            batches_done = last.done_after(self._loader._steps.n_done)
        return self._loader.state_dict(batches_done=batches_done)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Resume where a state was saved, on every rank: see :meth:`.DistributedSampler.load_state_dict`."""
        self._loader.load_state_dict(state, strict=strict)

    def reshard(self, dist_info: DistInfo | Deferred | None = None, *, batches_done: int | None = None) -> None:
        """Change the rank and the world size within an epoch: see :meth:`.StatefulLoader.reshard`.

        The next batch is read by new workers.
        """
        self.sampler.reshard_at(self.state_dict(batches_done=batches_done), dist_info)


def _have_died(workers: DataLoader[Any]) -> bool:
    """Return True if persistent workers have been started, and one of them has ended."""
    # torch has no public way to ask; tests/test_workers.py notices if it keeps them elsewhere
    iterator: Any = workers._iterator
    return iterator is not None and not all(worker.is_alive() for worker in iterator._workers)


def _check_guard(workers: DataLoader[Any]) -> None:
    """Raise a RuntimeError if workers are spawned, and the script that they import can't have a guard.

    They would run it again: join the job as ranks that are there already, say, and wait in it for ever.
    """
    context: Any = workers.multiprocessing_context
    method = get_start_method() if context is None else context.get_start_method()
    script = getattr(sys.modules["__main__"], "__file__", None)  # a notebook has none
    if method == "fork" or script is None or not Path(script).is_file():
        return
    if "__name__" not in Path(script).read_text(errors="ignore"):
        raise RuntimeError(
            f'{script} has no guard. Workers that are spawned import the script: without if __name__ == "__main__": '
            "around what it does, they would run it again. Put it into a function, and call that under the guard."
        )


def _check_not_evaluated(sampler: DistributedSampler) -> None:
    """Raise a RuntimeError if Hugging Face's ``Trainer`` evaluates on batches that aren't all full.

    It repeats the loss of each batch as often as a full one has cells, and gathers predictions of equal batches.
    """
    # frame 0 is this function, 1 the generator of batches, 2 is who asks for one
    caller = sys._getframe(2)
    if (caller.f_globals.get("__name__"), caller.f_code.co_name) != ("transformers.trainer", "evaluation_loop"):
        return
    if sampler.remainder != "drop":
        raise RuntimeError(
            "Hugging Face's Trainer weighs all batches alike when it evaluates or predicts, the smaller ones of "
            f"remainder={sampler.remainder!r} too, so that its loss and its predictions would be of other cells. "
            "Override evaluate, as 'Evaluate' on the page about the Trainer shows, or pass remainder='drop'."
        )


def _check_not_skipped() -> None:
    """Raise a RuntimeError if accelerate's ``skip_first_batches`` calls the function that asks.

    It would go on with a ``DataLoader`` of its own, which knows nothing of epochs and states.
    """
    # frame 0 is this function, 1 is the property, 2 is who asks for it
    caller = sys._getframe(2)
    if (caller.f_globals.get("__name__"), caller.f_code.co_name) != ("accelerate.data_loader", "skip_first_batches"):
        return
    raise RuntimeError(
        "accelerate's skip_first_batches can't skip batches of what to_dataloader() returns, whose epoch and state it "
        "would lose. Load the state that was saved with the checkpoint, load_state_dict(state): nothing is read twice "
        "then. Hugging Face's Trainer doesn't skip with TrainingArguments(ignore_data_skip=True)."
    )
