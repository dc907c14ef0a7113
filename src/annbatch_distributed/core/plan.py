"""The plan of an epoch: every rank's rows and batches, and the rows that are dropped or repeated.

A sharding determines the order of the selected rows, which is cut into a contiguous range for each rank. The plan is a
description. It computes a rank's shard on demand, and is the same on every rank.

With N selected rows, W ranks, batch size b, and q = N // W, the range of a rank has

=========  ==================================================  ==========================================
policy     rows of a rank                                      batches of a rank
=========  ==================================================  ==========================================
``drop``   q // b * b                                          q // b, all full
``keep``   q; the last N mod W ranks have q + 1                ceil(rows / b): may differ by one
``exact``  q; the last N mod W ranks have q + 1                B = ceil(N / (W * b)) on every rank
``pad``    B * b: its own as under ``exact``, then repeats     B, all full
=========  ==================================================  ==========================================

``count`` asks the wrapped sampler for the number of batches of every rank's shard. Every rank asks about all ranks, in
the same order, so an error for one rank is raised on every rank, before any of them has read a row:

1. The wrapped sampler must accept the shards: one of each length, or every shard if it holds a value for each row.
2. If the policy requires every row, its batches must hold all rows.
3. If the policy requires equal counts, the sampler's counts must be equal. Under ``exact``, a short rank may also split
   one of its batches.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from numbers import Integral
from typing import NamedTuple, Self

import numpy as np
from annbatch.abc import Sampler

from annbatch_distributed.core.config import Config
from annbatch_distributed.core.rows import Order, Rows, whole_chunks_first
from annbatch_distributed.core.sharding import Contiguous, Independent, ordered
from annbatch_distributed.core.units import EpochUnits
from annbatch_distributed.core.values import BOUND, plural
from annbatch_distributed.core.wrapped import (
    drawable_classes,
    localize,
    n_draws,
    needs_global_rows,
    private_copy,
    reads_every_row,
    refuse_short_draws,
    set_draws,
)


@dataclass(frozen=True)
class Shard:
    """Rows that one rank reads in one epoch.

    Examples
    --------
    >>> shard = sampler.plan(50).shard(1)
    >>> len(shard), shard.rows
    (24, Rows(24:48))
    """

    rows: Rows
    """Global rows of the shard; local row ``p`` is the ``p``-th of them."""
    n_own: int
    """Number of rows at the front that are the rank's own. Rows after them are repeats of other rows."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def repeated(self) -> Rows:
        """Repeated rows, under ``remainder="pad"``; otherwise empty."""
        return self.rows.cut(self.n_own, len(self))


@dataclass(frozen=True)
class Plan:
    """Rows and batches of every stream in one epoch: of every rank, or of every virtual rank."""

    config: Config = field(repr=False, compare=False)
    """Configuration of the sampler."""
    n_obs: int
    """Number of rows of the whole collection."""
    units: EpochUnits = field(repr=False, compare=False)
    """Units of this epoch. The plan counts units, which are rows unless the sampler samples sets."""
    epoch: int
    """Number of the epoch."""
    n_streams: int
    """Number of streams."""
    selected: Rows
    """Units that are sharded: those that the mask selects."""
    order: Order = field(repr=False)
    """Selected units that aren't dropped, in the order of the sharding."""
    dropped: Rows = field(repr=False)
    """Selected units that are in no shard of this epoch.

    Units of a shard that the wrapped sampler leaves out (``drop_last``, ``num_samples``) are not included.
    """
    align: int | None = None
    """Number whose multiples are the first units of whole chunks; None keeps the order of the sharding."""
    sampler_batches: tuple[int, ...] = field(default=(), repr=False)
    """Number of batches that the wrapped sampler yields for each stream's shard."""

    @classmethod
    def of(cls, config: Config, n_obs: int, units: EpochUnits, epoch: int, n_streams: int, selected: Rows) -> Self:
        """Return a plan whose batches aren't counted yet; a ValueError if too few units are selected.

        Under ``drop``, different units are dropped in each epoch: in epoch 0 the last ones, as annbatch does, and in
        each later epoch the ones before those dropped in the previous epoch, cyclically. Each unit is therefore dropped
        equally often. Fewer than half of the units are dropped at once, so any two consecutive epochs together read
        every unit.
        """
        plan = cls(config, n_obs, units, epoch, n_streams, selected, Order.of(selected), Rows())
        plan._check_enough()
        kept, dropped, n_dropped = plan.order, Rows(), plan.n_dropped
        if n_dropped:
            # of 10 rows, 4 are dropped: epoch 0 keeps 0:6, epoch 1 begins at -4 mod 10 = 6 and keeps 6:10 0:2
            start = -epoch * n_dropped % len(selected) if config.rotates else 0
            dropped = kept.cyclic(start - n_dropped, n_dropped)
            kept = Order(selected, kept.places.cyclic(start, len(selected) - n_dropped))
        order = ordered(config.sharding, kept, epoch=epoch, seed=config.seed)
        align = None if plan._has_annbatchs_layout else config.align
        return replace(plan, order=order, dropped=dropped, align=align)

    @property
    def _has_annbatchs_layout(self) -> bool:
        """True if annbatch's own ``DistributedSampler`` gives each rank the same rows, which then keep their order."""
        config, n_units = self.config, len(self.units)
        is_whole = config.remainder == "drop" or (config.remainder == "keep" and n_units % self.n_streams == 0)
        is_open = len(self.selected) == n_units
        return not self.epoch and is_open and is_whole and isinstance(config.sharding, Contiguous)

    def _check_enough(self) -> None:
        """Raise a ValueError if there are too few units, or samples, for the policy.

        Under ``exact``, only the sampler can tell if a stream is one batch short, so only one unit per stream is
        required here.
        """
        n_rows, n_streams = self.n_shared, self.n_streams
        remainder, size = self.config.remainder, self.config.batch_size
        is_masked = len(self.selected) < len(self.units)
        what = f"{'The mask selects' if is_masked else 'There are'} {plural(n_rows, self.units.noun)}"
        if self.n_samples is not None:
            what = f"The wrapped sampler takes {plural(n_rows, 'sample')}"
        if remainder == "drop":
            assert size is not None
            if n_rows < n_streams * size:
                raise ValueError(
                    f"{what}, too few for one full batch on every rank: {n_streams} ranks times batch size {size} is "
                    f"{n_streams * size:,}. Use fewer ranks or a smaller batch_size, remainder='exact' or "
                    "remainder='pad'."
                )
        elif remainder != "pad" and n_rows < n_streams:
            raise ValueError(
                f"{what}, too few for {n_streams} ranks: under remainder={remainder!r} every rank needs at least one. "
                "Use fewer ranks, or remainder='pad', which repeats rows."
            )
        elif n_rows < 1:
            raise ValueError(f"{what}, but at least one is needed. Pass a larger num_samples, or drop_last=False.")

    # Units of streams

    @cached_property
    def n_samples(self) -> int | None:
        """Number of samples that a single rank would take, if the sharding is independent; else None."""
        is_independent = isinstance(self.config.sharding, Independent)
        return n_draws(self.config.sampler, len(self.selected)) if is_independent else None

    @property
    def noun(self) -> str:
        """Noun for what is divided among streams: row, set or sample."""
        return self.units.noun if self.n_samples is None else "sample"

    @property
    def n_shared(self) -> int:
        """Number of units, or samples, that are divided among streams."""
        return len(self.selected) if self.n_samples is None else self.n_samples

    def _range(self, stream: int) -> tuple[int, int, int]:
        """Return the start of a stream's range in the order, its number of own units, and its length with repeats."""
        size = self.config.batch_size or 1
        rows, extra = divmod(self.n_shared, self.n_streams)
        if self.config.remainder == "drop":
            length = rows // size * size
            return stream * length, length, length
        # 7 rows on 3 ranks: 2, 2 and 3 rows, starting at 0, 2 and 4
        n_small = self.n_streams - extra  # streams with one row less come first
        start, own = stream * rows + max(0, stream - n_small), rows + (stream >= n_small)
        if self.config.remainder == "pad":
            # ceil(samples / (streams * size)) full batches: 10 rows on 2 ranks in batches of 4 are 2 batches, 8 rows
            return start, own, -(-self.n_shared // (self.n_streams * size)) * size
        return start, own, own

    def shard(self, stream: int) -> Shard:
        """Return the units of a stream; under ``sharding="independent"``, all selected ones."""
        return self._shard(stream, self.align)

    def _shard(self, stream: int, align: int | None) -> Shard:
        if self.n_samples is not None:  # samples are divided among streams, and each stream samples from all rows
            return Shard(self.order.to_rows(), len(self.order))
        start, n_own, length = self._range(stream)
        # repeats are the next rows in the order, which continues at the front after its end
        own, repeats = self.order.cut(start, start + n_own), self.order.cyclic(start + n_own, length - n_own)
        if align is not None:
            own, repeats = whole_chunks_first(own, align), whole_chunks_first(repeats, align, after=n_own)
        return Shard(own + repeats, n_own)

    def in_order(self, stream: int) -> Rows:
        """Return the units of a stream in the order of the sharding, without alignment."""
        return self._shard(stream, None).rows

    def positions(self, stream: int) -> range:
        """Return the positions in the order of a stream's units; they continue at the front after the end."""
        if self.n_samples is not None:
            return range(len(self.order))
        start, _, length = self._range(stream)
        return range(start, start + length)

    def size(self, stream: int) -> int:
        """Return the number of units of a stream's shard; of its samples, if the sharding is independent."""
        return self._range(stream)[2]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of units of each stream's shard; of its samples, if the sharding is independent."""
        # the last streams may have one row more: 7 rows on 3 ranks are 2 2 3
        n_longer = self.n_shared % self.n_streams
        shorter, longer = self.size(0), self.size(self.n_streams - 1)
        return (shorter,) * (self.n_streams - n_longer) + (longer,) * n_longer

    @property
    def n_dropped(self) -> int:
        """Number of selected units that are dropped in this epoch."""
        is_whole = self.config.remainder != "drop" or self.n_samples is not None
        return 0 if is_whole else self.n_shared % (self.n_streams * (self.config.batch_size or 1))

    @property
    def n_repeated(self) -> int:
        """Number of repeated units, over all streams."""
        return sum(self.sizes) - len(self.order) if self.n_samples is None else 0

    # Batches of streams

    def n_batches(self, stream: int) -> int:
        """Return the number of batches of a stream in the whole epoch."""
        return self.sampler_batches[stream] if self.config.remainder == "keep" else self.most_batches

    @cached_property
    def most_batches(self) -> int:
        """Number of batches of the stream with the most batches."""
        return max(self.sampler_batches)

    @property
    def counts(self) -> list[int]:
        """Number of batches of each stream."""
        return list(map(self.n_batches, range(self.n_streams)))

    @cached_property
    def _firsts(self) -> list[int]:
        """Number of the first batch of each stream, and the number of all batches: 0 4 7 of streams of 4 and 3."""
        return list(accumulate(self.counts, initial=0))

    def first_number(self, stream: int) -> int:
        """Return the number of the first batch of a stream, counted over all streams."""
        return self._firsts[stream]

    def stream_of(self, number: int) -> int:
        """Return the stream of a batch."""
        return bisect_right(self._firsts, number) - 1


#: A rank, and the classes that it can sample from.
type Classes = tuple[int, frozenset[str]]


class Counts(NamedTuple):
    """The wrapped sampler's answers about every rank's shard."""

    sampler_batches: tuple[int, ...]
    """Number of batches that the sampler yields for each rank's shard."""
    classes: tuple[Classes, ...]
    """Classes that each rank can sample from, if the sampler is a class sampler; else empty."""


def count(plan: Plan) -> Counts:
    """Ask the wrapped sampler about every rank's shard of a plan, without changing it.

    Shards that make no difference to the sampler are asked about once. A ValueError if a rank can't run on its shard,
    or can't have the number of batches that the policy requires.
    """
    # shards of one kind have the same answers: each rank is its own kind, or else shards of the same length are
    differs = needs_global_rows(plan.config.sampler) and plan.n_samples is None
    kinds = range(plan.n_streams) if differs else plan.sizes
    counts: dict[int, int] = {}
    classes: list[Classes] = []
    for stream, kind in enumerate(kinds):
        if kind not in counts:
            local, counts[kind] = _count(plan, stream)
            if (drawable := drawable_classes(local)) is not None:
                classes.append((stream, drawable))
    sampler_batches = tuple(map(counts.__getitem__, kinds))
    _check_equal(plan, sampler_batches)
    return Counts(sampler_batches, tuple(classes))


def _count(plan: Plan, stream: int) -> tuple[Sampler, int]:
    """Ask about the shard of one stream."""
    shard, sampler, remainder = plan.shard(stream), plan.config.sampler, plan.config.remainder
    try:
        local = prepared(plan, stream, shard)
        local.validate(len(shard))  # annbatch's own error, if the sampler can't run on this number of rows
        refuse_short_draws(local, len(shard))
        n_batches = _checked_count(sampler, local.n_batches(len(shard)), len(shard))
        if plan.n_samples is not None or (reads_every_row(sampler) and remainder in ("exact", "pad")):
            _refuse_impossible(plan, n_batches, plan.size(stream))
    except ValueError as error:
        hint = ""
        if drawable_classes(sampler) is not None:  # the shard cuts a run of a class
            hint = (
                " Pass sharding='independent', under which no boundary between ranks cuts a run of a class."
                if plan.n_samples is None
                else " A mask cuts runs of a class, too: write held-out rows to their own collection. "
                "annbatch-distributed collect --group-by COLUMN writes cells of each class together."
            )
        raise ValueError(
            f"{type(sampler).__name__} can't run on the shard of rank {stream} of {plan.n_streams}, rows {shard.rows} "
            f"of {len(plan.units)} (remainder={remainder!r}). For local rows [0, {len(shard)}), it raises: "
            f"{error}{hint}"
        ) from error
    return local, n_batches


def _check_equal(plan: Plan, counts: tuple[int, ...]) -> None:
    """Raise if the policy requires equal numbers of batches, but the ranks can't have them."""
    most, remainder = max(counts), plan.config.remainder
    if remainder == "keep" or min(counts) == most:
        return
    short = [rank for rank, n_batches in enumerate(counts) if n_batches < most]
    # a rank that is one batch short splits one of its batches, if that is always possible
    if remainder == "exact" and all(most - counts[rank] == 1 for rank in short):
        short = [rank for rank in short if not _is_full(plan, counts[rank], plan.size(rank))]
    if not short:
        return
    rank, name = short[0], type(plan.config.sampler).__name__
    split = "A rank that is one batch short can split a batch only if all its batches are full, of 2 rows or more. "
    raise ValueError(
        f"remainder={remainder!r} requires the same number of batches on each of the {len(counts)} ranks, but "
        f"{name} yields {counts[rank]} for the {plan.size(rank)} {plan.noun}s of rank {rank}, and "
        f"{most} on rank {counts.index(most)}. {split if remainder == 'exact' else ''}Pass a different batch_size, "
        "mask or number of ranks; or remainder='keep', if no step has a collective."
    )


def _is_full(plan: Plan, n_batches: int, n_rows: int) -> bool:
    """Return True if all batches of a rank are full and have two rows or more, so that any of them can be split."""
    size = plan.config.batch_size
    assert size is not None
    reads_all = plan.n_samples is not None or reads_every_row(plan.config.sampler)
    return reads_all and size > 1 and 0 < n_rows == n_batches * size


def _refuse_impossible(plan: Plan, n_batches: int, n_rows: int) -> None:
    """Raise a ValueError if the number of batches doesn't fit the rows, or samples, of a rank."""
    policy, size, noun = plan.config.remainder, plan.config.batch_size, plan.noun
    if size is None:
        return
    # 10 rows in batches of 4: 2 batches leave out 2 rows
    if n_batches * size < n_rows:
        raise ValueError(
            f"its {n_batches} batches of at most {size} rows leave out some of its {n_rows} {noun}s, but "
            f"remainder={policy!r} requires every {noun}. Pass drop_last=False, or remainder='drop'."
        )
    # more than 2 full batches, or more than 10 of at least one row each, would need more rows
    if n_batches > (n_rows // size if policy in ("drop", "pad") else n_rows):
        kind = f"full batches of {size} rows" if policy in ("drop", "pad") else "batches"
        raise ValueError(
            f"its {n_rows} {noun}s are too few for {n_batches} {kind}, which remainder={policy!r} requires. Fix its "
            "n_batches, or pass remainder='keep'."
        )


def _checked_count(sampler: Sampler, n_batches: object, n_rows: int) -> int:
    """Return a number of batches as an integer; ``np.ceil`` returns a float, for example."""
    expected = (
        f"{type(sampler).__name__}.n_batches({n_rows}) must return the number of batches for {n_rows} rows, an integer "
        "within [0, 2**63), got "
    )
    if isinstance(n_batches, bool) or not isinstance(n_batches, Integral | float | np.floating):
        # without its value, since other ranks see this message, and the object may be private
        raise TypeError(f"{expected}an object of type {type(n_batches).__name__}. Return an int.")
    if not 0 <= float(n_batches) < BOUND or not (isinstance(n_batches, Integral) or n_batches.is_integer()):
        advice = "Round quotients up with math.ceil if the last batch may be smaller, otherwise down with //."
        raise ValueError(f"{expected}{n_batches}. {advice}")
    return int(n_batches)


def prepared(plan: Plan, stream: int, shard: Shard, rng: np.random.Generator | None = None) -> Sampler:
    """Return a private copy of the wrapped sampler that runs on the local rows of a stream in the plan's epoch.

    ``rng`` replaces its generator. A ValueError if it can't run on these rows.
    """
    duplicate = private_copy(plan.config.sampler, rng)
    localize(duplicate, shard.rows, len(plan.units))
    if plan.n_samples is not None:
        set_draws(duplicate, plan.size(stream))
    # if a property computes the generator, the copy has a different one
    if rng is not None and duplicate.rng is not None and duplicate.rng is not rng:
        duplicate.rng = rng
    if callable(set_epoch := getattr(duplicate, "set_epoch", None)):
        set_epoch(plan.epoch)
    return duplicate
