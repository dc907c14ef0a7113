"""Ranks in one process that check each other: all texts are collected before any rank receives them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import HashStore

from annbatch_distributed.ranks import Placement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import pytest

    from annbatch_distributed.checks.exchange import Gather


class _Sent(Exception):
    """Ends a call once it has sent its text."""


def heard(calls: Sequence[Callable[[Gather], str | None]], listening: Iterable[int] | None = None) -> list[str]:
    """Return the outcome of each rank: the answer of its call, or the message of its error.

    Parameters
    ----------
    calls
        For each rank, a call that takes a function to gather with.
    listening
        Ranks whose outcomes are returned; None for all.
    """
    texts = [_text_of(call) for call in calls]
    return [_outcome(calls[rank], texts) for rank in (range(len(calls)) if listening is None else listening)]


def agreement(ranks: Sequence[Any], *arguments: object, listening: Iterable[int] | None = None) -> list[str]:
    """Return the outcome of `check_ranks_agree` for each sampler or loader."""
    return heard([partial(_call, rank.check_ranks_agree, arguments) for rank in ranks], listening)


def verdict(ranks: Sequence[Any], *arguments: object, listening: Iterable[int] | None = None) -> list[str]:
    """Return the outcome of `check_epoch_read` for each sampler or loader."""
    return heard([partial(_call, rank.check_epoch_read, arguments) for rank in ranks], listening)


def met_in_threads(calls: Sequence[Callable[..., Any]]) -> list[Any]:
    """Return the result of each rank's call, which takes a function to gather with any number of times."""
    texts, barrier = [""] * len(calls), threading.Barrier(len(calls), timeout=60)

    def gather(rank: int, text: str) -> list[str]:
        texts[rank] = text
        barrier.wait()
        gathered = list(texts)
        barrier.wait()  # no rank sends its next text before all have received this one
        return gathered

    with ThreadPoolExecutor(len(calls)) as pool:
        answers = [pool.submit(call, gather=partial(gather, rank)) for rank, call in enumerate(calls)]
    return [answer.result() for answer in answers]


def _call(check: Callable[..., str | None], arguments: tuple[object, ...], gather: Gather) -> str | None:
    return check(*arguments, gather=gather)


def _text_of(call: Callable[[Gather], str | None]) -> str:
    message = ""

    def gather(text: str) -> list[str]:
        nonlocal message
        message = text
        raise _Sent

    try:
        call(gather)
    except _Sent:
        return message
    msg = "the call has not gathered anything"
    raise AssertionError(msg)


def _outcome(call: Callable[[Gather], str | None], texts: list[str]) -> str:
    try:
        return call(lambda _: texts) or ""
    except ValueError as error:
        return str(error)


def met(calls: Sequence[Callable[[], str | None]], patch: pytest.MonkeyPatch) -> list[str]:
    """Return each rank's outcome of an exchange in a store: its answer, or the type and message of its error.

    Parameters
    ----------
    calls
        For each rank, a call, which runs in its own thread.
    patch
        Makes PyTorch treat each thread as a process.
    """
    own = threading.local()
    store = HashStore()
    torch = "annbatch_distributed.ranks.torch"
    patch.setattr(f"{torch}.is_initialized", lambda: True)
    patch.setattr(f"{torch}.default_group", lambda: Placement(own.number, len(calls), "threads", "torch"))
    patch.setattr("annbatch_distributed.checks.exchange.store_of", lambda _: store)
    outcomes = ["nothing, because it is still waiting"] * len(calls)

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
