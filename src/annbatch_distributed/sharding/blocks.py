"""Blocks: whole blocks of consecutive rows, in an order that a permutation works out.

How rows become blocks in a shuffled order:

1. Every range of the rows is cut at the multiples of the block size, so that a row is in the same block in every epoch,
   and blocks begin where chunks of that size do on disk. What is left at either end of a range is *ragged*.
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
    """The rows of all blocks, in ranges of whole blocks."""
    block_size: int
    """Rows of a block."""
    order: Permutation
    """Which block comes at each place."""
    places: range
    """Which places of the order this run is."""

    def __len__(self) -> int:
        return len(self.places) * self.block_size

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(map(self._block, self.places))

    def __str__(self) -> str:
        return f"{len(self.places)} block{'s' * (len(self.places) > 1)} of {self.block_size}"

    def _block(self, place: int) -> range:
        """The rows of the block at a place."""
        start = int(self._starts(np.array([place]))[0])
        return range(start, start + self.block_size)

    def _starts(self, places: Int64Array) -> Int64Array:
        """The first rows of the blocks at some places."""
        return self.rows.to_global(self.order(places) * self.block_size)

    def part(self, start: int, stop: int) -> Iterator[Piece]:
        """The rows at positions ``[start, stop)``: whole blocks, and a part of one before and one after them."""
        first, last = start // self.block_size, stop // self.block_size
        into_first, into_last = start % self.block_size, stop % self.block_size
        if first == last:
            yield self._block(self.places[first])[into_first:into_last]
            return
        if into_first:
            yield self._block(self.places[first])[into_first:]
            first += 1
        yield replace(self, places=self.places[first:last])
        if into_last:
            yield self._block(self.places[last])[:into_last]

    def joined(self, following: Run) -> Blocks | None:
        places = range(self.places.start, self.places.stop + len(following) // following.block_size)
        joined = replace(self, places=places)
        return joined if following == replace(self, places=range(self.places.stop, places.stop)) else None

    def to_array(self) -> Int64Array:
        starts = self._starts(np.arange(self.places.start, self.places.stop))
        return (starts[:, np.newaxis] + np.arange(self.block_size)).reshape(-1)

    def to_global(self, positions: Int64Array) -> Int64Array:
        places, into = np.divmod(positions, self.block_size)
        return self._starts(places + self.places.start) + into


def shuffled(rows: Rows, block_size: int, key: tuple[int, ...]) -> Rows:
    """Return rows that are made of ranges with their blocks of ``block_size`` rows in the order of a key.

    >>> order = shuffled(Rows((range(0, 7),)), 2, key=(0,))
    >>> sorted(order) == list(range(7)), sorted(map(len, order.pieces))[0]
    (True, 1)
    """
    whole: list[range] = []
    ragged: list[range] = []
    for piece in rows.pieces:
        if not isinstance(piece, range):
            raise TypeError(
                f"Only rows that are made of ranges can be cut into blocks, got {rows}. Shuffle the window itself."
            )
        start, stop = -(-piece.start // block_size) * block_size, piece.stop // block_size * block_size
        if start > stop:  # all of it in one block
            ragged.append(piece)
            continue
        whole.append(range(start, stop))
        ragged += [end for end in (range(piece.start, start), range(stop, piece.stop)) if end]
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
