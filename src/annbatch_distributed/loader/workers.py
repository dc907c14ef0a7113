"""The WorkerDataLoader: torch's ``DataLoader`` around a StatefulLoader, where frameworks find its epoch and its state.

torch's ``DataLoader`` hides ``set_epoch``, ``state_dict`` and the sampler of what it loads. Here they are in front, and
batches are counted as they come out of the workers, whatever was fetched ahead.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from annbatch_distributed.ranks.worker import current_worker
from annbatch_distributed.sharding.integers import integer

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from annbatch_distributed.loader import StatefulLoader
    from annbatch_distributed.resume.state import Position
    from annbatch_distributed.sampler import DistributedSampler

__all__ = ["WorkerDataLoader"]

#: What torch would divide rows by, or collect batches out of order with.
_REFUSED = "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order"

_END: Any = object()


class WorkerDataLoader:
    """What :meth:`.StatefulLoader.to_dataloader` returns.

    Parameters
    ----------
    loader
        The loader whose batches the workers read.
    num_workers
        How many worker processes, at least 0.
    options
        Any further ones of torch's ``DataLoader``.
    """

    def __init__(self, loader: StatefulLoader, *, num_workers: int, **options: Any) -> None:  # noqa: ANN401 torch's own
        from torch.utils.data import DataLoader

        num_workers = integer("num_workers", num_workers, least=0)
        if refused := [name for name in _REFUSED if name in options]:
            raise TypeError(
                f"to_dataloader takes the options of torch's DataLoader but for {', '.join(_REFUSED)}, got "
                f"{', '.join(refused)}. The loader makes the batches: give its sampler a batch_size."
            )
        if num_workers:
            # zarrs's threads don't survive a fork, and a worker that is started anew takes seconds to import
            options = {"multiprocessing_context": "spawn", "persistent_workers": True} | options
        self._dataloader = DataLoader(loader, batch_size=None, num_workers=num_workers, **options)
        self._loader = loader
        self._n_iterations = 0
        # the iteration that was begun last: where it began, how many batches are done, and whether it has ended
        self._began_at: Position | None = None
        self._n_done, self._is_finished = 0, False

    @property
    def dataset(self) -> StatefulLoader:
        """The loader."""
        return self._loader

    @property
    def sampler(self) -> DistributedSampler:
        """The sampler, where frameworks look for something whose ``set_epoch`` they can call."""
        return self._loader.sampler

    @property
    def num_workers(self) -> int:
        """How many worker processes there are."""
        return self._dataloader.num_workers

    @property
    def next_epoch(self) -> int:
        """Which epoch to go on with: see :attr:`.DistributedSampler.next_epoch`."""
        return self._loader.next_epoch

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next pass belongs to, on every rank: see :meth:`.DistributedSampler.set_epoch`."""
        self._loader.set_epoch(epoch)

    def __len__(self) -> int:
        """Return how many batches the epoch has on this rank, those included that were done before a resume."""
        return len(self._loader)

    def __iter__(self) -> Generator[Any]:
        """Return the batches of a pass, which begins with the first: what is left of a resumed epoch, or else all.

        Raises
        ------
        RuntimeError
            While iterating, if another iteration was begun since: workers that persist can't go back to this one.
        """
        self._n_iterations += 1
        number, sampler = self._n_iterations, self._loader.sampler
        n_before, n_left = sampler.batches_done, sampler.n_batches(self._loader.n_obs)
        batches = iter(self._dataloader)
        for n_taken in count():
            if number != self._n_iterations:
                raise RuntimeError(
                    "Another iteration over this DataLoader was begun, so that this one can't go on: its workers read "
                    "for that one now. For a look at a batch in the middle of an epoch, make another loader."
                )
            batch = next(batches, _END)
            if not n_taken:  # later on, the one that was begun last may be that of another DataLoader
                last = sampler._cursor.last(current_worker())
                self._began_at = None if last is None else last.position
            if batch is _END:
                self._is_finished = True
                return
            # before it is yielded: whoever saves a state has been given this batch
            self._n_done, self._is_finished = n_before + n_taken + 1, n_taken + 1 == n_left
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return how far the epoch is, by the batches that came out of the workers.

        Raises
        ------
        RuntimeError
            If the loader has begun another pass since, so that it isn't known which of them the state is to be about.
        """
        record = self._loader.sampler._cursor.under_way(current_worker())
        if record is None or self._began_at is None:
            return self._loader.state_dict()
        if record.position != self._began_at:
            raise RuntimeError(
                "The pass that was begun last is not one of this DataLoader, but of another one around the same "
                "loader, or of the loader itself. Give each a loader and a sampler of its own."
            )
        n_done = record.n_batches if self._is_finished and record.n_batches is not None else self._n_done
        return self._loader.state_dict(batches_done=n_done)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on where a state was saved, on every rank: see :meth:`.DistributedSampler.load_state_dict`."""
        self._loader.load_state_dict(state, strict=strict)
