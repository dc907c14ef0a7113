"""Resolving ``dist_info``: from what the user names to a :class:`Membership`.

There is no fallback to rank 0: in a job of several processes it would give every one of them all rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from annbatch_distributed.ranks import jax, torch
from annbatch_distributed.ranks.membership import Membership
from annbatch_distributed.ranks.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Callable

type Answer = tuple[int, int] | list[int] | Rank | Membership
type DistInfo = Literal["torch", "jax"] | Callable[[], Answer] | Rank | Membership

_SOURCES: dict[str, Callable[[], Membership]] = {"torch": torch.default_group, "jax": jax.all_processes}


def resolve(dist_info: DistInfo) -> Membership:
    """Return which member of a job this process is.

    Parameters
    ----------
    dist_info
        ``"torch"`` or ``"jax"`` ask the framework, which must have been initialised. A callable is called once, without
        arguments, and returns ``(rank, world_size)``. A :class:`Rank` or a :class:`Membership` is taken as it is.

    Raises
    ------
    RuntimeError
        If the framework is not initialised.
    ValueError
        If a string names no source, or what a callable returns is not a rank of a job.
    TypeError
        If ``dist_info`` is something else, or what a callable returns is not a pair of integers.
    ImportError
        If the framework is not installed.

    Examples
    --------
    >>> resolve(lambda: (1, 2)).rank
    Rank(rank=1, world_size=2)
    """
    if isinstance(dist_info, Membership):
        return dist_info
    if isinstance(dist_info, Rank):
        return Membership(dist_info, source="a Rank")
    if isinstance(dist_info, str):
        if dist_info not in _SOURCES:
            msg = f"Unknown dist_info {dist_info!r}. {_EXPECTED}"
            raise ValueError(msg)
        return _SOURCES[dist_info]()
    if not callable(dist_info):
        msg = f"Unknown dist_info {dist_info!r}. {_EXPECTED}"
        raise TypeError(msg)
    answer = dist_info()
    return answer if isinstance(answer, Membership) else Membership(_from_pair(answer), source="a callable")


_EXPECTED = f"Expected one of {', '.join(map(repr, _SOURCES))}, a callable that returns (rank, world_size), or a Rank."


def _from_pair(pair: object) -> Rank:
    """Check what a user's callable returned."""
    if isinstance(pair, Rank):
        return pair
    expected = "The dist_info callable must return a tuple of two integers (rank, world_size)"
    if not isinstance(pair, tuple | list):
        msg = f"{expected}, got {pair!r} of type {type(pair).__name__}."
        raise TypeError(msg)
    if len(pair) != 2:
        msg = f"{expected}, got {len(pair)} values: {pair!r}."
        raise ValueError(msg)
    try:
        return Rank(*pair)
    except (TypeError, ValueError) as error:
        msg = f"{expected} with 0 <= rank < world_size, got {pair!r}: {error}"
        raise type(error)(msg) from None
