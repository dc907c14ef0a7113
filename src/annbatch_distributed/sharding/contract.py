"""The contract of a sharding: what deals the rows of a window to ranks.

A sharding is a frozen object with one method, :meth:`Sharding.deal`. It knows the rows and how many ranks there are,
and nothing of samplers, batches or what becomes of the remainder. ``annbatch_distributed.testing.check_sharding`` holds
it to the laws.
"""

from __future__ import annotations

import inspect
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Protocol, cast

from annbatch_distributed.sharding.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Sharding", "check_rows", "checked_sharding", "draws"]


class Sharding(Protocol):
    """The rule that decides which rank owns which rows in an epoch.

    A class attribute ``draws = True`` says that the ranks draw with replacement from the rows that they are dealt,
    instead of reading each of them once. What the ranks share out is then the draws: rows may go to several ranks or
    to none. Without the attribute, it is False.
    """

    def deal(self, rows: Rows, *, world_size: int, epoch: int, seed: int | None) -> Rows | Sequence[Rows]:
        """Deal rows to ranks. The answer depends on the arguments alone, so that every rank works out the same.

        Parameters
        ----------
        rows
            The rows to deal, as ranges of global rows: the window. A sharding that returns an order of it is asked
            again under ``remainder="drop"``, for the rows that an even deal keeps in this epoch.
        world_size
            The number of ranks, at least 1.
        epoch
            What ``set_epoch`` was given, 0 before that.
        seed
            The job's, the same on every rank; None if the user gave none.

        Returns
        -------
        Either all of the rows in some order, which is then cut into stretches of equal size, one for each rank; or a
        list with the rows of each rank, which may be of different sizes. Every row is in it once. If the ranks draw, it
        is a list with the rows that each rank draws from.

        Raises
        ------
        ValueError
            If these rows can't be dealt to this number of ranks.
        """


def draws(sharding: Sharding) -> bool:
    """Return whether the ranks draw from the rows that a sharding deals to them. A TypeError if it doesn't say so."""
    answer: object = getattr(sharding, "draws", False)
    if callable(answer):  # a method of the user's own, which says nothing
        return False
    if not isinstance(answer, bool):
        raise TypeError(
            f"{type(sharding).__name__}.draws must be True, if ranks draw with replacement from the rows that they are "
            f"dealt, or False, if they read each of them once, got {shortened(answer)} of type {type(answer).__name__}."
        )
    return answer


def check_rows(rows: object) -> None:
    """Raise a TypeError unless a sharding is asked to deal Rows."""
    if not isinstance(rows, Rows):
        raise TypeError(
            f"rows must be Rows, got {rows!r} of type {type(rows).__name__}. Make Rows of ranges with "
            "Rows((range(5),)), and of row numbers with Rows.of."
        )


def checked_sharding(thing: object, expected: str) -> Sharding:
    """Return an object of the contract, as far as that can be told without asking it, or raise a TypeError.

    ``expected`` is the beginning of its message.
    """
    deal = getattr(thing, "deal", None)
    if inspect.isclass(thing) or not callable(deal):
        hint = " Pass an instance, not the class." if inspect.isclass(thing) else ""
        raise TypeError(f"{expected}, got {thing!r}.{hint}")
    try:
        inspect.signature(deal).bind(Rows(), world_size=1, epoch=0, seed=None)
    except ValueError:
        pass  # what is written in C may not tell
    except TypeError as error:
        raise TypeError(
            f"A sharding must have a method deal(rows, *, world_size, epoch, seed), but that of {thing!r} has {error}."
        ) from None
    return cast("Sharding", thing)
