"""Shared memory: what the process of a rank and its ``DataLoader`` workers know of each other.

A worker has a copy of the loader from the time when it was started. What is set later, it finds here, if it is
persistent. The other way round, the process finds which passes its workers have begun.

There are no locks. The process alone writes the first part, and does so while no pass begins. Of the second part, all
workers of an iteration write the same numbers.
"""

from __future__ import annotations

import mmap
import os
import sys
from multiprocessing.context import get_spawning_popen
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

_SIZE = 1 << 14
_N_NUMBERS = 16


class Report(NamedTuple):
    """The pass that the workers have begun last."""

    generation: int = -1
    """Of which generation of positions it is; -1 if there was none."""
    first: int = -1
    """The iteration that was the first of that generation."""
    iteration: int = -1
    """The iteration that it belongs to."""
    n_workers: int = 0
    """How many workers there are."""
    n_obs: int = 0
    """Rows of the collection."""
    n_batches: int = 0
    """How many batches the pass has on the rank that has the most."""
    was_loaded: int = 0
    """Whether every worker has loaded a position of its own."""
    finished: int = -1
    """The iteration that has come to the end of a resumed epoch; -1 if there was none in that generation."""


class SharedMemory:
    """A position that a process sets and its workers read, and what these report of their passes.

    Forked workers inherit it. With spawned ones it is shared when it is pickled for them; pickled or copied for another
    purpose, it is a new one.
    """

    def __init__(self) -> None:
        self._memories: list[npt.NDArray[np.uint8]] = [np.frombuffer(mmap.mmap(-1, _SIZE), dtype=np.uint8)]
        self._tensor: Any = None
        self._owner = os.getpid()
        self.write(0, "")
        self.report(**Report()._asdict())

    @property
    def is_own(self) -> bool:
        """Whether this process has made it, rather than one that started it."""
        return self._owner == os.getpid()

    def write(self, generation: int, text: str) -> None:
        """Set the position, in a text, and its generation."""
        content = np.frombuffer(text.encode(), dtype=np.uint8)
        begin = 8 * _N_NUMBERS
        if len(content) > _SIZE - begin:
            msg = f"A position takes {len(content)} bytes, and DataLoader workers can be told of {_SIZE - begin}."
            raise ValueError(msg)
        for memory in self._memories:
            memory[begin : begin + len(content)] = content
            memory[:16].view(np.int64)[:] = len(content), generation  # the last of all

    def read(self) -> tuple[int, str]:
        """Return the generation, and the position."""
        memory = self._memories[-1]
        length, generation = memory[:16].view(np.int64).tolist()
        return generation, memory[8 * _N_NUMBERS :][:length].tobytes().decode()

    def report(self, **fields: int) -> None:
        """Say what was begun or has come to its end, in a worker: some fields of a :class:`Report`."""
        for memory in self._memories:
            numbers = self._numbers(memory)
            for name, value in fields.items():
                numbers[Report._fields.index(name)] = value

    @property
    def reported(self) -> Report:
        """What was begun last."""
        reports = [Report(*self._numbers(memory).tolist()) for memory in self._memories]
        return max(reports, key=lambda report: report.generation)  # some workers may be forked, and others spawned

    @staticmethod
    def _numbers(memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        return memory[16 : 16 + 8 * len(Report._fields)].view(np.int64)

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
