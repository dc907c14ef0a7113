"""Exchange: every process of a job says something, and all hear the same verdict on it.

It goes through the store that a framework's processes met in, a table of keys and texts that one of them serves. No
collective is involved, so that it works with any backend, and a process that never comes is noticed. The processes of a
rendezvous meet in numbered rounds:

1. Each process goes to the first round that has no verdict yet, leaves its text there, and counts itself as arrived.
2. The last one to arrive reads all texts, judges them, and writes the verdict.
3. The others wait for it. Whoever has waited for too long writes a verdict that says who is missing, and whoever fails
   one that says so.
4. The first verdict is that of all. The first process, which may be the one that serves the store, leaves last.

What the store holds, or a function of the user's returns, is not trusted: see :mod:`messages`.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from hashlib import blake2b
from itertools import groupby
from numbers import Real
from typing import TYPE_CHECKING, Literal

from annbatch_distributed.checks import messages
from annbatch_distributed.checks.stores import JaxStore, TorchStore
from annbatch_distributed.ranks import jax, torch
from annbatch_distributed.resume.state import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from annbatch_distributed.checks.stores import Store
    from annbatch_distributed.ranks.membership import Framework, Membership

__all__ = ["Gather", "Timeout", "Verdict", "check_gather", "exchange", "initialized", "listed", "seconds_of"]

type Gather = Callable[[str], Sequence[str]]
type Timeout = float | timedelta
type Judge = Callable[[Sequence[str], Sequence[int]], Verdict]

#: For how many seconds a process waits for those that have come, but not yet written a verdict or heard it.
_GRACE = 10.0
#: How many processes there are at most, and how many characters a verdict on them has.
_MOST_PROCESSES, _LONGEST_VERDICT = 1 << 20, 1 << 16


@dataclass(frozen=True)
class Verdict:
    """What all processes hear."""

    kind: Literal["fine", "disagreement", "timeout"]
    """What it is."""
    text: str
    """What to say of it, cut to a bounded length."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", messages.cut(self.text, _LONGEST_VERDICT))

    def to_json(self) -> str:
        """Return it as a text."""
        return messages.written(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Verdict:
        """Read such a text; if it is none, that is the verdict."""
        fields = {"kind": messages.one_of("fine", "disagreement", "timeout"), "text": messages.text(_LONGEST_VERDICT)}
        try:
            return cls(**messages.record(messages.parsed(text), fields))
        except ValueError as error:
            return cls("disagreement", f"The ranks can't be checked, since their verdict can't be read: {error}.")

    def raise_or_return(self) -> str:
        """Return the text; or raise it, as a ValueError if ranks disagree, as a TimeoutError if one is missing."""
        # others may have said anything in it
        text = "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in self.text)
        if self.kind == "disagreement":
            raise ValueError(text)
        if self.kind == "timeout":
            raise TimeoutError(text)
        return text


def seconds_of(timeout: object) -> float:
    """Return a timeout of a user's in seconds; raise a TypeError or a ValueError if it is none."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not isinstance(seconds, Real) or isinstance(seconds, bool):
        kind = type(timeout).__name__
        raise TypeError(
            f"timeout must be a number of seconds or a datetime.timedelta, got {shown(timeout)} of type {kind}."
        )
    try:
        found = float(seconds)
    except OverflowError:
        found = math.inf
    if not 0 < found < math.inf:
        raise ValueError(
            f"timeout must be more than 0 seconds, and finite so that no process waits for ever, got {shown(timeout)}."
        )
    return found


def check_gather(gather: object) -> None:
    """Raise a TypeError unless something is a function to gather with, or None."""
    if gather is not None and not callable(gather):
        raise TypeError(
            f"gather must be a function that takes a text and returns the texts of all processes, got {shown(gather)}."
        )


def exchange(text: str, judge: Judge, membership: Membership, *, seconds: float, gather: Gather | None) -> Verdict:
    """Say a text to all processes of a job, and return the verdict that ``judge`` makes of all texts.

    ``gather`` returns the texts of all processes, in the same order everywhere, and waits for them as it likes. Without
    it, the processes meet through the framework that ``membership`` is from, or else the one that is initialised, torch
    first, and wait for some seconds. A RuntimeError if there is none, and there must be other processes.
    """
    if gather is not None:
        return _judge_gathered(text, judge, gather)
    framework = membership.framework or initialized()
    if framework is None:
        if membership.rank.world_size == 1 and membership.n_peers in (None, 1):
            return judge([text], [0])
        raise RuntimeError(
            f"The {membership.rank.world_size} ranks can't reach each other: neither torch.distributed nor "
            "jax.distributed is initialized. Initialize one of them first, or pass gather=, a function that is given a "
            "text and returns the texts of all processes, for instance mpi4py's comm.allgather."
        )
    here = torch.default_group() if framework == "torch" else jax.all_processes()
    store = TorchStore.current() if framework == "torch" else JaxStore.current()
    numbers = range(here.rank.world_size) if membership.processes is None else membership.processes
    return Rendezvous(store, here.rank.rank, tuple(numbers)).verdict(text, judge, seconds)


def initialized() -> Framework | None:
    """Return the framework that knows the processes of this job, if any does."""
    return "torch" if torch.is_initialized() else "jax" if jax.is_initialized() else None


def listed(kind: Literal["rank", "process"], numbers: Sequence[int]) -> str:
    """Return ascending numbers of ranks or processes as a text, with stretches of consecutive ones as such.

    >>> listed("rank", [0, 2, 3, 4, 7])
    'ranks 0, 2 to 4 and 7'
    """
    stretches: list[str] = []
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        stretch = [number for _, number in group]
        stretches += [f"{stretch[0]} to {stretch[-1]}"] if len(stretch) > 2 else map(str, stretch)
    plural = {"rank": "ranks", "process": "processes"}[kind]
    *others, last = stretches
    return f"{plural} {', '.join(others)} and {last}" if others else f"{kind if len(numbers) == 1 else plural} {last}"


def _judge_gathered(text: str, judge: Judge, gather: Gather) -> Verdict:
    texts = gather(text)
    if not isinstance(texts, list | tuple) or not all(isinstance(one, str) for one in texts) or text not in texts:
        raise TypeError(
            f"gather must return a list with the texts of all processes, that of this one included, got {shown(texts)}."
        )
    if len(texts) > _MOST_PROCESSES:
        raise ValueError(f"gather must return a text for each process, of {_MOST_PROCESSES} at most, got {len(texts)}.")
    return judge(texts, range(len(texts)))


class Rendezvous:
    """Where the process with a number meets all those with some ascending numbers, for one round.

    Other processes, or some of these with others, meet elsewhere in the same store.
    """

    def __init__(self, store: Store, number: int, numbers: tuple[int, ...]) -> None:
        self._store, self._number, self._numbers = store, number, numbers
        self.place = f"annbatch_distributed/{blake2b(repr(numbers).encode(), digest_size=8).hexdigest()}"
        self._round = 0

    def verdict(self, text: str, judge: Judge, timeout: float) -> Verdict:
        """Say something, and return the verdict on what all processes say, or on who didn't come in time."""
        self._round = self._first_open_round()
        try:
            self._store.set(self._key("said", self._number), text)
            if self._store.add(self._key("arrived")) == len(self._numbers):
                texts = [self._get("said", number) or "" for number in self._numbers]
                verdict = self._decide(lambda: judge(texts, self._numbers))
            else:
                verdict = self._wait(timeout) or self._decide(lambda: self._missing(timeout))
        except BaseException as error:
            failed = self._failed(error)
            with suppress(Exception):  # whatever it is, it is raised; the others hear of it if they can
                if self._get("verdict") is None:
                    self._decide(lambda: failed)
                self._store.set(self._key("heard", self._number), "yes")
            raise
        self._leave()
        return verdict

    def _key(self, kind: str, *number: int) -> str:
        return "/".join(map(str, (self.place, self._round, kind, *number)))

    def _get(self, kind: str, *number: int) -> str | None:
        return self._store.get(self._key(kind, *number))

    def _first_open_round(self) -> int:
        """Return the number of the first round without a verdict."""
        # so that processes of which one has called more often than the others meet again
        opened = self._store.get(f"{self.place}/open") or "0"
        if not (opened.isascii() and opened.isdigit() and len(opened) < 20):
            raise ValueError(
                f"The ranks can't be checked: their store says that round {shown(opened)} is open, which is no number."
            )
        number = int(opened)
        while self._store.get(f"{self.place}/{number}/verdict") is not None:
            number += 1
        return number

    def _leave(self) -> None:
        """Say that the verdict was heard; the first process waits until all have, and deletes what was said."""
        self._store.set(self._key("heard", self._number), "yes")
        if self._number != self._numbers[0]:
            return
        waiting = [number for number in self._numbers if self._get("said", number) is not None]
        deadline = time.monotonic() + _GRACE
        while waiting and time.monotonic() < deadline:
            waiting = [number for number in waiting if self._get("heard", number) is None]
            if waiting:
                time.sleep(0.01)
        for number in self._numbers:
            for kind in ("said", "heard"):
                self._store.delete(self._key(kind, number))

    def _decide(self, make: Callable[[], Verdict]) -> Verdict:
        """Make the verdict, unless there is one."""
        if self._store.add(self._key("verdicts")) > 1:
            return self._wait(_GRACE) or Verdict(
                "timeout", "The ranks can't be checked: the process that was to say so has failed."
            )
        try:
            verdict = make()
        except BaseException as error:
            self._write(self._failed(error))
            raise
        self._write(verdict)
        return self._read() or verdict

    def _write(self, verdict: Verdict) -> None:
        self._store.set(self._key("verdict"), verdict.to_json())
        self._store.set(f"{self.place}/open", str(self._round + 1))

    def _read(self) -> Verdict | None:
        text = self._get("verdict")
        return None if text is None else Verdict.from_json(text)

    def _wait(self, seconds: float) -> Verdict | None:
        deadline, pause = time.monotonic() + seconds, 0.002
        while (verdict := self._read()) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
        return verdict

    def _missing(self, timeout: float) -> Verdict:
        missing = [number for number in self._numbers if self._get("said", number) is None]
        what = f"{listed('process', missing)} didn't come" if missing else "the last to come didn't answer"
        return Verdict(
            "timeout",
            f"The ranks can't be checked: of {len(self._numbers)} processes, {what} within {timeout:g} seconds. All of "
            "them must make the same calls. Look for one that failed or hangs; if it is slow, pass a larger timeout.",
        )

    def _failed(self, error: BaseException) -> Verdict:
        what = f"{type(error).__name__}: {error}"
        text = f"The ranks can't be checked: process {self._number} has failed meanwhile with {what}"
        return Verdict("timeout", text)
