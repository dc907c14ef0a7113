"""Store of remote objects that are read in blocks, each of which a node fetches once.

Each answer has the version of its object, so the bytes of two versions of one are never mixed. The blocks that a load
request needs are fetched at the same time, in the order in which requests need them.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import obstore
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import ObjectStore

from annbatch_distributed.loader.cache import BLOCK, Cache
from annbatch_distributed.loader.files import Bytes

#: Number of requests of a process at the same time: at 20 and 60 ms, 8 took 1.4 and 2 times as long as 32, 64 as long.
_N_REQUESTS = 32


class _Part(NamedTuple):
    """Part of a block."""

    number: int
    """Number of the block in its object."""
    start: int
    """First byte in the block."""
    n_bytes: int


class CachedStore(ObjectStore[Any]):
    """Store of objects that are read through a cache, all but metadata.

    Parameters
    ----------
    store
        Store of obstore.
    url
        Its URL, by which the cache knows it.
    cache
        Cache.
    """

    is_remote = True

    def __init__(self, store: Any, url: str, cache: Cache, *, read_only: bool = True) -> None:  # noqa: ANN401 obstore's
        super().__init__(store, read_only=read_only)
        _check_process()  # metadata is read first, by zarr
        self.url, self.cache = url, cache
        # by key: the size and the ETag of an object, which is asked for once; None if there is none
        self._versions: dict[str, tuple[int, str] | None] = {}

    def with_read_only(self, read_only: bool = False) -> CachedStore:
        """Return the same store."""
        return type(self)(self.store, self.url, self.cache, read_only=read_only)

    def __str__(self) -> str:
        return self.url

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return bytes of an object, for zarr."""
        if _is_metadata(key):
            return await super().get(key, prototype, byte_range)
        content = await asyncio.to_thread(self._bytes_of, key, byte_range)
        return None if content is None else prototype.buffer.from_bytes(content.tobytes())

    def _bytes_of(self, key: str, byte_range: ByteRequest | None) -> Bytes | None:
        try:
            file = self.open_file(key)
        except FileNotFoundError:
            return None
        start, stop = 0, file.size
        match byte_range:
            case RangeByteRequest(start=start, end=stop):
                stop = min(stop, file.size)
            case OffsetByteRequest(offset=start):
                pass
            case SuffixByteRequest(suffix=n_bytes):
                start = max(0, file.size - n_bytes)
        content = np.empty(stop - start, np.uint8)
        file.read(start, content)
        return content

    def open_file(self, key: str) -> CachedObject:
        """Open an object; a FileNotFoundError if there is none."""
        if key not in self._versions:
            self._versions[key] = self._version_of(key)
        if (version := self._versions[key]) is None:
            raise FileNotFoundError(f"{self.url}/{key}")
        return CachedObject(self, key, *version)

    def _version_of(self, key: str) -> tuple[int, str] | None:
        _check_process()
        try:
            meta = obstore.head(self.store, key)
        except FileNotFoundError:
            return None
        return meta["size"], meta["e_tag"] or _modified(meta)

    def prepare(self, keys: Iterable[str]) -> None:
        """Ask for the versions of objects that will be opened, at the same time."""
        unknown = [key for key in keys if key not in self._versions]
        with _threads() as threads:
            self._versions.update(zip(unknown, threads.map(self._version_of, unknown), strict=True))


class CachedObject:
    """Object of a store that is read through a cache."""

    def __init__(self, store: CachedStore, key: str, size: int, etag: str) -> None:
        self.path, self.size, self.version = f"{store.url}/{key}", size, etag
        self._store, self._key = store, key
        # the ETags of S3 have quotes, and some stores have none; no file system has names of over 255 bytes
        name = quote(store.url, safe="")
        name = name if len(name) < 200 else f"{name[:150]}-{hashlib.sha256(name.encode()).hexdigest()}"
        self.name = f"{name}/{quote(key)}/{size:x}-{quote(etag.strip('"'), safe='')}"
        # by part: None if its block is in the cache; else its fetch, which returns the bytes of the part unless it has
        # written the block
        self._parts: dict[_Part, Future[Bytes | None] | None] = {}
        self._is_closed = False

    def announce(self, offset: int, n_bytes: int) -> None:
        """Fetch the blocks that have some bytes, unless they are in the cache."""
        for number, start, _, n_wanted in _blocks_of(offset, n_bytes):
            self._fetched(self._part(number, start, n_wanted))

    def _part(self, number: int, start: int, n_bytes: int) -> _Part:
        """Return what is fetched for a part of a block: all of it, but no more than the part if it can't be kept."""
        return _Part(number, start, n_bytes) if self._cache.is_closed else _Part(number, 0, self._n_bytes(number))

    def _fetched(self, part: _Part, *, again: bool = False) -> Future[Bytes | None] | None:
        if again or part not in self._parts:
            self._parts[part] = _fetches(os.getpid()).fetch(self, part, again=again)
        return self._parts[part]

    def fetch_again(self, offset: int, n_bytes: int) -> bool:
        """Fetch the blocks that have some bytes."""
        for number, start, _, n_wanted in _blocks_of(offset, n_bytes):
            self._fetched(self._part(number, start, n_wanted), again=True)
        return True

    def read(self, offset: int, out: Bytes) -> None:
        """Fill ``out`` with the bytes from an offset on."""
        if offset + len(out) > self.size:
            raise OSError(f"{self.path} ended at byte {self.size:,} while it was read.")
        self.announce(offset, len(out))
        for number, start, place, n_bytes in _blocks_of(offset, len(out)):
            wanted, part = out[place : place + n_bytes], self._part(number, start, n_bytes)
            fetch = self._fetched(part)
            content = None if fetch is None else fetch.result()
            if content is None and self._cache.read(self.name, number, start, wanted):
                continue
            if content is None:  # another process has deleted it, or it wasn't fetched for a closed object
                content = self._content(part)
            wanted[:] = content[start - part.start :][:n_bytes]

    def close(self) -> None:
        """End the use of the object; what it has asked for and isn't being fetched yet is not fetched."""
        self._parts, self._is_closed = {}, True

    @property
    def _cache(self) -> Cache:
        return self._store.cache

    def _n_bytes(self, number: int) -> int:
        return min(BLOCK, self.size - number * BLOCK)

    def is_cached(self, number: int) -> bool:
        """Return True if a block is in the cache."""
        return self._cache.has(self.name, number, self._n_bytes(number))

    def fetch(self, part: _Part) -> Bytes | None:
        """Fetch a part of a block; return it unless the block was written to the cache."""
        if self._is_closed:  # after an error: requests that fail may take minutes, and a process waits for them to end
            return None
        content = self._content(part)
        # parts of blocks aren't written, as they are asked for once the cache is closed
        return None if self._cache.write(self.name, part.number, content) else content

    def _content(self, part: _Part) -> Bytes:
        _check_process()
        start = part.number * BLOCK + part.start
        answer = obstore.get(self._store.store, self._key, options={"range": (start, start + part.n_bytes)})
        if self.version not in (answer.meta["e_tag"], _modified(answer.meta)) or answer.meta["size"] != self.size:
            raise OSError(f"{self.path} was replaced while it was open. Make the loader again, to read the new one.")
        content = np.frombuffer(answer.bytes(), np.uint8)
        if len(content) != part.n_bytes:
            raise OSError(f"{self.path}: the server has sent {len(content):,} bytes instead of {part.n_bytes:,}.")
        return content


def _blocks_of(offset: int, n_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the number of each block that has some bytes, the first byte in it, their place, and their number.

    >>> [*_blocks_of(BLOCK - 2, 5)]
    [(0, 1048574, 0, 2), (1, 0, 2, 3)]
    """
    place = 0
    while place < n_bytes:
        number, start = divmod(offset + place, BLOCK)
        part = min(BLOCK - start, n_bytes - place)
        yield number, start, place, part
        place += part


def _modified(meta: Any) -> str:  # noqa: ANN401 a dict of obstore
    """Return the version of an object in stores that have no ETags."""
    return f"{meta['last_modified']:%Y-%m-%dT%H:%M:%S.%f}"


def _is_metadata(key: str) -> bool:
    """Return True for objects with metadata, which are small, and are written again when cells are added."""
    name = key.rpartition("/")[2]
    return name == "zarr.json" or name.startswith(".z")


#: The process that was the first to make requests.
_PROCESSES: list[int] = []


def _check_process() -> None:
    """Raise a RuntimeError where a request would hang: in a process that was forked after its parent has made some."""
    if not _PROCESSES:
        _PROCESSES.append(os.getpid())
    if _PROCESSES[0] != os.getpid():
        raise RuntimeError(
            "This process was forked after its parent had read object storage, and reading would hang, because a fork "
            "doesn't copy the threads of obstore. Start ranks and workers by spawn (multiprocessing_context='spawn')."
        )


class _Fetches:
    """Blocks that a process is fetching, in the order in which they were asked for; each once at a time.

    Threads end when nothing is fetched. With 32 idle ones, glibc gives readers a heap that they share, whose pages are
    returned and mapped again for each batch: an epoch from the cache took 1.5 times as long.
    """

    def __init__(self) -> None:
        self._lock, self._running = threading.Lock(), dict[tuple[str, _Part], Future[Bytes | None]]()
        self._threads: ThreadPoolExecutor | None = None

    def fetch(self, file: CachedObject, part: _Part, *, again: bool = False) -> Future[Bytes | None] | None:
        """Fetch a part of a block, unless it is in the cache; also if it is, under ``again``."""
        key = file.name, part
        with self._lock:
            if (running := self._running.get(key)) is not None:
                return running
            # now, as a fetch ends after its block was written
            if not again and file.is_cached(part.number):
                return None
            if self._threads is None:
                self._threads = _threads()
            self._running[key] = future = self._threads.submit(file.fetch, part)
        future.add_done_callback(lambda _: self._end(key))
        return future

    def _end(self, key: tuple[str, _Part]) -> None:
        with self._lock:
            del self._running[key]
            if not self._running and self._threads is not None:
                self._threads.shutdown(wait=False)
                self._threads = None


def _threads() -> ThreadPoolExecutor:
    """Return threads that wait for answers."""
    return ThreadPoolExecutor(_N_REQUESTS, "annbatch_distributed-fetch")


@cache
def _fetches(process: int) -> _Fetches:  # noqa: ARG001 a fork doesn't copy threads
    """Return the fetches of a process."""
    return _Fetches()
