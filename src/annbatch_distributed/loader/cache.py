"""Cache: blocks of remote objects, as files in a folder that all processes of a node share.

Each block is a file of its own. It is written elsewhere and renamed, so other processes see all of it or nothing: they
need no locks and no memory in common, and a process that dies leaves nothing that is wrong. ::

    /nvme/cells/
        annbatch-distributed.json            # marks the folder as a cache
        annbatch-distributed.writing/        # blocks that are being written
        s3%3A%2F%2Fatlas%2Fcells.zarr/       # a collection
            dataset_0/X/data/c/0/            # an object
                1f4c-66f1e2/                 # a version of it, by its size and ETag
                    0.block                  # its first 1 MiB
                    17.block
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from annbatch_distributed.core.values import as_bytes, few
from annbatch_distributed.loader.files import Bytes

#: Bytes of a block. A first epoch at 30 ms took 1.6 times as long with 256 KiB, and the same time with 4 MiB, which is
#: more that no rank of this node may need.
BLOCK = 1 << 20
#: File that marks a folder as a cache, and what it says.
_MARK, _FORM = "annbatch-distributed.json", {"cache": 1, "block_bytes": BLOCK}
#: End of the names of blocks: other files, such as shards of zarr, may have numbers as names.
_BLOCK = ".block"
#: Folder of files that are being written, and the seconds after which such a file is left over.
_WRITING, _LEFT_OVER = "annbatch-distributed.writing", 3600.0
#: By folder: when this process, or the one whose copy it is, has first used it as a cache.
_BEGAN: dict[Path, float] = {}
#: By process, as a fork copies a lock that a thread holds.
_LOCKS: dict[int, threading.Lock] = {}
#: Parts of the limit: a process looks at the folder each time it has written one of `_LOOKS` parts. It fills the folder
#: up to one of `_RESERVED` parts, since it doesn't see what others are about to write: two of `_LOOKS` parts at most,
#: so 32 processes keep the limit.
_LOOKS, _RESERVED = 512, 8


class _File(NamedTuple):
    """File of a block."""

    last_read: float
    n_bytes: int
    path: str


class Cache:
    """Folder with blocks.

    Examples
    --------
    >>> import tempfile
    >>> cache = Cache(tempfile.mkdtemp())
    >>> cache.write("cells/0/etag", 3, b"some bytes")
    True
    >>> cache.has("cells/0/etag", 3, 10)
    True
    >>> out = np.empty(5, np.uint8)
    >>> cache.read("cells/0/etag", 3, 5, out)
    True
    >>> out.tobytes()
    b'bytes'

    Parameters
    ----------
    folder
        Folder, which is created; an existing one must be empty or a cache.
    limit
        Largest number of bytes of all blocks, such as ``"500GB"``, for up to 32 processes; None for none (default).

    Raises
    ------
    ValueError
        If the folder has other files, or blocks of another size; or if the limit is below 512 MiB.
    """

    def __init__(self, folder: str | os.PathLike[str], limit: int | str | None = None) -> None:
        self.folder = Path(folder).absolute()
        self.limit = None if limit is None else as_bytes(limit, "cache_limit")
        if self.limit is not None and self.limit < _LOOKS * BLOCK:
            raise ValueError(f"cache_limit must be at least {_LOOKS * BLOCK:,} bytes, got {limit!r}.")
        _mark(self.folder)
        # blocks that were read or written since then are kept, by all loaders of this process
        self._began = _BEGAN.setdefault(self.folder, time.time())
        # under a limit: bytes that this process may write before it looks at the folder again, and bytes that it is
        # about to write
        self._room, self._unwritten = 0, 0
        #: True if no more blocks are written: there was no room for one, as what was read stays, or no disk.
        self.is_closed = False

    def has(self, name: str, number: int, n_bytes: int) -> bool:
        """Return True if a block of ``n_bytes`` is there, and keep it from being deleted in this job."""
        path = self._path(name, number)
        try:
            # others were cut by a power failure
            is_whole = os.stat(path).st_size == n_bytes  # noqa: PTH116 a Path takes longer
        except OSError:
            return False
        if is_whole and self.limit is not None:
            with contextlib.suppress(OSError):  # another user has written it
                os.utime(path)
        return is_whole

    def read(self, name: str, number: int, start: int, out: Bytes) -> bool:
        """Fill ``out`` with the bytes of a block from ``start`` on; return False if they aren't there."""
        try:
            file = os.open(self._path(name, number), os.O_RDONLY)
        except OSError:
            return False
        try:
            return os.preadv(file, [out], start) == len(out)
        except OSError:
            return False
        finally:
            os.close(file)

    def write(self, name: str, number: int, content: Bytes | bytes) -> bool:
        """Write a block; return False if there is no room, or if the disk can't."""
        try:
            if self.is_closed or not self._takes(len(content)):
                return False
            try:
                self._write(Path(self._path(name, number)), content)
            finally:
                with _lock():
                    self._unwritten -= len(content)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and (self.folder / _MARK).exists():
                return False  # a folder in it was deleted meanwhile
            with _lock():
                was_closed, self.is_closed = self.is_closed, True
            if not was_closed:
                warnings.warn(
                    f"The cache {self.folder} can't be written: {error}. This process adds nothing to it.",
                    UserWarning,
                    stacklevel=2,
                )
            return False
        return True

    def _write(self, path: Path, content: Bytes | bytes) -> None:
        if not (self.folder / _MARK).exists():  # not to fill the disk below a mount point
            raise FileNotFoundError(f"{_MARK} is gone")
        part = _part(self.folder)
        for folder in (part.parent, path.parent):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(content)
            part.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise

    def _path(self, name: str, number: int) -> str:
        return f"{self.folder}/{name}/{number}{_BLOCK}"

    def _takes(self, n_bytes: int) -> bool:
        """Return True if a block may be written."""
        with _lock():
            if self.limit is not None:
                if self._room < n_bytes:
                    self._look(self.limit)
                if self.is_closed:
                    return False
                self._room -= n_bytes
            self._unwritten += n_bytes
            return True

    def _look(self, limit: int) -> None:
        """Find room in the folder: delete blocks that nothing has read since this job began, longest ago first."""
        # first, as a block may be in both
        n_bytes = self._unwritten
        files = sorted(self._files())
        free = limit - limit // _RESERVED - n_bytes - sum(file.n_bytes for file in files)
        for file in files:
            # more than is needed now, as a look takes seconds in a large folder
            if free >= limit // _RESERVED or file.last_read >= self._began:
                break
            with contextlib.suppress(OSError):  # another process has deleted it, or another user has written it
                Path(file.path).unlink()
                free += file.n_bytes
        self._room = max(0, min(limit // _LOOKS, free))
        self.is_closed = self._room < BLOCK

    def _files(self) -> Iterator[_File]:
        """Yield the files of blocks."""
        for folder, _, names in os.walk(self.folder):
            for name in names:
                if not name.endswith(_BLOCK):
                    continue
                path = f"{folder}/{name}"
                with contextlib.suppress(FileNotFoundError):
                    stat = os.stat(path)  # noqa: PTH116 a Path takes longer
                    yield _File(stat.st_mtime, stat.st_size, path)


def _lock() -> threading.Lock:
    """Return the lock of this process."""
    return _LOCKS.setdefault(os.getpid(), threading.Lock())


def _part(folder: Path) -> Path:
    """Return a new path for a file that is being written."""
    return folder / _WRITING / f"{secrets.token_hex(8)}.part"


def _mark(folder: Path) -> None:
    """Mark a folder as a cache; a ValueError if it has other files, or blocks of another form."""
    writing, mark = folder / _WRITING, folder / _MARK
    folder.mkdir(parents=True, exist_ok=True)
    others = [path.name for path in folder.iterdir() if path not in (writing, mark)]
    # if there are others now, it was made before them
    if not mark.exists() and others:
        raise ValueError(
            f"cache must be an empty folder, or one that was a cache before, got {folder} with {few(others, 5)}. "
            "Pass a new folder."
        )
    writing.mkdir(exist_ok=True)
    if not mark.exists():
        part = _part(folder)
        part.write_text(json.dumps(_FORM))
        part.replace(mark)
    try:
        form = json.loads(mark.read_text())
    except ValueError:  # cut by a power failure
        form = "another mark"
    if form != _FORM:
        raise ValueError(
            f"cache must be a folder with blocks of {BLOCK:,} bytes, got {folder} with {form}, which another version "
            "has written. Delete it, or pass another folder."
        )
    for path in writing.iterdir():  # of processes that died
        with contextlib.suppress(OSError):  # another process has deleted it, or another user has written it
            if path.stat().st_mtime < time.time() - _LEFT_OVER:
                path.unlink()
