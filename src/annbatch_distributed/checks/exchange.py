"""Exchange: every process of a job says something, and all hear the same verdict on it.

It goes through the store that a framework's processes met in, a table of keys and texts that one of them serves. No
collective is involved, so that it works with any backend, and a process that never comes is noticed:

1. Each process goes to the first room that has no verdict yet, leaves its text there, and counts itself as arrived.
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
from typing import TYPE_CHECKING, Literal, Self

from annbatch_distributed.checks import messages
from annbatch_distributed.checks.messages import cut, shown
from annbatch_distributed.checks.stores import JaxStore, TorchStore
from annbatch_distributed.ranks import jax, torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from annbatch_distributed.checks.stores import Store
    from annbatch_distributed.ranks.membership import Framework, Membership

    type Gather = Callable[[str], Sequence[str]]
    type Timeout = float | timedelta
    type Judge = Callable[[Sequence[str], Sequence[int]], "Verdict"]

#: For how many seconds those are waited for that have come, but not yet written a verdict or heard it.
_GRACE = 10.0
#: How many processes there are at most, and how many characters a verdict on them has.
_MOST_PROCESSES, _LONGEST_VERDICT = 1 << 20, 1 << 16


@dataclass(frozen=True)
class Means:
    """How a process reaches the others."""

    timeout: float = 300.0
    """For how many seconds it waits for them."""
    gather: Gather | None = None
    """A function that returns what all processes say, in the same order everywhere, and waits for them as it likes;
    None takes the framework that knows the processes."""
    problem: TypeError | ValueError | None = None
    """What is wrong with the arguments. The defaults take their place, so that the others hear of it."""

    @classmethod
    def of(cls, timeout: object, gather: object) -> Self:
        """Check the arguments of a call."""
        try:
            seconds = _seconds(timeout)
        except (TypeError, ValueError) as error:
            return cls(gather=gather if callable(gather) else None, problem=error)
        if gather is None or callable(gather):
            return cls(seconds, gather)
        msg = f"gather must be a function that is given a text and returns those of all processes, got {shown(gather)}."
        return cls(seconds, problem=TypeError(msg))

    @property
    def reach_others(self) -> bool:
        """Whether there is anybody to tell."""
        return self.gather is not None or initialized() is not None


def _seconds(timeout: object) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not isinstance(seconds, Real) or isinstance(seconds, bool):
        kind = type(timeout).__name__
        msg = f"timeout must be a number of seconds or a datetime.timedelta, got {shown(timeout)} of type {kind}."
        raise TypeError(msg)
    try:
        found = float(seconds)
    except OverflowError:
        found = math.inf
    if not 0 < found < math.inf:
        msg = (
            f"timeout must be more than 0 seconds, and finite so that no process waits for ever, got {shown(timeout)}."
        )
        raise ValueError(msg)
    return found


@dataclass(frozen=True)
class Verdict:
    """What all processes hear."""

    kind: Literal["fine", "disagreement", "timeout"]
    """What it is."""
    text: str
    """What to say of it, cut to a bounded length."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", cut(self.text, _LONGEST_VERDICT))

    def to_text(self) -> str:
        """Return it as a text."""
        return messages.written(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> Verdict:
        """Read such a text; if it is none, that is the verdict."""
        fields = {"kind": messages.one_of("fine", "disagreement", "timeout"), "text": messages.text(_LONGEST_VERDICT)}
        try:
            return cls(**messages.record(messages.parsed(text), fields))
        except ValueError as error:
            return cls("disagreement", f"The ranks can't be checked, since their verdict can't be read: {error}.")

    def carry_out(self) -> str:
        """Return the text, or raise the error that it is.

        Raises
        ------
        ValueError
            If it is about a disagreement.
        TimeoutError
            If a process was missing, or has failed.
        """
        # others may have said anything in it
        text = "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in self.text)
        if self.kind == "disagreement":
            raise ValueError(text)
        if self.kind == "timeout":
            raise TimeoutError(text)
        return text


def exchange(text: str, judge: Judge, membership: Membership, means: Means) -> Verdict:
    """Say something to all processes of a job, and return the verdict.

    Parameters
    ----------
    text
        What this process says.
    judge
        Makes a verdict of what all of them say, and their numbers.
    membership
        Which process this is, of which.
    means
        How to reach the others. Without ``gather``, it is through the framework that ``membership`` is from, or else
        the one that is initialised, torch first.

    Raises
    ------
    RuntimeError
        If neither of them is initialised, and there must be other processes.
    """
    if means.gather is not None:
        return _judge_gathered(text, judge, means.gather)
    framework = membership.framework or initialized()
    if framework is None:
        if membership.rank.world_size == 1 and membership.n_peers in (None, 1):
            return judge([text], [0])
        msg = (
            f"The {membership.rank.world_size} ranks can't reach each other: neither torch.distributed nor "
            "jax.distributed is initialized. Initialize one of them first, or pass gather=, a function that is given a "
            "text and returns those of all processes, for instance mpi4py's comm.allgather."
        )
        raise RuntimeError(msg)
    here = torch.default_group() if framework == "torch" else jax.all_processes()
    store = TorchStore.current() if framework == "torch" else JaxStore.current()
    numbers = range(here.rank.world_size) if membership.processes is None else membership.processes
    return Meeting(store, here.rank.rank, tuple(numbers)).hold(text, judge, means.timeout)


def initialized() -> Framework | None:
    """Return the framework that knows the processes of this job, if any does."""
    return "torch" if torch.is_initialized() else "jax" if jax.is_initialized() else None


def listed(kind: str, numbers: Sequence[int]) -> str:
    """Return numbers as a text, with stretches of consecutive ones as such.

    Parameters
    ----------
    kind
        What they are the numbers of: ``"rank"`` or ``"process"``.
    numbers
        Ascending, at least one.

    Examples
    --------
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
        msg = (
            f"gather must return a list with the texts of all processes, that of this one included, got {shown(texts)}."
        )
        raise TypeError(msg)
    if len(texts) > _MOST_PROCESSES:
        msg = f"gather must return a text for each process, of {_MOST_PROCESSES} at most, got {len(texts)}."
        raise ValueError(msg)
    return judge(texts, range(len(texts)))


@dataclass(frozen=True)
class Meeting:
    """Some processes, and where they meet."""

    store: Store
    """Where."""
    number: int
    """That of this process."""
    numbers: tuple[int, ...]
    """Those of all."""

    def hold(self, text: str, judge: Judge, timeout: float) -> Verdict:
        """Say something, and return the verdict on what all have said.

        Parameters
        ----------
        text, judge
            As for :func:`exchange`.
        timeout
            For how many seconds to wait for the others.
        """
        room = self._enter()
        try:
            self.store.set(f"{room}/said/{self.number}", text)
            if self.store.add(f"{room}/arrived") == len(self.numbers):
                said = [self.store.get(f"{room}/said/{number}") for number in self.numbers]
                verdict = self._decide(room, lambda: judge([one or "" for one in said], self.numbers))
            else:
                verdict = self._wait(room, timeout) or self._decide(room, lambda: self._missing(room, timeout))
        except BaseException as error:
            failed = self._failed(error)
            with suppress(Exception):  # whatever it is, it is raised; the others hear of it if they can
                if self.store.get(f"{room}/verdict") is None:
                    self._decide(room, lambda: failed)
                self.store.set(f"{room}/heard/{self.number}", "yes")
            raise
        self._leave(room)
        return verdict

    @property
    def _building(self) -> str:
        who = blake2b(repr(self.numbers).encode(), digest_size=8).hexdigest()
        return f"annbatch_distributed/{who}"

    def _enter(self) -> str:
        """Return the first room without a verdict."""
        # so that processes of which one has called more often than the others meet again
        opened = self.store.get(f"{self._building}/open") or "0"
        if not (opened.isascii() and opened.isdigit() and len(opened) < 20):
            msg = f"The ranks can't be checked: their store says that room {shown(opened)} is open, which is no number."
            raise ValueError(msg)
        number = int(opened)
        while self.store.get(f"{self._building}/{number}/verdict") is not None:
            number += 1
        return f"{self._building}/{number}"

    def _leave(self, room: str) -> None:
        """Say that the verdict was heard; the first process waits until all have, and clears the room."""
        self.store.set(f"{room}/heard/{self.number}", "yes")
        if self.number != self.numbers[0]:
            return
        waiting = [number for number in self.numbers if self.store.get(f"{room}/said/{number}") is not None]
        deadline = time.monotonic() + _GRACE
        while waiting and time.monotonic() < deadline:
            waiting = [number for number in waiting if self.store.get(f"{room}/heard/{number}") is None]
            if waiting:
                time.sleep(0.01)
        for number in self.numbers:
            for kind in ("said", "heard"):
                self.store.delete(f"{room}/{kind}/{number}")

    def _decide(self, room: str, make: Callable[[], Verdict]) -> Verdict:
        """Make the verdict, unless there is one."""
        if self.store.add(f"{room}/verdicts") > 1:
            heard = self._wait(room, _GRACE)
            return heard or Verdict("timeout", "The ranks can't be checked: the process that was to say so has failed.")
        try:
            verdict = make()
        except BaseException as error:
            self._write(room, self._failed(error))
            raise
        self._write(room, verdict)
        return self._read(room) or verdict

    def _write(self, room: str, verdict: Verdict) -> None:
        self.store.set(f"{room}/verdict", verdict.to_text())
        self.store.set(f"{self._building}/open", str(int(room.rpartition("/")[2]) + 1))

    def _wait(self, room: str, seconds: float) -> Verdict | None:
        deadline, pause = time.monotonic() + seconds, 0.002
        while (verdict := self._read(room)) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
        return verdict

    def _read(self, room: str) -> Verdict | None:
        text = self.store.get(f"{room}/verdict")
        return None if text is None else Verdict.of_text(text)

    def _missing(self, room: str, timeout: float) -> Verdict:
        missing = [number for number in self.numbers if self.store.get(f"{room}/said/{number}") is None]
        what = f"{listed('process', missing)} didn't come" if missing else "the last to come didn't answer"
        return Verdict(
            "timeout",
            f"The ranks can't be checked: of {len(self.numbers)} processes, {what} within {timeout:g} seconds. All of "
            "them must make the same calls. Look for one that failed or hangs; if it is slow, pass a larger timeout.",
        )

    def _failed(self, error: BaseException) -> Verdict:
        what = f"{type(error).__name__}: {error}"
        return Verdict("timeout", f"The ranks can't be checked: process {self.number} has failed meanwhile with {what}")
