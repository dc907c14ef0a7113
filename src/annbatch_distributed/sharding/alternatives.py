"""Alternatives: settings close to given ones under which fewer rows are lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from annbatch_distributed.sharding.remainder import Remainder

__all__ = ["Alternative", "alternatives", "least_lost", "nearby"]


class Alternative(NamedTuple):
    """Another remainder or batch size, and what an epoch comes to with it."""

    remainder: Remainder
    """What becomes of the rows that don't divide evenly."""
    batch_size: int
    """Rows of a full batch."""
    n_batches: int
    """Batches of the rank that has the most."""
    n_lost: int
    """How many rows of the window no rank reads."""
    n_repeated: int
    """How many rows are read a second time, over all ranks."""


def nearby(batch_size: int) -> range:
    """Return the batch sizes that are within a quarter of one."""
    return range(batch_size - batch_size // 4, batch_size + batch_size // 4 + 1)


def least_lost(n_rows: int, world_size: int, batch_sizes: Iterable[int], wished: int) -> int | None:
    """Return which batch size loses the fewest rows under ``"drop"``; of several, the one closest to the wished one.

    None if none of them fills a batch on every rank.

    >>> least_lost(20_000, 2, nearby(256), 256)
    250
    """
    possible = [size for size in batch_sizes if world_size * size <= n_rows]
    return min(possible, key=lambda size: (n_rows % (world_size * size), abs(size - wished), size), default=None)


def alternatives(
    n_rows: int, world_size: int, batch_size: int, rows_per_request: int | None = None
) -> tuple[Alternative, ...]:
    """Return settings under which fewer of some rows are lost than under ``"drop"`` with a batch size.

    A batch size comes first, if one within a quarter loses less than half as many, and divides the rows of a load
    request, which annbatch asks for. The other policies lose none. Nothing is returned where nothing is lost.

    >>> [
    ...     (other.remainder, other.batch_size, other.n_batches)
    ...     for other in alternatives(20_000, 2, 256, 2_000)
    ... ]
    [('drop', 250, 40), ('exact', 256, 40), ('keep', 256, 40), ('pad', 256, 40)]
    """
    n_lost = n_rows % (world_size * batch_size)
    if not n_lost:
        return ()
    found: list[Alternative] = []
    possible = (size for size in nearby(batch_size) if rows_per_request is None or rows_per_request % size == 0)
    closest = least_lost(n_rows, world_size, possible, batch_size)
    if closest is not None and 2 * (its_lost := n_rows % (world_size * closest)) < n_lost:
        found.append(Alternative("drop", closest, n_rows // (world_size * closest), its_lost, 0))
    n_batches = -(-n_rows // (world_size * batch_size))
    if n_rows // world_size >= n_batches:  # a row for each batch of every rank
        found.append(Alternative("exact", batch_size, n_batches, 0, 0))
    if n_rows >= world_size:
        found.append(Alternative("keep", batch_size, n_batches, 0, 0))
    found.append(Alternative("pad", batch_size, n_batches, 0, n_batches * world_size * batch_size - n_rows))
    return tuple(found)
