"""Exchange: every process of a job says something, and all hear the same verdict on it.

It goes through the store that a framework's processes met in, a table of keys and texts that one of them serves. No
collective is involved, so that it works with any backend, a process that never comes is noticed, and of ``n`` processes
none reads more than ``n`` texts:

1. Each process writes its text, and counts itself as arrived.
2. The last one to arrive reads all texts, judges them, and writes the verdict.
3. The others wait for it. Whoever has waited for too long writes a verdict that says who is missing.
4. The first verdict that is written is that of all.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal

from annbatch_distributed.ranks import jax, torch
from annbatch_distributed.ranks.stores import JaxStore, TorchStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from annbatch_distributed.ranks.membership import Framework, Membership
    from annbatch_distributed.ranks.stores import Store

    type Gather = Callable[[str], Sequence[str]]
    type Judge = Callable[[Sequence[str], Sequence[int]], "Verdict"]

#: For how many seconds the verdict of another process is waited for once that has begun to write it.
_GRACE = 10.0


@dataclass(frozen=True)
class Verdict:
    """What all processes hear."""

    kind: Literal["fine", "disagreement", "timeout"]
    """What it is."""
    text: str
    """What to say of it."""

    def carry_out(self) -> str:
        """Return the text, or raise the error that it is.

        Raises
        ------
        ValueError
            If it is about a disagreement.
        TimeoutError
            If a process was missing.
        """
        if self.kind == "disagreement":
            raise ValueError(self.text)
        if self.kind == "timeout":
            raise TimeoutError(self.text)
        return self.text


def exchange(text: str, judge: Judge, membership: Membership, *, timeout: float, gather: Gather | None) -> Verdict:
    """Say something to all processes of a job, and return the verdict.

    Parameters
    ----------
    text
        What this process says.
    judge
        Makes a verdict of what all of them say, and their numbers.
    membership
        Which process this is, of which.
    timeout
        For how many seconds to wait for the others.
    gather
        A function that returns what all processes say, in the same order everywhere, and waits for them as it likes;
        None takes the framework that ``membership`` is from, or else the one that is initialised, torch first.

    Raises
    ------
    RuntimeError
        If neither of them is initialised, and there must be other processes.
    """
    if gather is not None:
        return _judge_gathered(text, judge, gather)
    framework = membership.framework or _initialized()
    if framework is None:
        if membership.rank.world_size * membership.n_peers == 1:
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
    return _Meeting(store, here.rank.rank, numbers).hold(text, judge, timeout)


def _initialized() -> Framework | None:
    """Return the framework that knows the processes of this job, if any does."""
    return "torch" if torch.is_initialized() else "jax" if jax.is_initialized() else None


def _judge_gathered(text: str, judge: Judge, gather: Gather) -> Verdict:
    texts = gather(text)
    if not isinstance(texts, list | tuple) or not all(isinstance(one, str) for one in texts) or text not in texts:
        msg = f"gather must return a list with the texts of all processes, that of this one included, got {texts!r}."
        raise TypeError(msg)
    return judge(texts, range(len(texts)))


@dataclass(frozen=True)
class _Meeting:
    store: Store
    """Where the processes meet."""
    number: int
    """That of this process."""
    numbers: Sequence[int]
    """Those of all."""

    def hold(self, text: str, judge: Judge, timeout: float) -> Verdict:
        who = blake2b(repr(tuple(self.numbers)).encode(), digest_size=8).hexdigest()
        room = f"annbatch_distributed/{who}"
        # counted in the store, so that a process which takes the place of another goes on where that was
        room += f"/{self.store.add(f'{room}/calls/{self.number}')}"
        self.store.set(f"{room}/{self.number}", text)
        is_last = self.store.add(f"{room}/arrived") == len(self.numbers)
        texts = [self.store.get(f"{room}/{number}") for number in self.numbers] if is_last else [None]
        said = [one for one in texts if one is not None]
        if len(said) == len(texts):
            verdict = self._decide(room, judge(said, self.numbers))
        else:  # if this is the last one, others have given up and gone
            verdict = self._wait(room, timeout) or self._decide(room, self._missing(room, timeout))
        self.store.delete(f"{room}/{self.number}")
        return verdict

    def _decide(self, room: str, verdict: Verdict) -> Verdict:
        """Write a verdict, unless there is one."""
        if self.store.add(f"{room}/verdicts") == 1:
            self.store.set(f"{room}/verdict", json.dumps(asdict(verdict)))
            return verdict
        return self._wait(room, _GRACE) or verdict

    def _wait(self, room: str, seconds: float) -> Verdict | None:
        deadline, pause = time.monotonic() + seconds, 0.002
        while (text := self.store.get(f"{room}/verdict")) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
        return Verdict(**json.loads(text))

    def _missing(self, room: str, timeout: float) -> Verdict:
        missing = [number for number in self.numbers if self.store.get(f"{room}/{number}") is None]
        what = f"process {', '.join(map(str, missing))} didn't come" if missing else "the last to come didn't answer"
        return Verdict(
            "timeout",
            f"The ranks can't be checked: of {len(self.numbers)} processes, {what} within {timeout:g} seconds. All of "
            "them must make the same calls. Look for one that failed or hangs; if it is slow, pass a larger timeout.",
        )
