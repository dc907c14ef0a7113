"""How the rows of a window are divided among ranks in an epoch.

A sharding is asked for one order of all rows. An :class:`Order` is cut into even stretches; of :class:`Draws` the
number is divided instead of the rows. Both say the same of every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar

from annbatch_distributed.sharding.aligned import whole_chunks_first
from annbatch_distributed.sharding.contiguous import Contiguous
from annbatch_distributed.sharding.contract import ordered
from annbatch_distributed.sharding.independent import Independent
from annbatch_distributed.sharding.remainder import Even, drop_offset
from annbatch_distributed.sharding.rows import Rows
from annbatch_distributed.sharding.shuffled import Shuffled

if TYPE_CHECKING:
    from annbatch_distributed.sharding.contract import Sharding
    from annbatch_distributed.sharding.remainder import Remainder, Stretch

__all__ = ["Dealt", "Division", "Draws", "Order", "Shard"]


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
class Order:
    """One order of rows, cut into a stretch for each rank."""

    rows: Rows
    """The rows that the epoch keeps, in the order of the sharding."""
    lost: Rows
    """The rows of the window that no rank has in this epoch."""
    even: Even
    """How the rows are cut."""
    align: int | None = None
    """Of which number the first rows of whole chunks are multiples, see :mod:`aligned`; None leaves rows in order."""

    is_drawn: ClassVar[bool] = False
    """Whether ranks draw from their rows instead of reading each of them once."""

    def shard(self, rank: int) -> Shard:
        """Return the rows of a rank."""
        return _cut(self.rows, self.even.stretch(rank), self.align)

    def in_order(self, rank: int) -> Rows:
        """Return the rows of a rank in the order of the sharding, whatever comes first in its shard."""
        return _cut(self.rows, self.even.stretch(rank), None).rows

    def size(self, rank: int) -> int:
        """Return how many rows the shard of a rank has."""
        return self.even.stretch(rank).length

    @property
    def sizes(self) -> tuple[int, ...]:
        """For each rank, how many rows its shard has."""
        return self.even.sizes

    @property
    def n_lost(self) -> int:
        """How many rows of the window no rank has."""
        return len(self.lost)

    @property
    def n_repeated(self) -> int:
        """How many rows are read a second time, over all ranks."""
        return sum(self.sizes) - len(self.rows)


@dataclass(frozen=True)
class Draws:
    """Rows that every rank draws from. The ranks share out the draws."""

    rows: Rows
    """The rows to draw from."""
    even: Even
    """How the samples are shared out that the wrapped sampler would draw alone."""

    is_drawn: ClassVar[bool] = True
    lost: ClassVar[Rows] = Rows()
    n_lost: ClassVar[int] = 0
    n_repeated: ClassVar[int] = 0

    def shard(self, rank: int) -> Shard:
        """Return the rows that a rank draws from."""
        del rank  # all of them
        return Shard(self.rows, len(self.rows))

    def in_order(self, rank: int) -> Rows:
        """As for :class:`Order`."""
        del rank
        return self.rows

    def size(self, rank: int) -> int:
        """Return how many samples a rank draws."""
        return self.even.stretch(rank).length

    @property
    def sizes(self) -> tuple[int, ...]:
        """For each rank, how many samples it draws."""
        return self.even.sizes


type Dealt = Order | Draws


@dataclass(frozen=True)
class Division:
    """What a sharding is asked for an epoch, and its answer."""

    sharding: Sharding
    """What deals the rows to the ranks."""
    window: Rows
    """The rows that the ranks share out."""
    world_size: int
    """The number of ranks."""
    epoch: int
    """Which epoch this is of."""
    seed: int | None
    """What the sharding's own randomness begins from, the same on every rank."""
    remainder: Remainder
    """What becomes of the rows that don't divide evenly."""
    batch_size: int | None
    """Rows of a full batch; None where the wrapped sampler has none."""
    n_samples: int | None
    """How many samples the wrapped sampler would draw alone, where ranks share out draws; None where it is rows."""
    align: int | None = None
    """Of which number the first rows of whole chunks are multiples; None leaves rows in the sharding's order."""

    @cached_property
    def answer(self) -> Rows:
        """What the sharding makes of the window: an order of all rows."""
        return self._ordered(self.window)

    def _ordered(self, rows: Rows) -> Rows:
        is_ours = isinstance(self.sharding, Contiguous | Shuffled | Independent)
        order = self.sharding if is_ours else partial(ordered, self.sharding)
        return order(rows, epoch=self.epoch, seed=self.seed)

    @property
    def is_exhausted(self) -> bool:
        """Whether there is too little for every rank to read."""
        return self.even.n_rows < (self.world_size * (self.batch_size or 1) if self.remainder == "drop" else 1)

    def dealt(self, rotations: int) -> Dealt:
        """Return what every rank has when the rows that ``drop`` loses have moved on a number of times."""
        if rotations not in self._dealt:
            self._dealt[rotations] = self._deal(rotations)
        return self._dealt[rotations]

    @cached_property
    def _dealt(self) -> dict[int, Dealt]:
        """What was worked out before, which can take a while where the rest of an epoch is dealt."""
        return {}

    @property
    def even(self) -> Even:
        """The rows of the window, or the samples, shared out evenly."""
        n_rows = len(self.window) if self.n_samples is None else self.n_samples
        return Even(self.remainder, n_rows, self.world_size, self.batch_size)

    def _deal(self, rotations: int) -> Dealt:
        answer, even = self.answer, self.even
        if self.n_samples is not None:
            return Draws(answer, even)
        n_rows, n_lost = even.n_rows, even.n_lost
        offset = drop_offset(rotations, lost=n_lost, n_rows=n_rows)
        if n_lost:
            answer = self._ordered(self.window.cyclic(offset, n_rows - n_lost))
        return Order(answer, self.window.cyclic(offset - n_lost, n_lost), even._replace(n_rows=len(answer)), self.align)


def _cut(order: Rows, place: Stretch, align: int | None) -> Shard:
    own = order.cyclic(place.start, place.own)
    repeats = order.cyclic(place.start + place.own, place.length - place.own)
    if align is None:
        return Shard(own.blocks_first() + repeats, place.own)
    own, repeats = whole_chunks_first(own, align), whole_chunks_first(repeats, align, after=place.own)
    return Shard(own + repeats, place.own)
