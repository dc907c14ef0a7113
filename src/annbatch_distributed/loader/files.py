"""Files: stored objects on a local disk, of which bytes are read by path and offset.

Readers use only what :class:`StoredFile` has, so an object of another kind of store may take the place of a file.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Hashable, Iterable
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from zarr.storage import LocalStore

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

    def fetch_again(self, offset: int, n_bytes: int) -> bool:
        """Replace bytes that were damaged on their way from the store; return False if there is no way."""

    def close(self) -> None:
        """End the use of the object."""


@runtime_checkable
class FileStore(Protocol):
    """Store whose objects can be opened."""

    is_remote: bool
    """True if each read takes long, but many at the same time hardly longer than one. Open files cost nothing then."""

    def open_file(self, key: str) -> StoredFile:
        """Open an object; a FileNotFoundError if there is none."""

    def prepare(self, keys: Iterable[str]) -> None:
        """Tell the store that some objects will be opened."""


class LocalFiles:
    """Files in a folder."""

    is_remote = False

    def __init__(self, root: str) -> None:
        self._root = root

    def open_file(self, key: str) -> StoredFile:
        """Open a file; a FileNotFoundError if there is none."""
        return LocalFile(f"{self._root}/{key}")

    def prepare(self, keys: Iterable[str]) -> None:
        """Do nothing, as opening a file takes no time."""

    def __str__(self) -> str:
        return self._root


#: Reading that yields after it has announced what it reads, if the store is remote.
type Reading[T] = Generator[None, None, T]


def together[T](readings: Iterable[Reading[T]]) -> list[T]:
    """Return what readings return: all of them announce what they read before the first one waits for it."""
    running = dict(enumerate(readings))
    results = dict[int, T]()
    try:
        while running:
            for number, reading in [*running.items()]:
                try:
                    next(reading)
                except StopIteration as end:
                    results[number] = end.value
                    del running[number]
    finally:  # after an error, of which a traceback would keep them open
        for reading in running.values():
            reading.close()
    return [results[number] for number in sorted(results)]


def files_in(store: object) -> FileStore | None:
    """Return the files of a store; None if only zarr can read it."""
    if type(store) is LocalStore:
        return LocalFiles(str(store.root)) if IS_SUPPORTED else None
    return store if isinstance(store, FileStore) else None


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

    def fetch_again(self, offset: int, n_bytes: int) -> bool:  # noqa: ARG002 nothing is between it and its reader
        """Return False."""
        return False

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
