"""Deferred: a ``dist_info`` that is asked at first use.

Frameworks such as Lightning have loaders built before there is a process group. What doesn't depend on the rank can be
said and checked then; the rank is asked for when it is needed.
"""

from __future__ import annotations

from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, Self

from annbatch_distributed.ranks.frameworks import knows_rank
from annbatch_distributed.ranks.resolve import resolve, source_of
from annbatch_distributed.ranks.worker import current_worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from annbatch_distributed.ranks.membership import Membership
    from annbatch_distributed.ranks.resolve import DistInfo

__all__ = ["Deferred", "deferred", "member"]


class Deferred:
    """What :func:`deferred` returns. All copies within a process ask once, together, or again if it was too early."""

    def __init__(self, ask: Callable[[], Membership]) -> None:
        self._ask = ask
        self._answer: Membership | None = None
        self._answer_of_parent: Membership | None = None

    @property
    def framework_object(self) -> object:
        """The framework's object that is asked; None if another thing is."""
        return getattr(self._ask, "thing", None)

    @property
    def is_known(self) -> bool:
        """Whether it was asked already."""
        return self._answer is not None

    def membership(self) -> Membership:
        """Return which member of a job this process is."""
        if self._answer is None:
            # a DataLoader's worker is in no process group, and belongs to the rank that has started it
            self._answer = (self._answer_of_parent if current_worker() is not None else None) or self._ask()
        return self._answer

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        # another process may be another rank, and asks for itself, unless it turns out to be a DataLoader's worker
        of_parent = self._answer
        if get_spawning_popen() is not None and of_parent is None:
            try:
                of_parent = self.membership()
            except Exception:  # noqa: BLE001 it is too early here, and a worker that asks again says so
                of_parent = None
        return {"_ask": self._ask, "_answer": None, "_answer_of_parent": of_parent}


def deferred(dist_info: DistInfo | Deferred) -> Deferred:
    """Have a ``dist_info`` asked when the rank is first needed, instead of when the sampler is made.

    Parameters
    ----------
    dist_info
        Any ``dist_info``. Where it can't be made before its time either, as a process group or a mesh, pass a callable
        that makes it.

    Raises
    ------
    TypeError, ValueError
        If it is nothing that can be asked.

    Examples
    --------
    >>> from annbatch.samplers import SequentialSampler
    >>> from annbatch_distributed import DistributedSampler, deferred
    >>> who = {}
    >>> sampler = DistributedSampler(
    ...     SequentialSampler(2, 1, 2), dist_info=deferred(lambda: (who["rank"], 2))
    ... )
    >>> who["rank"] = 1  # only now does the job begin
    >>> sampler.rank
    1
    """
    return dist_info if isinstance(dist_info, Deferred) else Deferred(source_of(dist_info))


def member(dist_info: DistInfo | Deferred) -> Membership | Deferred:
    """Ask a ``dist_info`` which member this process is, but for a framework's object that may not know it yet."""
    if isinstance(dist_info, Deferred):
        return dist_info
    return deferred(dist_info) if knows_rank(dist_info) else resolve(dist_info)
