"""Ranks of one process that check each other: what each says is known before any of them hears."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from annbatch_distributed.ranks.exchange import Gather


class _Said(Exception):
    """Ends a call that has said what it has to say."""


def heard(calls: Sequence[Callable[[Gather], str | None]]) -> list[str]:
    """Return what each rank hears: the answer of its call, or the message of its error.

    Parameters
    ----------
    calls
        For each rank, a call that is given a function to gather with.
    """
    texts = [_said(call) for call in calls]
    return [_heard(call, texts) for call in calls]


def _said(call: Callable[[Gather], str | None]) -> str:
    said = ""

    def gather(text: str) -> list[str]:
        nonlocal said
        said = text
        raise _Said

    try:
        call(gather)
    except _Said:
        return said
    msg = "the call has not gathered anything"
    raise AssertionError(msg)


def _heard(call: Callable[[Gather], str | None], texts: list[str]) -> str:
    try:
        return call(lambda _: texts) or ""
    except ValueError as error:
        return str(error)
