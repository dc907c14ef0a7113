"""Alignment: whole chunks of a shard begin at multiples of the chunk size, and ragged ends come after them.

A store is written in chunks, and a read that begins within one decodes one more. Where the ranks' stretches begin and
stop is up to their number, the mask and the rows that are lost, hence anywhere. So each stretch is cut at the absolute
multiples of a number of rows, and a shard has its whole chunks first. Local rows ``[k * align, (k + 1) * align)`` then
begin at a multiple of it, but for the last few: what is *ragged*, at either end of a stretch, comes last.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from annbatch_distributed.sharding.rows import Rows
from annbatch_distributed.sharding.selection import Selected

if TYPE_CHECKING:
    from annbatch_distributed.sharding.rows import Piece

__all__ = ["whole_chunks_first"]


def whole_chunks_first(rows: Rows, align: int, *, after: int = 0) -> Rows:
    """Return rows with their whole chunks first, for a shard that has ``after`` rows before them.

    Blocks count as chunks if they are of whole ones, and otherwise come before them. If the rows before the chunks are
    no multiple of ``align``, some ragged ones come between, so that each chunk begins at a multiple in the shard too.

    >>> whole_chunks_first(Rows((range(5, 30), range(41, 44))), 8)
    Rows(8:24, 5:8, 24:30, 41:44)
    >>> whole_chunks_first(Rows((range(5, 30),)), 8, after=6)
    Rows(5:7, 8:24, 7:8, 24:30)
    """
    others: list[Piece] = []
    blocks: list[Piece] = []
    stretches: list[Piece] = []
    chunks, rest = Rows(), Rows()
    for piece in rows.pieces:
        match piece:
            case range():
                stretches.append(piece)
            case Selected():
                whole, ragged = _selected_cut(piece, align)
                chunks, rest = chunks + whole, rest + ragged
            case _:
                (others if piece.block_size % align else blocks).append(piece)
    whole, ragged = _ranges_cut(Rows(tuple(stretches)), align)
    chunks, rest = Rows(tuple(blocks)) + chunks + whole, rest + ragged
    n_between = -(after + sum(map(len, others))) % align if len(chunks) else 0
    if n_between > len(rest):  # less than a chunk
        rest += chunks.cyclic(len(chunks) - align, align)
        chunks = chunks.cyclic(0, len(chunks) - align)
    between, rest = rest.cyclic(0, n_between), rest.cyclic(n_between, len(rest) - n_between)
    return Rows(tuple(others)) + between + chunks + rest


def _ranges_cut(rows: Rows, align: int) -> tuple[Rows, Rows]:
    """The whole chunks of rows in ranges, and the other ones."""
    starts, stops = rows.bounds()
    first, last = -(-starts // align) * align, stops // align * align
    first, last = np.where(first < last, [first, last], [stops, stops])
    edges = np.array([[starts, last], [first, stops]]).transpose(0, 2, 1).reshape(2, -1)  # at the front, at the back
    return Rows.of_bounds(first, last), Rows.of_bounds(*edges)


def _selected_cut(piece: Selected, align: int) -> tuple[Rows, Rows]:
    """The whole chunks of the rows at some positions of a selection, and the other ones."""
    selection, places = piece.selection, piece.places
    parts = selection.chunks_and_rest(align)
    if parts is None:
        return Rows(), Rows((piece,))
    chunks, rest = parts
    begin, end = selection.row_at(places.start), selection.row_at(places.stop - 1) + 1
    # a chunk in which the stretch begins or stops is not whole
    start, stop = -(-begin // align) * align, end // align * align
    start, stop = (start, stop) if start < stop else (end, end)
    found = [Selected(chunks, range(*map(chunks.rank, bounds))) for bounds in pairwise([begin, start, stop, end])]
    others = Selected(rest, range(rest.rank(begin), rest.rank(end)))
    return Rows((found[1],)), Rows((found[0], others, found[2]))
