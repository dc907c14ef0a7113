"""The plan of an epoch: every rank's rows and batches, and what is lost or repeated.

It is a description. It holds a few integers whatever the number of rows and ranks, works out a rank's shard when asked
for it, and gives the same answers on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from reprlib import repr as shortened
from typing import TYPE_CHECKING

from annbatch_distributed.sharding.contiguous import Contiguous
from annbatch_distributed.sharding.independent import Independent
from annbatch_distributed.sharding.integers import integer
from annbatch_distributed.sharding.remainder import drop_offset, filled, n_lost, stretch
from annbatch_distributed.sharding.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from annbatch_distributed.sharding.contract import Sharding
    from annbatch_distributed.sharding.remainder import Remainder, Stretch
    from annbatch_distributed.sharding.rows import Piece

#: More ranks than this, and the table shows the first and the last ones.
_TABLE_RANKS = 16


@dataclass(frozen=True)
class Shard:
    """The rows that one rank reads in one epoch; local row ``p`` is the ``p``-th of them."""

    rows: Rows
    """All of them, as global rows."""
    n_own: int
    """How many of them, the leading ones, are this rank's own. Those after them are repeats."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def repeated(self) -> Rows:
        """The rows that are repeats (under ``remainder="pad"``): they are some rank's own rows as well."""
        return self.rows.cyclic(self.n_own, len(self) - self.n_own)


@dataclass(frozen=True)
class EpochPlan:
    """What every rank reads in one epoch; made by :meth:`DistributedSampler.plan`.

    ``str(plan)`` is a small table.

    Examples
    --------
    >>> from annbatch.samplers import RandomSampler
    >>> from annbatch_distributed import DistributedSampler, Rank
    >>> sampler = RandomSampler(chunk_size=64, preload_nchunks=32, batch_size=256)
    >>> plan = DistributedSampler(sampler, dist_info=Rank(0, 2)).plan(20_000)
    >>> print(plan)
    epoch 0: 2 ranks share 20000 of 20000 rows (remainder="drop", batch size 256)
    rank  batches  rows  repeated  global rows
       0       39  9984         0  0:9984
       1       39  9984         0  9984:19968
    lost in this epoch: 32 rows (19968:20000)
    >>> plan.n_batches(1), len(plan.shard(1)), list(plan.lost)[0]
    (39, 9984, 19968)
    """

    n_obs: int
    """Rows of the whole collection."""
    window: Rows
    """The rows that the ranks share out: those that the mask selects."""
    world_size: int
    """The number of ranks."""
    batch_size: int | None
    """Rows of a full batch; None where the wrapped sampler has none."""
    rows_per_step: int | None
    """Rows of a rank that become a batch, or a batch on each of the ranks within it that share them out once more."""
    remainder: Remainder
    """What becomes of the rows that don't divide evenly."""
    sharding: Sharding
    """What deals the rows to the ranks."""
    seed: int | None
    """What the sharding's own randomness begins from, the same on every rank."""
    epoch: int
    """Which epoch this is the plan of."""
    segment: int
    """How many times the epoch went on with another number of ranks; the window is what was left of it then."""
    turn: int
    """How often the lost rows have moved on."""
    n_samples: int | None
    """How many samples the wrapped sampler would draw alone, where ranks share out draws; None where it is rows."""
    natural_batches: tuple[int, ...]
    """For each rank, the batches that the wrapped sampler gives for its shard by itself."""

    def counted(self, natural_batches: tuple[int, ...], *, turn: int, n_samples: int | None) -> EpochPlan:
        """Return this plan, completed by what only the wrapped sampler can tell."""
        plan = replace(self, natural_batches=natural_batches, turn=turn, n_samples=n_samples)
        # these don't change with it, and can take a while where the rest of an epoch is dealt
        vars(plan)["dealt"] = self.dealt
        if turn == self.turn:
            vars(plan)["_order"] = self._order
        return plan

    @property
    def shares_draws(self) -> bool:
        """Whether the ranks share out draws, each of which may be of any row of the window, instead of the rows."""
        return isinstance(self.sharding, Independent)

    def shard(self, rank: int) -> Shard:
        """Return the rows of a rank.

        Raises
        ------
        TypeError
            If the rank is no integer.
        IndexError
            If there is no such rank.
        """
        rank = self._checked(rank)
        if self.shares_draws:
            rows = self._shares[rank]
            return Shard(rows, len(rows))
        if self._order is not None:
            order, place = self._order, self._stretch(len(self._order), rank)
        else:
            order, place = self._shares[rank], self._filled(rank)
        own = order.cyclic(place.start, place.own).runs_first()
        repeated = order.cyclic(place.start + place.own, place.length - place.own)
        return Shard(own + repeated, place.own)

    def n_batches(self, rank: int) -> int:
        """Return the number of batches of a rank: the same for every rank, unless ``remainder`` is ``"keep"``.

        Raises
        ------
        TypeError
            If the rank is no integer.
        IndexError
            If there is no such rank.
        """
        rank = self._checked(rank)
        return self.natural_batches[rank] if self.remainder == "keep" else self._most_batches

    @cached_property
    def _most_batches(self) -> int:
        return max(self.natural_batches)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left of the epoch that a rank could read."""
        n_rows = len(self.window) if self.n_samples is None else self.n_samples
        fewest = self.world_size * (self.rows_per_step or 1) if self.remainder == "drop" else 1
        return self.segment > 0 and n_rows < fewest

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """For each rank, how many rows its shard has; or samples, where ranks share out draws."""
        n_rows = self.n_samples
        if not self.shares_draws:
            if self._order is None:
                return tuple(self._filled(rank).length for rank in range(self.world_size))
            n_rows = len(self._order)
        assert n_rows is not None
        n_longer = 0 if self.remainder in ("drop", "pad") else n_rows % self.world_size
        first, last = self._stretch(n_rows, 0).length, self._stretch(n_rows, self.world_size - 1).length
        return (first,) * (self.world_size - n_longer) + (last,) * n_longer

    @property
    def lost(self) -> Rows:
        """The rows of the window that no rank is given in this epoch.

        What the wrapped sampler itself leaves out of a rank's rows (``drop_last``, ``num_samples``) is not among them.
        """
        if self.shares_draws:
            return Rows()
        if self._order is not None:
            offset = drop_offset(self.turn, lost=self._n_spare, n_rows=len(self.window))
            return self.window.cyclic(offset - self._n_spare, self._n_spare)
        pieces: list[Piece] = []
        for rank, share in enumerate(self._shares):
            place = self._filled(rank)
            n_lost = max(0, len(share) - place.length)
            pieces += share.cyclic(place.start - n_lost, n_lost).pieces
        return Rows(tuple(pieces))

    @property
    def n_lost(self) -> int:
        """How many rows of the window no rank is given in this epoch."""
        if self._order is not None:
            return self._n_spare
        return 0 if self.shares_draws or self.remainder != "drop" else len(self.window) - sum(self.sizes)

    @property
    def n_repeated(self) -> int:
        """How many rows are read a second time, over all ranks."""
        return sum(self.sizes) - len(self.window) if self.remainder == "pad" and not self.shares_draws else 0

    @cached_property
    def dealt(self) -> Rows | tuple[Rows, ...]:
        """What the sharding makes of the window: an order of all rows, to be shared out evenly, or a share per rank."""
        return self._deal(self.window)

    @cached_property
    def share_sizes(self) -> tuple[int, ...]:
        """For each rank, the rows that a sharding of shares has dealt to it."""
        return tuple(map(len, self._shares))

    @property
    def _shares(self) -> tuple[Rows, ...]:
        assert isinstance(self.dealt, tuple)
        return self.dealt

    @cached_property
    def _order(self) -> Rows | None:
        """The rows that are shared out evenly, in order and without those that are lost; None if each has its own."""
        if not isinstance(self.dealt, Rows):
            return None
        if not self._n_spare:
            return self.dealt
        offset = drop_offset(self.turn, lost=self._n_spare, n_rows=len(self.window))
        order = self._deal(self.window.cyclic(offset, len(self.window) - self._n_spare))
        if not isinstance(order, Rows):
            name = type(self.sharding).__name__
            msg = f"{name}.deal must return one Rows for every window, or a list of them for every window."
            raise TypeError(msg)
        return order

    @property
    def _n_spare(self) -> int:
        """How many rows are lost where the window is shared out evenly."""
        return n_lost(
            self.remainder, n_rows=len(self.window), world_size=self.world_size, batch_size=self.rows_per_step
        )

    def _stretch(self, n_rows: int, rank: int) -> Stretch:
        return stretch(
            self.remainder, n_rows=n_rows, world_size=self.world_size, batch_size=self.rows_per_step, rank=rank
        )

    def _filled(self, rank: int) -> Stretch:
        return filled(self.remainder, sizes=self.share_sizes, batch_size=self.rows_per_step, turn=self.turn, rank=rank)

    def _deal(self, rows: Rows) -> Rows | tuple[Rows, ...]:
        """Ask the sharding, and check what can be checked at once."""
        name = type(self.sharding).__name__  # its own text may show what other ranks, who are told, mustn't see
        dealt = self.sharding.deal(rows, world_size=self.world_size, epoch=self.epoch, seed=self.seed)
        shares = dealt if isinstance(dealt, Sequence) else [dealt]
        if not all(isinstance(share, Rows) for share in shares):
            got = shortened(dealt)  # which may be all row numbers
            msg = f"{name}.deal must return Rows, or a list of them with one for each rank, got {got}."
            raise TypeError(msg)
        if isinstance(dealt, Sequence) and len(dealt) != self.world_size:
            msg = f"{name}.deal must return Rows for each of the {self.world_size} ranks, got {len(dealt)}."
            raise ValueError(msg)
        if not self.shares_draws and not _each_once(rows, shares):
            msg = (
                f"{name}.deal must deal each of the {len(rows)} rows of {_shortened(rows)} once and no other; "
                f"it dealt {sum(map(len, shares))}. annbatch_distributed.testing.check_sharding shows a small example "
                "of what is wrong."
            )
            raise ValueError(msg)
        return dealt if isinstance(dealt, Rows) else tuple(dealt)

    def _checked(self, rank: int) -> int:
        rank = integer("rank", rank)
        if not 0 <= rank < self.world_size:
            msg = f"rank must be in [0, {self.world_size}), the ranks of this plan, got {rank}."
            raise IndexError(msg)
        return rank

    def __str__(self) -> str:
        lines = [("rank", "batches", "samples" if self.shares_draws else "rows", "repeated", "global rows")]
        sizes = self.sizes
        if self.world_size <= _TABLE_RANKS:
            lines += [self._line(rank, sizes[rank]) for rank in range(self.world_size)]
        else:
            lines += [self._line(rank, sizes[rank]) for rank in range(_TABLE_RANKS - 1)]
            lines += [("...",) * 5, self._line(self.world_size - 1, sizes[-1])]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)][:-1]
        table = "\n".join(
            "  ".join([*(cell.rjust(width) for cell, width in zip(line, widths, strict=False)), line[-1]])
            for line in lines
        )
        settings = [f'remainder="{self.remainder}"']
        if not isinstance(self.sharding, Contiguous):
            settings.insert(0, f"sharding={self.sharding}")
        settings.append("no batch size" if self.batch_size is None else f"batch size {self.batch_size}")
        done = f"draw {sum(sizes)} samples from" if self.shares_draws else f"share {len(self.window)} of"
        of = f"{len(self.window)} of {self.n_obs}" if self.shares_draws else f"{self.n_obs}"
        epoch = f"what is left of epoch {self.epoch}" if self.segment else f"epoch {self.epoch}"
        title = f"{epoch}: {self.world_size} ranks {done} {of} rows ({', '.join(settings)})"
        if self.shares_draws:
            foot = f"alone, the wrapped sampler draws {self.n_samples} samples"
        else:
            lost = f" ({_shortened(self.lost)})" if self.n_lost else ""
            foot = f"lost in this epoch: {self.n_lost} rows{lost}"
            if self.n_repeated:
                foot += f"; repeated: {self.n_repeated}"
        return "\n".join((title, table, foot))

    def _line(self, rank: int, size: int) -> tuple[str, str, str, str, str]:
        shard = self.shard(rank)
        n_repeated = len(shard) - shard.n_own
        return str(rank), str(self.n_batches(rank)), str(size), str(n_repeated), _shortened(shard.rows)


def _each_once(rows: Rows, shares: Sequence[Rows]) -> bool:
    """Whether shares hold each of some rows once and no others, as far as that can be told from ranges alone."""
    if sum(map(len, shares)) != len(rows):
        return False
    if list(shares) == [rows]:  # as they were, which there can be very many pieces of in the rest of an epoch
        return True
    ranges = [piece for share in shares for piece in share.pieces if isinstance(piece, range)]
    if sum(map(len, ranges)) != len(rows):
        return True  # some are worked out; it would take each of them to tell
    return _ascending(ranges) == _ascending(rows.pieces)


def _ascending(pieces: Iterable[Piece]) -> Rows:
    ranges = [piece for piece in pieces if isinstance(piece, range)]
    ranges.sort(key=lambda stretch: stretch.start)
    return Rows(tuple(ranges))


def _shortened(rows: Rows) -> str:
    """Rows as text, the first few pieces only."""
    return str(rows) if len(rows.pieces) <= 3 else f"{Rows(rows.pieces[:3])}, ..."
