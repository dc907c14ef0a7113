"""Reader for uncompressed arrays on a local disk: reads runs of rows straight into the buffer.

A shard of uncompressed chunks is a file in which rows follow each other, if its chunks do. Its index, at its end, says
where each chunk begins. So a run of rows is one positional read, wherever chunks begin and end in it. All reads of some
files are announced to the kernel before the first one, which may then read a cold disk in parallel.

Other arrays are left to other readers: with compressed or missing chunks, or chunks in another order.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import batched
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt
from zarr import AsyncArray
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec

#: Number of files that are open at the same time, far below the limit of a process.
_MOST_FILES = 64
#: Bytes of an entry of the index: the first byte of a chunk, and its number of bytes.
_ENTRY = 16
#: Bytes of the checksum after the index.
_CHECKSUM = 4
#: Number in the entry of a chunk that isn't stored, since all its values are the fill value.
_MISSING = np.iinfo(np.uint64).max
#: First byte of a shard's rows, or None, by the path, the stamp and the layout of the shard.
_FIRST_BYTES: dict[tuple[Any, ...], int | None] = {}
#: Largest number of entries; all are forgotten beyond it, and read again.
_MOST_FIRST_BYTES = 1 << 16

#: Rows of a shard to read: its number, first and end row in it, and the place of the first row in the output.
type Part = tuple[int, int, int, int]


class _Read(NamedTuple):
    """Bytes to read."""

    file: int
    path: str
    offset: int
    out: npt.NDArray[np.uint8]


def read(array: AsyncArray[Any], parts: Iterable[Part], out: npt.NDArray[Any]) -> bool:
    """Read parts of shards into ``out``; return False if another reader must read them.

    Raises
    ------
    OSError
        If the index of a file doesn't fit the file, or the file ends while it is read.
    """
    if not _is_raw(array):
        return False
    row_bytes, to = out.itemsize * math.prod(out.shape[1:]), out.reshape(-1).view(np.uint8)
    of_shards: dict[int, list[Part]] = {}
    for part in parts:
        of_shards.setdefault(part[0], []).append(part)
    columns = (0,) * (out.ndim - 1)
    store: Any = array.store_path.store  # a LocalStore
    folder = str(store.root / array.store_path.path)  # a Path for each shard takes longer than reading
    for shards in batched(of_shards.items(), _MOST_FILES):
        reads = list[_Read]()
        with ExitStack() as opened:
            for number, own in shards:
                path = f"{folder}/{array.metadata.encode_chunk_key((number, *columns))}"
                try:
                    file = os.open(path, os.O_RDONLY)
                except FileNotFoundError:
                    return False
                opened.callback(os.close, file)
                begin = _first_byte(file, path, *_chunks_of(array, number, row_bytes))
                if begin is None:
                    return False
                reads += [
                    _Read(file, path, begin + first * row_bytes, to[at * row_bytes : (at + end - first) * row_bytes])
                    for _, first, end, at in own
                ]
            if hasattr(os, "posix_fadvise"):  # macOS has none
                for one in reads:
                    os.posix_fadvise(one.file, one.offset, len(one.out), os.POSIX_FADV_WILLNEED)
            for one in reads:
                _fill(one)
    return True


def _is_raw(array: AsyncArray[Any]) -> bool:
    """Return True if an array has shards of uncompressed chunks of whole rows, in the byte order of this machine."""
    match getattr(array.metadata, "codecs", ()):  # zarr 2 has none
        case (ShardingCodec() as sharding,):
            match tuple(sharding.codecs), tuple(sharding.index_codecs):
                case (BytesCodec(endian=endian),), (BytesCodec(endian=of_index), Crc32cCodec()):
                    return (
                        (array.dtype.itemsize == 1 or _name(endian) == sys.byteorder)
                        and _name(of_index) == "little"
                        and _name(sharding.index_location) == "end"
                        and sharding.chunk_shape[1:] == array.shape[1:] == (array.shards or ())[1:]
                        and hasattr(os, "preadv")  # Windows has none
                    )
    return False


def _name(option: Any) -> str | None:  # noqa: ANN401 a string, or an enum of older versions of zarr
    name: str | None = getattr(option, "value", option)
    return name


def _chunks_of(array: AsyncArray[Any], number: int, row_bytes: int) -> tuple[int, int, int]:
    """Return the bytes of a chunk, the number of chunks of a shard, and how many of them have rows of the array."""
    (shard, *_), (chunk, *_) = array.shards or (), array.chunks
    n_rows = min(shard, array.shape[0] - number * shard)
    return chunk * row_bytes, shard // chunk, -(-n_rows // chunk)


def _stamp(file: int) -> tuple[int, int, int]:
    """Return what differs if a file has been replaced or written again."""
    stat = os.fstat(file)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _first_byte(file: int, path: str, chunk_bytes: int, n_chunks: int, n_used: int) -> int | None:
    """Return the first byte of a shard's rows; None if its chunks don't follow each other. An OSError if damaged."""
    stamp = _stamp(file)
    key = path, stamp, chunk_bytes, n_chunks, n_used
    first = _FIRST_BYTES.get(key, -1)  # looked up once, as another thread may forget all entries
    if first == -1:
        first = _read_index(file, path, stamp[1], chunk_bytes, n_chunks, n_used)
        if len(_FIRST_BYTES) >= _MOST_FIRST_BYTES:
            _FIRST_BYTES.clear()
        _FIRST_BYTES[key] = first
    return first


def _read_index(file: int, path: str, size: int, chunk_bytes: int, n_chunks: int, n_used: int) -> int | None:
    """Return what :func:`_first_byte` returns, from the index of a shard, a file of ``size`` bytes."""
    n_bytes = n_chunks * _ENTRY
    end = size - n_bytes - _CHECKSUM
    content = os.pread(file, n_bytes + _CHECKSUM, end) if end >= 0 else b""
    # of a shard of another size, which has replaced this one, the last entries would look like an index
    if int.from_bytes(content[n_bytes:], "little") != google_crc32c.value(content[:n_bytes]) or not content:
        raise OSError(
            f"{path} is damaged, or was written again in another form while it was open: the checksum of its index is "
            f"wrong. It has {size:,} bytes. Open the collection again, or write it again."
        )
    index = np.frombuffer(content, "<u8", 2 * n_used).reshape(-1, 2)
    offsets, sizes = index.T
    fits = (sizes == chunk_bytes) & (offsets <= max(0, end - chunk_bytes))
    if not (fits | (index == _MISSING).all(axis=1)).all():
        raise OSError(
            f"{path} is damaged: the index of its chunks doesn't fit its {size:,} bytes. Write the collection again."
        )
    # chunks of 10 bytes that follow each other begin at the bytes 0 10 20
    follow = offsets == offsets[0] + chunk_bytes * np.arange(n_used, dtype=np.uint64)
    return int(offsets[0]) if (fits & follow).all() else None


def _fill(read: _Read) -> None:
    """Read bytes; the kernel returns fewer than asked for if there are more than 2 GB, or if the file ends."""
    out, offset = read.out, read.offset
    while len(out):
        try:
            n_bytes = os.preadv(read.file, [out], offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, read.path) from error
        if not n_bytes:
            raise OSError(f"{read.path} ended at byte {offset:,} while it was read. Write the collection again.")
        out, offset = out[n_bytes:], offset + n_bytes
