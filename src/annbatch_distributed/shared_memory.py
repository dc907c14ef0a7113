"""Shared memory: what the process of a rank and its ``DataLoader`` workers tell each other.

A worker has a copy of the loader from the time when it was started. What is set later, it finds here, if it persists.
In each iteration over the ``DataLoader``, one worker announces with which position its pass begins. The others wait for
that, so that all have parts of the same pass, and the process finds there what was begun.

There are no locks: whatever is written here has a single writer, and a version that is written last.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from multiprocessing.context import get_spawning_popen
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

#: Bytes of a text with its version and length.
_RECORD = 1 << 11
#: How many announcements are kept; the first record is that of the process.
_N_ANNOUNCED = 1 << 6
#: How many workers can be told apart, of those that have the same seed in two iterations.
_N_WORKERS = 1 << 10
_SIZE = (1 + _N_ANNOUNCED) * _RECORD + 8 * (4 * _N_ANNOUNCED + _N_WORKERS + 1)

type Bytes = npt.NDArray[np.uint8]
type Numbers = npt.NDArray[np.int64]


class Announced(NamedTuple):
    """The pass that workers have begun last."""

    version: int
    """When it was announced."""
    text: str
    """What was announced."""
    n_obs: int | None
    """Rows of the collection; None until it is known."""
    n_batches: int | None
    """How many batches the epoch has on the rank that has the most; None until it is known."""
    is_finished: bool
    """Whether the worker with the last batch has come to its end."""


class SharedMemory:
    """A text that a process sets and its workers read, and texts that one of these announces for each iteration.

    Forked workers inherit it. With spawned ones it is shared when it is pickled for them; pickled or copied for another
    purpose, it is a new one.
    """

    def __init__(self) -> None:
        self._memories: list[Bytes] = [np.frombuffer(mmap.mmap(-1, _SIZE), dtype=np.uint8)]
        self._tensor: Any = None
        self._owner = os.getpid()

    @property
    def is_own(self) -> bool:
        """Whether this process has made it, rather than one that started it."""
        return self._owner == os.getpid()

    def write(self, text: str) -> None:
        """Set the text of the process."""
        for memory in self._memories:
            _write(memory[:_RECORD], text)

    def read(self) -> str:
        """Return the text of the process; nothing if it has set none."""
        return _read(self._memories[-1][:_RECORD])[1]

    def announce(self, iteration: int, text: str) -> int:
        """Announce with what an iteration begins, in the worker that decides it; return the version."""
        memory, place = self._memories[-1], iteration % _N_ANNOUNCED
        numbers = _numbers(memory)
        numbers[_N_ANNOUNCED + place] = numbers[2 * _N_ANNOUNCED + place] = 0
        version = _write(_announcement(memory, place), text)
        numbers[place] = iteration
        numbers[-1] = place + 1
        return version

    def heard(self, iteration: int, worker: int) -> tuple[int, str] | None:
        """Return what was announced for an iteration, and when, once for each worker; None if nothing was as yet."""
        memory, place = self._memories[-1], iteration % _N_ANNOUNCED
        numbers = _numbers(memory)
        taken = numbers[4 * _N_ANNOUNCED + worker % _N_WORKERS :][:1]
        if numbers[place] != iteration:  # it is written last
            return None
        version, text = _read(_announcement(memory, place))
        if version <= taken[0]:  # torch can draw the same seed again, if its user has it do so
            return None
        taken[0] = version
        return version, text

    def describe(self, iteration: int, *, n_obs: int, n_batches: int) -> None:
        """Add what is known when the pass begins, in the worker that has announced it."""
        numbers, place = _numbers(self._memories[-1]), iteration % _N_ANNOUNCED
        numbers[_N_ANNOUNCED + place] = n_obs
        numbers[2 * _N_ANNOUNCED + place] = n_batches

    def finish(self, iteration: int, version: int) -> None:
        """Say that the last batch was fetched, in the worker that has it."""
        _numbers(self._memories[-1])[3 * _N_ANNOUNCED + iteration % _N_ANNOUNCED] = version

    @property
    def latest(self) -> Announced | None:
        """What was announced last, by workers that were forked or spawned."""
        return max(filter(None, map(self._latest_of, self._memories)), default=None)

    @staticmethod
    def _latest_of(memory: Bytes) -> Announced | None:
        numbers = _numbers(memory)
        place = int(numbers[-1]) - 1
        version, text = _read(_announcement(memory, place)) if place >= 0 else (0, "")
        if not version:
            return None
        n_obs, n_batches, finished = (int(numbers[which * _N_ANNOUNCED + place]) for which in (1, 2, 3))
        return Announced(version, text, n_obs or None, n_batches or None, finished == version)

    def __getstate__(self) -> dict[str, Any]:
        torch = sys.modules.get("torch")  # which alone has DataLoader workers, and knows how to share memory with them
        if get_spawning_popen() is None or torch is None or not self.is_own:
            return {}
        if self._tensor is None:
            self._tensor = torch.from_numpy(self._memories[0].copy()).share_memory_()
            self._memories.append(self._tensor.numpy())
        return {"tensor": self._tensor, "owner": self._owner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if not state:
            self.__init__()  # type: ignore[misc]  # on its own from here on
            return
        self._tensor, self._owner = state["tensor"], state["owner"]
        self._memories = [self._tensor.numpy()]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()


def _announcement(memory: Bytes, place: int) -> Bytes:
    return memory[(1 + place) * _RECORD :][:_RECORD]


def _numbers(memory: Bytes) -> Numbers:
    """Iteration, n_obs, n_batches and what is finished of each announcement; what each worker heard; the last place."""
    return memory[(1 + _N_ANNOUNCED) * _RECORD :].view(np.int64)


def _write(record: Bytes, text: str) -> int:
    """Write a text and its version, which is a time that all processes have in common."""
    content = np.frombuffer(text.encode(), dtype=np.uint8)
    if len(content) > _RECORD - 16:
        msg = f"A position takes {len(content)} bytes, and DataLoader workers can be told of {_RECORD - 16}."
        raise ValueError(msg)
    head = record[:16].view(np.int64)
    version = max(time.monotonic_ns(), int(head[0]) + 1)
    head[0] = 0
    record[16 : 16 + len(content)] = content
    head[1] = len(content)
    head[0] = version
    return version


def _read(record: Bytes) -> tuple[int, str]:
    """Return the version and the text of a record; version 0 if there is none, or it is just being written."""
    head = record[:16].view(np.int64)
    version, length = head.tolist()
    content = record[16 : 16 + length].tobytes()
    return (version, content.decode()) if version and head[0] == version else (0, "")
