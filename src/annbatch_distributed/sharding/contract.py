"""Shardings: functions that put the rows of a window into the order that is cut into a stretch for each rank.

They know rows, the epoch and the seed, and nothing of ranks, samplers, batches or what becomes of the remainder.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np

from annbatch_distributed.sharding.rows import Rows
from annbatch_distributed.sharding.selection import chunks

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Sharding", "check_rows", "checked_sharding", "name_of", "ordered"]

#: Takes rows, and by name the epoch and the seed, and returns the same rows in another order. What it returns depends
#: on these alone, so that every rank works out the same.
type Sharding = Callable[..., Rows]


def check_rows(rows: object) -> None:
    """Raise a TypeError unless a sharding is asked for an order of Rows."""
    if not isinstance(rows, Rows):
        raise TypeError(
            f"rows must be Rows, got {rows!r} of type {type(rows).__name__}. Make Rows of ranges with "
            "Rows((range(5),)), and of row numbers with Rows.of."
        )


def checked_sharding(thing: object, expected: str) -> Sharding:
    """Return what can be asked for an order, as far as that can be told without asking, or raise a TypeError.

    ``expected`` is the beginning of its message.
    """
    if inspect.isclass(thing) or not callable(thing):
        hint = " Pass an instance, not the class." if inspect.isclass(thing) else ""
        raise TypeError(f"{expected}, got {thing!r}.{hint}")
    try:
        inspect.signature(thing).bind(Rows(), epoch=0, seed=None)
    except ValueError:
        pass  # what is written in C may not tell
    except TypeError as error:
        raise TypeError(f"A sharding is a function (rows, *, epoch, seed), but {name_of(thing)} has {error}.") from None
    return cast("Sharding", thing)


def name_of(sharding: object) -> str:
    """Return the name of a sharding, and nothing that it holds: other ranks see it."""
    return getattr(sharding, "__name__", type(sharding).__name__)


def ordered(sharding: Sharding, rows: Rows, *, epoch: int, seed: int | None) -> Rows:
    """Ask a sharding of a user's for an order of rows.

    A TypeError if it returns something else; a ValueError if these aren't the same rows. They are compared by their
    number and a sum over mixed row numbers, which takes about 10 ns for each.
    """
    answer: object = sharding(rows, epoch=epoch, seed=seed)
    name = name_of(sharding)
    if not isinstance(answer, Rows):
        raise TypeError(
            f"The sharding {name} must return Rows, got an object of type {type(answer).__name__}. Make them of row "
            "numbers with Rows.of."
        )
    if len(answer) != len(rows) or _mixed_sum(answer) != _mixed_sum(rows):
        raise ValueError(
            f"The sharding {name} must return each of the {len(rows)} rows of {rows.in_short(3)} once and no other, in "
            f"any order; it returned {len(answer)} rows, {answer.in_short(3)}."
        )
    return answer


def _mixed_sum(rows: Rows) -> int:
    """Return the sum of row numbers, each mixed so that other rows have other sums (splitmix64, modulo 2**64)."""
    total = np.uint64(0)
    for positions in chunks(len(rows)):
        mixed: npt.NDArray[np.uint64] = rows.to_global(positions).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        total += (mixed ^ (mixed >> np.uint64(31))).sum(dtype=np.uint64)
    return int(total)
