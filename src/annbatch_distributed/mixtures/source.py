"""Sources of a mixture: a loader or its workers, and where the mixture reads next."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from annbatch_distributed.checks import Description, Reading, Tally
from annbatch_distributed.core.epochs import Epochs
from annbatch_distributed.core.rank import Placement
from annbatch_distributed.core.state import Position, check_identity, differences, from_state, to_state
from annbatch_distributed.cursor import Cursor
from annbatch_distributed.loader.epoch_loader import EpochLoader
from annbatch_distributed.ranks import DistInfo
from annbatch_distributed.sampler import cursor_of

if TYPE_CHECKING:
    from annbatch_distributed.loader.workers import WorkerDataLoader


class Source:
    """Source of a mixture."""

    def __init__(self, name: str, reader: EpochLoader | WorkerDataLoader) -> None:
        loader = getattr(reader, "_loader", reader)  # a WorkerDataLoader has one
        if not isinstance(loader, EpochLoader):
            raise TypeError(f"The source {name!r} must be a loader such as StatefulLoader, got {reader!r}.")
        if loader.sampler.remainder == "keep":
            raise ValueError(
                f"All ranks must have the same number of batches of the source {name!r}, got a sampler with "
                "remainder='keep'. Pass remainder='exact', 'drop' or 'pad'."
            )
        self.name, self.loader, self._reader = name, loader, reader
        self._n_workers = (getattr(reader, "num_workers", 0) or 1) if reader is not loader else 1
        # at the first check: the number of rows, and how often a mask or rng was assigned
        self._first_check: tuple[int, int] | None = None
        #: Beginnings of an epoch, by the numbers of ranks and workers, that this job can run.
        self._checked = set[Position]()
        # numbers of batches from the beginning of a segment on, by the number of rows, of changes, and the position
        self._n_left: dict[tuple[int, int, Position], int] = {}
        # the batches of the open pass; without one, the next pass
        self._batches: Iterator[Any] | None = None
        # where that pass begins, and the number of its batches that were taken
        self._start, self._n_taken = Position(), 0
        #: For each complete pass since the last check: its position, and the rows that were read.
        self.unchecked: list[tuple[Position, Tally | None]] = []

    @property
    def cursor(self) -> Cursor:
        """Place of this rank in the epochs of the source."""
        return cursor_of(self.loader.sampler)

    @property
    def epochs(self) -> Epochs:
        """Epochs of the source, as functions of a position."""
        return self.cursor.epochs

    def check(self) -> None:
        """Raise if the source has too few rows, or its rows have changed since the mixture began."""
        current = self.loader.n_obs, self.cursor.n_changes
        if self._first_check not in (None, current):
            raise RuntimeError(
                f"The datasets, the mask or the rng of the source {self.name!r} have changed since the mixture began. "
                "Make a new mixture."
            )
        # once for each number of ranks and workers: reshard() may add ranks for which there are too few rows
        beginning = self.here(Position())
        try:
            if beginning not in self._checked:
                self.n_left(beginning)
        except ValueError as error:
            raise ValueError(f"The source {self.name}: {error}") from error
        self._first_check = current
        self._checked.add(beginning)

    # Positions

    def here(self, position: Position) -> Position:
        """Return a position whose last segment has the ranks and workers of this job."""
        return self.epochs.here(position, self._n_workers)

    def n_left(self, position: Position) -> int:
        """Return the number of batches of the epoch after a position, for the ranks of its last segment."""
        if position.finished:
            return 0
        n_obs, (*before, last) = self.loader.n_obs, position.segments
        begin = replace(position, segments=(*before, last._replace(done=0)), unverified=False)
        if not before and not self.epochs.counts_vary:
            begin = replace(begin, epoch=0)  # all epochs have the same number of batches
        key = n_obs, self.cursor.n_changes, begin
        if key not in self._n_left:
            self._n_left[key] = self.epochs.n_left(n_obs, begin)
        if last.done > self._n_left[key]:
            return self.epochs.n_left(n_obs, position)  # raises
        return self._n_left[key] - last.done

    def after(self, position: Position, n_batches: int) -> Position:
        """Return the position after more batches, read by the ranks and workers of its last segment."""
        *_, (n_lanes, n_workers, _) = position.segments
        n_left = self.n_left(position)
        while n_batches > n_left:
            n_batches -= n_left
            position = Position(position.epoch + 1).with_lanes(n_lanes, n_workers)
            n_left = self.n_left(position)
            if not n_left:
                raise ValueError(
                    f"Every epoch of a source must have batches, got none in epoch {position.epoch} of {self.name!r}. "
                    "Select more rows, or pass a smaller batch_size."
                )
            if not self.epochs.counts_vary:
                # of 12 batches in epochs of 5, 2 whole epochs are passed over, and 2 batches are left
                n_epochs = (n_batches - 1) // n_left
                position = replace(position, epoch=position.epoch + n_epochs)
                n_batches -= n_epochs * n_left
        return position.at(position.done + n_batches, position.done + n_left)

    def next_batch(self, position: Position) -> Position:
        """Return the position of the next batch: this one, or the beginning of the next epoch if none is left."""
        position = self.here(position)
        return position if self.n_left(position) else self.here(Position(position.epoch + 1))

    # Reading

    def go_to(self, position: Position) -> None:
        """Make the next batch be the one at a position; an open pass that is there continues."""
        position = self.next_batch(position)
        current = self._start.at(self._start.done + self._n_taken, -1) if self._n_taken else self._start
        if self._batches is None or replace(position, unverified=current.unverified) != current:
            self.close()
            self._start, self._n_taken = position, 0

    def close(self) -> None:
        """Close the open pass."""
        if self._batches is not None:
            self._batches.close()  # type: ignore[attr-defined]  # it is a generator
            self._batches = None

    def take(self, readers: Executor | None) -> Any:  # noqa: ANN401 whatever is read
        """Return the next batch, from the next epoch if the current one has ended."""
        if self._batches is None:
            self.cursor.go_to(self._start)
            self._batches = self._reader._iterate(readers)  # all sources share the threads of the mixture
        try:
            return next(self._batches)
        except StopIteration:
            raise RuntimeError(
                f"The loader of the source {self.name!r} was iterated over, or its epoch was set, outside of the "
                "mixture. Use only the mixture, and iterate over it again."
            ) from None

    def note_taken(self) -> None:
        """Move to the next batch, and record the open pass if the last batch has ended it."""
        if not self.cursor.clock.place.finished or self._batches is None:
            self._n_taken += 1
            return
        next(self._batches, None)
        last, read = self.loader._read_of_last_pass()
        # the sum of two tallies is three numbers, without the rows that aren't added up yet
        self.unchecked.append((last.position, None if read is None else Tally() + Tally.of(read)))
        self._batches, self._start, self._n_taken = None, self.here(Position(last.position.epoch + 1)), 0

    # States

    @contextmanager
    def resharded(self, dist_info: DistInfo | None) -> Generator[None]:
        """Change the rank for good, unless the block raises; then restore the old rank."""
        with self.cursor.resharded(dist_info):
            yield
        self.close()  # the open pass is of the old rank, even if it has the same position
        if self._first_check is not None:
            n_obs, n_changes = self._first_check
            self._first_check = n_obs, n_changes + 1

    def to_state(self, position: Position) -> dict[str, Any]:
        """Return the state of the source at a position."""
        identity = self.epochs.config.identity(self.loader.n_obs) | self.loader._collection
        return to_state(self.here(position), identity)

    def from_state(self, state: Mapping[str, Any], since: int, *, strict: bool) -> tuple[Position, Position, list[str]]:
        """Return the position in a state, the position after ``since`` more batches, and differences of the settings.

        Differences raise if ``strict``.
        """
        start, saved = from_state(state)
        is_within = bool(start.done or since)
        n_obs, config = self.loader.n_obs, self.epochs.config
        here = {"n_obs": n_obs if is_within else None, **self.loader._collection}
        compared = config.compared(saved, here, n_obs=n_obs, is_within=is_within)
        if strict:
            check_identity(*compared)
        problems = [f"has different settings: {'; '.join(texts)}"] if (texts := differences(*compared)) else []
        if is_within and (changed := config.changed_versions(saved)):
            problems.append(f"was saved by {changed}")
        after = self.after(start, since)
        after = replace(after, unverified=after.unverified or (bool(problems) and after.done > 0))
        _ = self.next_batch(after)  # raises if this number of ranks can't resume it
        return start, after, problems

    def is_here(self, position: Position) -> bool:
        """Return True if the last segment of a position has the ranks and workers of this job."""
        return position.segments[-1][:2] == self.here(position).segments[-1][:2]

    # Checks

    def describe(self, job: Placement, position: Position) -> Description:
        """Return the description of this process at a position."""
        return Description.of(job, self.cursor, self.loader.n_obs, self.here(position), self.loader._collection)

    def readings(self, job: Placement) -> Iterator[tuple[str, Reading]]:
        """Yield the rows that this process has read in each ended epoch, by the source and the epoch."""
        n_obs = self.loader.n_obs
        for position, read in self.unchecked:
            last = self.epochs.pass_at(n_obs, position)
            yield f"{self.name}, epoch {position.epoch}", Reading.of(job, self.cursor, n_obs, read, last)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {
            "_batches": None,
            "_n_left": {},
            "_checked": set[Position](),
            "unchecked": [*self.unchecked],
        }
