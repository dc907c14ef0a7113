"""Ranks of one process that check each other: what each says is known before any of them hears."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import HashStore

from annbatch_distributed import Rank
from annbatch_distributed.ranks import Placement

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest

    from annbatch_distributed.checks.exchange import Gather


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


def agreement(ranks: Sequence[Any], *arguments: object) -> list[str]:
    """Return what each of some samplers or loaders hears when they check that they agree."""
    return heard([partial(_asked, rank.check_ranks_agree, arguments) for rank in ranks])


def verdict(ranks: Sequence[Any], *arguments: object) -> list[str]:
    """Return what each of some samplers or loaders hears when they check what they have read."""
    return heard([partial(_asked, rank.check_epoch_read, arguments) for rank in ranks])


def met_in_threads(calls: Sequence[Callable[..., Any]]) -> list[Any]:
    """Return what each rank's call returns that is given a function to gather with, as often as it likes."""
    texts, barrier = [""] * len(calls), threading.Barrier(len(calls), timeout=60)

    def gather(rank: int, text: str) -> list[str]:
        texts[rank] = text
        barrier.wait()
        gathered = list(texts)
        barrier.wait()  # nobody says the next one before all have heard this one
        return gathered

    with ThreadPoolExecutor(len(calls)) as pool:
        answers = [pool.submit(call, gather=partial(gather, rank)) for rank, call in enumerate(calls)]
    return [answer.result() for answer in answers]


def _asked(ask: Callable[..., str | None], arguments: tuple[object, ...], gather: Gather) -> str | None:
    return ask(*arguments, gather=gather)


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


def met(calls: Sequence[Callable[[], str | None]], patch: pytest.MonkeyPatch) -> list[str]:
    """Return what each rank hears that meets the others in a store: its answer, or the type and message of its error.

    Parameters
    ----------
    calls
        For each rank, a call, which is made by a thread of its own.
    patch
        Has torch say that each thread is a process.
    """
    own = threading.local()
    store = HashStore()
    torch = "annbatch_distributed.ranks.torch"
    patch.setattr(f"{torch}.is_initialized", lambda: True)
    patch.setattr(f"{torch}.default_group", lambda: Placement(Rank(own.number, len(calls)), "threads", "torch"))
    patch.setattr("annbatch_distributed.checks.exchange.store_of", lambda _: store)
    outcomes = ["nothing, since it still waits"] * len(calls)

    def run(number: int, call: Callable[[], str | None]) -> None:
        own.number = number
        try:
            outcomes[number] = call() or ""
        except Exception as error:  # noqa: BLE001 the outcome names it
            outcomes[number] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return outcomes
