"""Blocks: whole blocks of consecutive rows, in an order that a permutation works out.

How rows become blocks in a shuffled order:

1. Every range of the rows is cut at the multiples of the block size, so that a row is in the same block in every epoch,
   and blocks begin where chunks of that size do on disk. What is left at either end of a range is *ragged*. Of a
   selection, positions are cut instead: a block has as many rows of it, however far they lie apart.
2. The whole blocks go into the order of a keyed permutation, which is not kept but worked out.
3. Each ragged end is put between two of them, at a place that is drawn as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from annbatch_distributed.sharding.permutation import Permutation
from annbatch_distributed.sharding.rows import Rows
from annbatch_distributed.sharding.selection import Selected, chunks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch_distributed.sharding.rows import Int64Array, Piece, Run

__all__ = ["shuffled"]


@dataclass(frozen=True)
class Blocks:
    """A run of blocks: those at some consecutive places of the shuffled order.

    >>> blocks = Blocks(Rows((range(100, 106),)), 2, Permutation(3, (0,)), range(3))
    >>> sorted(blocks)
    [100, 101, 102, 103, 104, 105]
    """

    rows: Rows
    """The rows of all blocks, in pieces of whole blocks."""
    block_size: int
    """Rows of a block."""
    order: Permutation
    """Which block comes at each place."""
    places: range
    """Which places of the order this run is."""

    def __len__(self) -> int:
        return len(self.places) * self.block_size

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._in_block(place, 0, self.block_size) for place in self.places)

    def __str__(self) -> str:
        return f"{len(self.places)} block{'s' * (len(self.places) > 1)} of {self.block_size}"

    def _in_block(self, place: int, start: int, stop: int) -> Rows:
        """The rows at positions ``[start, stop)`` of the block at a place."""
        return self.rows.cyclic(int(self._starts(np.array([place]))[0]) + start, stop - start)

    def _starts(self, places: Int64Array) -> Int64Array:
        """The positions in ``rows`` at which the blocks at some places begin."""
        return self.order(places) * self.block_size

    def part(self, start: int, stop: int) -> Iterator[Piece]:
        """The rows at positions ``[start, stop)``: whole blocks, and a part of one before and one after them."""
        first, last = start // self.block_size, stop // self.block_size
        into_first, into_last = start % self.block_size, stop % self.block_size
        if first == last:
            yield from self._in_block(self.places[first], into_first, into_last).pieces
            return
        if into_first:
            yield from self._in_block(self.places[first], into_first, self.block_size).pieces
            first += 1
        yield replace(self, places=self.places[first:last])
        if into_last:
            yield from self._in_block(self.places[last], 0, into_last).pieces

    def joined(self, following: Run) -> Blocks | None:
        places = range(self.places.start, self.places.stop + len(following) // following.block_size)
        joined = replace(self, places=places)
        return joined if following == replace(self, places=range(self.places.stop, places.stop)) else None

    def to_array(self) -> Int64Array:
        return np.concatenate([np.arange(0), *map(self.to_global, chunks(len(self)))])

    def to_global(self, positions: Int64Array) -> Int64Array:
        places, into = np.divmod(positions, self.block_size)
        # positions mostly come in stretches: a place is looked up once for each stretch that is in it
        changes = np.diff(places, prepend=-1) != 0
        starts = self._starts(places[changes] + self.places.start)
        return self.rows.to_global(starts[np.cumsum(changes) - 1] + into)

    def slices_to_global(self, starts: Int64Array, stops: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        places, into = np.divmod(starts, self.block_size)
        begins = self._starts(places + self.places.start) + into
        return self.rows.slices_to_global(begins, begins + (stops - starts))


def shuffled(rows: Rows, block_size: int, key: tuple[int, ...]) -> Rows:
    """Return rows that are made of ranges with their blocks of ``block_size`` rows in the order of a key.

    >>> order = shuffled(Rows((range(0, 7),)), 2, key=(0,))
    >>> sorted(order) == list(range(7)), sorted(map(len, order.pieces))[0]
    (True, 1)
    """
    whole: list[Piece] = []
    ragged: list[Piece] = []
    for piece in rows.pieces:
        match piece:
            case range():
                front, back = piece.start, piece.stop
            case Selected():
                front, back = piece.places.start, piece.places.stop
            case _:
                raise TypeError(f"Only rows in ranges can be cut into blocks, got {rows}. Shuffle the window itself.")
        start, stop = -(-front // block_size) * block_size, back // block_size * block_size
        if start > stop:  # all of it in one block
            ragged.append(piece)
            continue
        part = Rows((piece,)).cyclic
        whole += part(start - front, stop - start).pieces
        ragged += [*part(0, start - front).pieces, *part(stop - front, back - stop).pieces]
    blocks = Rows(tuple(whole))
    n_blocks = len(blocks) // block_size
    order = Permutation(n_blocks, (*key, 0))

    def run(start: int, stop: int) -> Blocks:
        return Blocks(blocks, block_size, order, range(start, stop))

    pieces: list[Piece] = []
    done = 0
    # places among all blocks, the ragged ones counted
    places = Permutation(n_blocks + len(ragged), (*key, 1))(np.arange(len(ragged))).tolist()
    for n_before, (place, end) in enumerate(sorted(zip(places, ragged, strict=True), key=lambda pair: pair[0])):
        pieces += [run(done, place - n_before), end]
        done = place - n_before
    return Rows((*pieces, run(done, n_blocks)))
