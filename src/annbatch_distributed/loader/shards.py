"""Shards of an array on a local disk or in a cache: where its chunks are, and how one is verified and decoded.

Known are the arrays of ``collect``, annbatch and anndata: chunks of whole rows, in shards or not, whose codecs are
``bytes``, then at most one of ``blosc`` and ``zstd``, then at most ``crc32c``; and the strings of ``collect``, whose
codecs are ``vlen-utf8``, then at most ``crc32c``. zarr's own reader makes several objects
for each run of rows, and zarrs doesn't verify the checksums of chunks within a shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import google_crc32c
import numpy as np
import numpy.typing as npt
import zarr
from numcodecs import Blosc, VLenUTF8, Zstd
from zarr import AsyncArray
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ShardingCodec, VLenUTF8Codec, ZstdCodec

from annbatch_distributed.core.values import SHARD_DIGESTS, Int64Array, few
from annbatch_distributed.loader.files import Bytes, FileStore, StoredFile, files_in

#: Bytes of an entry of the index: the first byte of a chunk, and its number of bytes.
_ENTRY = 16
#: Bytes of the checksum after a chunk or an index, and the CRC32C of any bytes that their own CRC32C follows.
_CHECKSUM, _RESIDUE = 4, 0x48674BC7
#: Number in the entry of a chunk that isn't stored, since all its values are the fill value.
_MISSING = np.iinfo(np.uint64).max
#: Decoders of codecs between ``bytes`` and ``crc32c``.
_DECODERS: dict[type, Callable[[Bytes], Any]] = {BloscCodec: Blosc().decode, ZstdCodec: Zstd().decode}
#: Kinds of dtypes of numbers and booleans, and of strings.
_NUMBERS, _STRINGS = "biuf", "OTU"


class DamagedChunkError(OSError):
    """Error for rows of an array that aren't stored as they were written."""

    def __init__(self, problem: str, start: int, stop: int) -> None:
        super().__init__(problem)
        self.start, self.stop = start, stop

    def of_cells(self, dataset: int, rows: Int64Array) -> OSError:
        """Return the error for some cells of a dataset that have values in these rows."""
        return OSError(
            f"{self} It has values of the cells {few(list(map(str, rows[:9])), 8)} of dataset {dataset}, which are not "
            "read. Copy the file again from where it is intact, or write the collection again."
        )


@dataclass
class Shards:
    """Shards of an array."""

    files: FileStore
    """Files of the collection."""
    folder: str
    """Path of the array in the collection."""
    name_of: Callable[[tuple[int, ...]], str]
    """Function that returns the name of a shard."""
    n_rows: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """Dtype of the stored values, with their byte order; of objects for strings."""
    chunk_size: int
    """Number of rows of a chunk."""
    shard_size: int
    """Number of rows of a shard; of a chunk, if chunks are stored without shards."""
    has_indexes: bool
    """True for shards, which end with an index of their chunks."""
    decode: Callable[[Bytes], Any] | None
    """Decoder of chunks, to bytes or an array of strings; None for uncompressed ones."""
    has_checksums: bool
    """True if each chunk ends with its checksum."""
    fill_value: Any
    """Value of the rows of chunks that aren't stored; None if all chunks must be."""
    _indexes: dict[int, tuple[Any, npt.NDArray[Any]]] = field(default_factory=dict, repr=False)
    """By shard: its version, and the first byte and the number of bytes of each chunk."""

    @classmethod
    def of(cls, array: AsyncArray[Any]) -> Self | None:
        """Return the shards of an array; None if they are of a kind that only zarr can read."""
        files, codecs = files_in(array.store_path.store), getattr(array.metadata, "codecs", ())  # zarr 2 has none
        if files is None or not array.shape:
            return None
        is_text = array.dtype.kind in _STRINGS and array.ndim == 1
        try:
            chunks, shards = array.chunks, array.shards or array.chunks
        except NotImplementedError:  # of different sizes
            return None
        match codecs:
            case (ShardingCodec(codecs=inner) as sharding,) if _has_known_index(sharding):
                has_indexes = True
            case _:
                inner, has_indexes = codecs, False
        match inner:
            case (BytesCodec(endian=endian), *others) if array.dtype.kind in _NUMBERS:
                has_checksums = bool(others) and isinstance(others[-1], Crc32cCodec)
                decoders = [_DECODERS.get(type(codec)) for codec in others[: len(others) - has_checksums]]
            case (VLenUTF8Codec(), *others) if is_text and all(isinstance(codec, Crc32cCodec) for codec in others):
                endian, has_checksums, decoders = None, bool(others), [VLenUTF8().decode]
            case _:
                return None
        is_known = len(decoders) < 2 and None not in decoders
        if not is_known or 0 in array.shape[1:] or not array.shape[1:] == chunks[1:] == shards[1:]:
            return None
        return cls(
            files,
            array.store_path.path,
            array.metadata.encode_chunk_key,
            array.shape[0],
            array.shape[1:],
            # chunks of single bytes have no order of bytes
            np.dtype(object) if is_text else array.dtype.newbyteorder(">" if _name(endian) == "big" else "<"),
            chunks[0],
            shards[0],
            has_indexes,
            decoders[0] if decoders else None,
            has_checksums,
            array.metadata.fill_value if _may_be_missing(array) else None,
        )

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_indexes": {}}

    @cached_property
    def row_bytes(self) -> int:
        """Number of bytes of a row."""
        return self.dtype.itemsize * math.prod(self.row_shape)

    @cached_property
    def chunk_bytes(self) -> int:
        """Number of bytes of the rows of a chunk."""
        return self.chunk_size * self.row_bytes

    @cached_property
    def encoded_bytes(self) -> int:
        """Number of bytes of a stored chunk that isn't compressed, with its checksum."""
        return self.chunk_bytes + self.has_checksums * _CHECKSUM

    @property
    def n_chunks(self) -> int:
        """Number of chunks of a shard."""
        return self.shard_size // self.chunk_size

    def open(self, number: int) -> StoredFile | None:
        """Open a shard; return None if it isn't stored."""
        try:
            return self.files.open_file(self._key(number))
        except FileNotFoundError:
            return None

    def path(self, number: int) -> str:
        """Return the path of a shard, for people."""
        return f"{self.files}/{self._key(number)}"

    def keys(self) -> Iterator[str]:
        """Yield the keys of all shards."""
        yield from map(self._key, range(-(-self.n_rows // self.shard_size)))

    def _key(self, number: int) -> str:
        name = self.name_of((number, *(0 for _ in self.row_shape)))
        return f"{self.folder}/{name}" if self.folder else name

    def index(self, number: int, file: StoredFile) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Return the first byte and the number of bytes of each chunk of a shard; 0 bytes of chunks that aren't stored.

        It has the shape ``(n_chunks, 2)``, and is kept. Raises a DamagedChunkError if it isn't as it was written.
        """
        # looked up once, as another thread may replace it
        version, index = self._indexes.get(number, (None, None))
        if index is None or version != file.version:
            index = self._index_in(number, file)
            self._indexes[number] = file.version, index
        return index

    def announce_index(self, number: int, file: StoredFile) -> None:
        """Tell the store that the index of a shard will be read soon, unless it is known."""
        version, _ = self._indexes.get(number, (None, None))
        start, n_bytes = self._index_bytes(file)
        if self.has_indexes and version != file.version and start >= 0:
            file.announce(start, n_bytes)

    def _index_bytes(self, file: StoredFile) -> tuple[int, int]:
        """Return the first byte of the index of a shard, negative if the file is too short, and its number of bytes."""
        n_bytes = self.n_chunks * _ENTRY + _CHECKSUM
        return file.size - n_bytes, n_bytes

    def has_all_in_order(self, file: StoredFile) -> bool:
        """Return True if the only shard has all chunks of an uncompressed array, one after the other.

        Raises a DamagedChunkError if the index isn't as it was written, or if a chunk isn't stored that must be.
        """
        index = self._index_in(0, file)[: -(-self.n_rows // self.chunk_size)]
        if self.fill_value is None and not index[:, 1].all():
            raise self.missing(int(np.argmin(index[:, 1])))
        return bool((index[:, 0] == np.arange(len(index)) * self.encoded_bytes).all() and index[:, 1].all())

    def _index_in(self, number: int, file: StoredFile) -> npt.NDArray[np.unsignedinteger[Any]]:
        if not self.has_indexes:
            if not file.size:
                raise self._damaged_shard(number, f"{file.path} is damaged: it is empty.")
            return np.array([[0, file.size]], np.uint64)
        end, n_bytes = self._index_bytes(file)
        content = np.empty(n_bytes, np.uint8)

        def read() -> None:
            if end >= 0:
                file.read(end, content)
            # of a shard of another size, which has replaced this one, the last entries would look like an index
            if end < 0 or not _is_intact(content):
                raise self.rewritten(number, f"the checksum of its index is wrong. It has {file.size:,} bytes.")

        twice(file, end, n_bytes, read)
        index = content[:-_CHECKSUM].view("<u8").reshape(-1, 2)
        is_missing = (index == _MISSING).all(axis=1)
        starts, sizes = index.T
        fits = (sizes > 0) & (sizes <= end) & (starts <= end - np.minimum(sizes, end))
        if self.decode is None:
            fits &= sizes == self.encoded_bytes
        if not (fits | is_missing).all():
            raise self._damaged_shard(
                number, f"{file.path} is damaged: the index of its chunks doesn't fit its {file.size:,} bytes."
            )
        # 4 bytes, where they are enough: it is kept for each chunk of the collection
        return np.where(is_missing[:, None], 0, index).astype(np.uint32 if end < 1 << 32 else np.uint64)

    def read_chunks(self, file: StoredFile, first: int, out: Bytes, *, verifies: bool) -> None:
        """Fill ``out``, of shape ``(n_chunks, n_bytes)``, with chunks of the only shard, which isn't compressed."""
        file.read(first * self.encoded_bytes, out.reshape(-1))
        if verifies:
            for number, encoded in enumerate(out, first):
                self.verify(number, encoded, file.path)

    def verify(self, number: int, encoded: Bytes, path: str) -> None:
        """Raise a DamagedChunkError if the checksum of a chunk is wrong."""
        if self.has_checksums and not _is_intact(encoded):
            raise self._damaged(number, path, "its checksum is wrong")

    def decoded(self, number: int, encoded: Bytes, path: str, *, verifies: bool = True) -> npt.NDArray[Any]:
        """Return the rows of a chunk of the array, from its bytes in the file ``path``.

        Raises a DamagedChunkError if they aren't as they were written, as far as a checksum or the decoder can tell.
        """
        if verifies:
            self.verify(number, encoded, path)
        content = encoded[:-_CHECKSUM] if self.has_checksums else encoded
        values: Any = content
        if self.decode is not None:
            try:
                values = self.decode(content)
            except (RuntimeError, ValueError) as error:  # as numcodecs raises
                raise self._damaged(number, path, f"it can't be decoded: {error}") from error
        if self.dtype == object:
            if len(values) != self.chunk_size:
                raise self._damaged(number, path, f"it has {len(values):,} strings")
            return np.asarray(values, dtype=object)
        if len(values) != self.chunk_bytes:
            raise self._damaged(number, path, f"it has {len(values):,} bytes")
        rows: npt.NDArray[Any] = np.frombuffer(values, self.dtype)
        return rows.reshape(self.chunk_size, *self.row_shape) if self.row_shape else rows

    def damage(self, number: int) -> list[DamagedChunkError]:
        """Return an error for each damaged chunk of a shard."""
        errors = list[DamagedChunkError]()
        file = self.open(number)
        first = number * self.n_chunks
        last = min(first + self.n_chunks, -(-self.n_rows // self.chunk_size))
        if file is None:
            return [] if self.fill_value is not None else [self.missing(chunk) for chunk in range(first, last)]
        try:
            index = self.index(number, file).tolist()
            for chunk, (offset, size) in zip(range(first, last), index, strict=False):
                encoded = np.empty(size, np.uint8)
                file.read(offset, encoded)
                try:
                    if size:
                        self.decoded(chunk, encoded, file.path)
                    elif self.fill_value is None:
                        raise self.missing(chunk)
                except DamagedChunkError as error:
                    errors.append(error)
        except DamagedChunkError as error:  # of the index
            errors.append(error)
        finally:
            file.close()
        return errors

    def missing(self, number: int) -> DamagedChunkError:
        """Return the error for a chunk that isn't stored, but must be."""
        return self._damaged(number, self.path(number // self.n_chunks), "it isn't stored")

    def rewritten(self, number: int, problem: str = "its chunks don't follow each other.") -> DamagedChunkError:
        """Return the error for a shard that isn't in the form in which it was when it was opened."""
        path = self.path(number)
        return self._damaged_shard(
            number, f"{path} is damaged, or was written again in another form while it was open: {problem}"
        )

    def _damaged(self, number: int, path: str, problem: str) -> DamagedChunkError:
        start = number * self.chunk_size
        message = f"{path} is damaged: chunk {number % self.n_chunks}: {problem}."
        return DamagedChunkError(message, start, min(start + self.chunk_size, self.n_rows))

    def _damaged_shard(self, number: int, message: str) -> DamagedChunkError:
        start = number * self.shard_size
        return DamagedChunkError(message, start, min(start + self.shard_size, self.n_rows))


def prepare(arrays: Sequence[Shards]) -> None:
    """Tell the store that all shards of some arrays of a collection will be opened."""
    if arrays:
        arrays[0].files.prepare(key for shards in arrays for key in shards.keys())  # noqa: SIM118 no dict


def twice(file: StoredFile, offset: int, n_bytes: int, read: Callable[[], None]) -> None:
    """Call a function that reads some bytes of a file; once more if they are damaged, and can be fetched again."""
    try:
        read()
    except DamagedChunkError:
        if offset < 0 or not file.fetch_again(offset, n_bytes):
            raise
        read()


def _may_be_missing(array: AsyncArray[Any]) -> bool:
    """Return True if chunks of fill values need not be stored; they are in collections of ``collect``."""
    # older versions of zarr have no such setting, and always read missing chunks as the fill value
    config = getattr(array, "config", None)
    return SHARD_DIGESTS not in array.attrs and getattr(config, "read_missing_chunks", True)


def _has_known_index(sharding: ShardingCodec) -> bool:
    """Return True if the index of shards is at their end, of little-endian numbers, and has a checksum."""
    match tuple(sharding.index_codecs):
        case (BytesCodec(endian=endian), Crc32cCodec()):
            return _name(endian) == "little" and _name(sharding.index_location) == "end"
    return False


def _name(option: Any) -> str | None:  # noqa: ANN401 a string, or an enum of older versions of zarr
    name: str | None = getattr(option, "value", option)
    return name


def _is_intact(content: Bytes) -> bool:
    """Return True if bytes end with their checksum: the CRC32C of such bytes is the same for all of them."""
    return bool(google_crc32c.value(content) == _RESIDUE)


def verifies() -> bool:
    """Return True unless checksums are switched off, by the setting of zarrs."""
    return bool(zarr.config.get("codec_pipeline.validate_checksums", default=True))
