"""A model of what ranks read: each step of each rank, cut out of the batches of uninterrupted epochs."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import chain, islice, pairwise, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from annbatch_distributed import Rank
from annbatch_distributed.mixtures.order import RandomOrder
from tests.lanes import Model, in_turn
from tests.simulated.jobs import DRAWING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from annbatch_distributed import CellSets
    from annbatch_distributed.core.stream import Pass
    from tests.simulated.jobs import Batch, Job, Source

#: Rows whose random order is never the same twice.
_MANY = 15

#: What a rank reads in a step: the batch of each of its sources; None if it has no batch left.
type Taken = tuple[tuple[str, Batch], ...] | None


class Ranks(NamedTuple):
    """The numbers of ranks, and of the workers of each."""

    n: int
    n_workers: int


class Segment(NamedTuple):
    """A part of an epoch, run by some ranks."""

    ranks: Ranks
    done: int


def units_of(batch: dict[str, Any]) -> Batch:
    """The units of a batch: its rows, or the rows of its sets, with marks of repeated rows."""
    rows = batch["index"].tolist()
    marks = batch["repeated"].tolist() if "repeated" in batch else [False] * len(rows)
    reads = [*zip(rows, marks, strict=True)]
    if "set" not in batch:
        return tuple((read,) for read in reads)
    numbers = batch["set"].tolist()
    assert numbers[0] == 0
    assert {after - before for before, after in pairwise(numbers)} <= {0, 1}, "sets are not numbered in order"
    units: list[list[tuple[int, bool]]] = [[] for _ in range(numbers[-1] + 1)]
    for number, read in zip(numbers, reads, strict=True):
        units[number].append(read)
    return tuple(map(tuple, units))


class SourceEpochs:
    """The epochs of a source, as some ranks begin and others continue them."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.whole = cache(self._whole)
        # by the order of the rows of a stream: the epoch and the stream that have it
        self._orders: dict[tuple[int, ...], tuple[int, int]] = {}
        self._steps: dict[Any, tuple[Iterator[list[Batch | None]], list[list[Batch | None]]]] = {}

    def _whole(self, epoch: int, n_streams: int) -> list[list[Batch]]:
        """The batches of each stream of an uninterrupted epoch, after checking that they have the rows they must."""
        streams = []
        for stream in range(n_streams):
            sampler = self.source.sampler_of(Rank(stream, n_streams))
            sampler.set_epoch(epoch)
            streams.append([units_of(batch) for batch in _planned(sampler.sample(self.source.n_obs))])
        check_epoch(self.source, streams)
        for stream, batches in enumerate(streams):
            self._check_order(epoch, stream, batches)
        return streams

    def _check_order(self, epoch: int, stream: int, batches: Sequence[Batch]) -> None:
        """Check that no other stream and no other epoch has the same order, since each has its own generator."""
        rows = [row for batch in batches for unit in batch for row, _ in unit]
        if self.source.kind != "random" or self.source.unit != "row" or len(rows) < _MANY:
            return
        known = self._orders.setdefault(tuple(np.argsort(rows).tolist()), (epoch, stream))
        assert known == (epoch, stream), f"(epoch, stream) {known} and {epoch, stream} have the same order"

    def remaining(self, epoch: int, segments: Sequence[Segment], ranks: Ranks) -> list[list[Batch | None]]:
        """The batch of each rank in the steps of an epoch that are left after some segments."""
        source, virtual = self.source, self.source.virtual_ranks
        # (lanes, workers, done); parts of equal numbers of lanes and workers are one: its lanes aren't cut again
        joined: list[tuple[int, int, int]] = []
        for (n, n_workers), done in [*segments, Segment(ranks, 0)]:
            part = virtual or n, n_workers if source.sampler.shuffle else 1
            n_before = joined.pop()[2] if joined and joined[-1][:2] == part else 0
            joined.append((*part, n_before + done))
        *before, (n_lanes, n_workers, done) = joined
        streams = self.whole(epoch, joined[0][0])
        model = Model(list(map(len, streams)), source.remainder)
        for n, workers, n_done in before:
            model.recut(n)
            model.read(workers, n_done)
        model.recut(n_lanes)
        batches = [*chain(*streams)]
        lanes = [
            [_cut(batches[number], *part) for number, *part in in_turn(model.workers(lane, n_workers))[done:]]
            for lane in model.lanes
        ]
        # a rank with virtual ranks joins the batches of its lanes
        n_own = n_lanes // ranks.n if virtual else 1
        return [
            [_joined(step[rank * n_own : (rank + 1) * n_own]) for rank in range(ranks.n)]
            for step in zip_longest(*lanes)
        ]

    def steps(self, parts: Sequence[Segment], ranks: Ranks, number: int) -> list[Batch | None]:
        """The batches of a step, counted from the first step of epoch 0, if ranks have changed after some parts."""
        key = *parts, ranks
        if key not in self._steps:
            self._steps[key] = self._walk([*parts, Segment(ranks, -1)]), []
        walk, known = self._steps[key]
        known += islice(walk, max(0, number + 1 - len(known)))
        return known[number]

    def _walk(self, parts: Sequence[Segment]) -> Iterator[list[Batch | None]]:
        epoch, segments = 0, list[Segment]()
        for ranks, n_steps in parts:
            left, has_begun = n_steps, False  # -1: without an end
            while left or not has_begun:
                steps = self.remaining(epoch, segments, ranks)
                own = steps if left < 0 else steps[:left]
                yield from own
                left, has_begun = left - len(own), True
                segments += [Segment(ranks, len(own))] if own else []
                if len(own) == len(steps):  # also if these ranks have none, and take none
                    epoch, segments = epoch + 1, []


def _planned(open_pass: Pass) -> Iterator[dict[str, Any]]:
    """Yield the rows of each batch of a pass, and their marks, without reading them."""
    while True:
        try:
            request = open_pass.take()
        except StopIteration:
            return
        for split, marks in zip(request.splits, request.marks(), strict=True):
            yield {"index": request.rows_at(split), **marks}


def _cut(batch: Batch, part: int, n_parts: int, is_repeat: bool) -> Batch:
    """A part of a batch that several lanes share, or a batch that a lane repeats."""
    units = tuple(batch[place] for place in np.array_split(np.arange(len(batch)), n_parts)[part])
    return tuple(tuple((row, True) for row, _ in unit) for unit in units) if is_repeat else units


def _joined(batches: Sequence[Batch | None]) -> Batch | None:
    own = [batch for batch in batches if batch is not None]
    return tuple(chain(*own)) if own else None


# What the batches of an epoch must have


def check_epoch(source: Source, streams: list[list[Batch]]) -> None:
    """Check the rows of an uninterrupted epoch by enumeration: each as often as the policies promise."""
    counts, size, policy = list(map(len, streams)), source.batch_size, source.remainder
    assert max(counts) - min(counts) <= (policy == "keep"), f"the ranks have {counts} batches"
    batches = [*chain(*streams)]
    assert all(0 < len(batch) <= size for batch in batches)
    assert policy in ("keep", "exact") or source.kind in DRAWING or all(len(batch) == size for batch in batches)
    check_rows(source, batches, n_lost=len(streams) * size - 1)


def check_rows(source: Source, batches: Sequence[Batch], *, n_lost: int) -> None:
    """Check that an epoch has each of its rows; `drop` may lose `n_lost` units."""
    policy, sampled = source.remainder, source.options
    reads = [read for batch in batches for unit in batch for read in unit]
    selected = set(source.selected)
    assert {row for row, _ in reads} <= selected, "a row that the mask doesn't select"
    if source.kind in DRAWING:
        return
    # rows as often as they were read, without marked repeats
    n_read = Counter(row for row, is_repeat in reads if not is_repeat)
    match source.unit:
        case "row":
            assert max(n_read.values()) == 1, "a row was read twice"
            n_missing = len(selected) - len(n_read)
        case "draw":
            weights, n_draws = np.asarray(sampled["weights"]), sampled["num_samples"]
            read = np.array([n_read[row] for row in range(source.n_obs)])
            # (rounds, cells): the draws that are due in each round, which are rounded in each of them
            sizes = np.array([len(part) for part in np.array_split(np.arange(n_draws), sampled["rounds"])])
            due = sizes[:, None] * weights / weights.sum()
            assert (read <= np.ceil(due - 1e-6).sum(axis=0)).all(), "a cell was drawn too often"
            assert policy == "drop" or (read >= np.floor(due + 1e-6).sum(axis=0)).all(), "a cell was drawn too rarely"
            n_missing = int(sampled["num_samples"] - read.sum())
        case _:
            sets = sampled["sets"]
            treated = set(sets.treated.rows)
            in_sets = Counter({row: n for row, n in n_read.items() if row in treated})
            assert max(in_sets.values()) == 1, "a cell is in two sets"
            groups = _groups_of(sets)
            groups_in = ({groups.get(row) for row, _ in unit} - {None} for batch in batches for unit in batch)
            assert all(len(own) == 1 for own in groups_in), "a set has cells of two groups"
            n_missing = len(sets) - sum(map(len, batches))
            if policy == "pad":
                n_missing = 0 if sets.remainder == "drop" or in_sets.keys() == treated else 1
    assert n_missing >= 0 or (policy, source.unit) == ("pad", "set"), "more than there is"
    assert n_missing <= (n_lost if policy == "drop" else 0), f"{n_missing} {source.unit}s were not read"


def _groups_of(sets: CellSets) -> dict[int, int]:
    """The group of each cell that isn't a control, by row."""
    numbers = np.repeat(np.arange(len(sets.labels)), sets.treated.sizes)
    return dict(zip(sets.treated.rows, numbers.tolist(), strict=True))


# Where a job is


class Place(NamedTuple):
    """Where a pass begins."""

    epoch: int = 0
    parts: tuple[Segment, ...] = ()
    """Steps that were run: of the epoch of a loader; of all epochs of a mixture."""
    finished: bool = False
    step: int = 0
    """Number of steps before, of the epoch of a loader; of all epochs of a mixture."""
    anchor: tuple[int, int] = (0, 0)
    """The epoch of a mixture in which the ranks have changed, and how many of its steps others have done."""


class LoaderTimeline:
    """The steps of a loader with one sampler."""

    def __init__(self, job: Job) -> None:
        (source,) = job.sources
        self.source, self.epochs = source, SourceEpochs(source)

    def start_of(self, place: Place, epoch: int) -> Place:
        return Place(epoch)

    def after(self, place: Place) -> Place:
        return Place(place.epoch + 1)

    def done(self, place: Place) -> int:
        """Number of steps of the epoch that are done."""
        return place.step

    def first_known(self, place: Place) -> int:
        """The first step of the epoch whose cells a loader can list."""
        return 0

    def steps(self, place: Place, ranks: Ranks) -> list[list[Taken]]:
        """What each rank reads in each step from a place on."""
        if place.finished:
            return []
        steps = self.epochs.remaining(place.epoch, place.parts, ranks)
        return [[None if batch is None else ((self.source.name, batch),) for batch in step] for step in steps]

    def at(self, place: Place, ranks: Ranks, n_steps: int, n_left: int) -> Place:
        """The place after some of the `n_left` steps that are left at another one."""
        parts = (*place.parts, Segment(ranks, n_steps)) if n_steps else place.parts
        return place._replace(parts=parts, step=place.step + n_steps, finished=place.finished or n_steps == n_left)

    def loaded(self, place: Place, before: Ranks, ranks: Ranks) -> Place:
        """The place of ranks that load a state, which other ranks have saved."""
        return place


class MixtureTimeline:
    """The steps of a mixture."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.sources = {source.name: SourceEpochs(source) for source in job.sources}
        self._names: list[tuple[str, ...]] = []

    def names(self, step: int) -> tuple[str, ...]:
        """The sources of a step."""
        if self.job.kind == "mixture of batches":
            return tuple(sorted(self.sources))
        if len(self._names) <= step:
            order = RandomOrder(self.job.weights, sorted(self.sources), self.job.seed % 7)
            self._names = list(order.at(0, 2 * step + 50))
        return self._names[step]

    def start_of(self, place: Place, epoch: int) -> Place:
        first, (anchor, n_done), parts = epoch * self.job.n_steps, place.anchor, place.parts
        if epoch < anchor:  # read again from its beginning, by this job
            return Place(epoch, (), step=first, anchor=(epoch, 0))
        # the anchor's epoch is read again after the steps of other ranks
        stop = first + n_done * (epoch == anchor)
        clipped = tuple(Segment(ranks, min(end, stop)) for ranks, end in parts)
        return Place(epoch, clipped, step=stop, anchor=place.anchor)

    def after(self, place: Place) -> Place:
        return place._replace(epoch=place.epoch + 1, step=(place.epoch + 1) * self.job.n_steps, finished=False)

    def done(self, place: Place) -> int:
        return place.step - place.epoch * self.job.n_steps

    def first_known(self, place: Place) -> int:
        epoch, n_done = place.anchor
        return n_done if place.epoch == epoch else 0

    def steps(self, place: Place, ranks: Ranks) -> list[list[Taken]]:
        if place.finished:
            return []
        found: list[list[Taken]] = []
        for step in range(place.step, (place.epoch + 1) * self.job.n_steps):
            batches = {name: self._batches(name, place, ranks, step) for name in self.names(step)}
            found.append([tuple((name, own[rank]) for name, own in batches.items()) for rank in range(ranks.n)])  # type: ignore[misc]  # no source ends under keep
        return found

    def _batches(self, name: str, place: Place, ranks: Ranks, step: int) -> list[Batch | None]:
        """The batches of a source in a step of the mixture."""
        own = [number for number in range(step + 1) if name in self.names(number)]
        parts, began = [], 0
        for others, stop in place.parts:
            parts.append(Segment(others, sum(began <= number < stop for number in own)))
            began = max(began, stop)
        return self.sources[name].steps(parts, ranks, len(own) - 1)

    def at(self, place: Place, ranks: Ranks, n_steps: int, n_left: int) -> Place:
        return place._replace(step=place.step + n_steps, finished=place.finished or n_steps == n_left)

    def loaded(self, place: Place, before: Ranks, ranks: Ranks) -> Place:
        parts = (*place.parts, Segment(before, place.step)) if place.step else place.parts
        if parts and self._lanes(parts[-1].ranks) != self._lanes(ranks):
            return place._replace(parts=parts, anchor=(place.epoch, place.step - place.epoch * self.job.n_steps))
        # epochs before that of a state are read again from their beginning
        return place._replace(parts=parts, anchor=max(place.anchor, (place.epoch, 0)))

    def _lanes(self, ranks: Ranks) -> tuple[int, int]:
        """The numbers of lanes and of workers, as far as they make a difference to a source."""
        shuffles = any(source.sampler.shuffle for source in self.job.sources)
        return self.job.sources[0].virtual_ranks or ranks.n, ranks.n_workers if shuffles else 1
