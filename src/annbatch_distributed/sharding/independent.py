"""Independent: every rank draws from all of the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from annbatch_distributed.sharding.contract import check_rows

if TYPE_CHECKING:
    from annbatch_distributed.sharding.rows import Rows

__all__ = ["Independent"]


@dataclass(frozen=True)
class Independent:
    """Let every rank draw from all of the rows: for samplers that draw with replacement.

    What the ranks share out is the draws. The job as a whole makes as many as the wrapped sampler would make alone, and
    every rank its part of them, with a generator of its own. Weights of classes hold for the whole job, which they
    can't where each rank sees only a stretch of rows that are sorted by class.

    How 10 draws go to 2 ranks with a batch size of 2 or 4::

        remainder    batches of 2                  batches of 4
        "drop"       4 and 4, in 2 batches each    4 and 4, in 1 batch each: 2 fewer draws
        "keep"       5 and 5, in 3 batches each    5 and 5, in 2 batches each
        "exact"      5 and 5, in 3 batches each    5 and 5, in 2 batches each
        "pad"        6 and 6, in 3 batches each    8 and 8, in 2 batches each: 6 draws more

    Examples
    --------
    >>> from annbatch.samplers import RandomSampler
    >>> from annbatch_distributed import DistributedSampler, Independent, Rank
    >>> sampler = RandomSampler(2, 2, 2, replacement=True, num_samples=10)
    >>> job = [
    ...     DistributedSampler(sampler, dist_info=Rank(rank, 2), sharding=Independent())
    ...     for rank in range(2)
    ... ]
    >>> [rank.n_batches(100) for rank in job]
    [2, 2]
    """

    def __call__(self, rows: Rows, *, epoch: int, seed: int | None) -> Rows:
        """Return the rows, which are every rank's to draw from."""
        del epoch, seed  # the same for all of them
        check_rows(rows)
        return rows
