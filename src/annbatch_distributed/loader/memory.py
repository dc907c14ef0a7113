"""Memory that one load request after the other is read into, and that malloc has for the batches.

annbatch has new memory for each load request. Of large ones, the kernel makes the pages when they are written to, and
takes them back afterwards, which is a tenth to a sixth of the time of reading. Here, memory is used again as soon as
nobody has an array in it. Batches are arrays of annbatch's, for which the same goes where they are large, unless malloc
is told to keep what is free.
"""

from __future__ import annotations

import math
import weakref
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Memory", "keep_what_is_free"]


class Memory:
    """Memory for arrays, of which there is hardly more than was in use at a time.

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
        # by their ids; any thread takes and gives at any time, without a lock that a fork could leave locked
        self._spare: dict[int, npt.NDArray[np.uint8]] = {}

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an array whose values are whatever was in the memory."""
        n_bytes = math.prod(shape) * dtype.itemsize
        if not n_bytes or dtype.hasobject:
            return np.empty(shape, dtype)
        spare = self._spare
        memory = _taken(spare, n_bytes)
        # views of it keep this array alive, and not what it is made of: so it ends with the last of them
        array = np.frombuffer(memory.data[:n_bytes], dtype)
        weakref.finalize(array, spare.__setitem__, id(memory), memory).atexit = False
        return array.reshape(shape)

    def close(self) -> None:
        """Keep none of it; arrays that are in use have theirs to themselves from now on."""
        self._spare = {}

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()  # a copy has memory of its own


def _taken(spare: dict[int, npt.NDArray[np.uint8]], n_bytes: int) -> npt.NDArray[np.uint8]:
    """Take the smallest memory that is large enough; if none is, make some in place of what there is."""
    for memory in sorted(spare.values(), key=len):
        if len(memory) >= n_bytes and spare.pop(id(memory), None) is not None:
            return memory
    spare.clear()
    # somewhat more, of which no page is made before it is used: load requests of sparse cells differ a little
    return np.empty(n_bytes + n_bytes // 8, np.uint8)


@cache
def keep_what_is_free() -> None:
    """Raise the thresholds of glibc's malloc in this process, once.

    Arrays of up to 32 MiB come from its heaps then, and the free end of a heap is given back from 64 MiB on. glibc does
    that by itself when an array is freed that is larger than those before (M_MMAP_THRESHOLD in mallopt(3)), unless
    whoever started the process has set a threshold. Other C libraries have other ways, and nothing changes.
    """
    np.empty(_LARGEST, np.uint8)  # no page of it is made, and it is freed at once


#: In bytes, the largest array that changes anything: 32 MiB with its header, in pages of whatever size.
_LARGEST = (32 << 20) - (64 << 10)
