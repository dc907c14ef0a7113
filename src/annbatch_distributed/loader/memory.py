"""Memory that one load request after the other is read into.

annbatch has new memory for each load request. Of large ones, the kernel makes the pages when they are written to, and
takes them back afterwards, which is a tenth to a sixth of the time of reading. Here, memory is used again as soon as
nobody has an array in it.
"""

from __future__ import annotations

import math
import threading
import weakref
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Memory"]


class Memory:
    """Memory for arrays, of which there is no more than was in use at a time.

    >>> memory = Memory()
    >>> array = memory.array((2, 3), np.dtype("float32"))
    >>> address = array.ctypes.data
    >>> row = array[1]
    >>> del array  # there is still a row of it
    >>> other = memory.array((6,), np.dtype("int32"))
    >>> other.ctypes.data == address
    False
    >>> del row
    >>> memory.array((6,), np.dtype("int32")).ctypes.data == address
    True
    """

    def __init__(self) -> None:
        self._spare: list[npt.NDArray[np.uint8]] = []
        self._taking = threading.Lock()

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an array whose values are whatever was in the memory."""
        n_bytes = math.prod(shape) * dtype.itemsize
        if not n_bytes:
            return np.empty(shape, dtype)
        spare = self._spare
        memory = self._take(spare, n_bytes)
        # this is what numpy's views of it refer to, and nothing refers to what it is made of
        array = np.frombuffer(memory.data[:n_bytes], dtype)
        weakref.finalize(array, spare.append, memory).atexit = False
        return array.reshape(shape)

    def _take(self, spare: list[npt.NDArray[np.uint8]], n_bytes: int) -> npt.NDArray[np.uint8]:
        """Take the smallest memory that is large enough; if none is, make some in place of what there was."""
        with self._taking:
            # arrays end in any thread, and while this runs: what they give back comes last
            sizes = list(map(len, spare))
            enough = [index for index, size in enumerate(sizes) if size >= n_bytes]
            if enough:
                return spare.pop(min(enough, key=sizes.__getitem__))
            spare.clear()
        # somewhat more, of which no page is made before it is used: load requests of sparse cells differ a little
        return np.empty(n_bytes + n_bytes // 8, np.uint8)

    def close(self) -> None:
        """Keep none of it; arrays that are in use have theirs to themselves from now on."""
        self._spare = []

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()  # a copy has memory of its own
