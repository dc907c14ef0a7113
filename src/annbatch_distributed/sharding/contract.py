"""The contract of a sharding: what deals the rows of a window to ranks.

A sharding is a frozen object with one method, :meth:`Sharding.deal`. It knows the rows and how many ranks there are,
and nothing of samplers, batches or what becomes of the remainder. ``annbatch_distributed.testing.check_sharding`` holds
it to the laws.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from annbatch_distributed.sharding.rows import Rows


class Sharding(Protocol):
    """The rule that decides which rank owns which rows in an epoch."""

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
        list with the rows of each rank, which may be of different sizes. Every row is in it once.

        Raises
        ------
        ValueError
            If these rows can't be dealt to so many ranks.
        """
        ...
