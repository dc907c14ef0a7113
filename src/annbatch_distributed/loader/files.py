"""Files: stored objects on a local disk, of which bytes are read by path and offset.

Readers use only what :class:`StoredFile` has, so an object of another kind of store may take the place of a file.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from typing import Protocol

import numpy as np
import numpy.typing as npt

type Bytes = npt.NDArray[np.uint8]

#: Systems without these can't read at an offset into memory, such as Windows.
IS_SUPPORTED = hasattr(os, "preadv")


class StoredFile(Protocol):
    """Object of a store, open for reading."""

    @property
    def path(self) -> str:
        """Its name, for people."""

    @property
    def size(self) -> int:
        """Number of its bytes."""

    @property
    def version(self) -> Hashable:
        """What differs if it was replaced or written again."""

    def announce(self, offset: int, n_bytes: int) -> None:
        """Tell the store that some bytes will be read soon."""

    def read(self, offset: int, out: Bytes) -> None:
        """Fill ``out`` with the bytes from an offset on; an OSError if there are fewer."""

    def close(self) -> None:
        """End the use of the object."""


class LocalFile:
    """File on a local disk; a FileNotFoundError if there is none."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY)
        stat = os.fstat(self._file)
        self.size = stat.st_size
        self.version = stat.st_ino, stat.st_size, stat.st_mtime_ns

    def announce(self, offset: int, n_bytes: int) -> None:
        """Let the kernel read bytes from a cold disk, in parallel with others."""
        if hasattr(os, "posix_fadvise"):  # macOS has none
            os.posix_fadvise(self._file, offset, n_bytes, os.POSIX_FADV_WILLNEED)

    def read(self, offset: int, out: Bytes) -> None:
        """Fill ``out``; the kernel returns fewer bytes than asked for if there are more than 2 GB, or at the end."""
        while len(out):
            try:
                n_bytes = os.preadv(self._file, [out], offset)
            except OSError as error:
                raise OSError(error.errno, error.strerror, self.path) from error
            if not n_bytes:
                raise OSError(f"{self.path} ended at byte {offset:,} while it was read.")
            out, offset = out[n_bytes:], offset + n_bytes

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
