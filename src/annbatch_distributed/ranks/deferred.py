"""Deferred: a ``dist_info`` that is asked at first use.

Frameworks such as Lightning have loaders built before there is a process group. What doesn't depend on the rank can be
said and checked then; the rank is asked for when it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from annbatch_distributed.ranks.resolve import DistInfo


@dataclass(frozen=True)
class Deferred:
    """What :func:`deferred` returns."""

    dist_info: DistInfo
    """What is asked at first use."""


def deferred(dist_info: DistInfo) -> Deferred:
    """Have a ``dist_info`` asked when the rank is first needed, instead of when the sampler is made.

    Parameters
    ----------
    dist_info
        Any ``dist_info``. Where it can't be made before its time either, as a process group or a mesh, pass a callable
        that makes it.

    Examples
    --------
    >>> from annbatch.samplers import SequentialSampler
    >>> from annbatch_distributed import DistributedSampler, deferred
    >>> who = {}
    >>> sampler = DistributedSampler(SequentialSampler(2, 1, 2), dist_info=deferred(lambda: (who["rank"], 2)))
    >>> who["rank"] = 1  # only now does the job begin
    >>> sampler.rank
    1
    """
    return Deferred(dist_info)
