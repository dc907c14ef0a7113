"""Selections: any rows of a collection, in ascending order, kept as one bit for each.

A split by what cells are selects rows anywhere: of 10^8 rows, a random 90 % are nine million ranges, which would take
gigabytes as ranges. As bits they take 12 MB, whichever rows they are. Bits are kept in blocks of consecutive rows, and
only of blocks that have some, so that a few rows far apart take little as well.

A :class:`Selection` is shared by all that is made of it: a window, shards, blocks are stretches of its positions, which
:class:`Selected` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    from annbatch_distributed.sharding.rows import Int64Array, Run

    type Words = npt.NDArray[np.uint64]

__all__ = ["BLOCK", "Selected", "Selection", "chunks"]

#: Rows of a block.
BLOCK = 512

#: How many rows are worked out at once where all of them are; they take 8 MiB.
_AT_ONCE = 1 << 20


def chunks(n_rows: int) -> Iterator[Int64Array]:
    """Return the positions ``[0, n_rows)`` as arrays of a bounded length."""
    return (np.arange(start, min(start + _AT_ONCE, n_rows)) for start in range(0, n_rows, _AT_ONCE))


@dataclass(frozen=True, eq=False, repr=False)
class Selection:
    """Ascending rows; the ``p``-th of them is at position ``p``."""

    blocks: Int64Array
    """The numbers of the blocks that have some, ascending; block ``k`` is rows ``[k * BLOCK, (k + 1) * BLOCK)``."""
    bits: npt.NDArray[np.uint8]
    """For each of these blocks, a bit for each of its rows, the first one lowest; of shape (blocks, BLOCK / 8)."""

    def __post_init__(self) -> None:
        for array in (self.blocks, self.bits):
            array.flags.writeable = False  # copies share them

    @classmethod
    def of_flags(cls, flags: npt.NDArray[np.bool_]) -> Selection:
        """Return the rows whose flag is set."""
        blocks, bits = [np.empty(0, dtype=np.int64)], [np.empty((0, BLOCK // 8), dtype=np.uint8)]
        for start in range(0, len(flags), 8 * _AT_ONCE):
            flat = np.packbits(flags[start : start + 8 * _AT_ONCE], bitorder="little")
            packed = np.pad(flat, (0, -len(flat) % (BLOCK // 8))).reshape(-1, BLOCK // 8)
            some = packed.any(axis=1)
            blocks.append(start // BLOCK + np.flatnonzero(some))
            bits.append(packed if some.all() else packed[some])
        return cls(np.concatenate(blocks), np.concatenate(bits))

    @classmethod
    def of_bounds(cls, starts: Int64Array, stops: Int64Array) -> Selection:
        """Return the rows of half-open ranges, ascending and none of them empty."""
        first, last = starts // BLOCK, (stops - 1) // BLOCK
        # a range that begins in the block in which the one before ends has that one from there
        new = np.maximum(first, np.append(first[:1], last[:-1] + 1))
        n_new = last - new + 1
        last_slot = np.cumsum(n_new) - 1
        n_slots = int(last_slot[-1]) + 1 if len(last_slot) else 0
        blocks = np.arange(n_slots) + np.repeat(new - (last_slot + 1 - n_new), n_new)
        # the rows of these blocks alone, numbered through
        starts = (last_slot - (last - first)) * BLOCK + starts % BLOCK
        stops = last_slot * BLOCK + (stops - 1) % BLOCK + 1
        bits = np.empty((n_slots, BLOCK // 8), dtype=np.uint8)
        step = max(1, _AT_ONCE // BLOCK)
        for slot in range(0, n_slots, step):
            low, high = slot * BLOCK, min(slot + step, n_slots) * BLOCK
            some = slice(np.searchsorted(stops, low, side="right"), np.searchsorted(starts, high))
            marks = np.zeros(high - low + 1, dtype=np.int8)
            marks[np.maximum(starts[some] - low, 0)] += 1
            marks[np.minimum(stops[some], high) - low] -= 1
            packed = np.packbits(np.cumsum(marks[:-1], dtype=np.int8).view(np.bool_), bitorder="little")
            bits[slot : slot + step] = packed.reshape(-1, BLOCK // 8)
        return cls(blocks, bits)

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self.blocks) else 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Selection):
            return NotImplemented
        same = np.array_equal(self.blocks, other.blocks) and np.array_equal(self.bits, other.bits)
        return self is other or same

    def __hash__(self) -> int:
        return hash(self.digest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Selection:
        return self  # nothing in it ever changes

    def __getstate__(self) -> dict[str, Any]:
        return {"blocks": self.blocks, "bits": self.bits}

    @cached_property
    def digest(self) -> str:
        """A few letters that are others for other rows, and the same for the same on any machine."""
        parts = (self.blocks.astype("<i8", copy=False), self.bits)
        return blake2b(b"".join(blake2b(part.data).digest() for part in parts), digest_size=16).hexdigest()

    @cached_property
    def _stops(self) -> Int64Array:
        """The position at which each block stops."""
        return np.cumsum(np.bitwise_count(self.bits).sum(axis=1, dtype=np.int64))

    def rows_at(self, positions: Int64Array) -> Int64Array:
        """Return the rows at positions, in any order."""
        if not len(positions):
            return positions
        slots = np.searchsorted(self._stops, positions, side="right")
        # positions mostly come in stretches: a block is unpacked once for each stretch that is in it
        changes = np.diff(slots, prepend=-1) != 0
        used, which = slots[changes], np.cumsum(changes) - 1
        flags = np.unpackbits(self.bits[used], axis=1, bitorder="little").view(np.bool_)
        found = np.flatnonzero(flags)  # in all of these blocks, one after the other
        counts = np.bitwise_count(self.bits[used]).sum(axis=1, dtype=np.int64)
        stops = np.cumsum(counts)
        into_all = found[positions - (self._stops[used] - stops)[which]]
        rows: Int64Array = into_all + ((self.blocks[used] - np.arange(len(used))) * BLOCK)[which]
        return rows

    def ranges_at(self, starts: Int64Array, stops: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return the ranges of rows that slices of positions are, in order; none of the slices is empty.

        They are the starts and stops of ranges, and for each of these the index of the slice that it is of.
        """
        first, last = (np.searchsorted(self._stops, at, side="right") for at in (starts, stops - 1))
        n_slots = last - first + 1
        ends = np.cumsum(n_slots)
        slots = np.arange(ends[-1]) + np.repeat(first - (ends - n_slots), n_slots)
        # a flag that isn't set behind each block, so that no range goes on in another one
        flags = np.zeros((len(slots), BLOCK + 1), dtype=np.bool_)
        flags[:, :BLOCK] = np.unpackbits(self.bits[slots], axis=1, bitorder="little").view(np.bool_)
        in_first, in_last = flags[ends - n_slots], flags[ends - 1]
        before = np.append(0, self._stops)
        too_early = np.cumsum(in_first, axis=1) <= (starts - before[first])[:, np.newaxis]
        too_late = np.cumsum(in_last, axis=1) > (stops - before[last])[:, np.newaxis]
        flags[ends - n_slots] &= ~too_early
        flags[ends - 1] &= ~too_late
        flat = flags.reshape(-1)
        edges = np.flatnonzero(flat[1:] != flat[:-1]) + 1
        edges = np.append(0, edges) if flat[0] else edges
        slot, place = np.divmod(edges[::2], BLOCK + 1)
        begins = self.blocks[slots[slot]] * BLOCK + place
        stops_ = begins + (edges[1::2] - edges[::2])
        which = np.searchsorted(ends, slot, side="right")
        apart = (begins[1:] != stops_[:-1]) | (which[1:] != which[:-1])
        new = np.append(True, apart)
        return begins[new], stops_[np.append(apart, True)], which[new]

    def rank(self, row: int) -> int:
        """Return how many of the rows are below a row."""
        return int(self._ranks(np.array([row]))[0])

    def row_at(self, position: int) -> int:
        """Return the row at a position."""
        return int(self.rows_at(np.array([position]))[0])

    def chunks_and_rest(self, size: int) -> tuple[Selection, Selection] | None:
        """Return the rows of which whole chunks are selected, ``size`` rows from a multiple of it on, and the others.

        None if it is less than a quarter of the rows, so that taking them apart would not be worth the memory.
        """
        if size not in self._taken_apart:
            self._taken_apart[size] = self._chunks_and_rest(size)
        return self._taken_apart[size]

    @cached_property
    def _taken_apart(self) -> dict[int, tuple[Selection, Selection] | None]:
        """For each size that was asked for, the answer."""
        return {}

    def _chunks_and_rest(self, size: int) -> tuple[Selection, Selection] | None:
        # the chunks that rows of each block can be in, without those of the block before
        first, last = self.blocks * BLOCK // size, (self.blocks * BLOCK + BLOCK - 1) // size
        first = np.maximum(first, np.append(first[:1], last[:-1] + 1))
        found = [np.arange(0)]
        for part in np.array_split(np.arange(len(first)), len(first) * (BLOCK // size + 1) // _AT_ONCE + 1):
            counts = last[part] - first[part] + 1
            numbers = np.repeat(first[part] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
            found.append(numbers[self._ranks((numbers + 1) * size) - self._ranks(numbers * size) == size])
        numbers = np.concatenate(found)
        if not len(numbers) or 4 * len(numbers) * size < len(self):
            return None
        new = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)
        stops = numbers[np.append(new[1:] - 1, len(numbers) - 1)] + 1
        chunks = Selection.of_bounds(numbers[new] * size, stops * size)
        return chunks, self.without(chunks)

    def _ranks(self, rows: Int64Array) -> Int64Array:
        """For each of some rows, how many of the selection are below it."""
        slots = np.searchsorted(self.blocks, rows // BLOCK)
        ranks: Int64Array = np.append(0, self._stops)[slots]
        within = np.flatnonzero(np.append(self.blocks, -1)[slots] == rows // BLOCK)
        words: Words = self.bits.view("<u8").astype(np.uint64, copy=False)
        for part in np.array_split(within, len(within) * (BLOCK // 64) // _AT_ONCE + 1):
            own, places = words[slots[part]], rows[part] % BLOCK
            counts = np.bitwise_count(own)
            counts[np.arange(BLOCK // 64) >= (places // 64)[:, np.newaxis]] = 0
            last = own[np.arange(len(part)), places // 64] & (
                (np.uint64(1) << (places % 64).astype(np.uint64)) - np.uint64(1)
            )
            ranks[part] += counts.sum(axis=1, dtype=np.int64) + np.bitwise_count(last)
        return ranks

    def at(self, places: range) -> Selection:
        """Return the rows at some consecutive positions."""
        if len(places) == len(self):
            return self
        slots = np.searchsorted(self._stops, [places.start, places.stop - 1], side="right") if places else [0, -1]
        bits = self.bits[slots[0] : slots[1] + 1].copy()
        if places:
            rows = self.rows_at(np.array([places.start, places.stop - 1])) % BLOCK
            bits[0] &= np.packbits(np.arange(BLOCK) >= rows[0], bitorder="little")
            bits[-1] &= np.packbits(np.arange(BLOCK) <= rows[1], bitorder="little")
        return Selection(self.blocks[slots[0] : slots[1] + 1].copy(), bits)

    @cached_property
    def n_ranges(self) -> tuple[int, int]:
        """How many ranges of consecutive rows there are, and how many blocks they are in, each range by itself."""
        words: Words = self.bits.view("<u8").astype(np.uint64, copy=False)
        before = np.zeros_like(words)  # whether the row before the first one of a word is selected
        before[:, 1:] = words[:, :-1] >> np.uint64(63)
        in_blocks = int(np.bitwise_count(words & ~((words << np.uint64(1)) | before)).sum())
        goes_on = (self.blocks[1:] == self.blocks[:-1] + 1) & (words[:-1, -1] >> np.uint64(63)).astype(np.bool_)
        goes_on &= (words[1:, 0] & np.uint64(1)).astype(np.bool_)
        return in_blocks - int(np.count_nonzero(goes_on)), in_blocks

    def without(self, other: Selection) -> Selection:
        """Return the rows that are not in another selection."""
        slots = np.minimum(np.searchsorted(self.blocks, other.blocks), len(self.blocks) - 1)
        found = self.blocks[slots] == other.blocks if len(self.blocks) else np.zeros(len(slots), dtype=np.bool_)
        bits = self.bits.copy()
        bits[slots[found]] &= ~other.bits[found]
        some = bits.any(axis=1)
        return Selection(self.blocks[some], bits[some])


@dataclass(frozen=True)
class Selected:
    """A run of the rows of a selection: those at some consecutive positions.

    >>> selection = Selection.of_flags(np.array([True, False, True, True, False, True]))
    >>> list(Selected(selection, range(1, 4)))
    [2, 3, 5]
    """

    selection: Selection
    """The rows."""
    places: range
    """The positions in it."""

    @property
    def block_size(self) -> int:
        """All rows are one block."""
        return len(self)

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[int]:
        for positions in chunks(len(self)):
            yield from self.to_global(positions).tolist()

    def __str__(self) -> str:
        first, last = self.to_global(np.array([0, len(self) - 1])).tolist()
        return f"{len(self)} of {first}:{last + 1}"

    def part(self, start: int, stop: int) -> Iterable[Selected]:
        """The rows at positions ``[start, stop)``."""
        return [Selected(self.selection, self.places[start:stop])]

    def joined(self, following: Run) -> Selected | None:
        """This run and the following one, if that goes on where this one stops."""
        if not (isinstance(following, Selected) and self.places.stop == following.places.start):
            return None
        if self.selection != following.selection:
            return None
        return Selected(self.selection, range(self.places.start, following.places.stop))

    def to_array(self) -> Int64Array:
        """All rows."""
        return np.concatenate([np.arange(0), *map(self.to_global, chunks(len(self)))])

    def to_global(self, positions: Int64Array) -> Int64Array:
        """The rows at positions of this run."""
        return self.selection.rows_at(positions + self.places.start)

    def slices_to_global(self, starts: Int64Array, stops: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The ranges of rows that slices of this run are, see :meth:`Selection.ranges_at`."""
        return self.selection.ranges_at(starts + self.places.start, stops + self.places.start)
