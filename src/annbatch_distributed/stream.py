"""A stream: the numbered batches that the wrapped sampler makes of one shard.

1. A private copy of the sampler runs on local rows ``[0, len(shard))`` with a generator of its own; it never learns
   which rows of the collection they are. It is run from its beginning, which reads nothing.
2. What a user's sampler yields is checked, and gets the splits that it left out.
3. The number of batches is made the planned one. Under ``"exact"``, a last batch of one row gets one of the batch
   before it, since batch norm, for one, can't train on a single row.
4. Batches that aren't asked for are left out, and with them the rows that only they need.
5. Local rows become global ones, and short holes between them are read through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any

import numpy as np
from annbatch.abc import Sampler
from annbatch.samplers import RandomSampler, SequentialSampler

from annbatch_distributed import known
from annbatch_distributed.copies import private_copy
from annbatch_distributed.randomness import generator
from annbatch_distributed.requests import Request, bounds_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from annbatch_distributed.lanes import Numbers, SharedStep
    from annbatch_distributed.plan import EpochPlan, Shard
    from annbatch_distributed.requests import Split
    from annbatch_distributed.rows import Int64Array

__all__ = ["Stream", "prepared"]


@dataclass(frozen=True)
class Stream:
    """One stream of a pass."""

    sampler: Sampler
    """The wrapped sampler, which is never run: only private copies of it are."""
    plan: EpochPlan
    """Every stream's rows and batches."""
    number: int
    """Which stream it is."""
    root_seed: int
    """What the job's randomness begins from."""
    passes: int
    """How many passes were begun before, since the epoch was set."""

    @property
    def _name(self) -> str:
        return type(self.sampler).__name__

    def requests(self, numbers: Numbers, *, step: SharedStep | None = None, longest_hole: int = 0) -> Iterator[Request]:
        """Yield load requests of global rows for some of its batches, by their numbers in the stream, ascending.

        ``step`` says which part of the batch is read, if there is one that lanes share. Holes of at most
        ``longest_hole`` rows are read through.
        """
        shard = self.plan.shard(self.number)
        n_batches = self.plan.n_batches(self.number)
        requests = _counted(
            self._run(shard), promised=self.plan.sampler_batches[self.number], planned=n_batches, name=self._name
        )
        if self.plan.remainder == "exact" and type(self.sampler) in (RandomSampler, SequentialSampler):
            requests = _without_a_lone_row(requests)
        if numbers != (range(n_batches),):
            requests = _selected(requests, numbers, n_batches)
        for request in requests:
            if step is not None:
                request = request.narrowed([np.array_split(request.splits[0], step.n_parts)[step.part]])  # noqa: PLW2901 a part
            is_repeat = step is not None and step.is_repeat
            yield self._to_global(request, shard, is_repeat=is_repeat, longest_hole=longest_hole)

    def _run(self, shard: Shard) -> Iterator[Request]:
        """Run the sampler, and yield all load requests, of local rows."""
        rng = generator(self.root_seed, stream=self.number, epoch=self.plan.epoch, passes=self.passes)
        sampler = prepared(self.sampler, self.plan, self.number, shard, rng)
        # the splits that annbatch's own ``sample`` adds are shuffled with numpy's global random state
        if type(sampler).sample is not Sampler.sample:
            requests: object = sampler.sample(len(shard))
        else:
            sampler.validate(len(shard))
            requests = sampler._sample(len(shard))
        if not isinstance(requests, Iterable):
            raise TypeError(f"{self._name} must yield load requests for its rows, got {shortened(requests)} instead.")
        is_trusted = known.is_annbatchs_own(sampler)
        grid = known.chunk_size(sampler) if type(sampler) is RandomSampler and self.plan.grid is not None else None
        for given in requests:
            if not is_trusted:
                request = _checked(given, sampler, len(shard), rng)
                if request is not None:
                    yield request
                continue
            slices: Sequence[slice] = list(given["requests"])
            starts = np.array([part.start for part in slices], dtype=np.int64)
            stops = np.array([part.stop for part in slices], dtype=np.int64)
            if grid is not None:
                starts, stops = _aligned(starts, stops - starts, grid, len(shard))
            if given["splits"]:
                yield Request(starts, stops, given["splits"])

    def _to_global(self, request: Request, shard: Shard, *, is_repeat: bool, longest_hole: int) -> Request:
        """Turn local rows into global ones."""
        starts, stops, which = shard.rows.slices_to_global(request.starts, request.stops)
        are_repeats = None
        if self.plan.remainder == "pad":
            are_repeats = (request.rows() >= shard.n_own) | is_repeat
        gaps = starts[1:] - stops[:-1]
        are_read = (gaps > 0) & (gaps <= longest_hole)
        if not request.is_narrowed:
            # what lies between two chunks is in another one
            follows = np.append(request.starts[1:] == request.stops[:-1], False)
            are_read &= (which[1:] == which[:-1]) | follows[which[:-1]]
        return Request(starts, stops, request.splits, are_repeats, request.is_narrowed).read_through(are_read)


def prepared(
    sampler: Sampler, plan: EpochPlan, stream: int, shard: Shard, rng: np.random.Generator | None = None
) -> Sampler:
    """Return a private copy of a sampler that runs on the local rows of a stream in the plan's epoch.

    ``rng`` takes the place of its generator. A ValueError if it can't run on these rows.
    """
    duplicate = private_copy(sampler, rng)
    known.localize(duplicate, shard.rows, plan.n_obs)
    if plan.n_draws is not None:
        known.set_draws(duplicate, plan.size(stream))
    # where the generator is worked out instead of held, so that the copy has another one
    if rng is not None and duplicate.rng is not None and duplicate.rng is not rng:
        duplicate.rng = rng
    if callable(set_epoch := getattr(duplicate, "set_epoch", None)):
        set_epoch(plan.epoch)
    return duplicate


def _aligned(starts: Int64Array, lengths: Int64Array, size: int, n_rows: int) -> tuple[Int64Array, Int64Array]:
    """Have whole chunks of annbatch's ``RandomSampler`` begin at multiples of their size, and the last one be ragged.

    It makes any of the chunks the ragged one, and those beyond it begin earlier. Which chunk is read when stays.
    """
    starts = np.where(lengths < size, n_rows - n_rows % size, starts // size * size)
    return starts, starts + lengths


def _checked(given: object, sampler: Sampler, n_rows: int, rng: np.random.Generator) -> Request | None:
    """Return a load request of a user's sampler with splits; None if it has no batches.

    A TypeError or a RuntimeError if annbatch's ``Loader`` can't read it, or would read something else.
    """
    name = type(sampler).__name__
    expected = (
        f"{name} must yield load requests: dicts with 'requests', slices with integer bounds and no step or an integer "
        "array of rows, and 'splits', a list with an integer array for each batch, of positions in these rows; got "
    )
    if not isinstance(given, Mapping) or "requests" not in given:
        raise TypeError(f"{expected}{shortened(given)}.")
    rows = given["requests"]
    starts, stops = _bounds(rows, expected)
    if len(starts) and not 0 <= starts.min() <= stops.max() <= n_rows:
        raise RuntimeError(
            f"{name} was given the rows [0, {n_rows}) and asked for rows from [{starts.min()}, {stops.max()}). A "
            "sampler must stay within the n_obs that sample(n_obs) gets. If it holds something for each row of the "
            "collection, give it a method localize(rows, n_obs) that narrows that down to a shard."
        )
    n_here = int((stops - starts).sum())
    splits = _splits(given["splits"], n_here, expected) if "splits" in given else _cut(sampler, n_here, rng)
    if not splits:
        return None
    order = np.argsort(starts, kind="stable") if isinstance(rows, np.ndarray) and rows.dtype != object else None
    if order is None:
        return Request(starts, stops, splits, None, True)
    # rows in any order are read in theirs
    places = np.empty(n_here, dtype=np.intp)
    places[order] = np.arange(n_here)
    return Request(*bounds_of(starts[order]), [places[split] for split in splits], None, True)


def _bounds(rows: object, expected: str) -> tuple[Int64Array, Int64Array]:
    """Return the starts and stops of the rows of a user's load request, those of an array one by one."""
    if isinstance(rows, np.ndarray) and rows.dtype.kind in "iu" and rows.ndim == 1:
        starts = rows.astype(np.int64)
        return starts, starts + 1
    slices: list[Any] = list(rows) if isinstance(rows, list | tuple | np.ndarray) and np.ndim(rows) == 1 else [rows]
    if all(isinstance(part, slice) and part.step in (None, 1) for part in slices):
        starts, stops = np.array([part.start for part in slices]), np.array([part.stop for part in slices])
        if not slices or (starts.dtype.kind in "iu" and stops.dtype.kind in "iu" and (starts <= stops).all()):
            return starts.astype(np.int64), stops.astype(np.int64)
    raise TypeError(f"{expected}requests {shortened(rows)}.")


def _splits(given: object, n_rows: int, expected: str) -> list[Split]:
    """Return the splits of a user's load request of some rows as arrays."""
    if not isinstance(given, list | tuple | np.ndarray):
        raise TypeError(f"{expected}splits {shortened(given)}.")
    splits: list[Split] = []
    for split in given:
        try:
            positions = np.asarray(split)
        except ValueError:  # lists of different lengths
            positions = np.empty(0)
        if positions.ndim != 1 or positions.dtype.kind not in "iu" or not len(positions):
            raise TypeError(f"{expected}a batch of {shortened(split)}.")
        if not 0 <= positions.min() <= positions.max() < n_rows:
            raise RuntimeError(
                f"{expected}positions from {positions.min()} to {positions.max()} of {n_rows} rows. Positions count "
                "from 0, in the order of the request."
            )
        splits.append(positions.astype(np.intp, copy=False))
    return splits


def _cut(sampler: Sampler, n_rows: int, rng: np.random.Generator) -> list[Split]:
    """Return the batches of a load request without splits: all rows, shuffled if the sampler says so."""
    size, shuffle = sampler.batch_size, sampler.shuffle
    if size is None or shuffle is None:
        raise ValueError(
            f"{type(sampler).__name__} yields load requests without splits, so it must have a batch_size, and True or "
            f"False for shuffle; it has batch_size {size} and shuffle {shuffle}."
        )
    positions = rng.permutation(n_rows) if shuffle else np.arange(n_rows)
    return [positions[start : start + int(size)] for start in range(0, n_rows, int(size))]


def _counted(requests: Iterable[Request], *, promised: int, planned: int, name: str) -> Iterator[Request]:
    """Raise a RuntimeError unless there are as many batches as the sampler promised; add one more if it is planned.

    That one comes from halving the largest batch of the request that holds the last one: every batch stays part of one
    of the sampler's own, none is empty and none grows.
    """
    n_batches = 0
    for request in requests:
        n_batches += len(request.splits)
        if n_batches > promised:
            break
        is_short = planned > promised == n_batches
        yield request._replace(splits=_halved(request.splits, name)) if is_short else request
    if n_batches != promised:
        yielded = f"only {n_batches}" if n_batches < promised else f"{n_batches} or more"
        raise RuntimeError(
            f"{name} promised {promised} batches (n_batches) and yielded {yielded}. Ranks that yield different numbers "
            "of batches wait for each other for ever, so its n_batches(n_obs) must be what it yields for n_obs rows."
        )


def _halved(splits: Sequence[Split], name: str) -> list[Split]:
    # the last of the largest, so that the batches before it stay in their places
    index = max(range(len(splits)), key=lambda i: (len(splits[i]), i))
    if len(splits[index]) < 2:
        raise RuntimeError(
            f"{name} ended on batches of a single row, although all of its batches must be full for its number of rows "
            "and batches (n_batches) to fit together. They can't be cut to make one batch more."
        )
    return [*splits[:index], *np.array_split(splits[index], 2), *splits[index + 1 :]]


def _without_a_lone_row(requests: Iterable[Request]) -> Iterator[Request]:
    """Give a batch of one row, of the last ones, a row of the batch before it, or of the largest, that has three."""
    held: list[Request] = []
    for request in requests:
        held.append(request)
        if len(held) > 2:
            yield held.pop(0)
    if len(held) == 2 and [len(split) for split in held[1].splits] == [1]:
        first, last = held  # the batch before it is in another load request
        (split,) = last.splits
        starts, stops = np.append(first.starts, last.starts), np.append(first.stops, last.stops)
        held = [Request(starts, stops, [*first.splits, split + int((first.stops - first.starts).sum())])]
    *others, last = held
    yield from others
    splits = list(last.splits)
    lone = next((index for index, split in enumerate(splits) if len(split) == 1), 0)
    giver = max(
        range(len(splits)), key=lambda index: (index == lone - 1 and len(splits[index]) > 2, len(splits[index]))
    )
    if len(splits[lone]) == 1 and len(splits[giver]) > 2:
        splits[giver], given = splits[giver][:-1], splits[giver][-1:]
        splits[lone] = np.append(given, splits[lone])
    yield last._replace(splits=splits)


def _selected(requests: Iterable[Request], numbers: Numbers, n_batches: int) -> Iterator[Request]:
    """Keep the batches of some numbers, which ascend, of ``n_batches``, and the rows that they need."""
    pending = iter(numbers)
    part, n_before = next(pending), 0
    for request in requests:
        n_here = len(request.splits)
        kept: list[int] = []
        while part and part.start < n_before + n_here:
            here = range(part.start, min(part.stop, n_before + n_here), part.step)
            kept += range(here.start - n_before, here.stop - n_before, here.step)
            part = part[len(here) :] or next(pending, range(0))
        if len(kept) == n_here:
            yield request
        elif kept:
            yield request.narrowed([request.splits[index] for index in kept])
        n_before += n_here
        # whoever has the last batch sees whether the sampler keeps its promise
        if not part and numbers[-1][-1] < n_batches - 1:
            return
