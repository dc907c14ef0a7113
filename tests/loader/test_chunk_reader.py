"""Chunks read without zarr: the values that zarr has written, or an error for files that are damaged."""

from __future__ import annotations

import os
import pickle
import shutil
from contextlib import nullcontext
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import google_crc32c
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ShardingCodec, ZstdCodec
from zarr.storage import LocalStore, MemoryStore

from annbatch_distributed.loader import chunk_reader, files
from annbatch_distributed.loader.shards import DamagedChunkError, Shards
from tests.workers import as_worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LITTLE, BIG = BytesCodec(endian="little"), BytesCodec(endian="big")
CODECS: dict[str, tuple[Any, ...]] = {
    "none": (),
    "lz4": (BloscCodec(cname="lz4", shuffle="shuffle"),),
    "blosc zstd": (BloscCodec(cname="zstd", shuffle="bitshuffle"),),
    "zstd": (ZstdCodec(),),
}


class Layout(NamedTuple):
    """How an array is stored."""

    n_rows: int = 150
    row_shape: tuple[int, ...] = (12,)
    dtype: str = "float32"
    chunk: int = 8
    n_chunks: int | None = 5
    """Number of chunks of a shard; None without shards."""
    codec: str = "none"
    has_checksums: bool = False
    order: str = "little"

    def values(self) -> Any:
        """Return values, of which none is the fill value."""
        drawn = np.random.default_rng(0).integers(1, 100, (self.n_rows, *self.row_shape))
        return drawn.astype(self.dtype)

    def write(self, folder: Path | str, values: Any = None, **options: Any) -> zarr.Array[Any]:
        """Store values with zarr, and open the array."""
        values = self.values() if values is None else values
        compressors = (*CODECS[self.codec], *([Crc32cCodec()] if self.has_checksums else []))
        n_chunks = self.n_chunks
        array = zarr.create_array(
            LocalStore(folder),
            overwrite=True,
            **{
                "shape": values.shape,
                "dtype": values.dtype,
                "chunks": (self.chunk, *self.row_shape),
                "shards": None if n_chunks is None else (self.chunk * n_chunks, *self.row_shape),
                "compressors": compressors or None,
                "serializer": BytesCodec(endian=self.order),
                "filters": None,
                **options,
            },
        )
        array[:] = values
        return zarr.open_array(LocalStore(folder), mode="r")


LAYOUTS = st.builds(
    Layout,
    st.integers(1, 60),
    st.sampled_from([(), (1,), (3,)]),
    st.sampled_from(["uint8", "bool", "int16", "uint16", "float32", "int64", "float64"]),
    st.integers(1, 8),
    st.sampled_from([None, 1, 2, 5]),
    st.sampled_from([*CODECS]),
    st.booleans(),
    st.sampled_from(["little", "big"]),
)


def known(array: zarr.Array[Any]) -> Shards:
    found = Shards.of(array.async_array)
    assert found is not None
    return found


def read(own: Shards, rows: Any, dtype: Any = None) -> Any:
    """Read single rows."""
    rows = np.asarray(rows, dtype=np.int64)
    out = np.full((len(rows), *own.row_shape), 111, own.dtype if dtype is None else dtype)
    chunk_reader.read(own, rows, rows + 1, out)
    return out


def read_all(own: Shards) -> Any:
    out = np.full((own.n_rows, *own.row_shape), 111, own.dtype)
    chunk_reader.read(own, np.array([0]), np.array([own.n_rows]), out)
    return out


@given(st.data(), LAYOUTS, st.sampled_from([None, 1, 3]), st.integers(1, 300), st.sampled_from([1, 64]))
def test_runs_have_the_values_that_were_written(
    data: st.DataObject, layout: Layout, n_threads: int | None, at_a_time: int, most_files: int
) -> None:
    """Runs in any order, empty, repeated or of all rows, in their dtype or a wider one, with any number of threads."""
    bounds = st.tuples(st.integers(0, layout.n_rows), st.integers(0, layout.n_rows)).map(sorted)
    runs = data.draw(st.lists(bounds, max_size=12))
    values = layout.values()
    wide = data.draw(st.sampled_from([values.dtype, np.result_type(values.dtype, np.int32)]))
    starts, stops = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    expected = np.concatenate([values[:0], *(values[start:stop] for start, stop in runs)])
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        own = known(layout.write(folder, values))
        patched.setattr(chunk_reader, "_AT_A_TIME", at_a_time)
        patched.setattr(chunk_reader, "_WORTH_A_THREAD", 1)
        patched.setattr(chunk_reader, "_MOST_FILES", most_files)
        for _ in range(2):  # with the indexes that are kept
            out = np.full(expected.shape, 111, wide)
            with zarr.config.set({"threading.max_workers": n_threads}):
                chunk_reader.read(own, starts, stops, out)
            np.testing.assert_array_equal(out, expected)


def other_inner(folder: Path, **options: Any) -> zarr.Array[Any]:
    """Store an array with options of the codec that makes shards."""
    codec = ShardingCodec(chunk_shape=(8, 12), **{"codecs": (LITTLE,)} | options)
    return Layout().write(folder, chunks=(40, 12), shards=None, serializer=codec, compressors=None)


def in_memory(_: Path) -> zarr.Array[Any]:
    return zarr.create_array(MemoryStore(), shape=(10, 2), chunks=(5, 2), dtype="float32")


UNKNOWN: dict[str, Callable[[Path], zarr.Array[Any]]] = {
    "not a local disk": in_memory,
    "zarr 2": lambda folder: Layout(n_chunks=None).write(folder, zarr_format=2, serializer="auto"),
    "transposed": lambda folder: Layout().write(folder, filters=(zarr.codecs.TransposeCodec(order=(1, 0)),)),
    "gzip": lambda folder: Layout().write(folder, compressors=(zarr.codecs.GzipCodec(),)),
    "compressed twice": lambda folder: Layout().write(folder, compressors=(*CODECS["zstd"], *CODECS["lz4"])),
    "a checksum before compression": lambda folder: Layout().write(folder, compressors=(Crc32cCodec(), *CODECS["lz4"])),
    "chunks of some columns": lambda folder: Layout().write(folder, chunks=(8, 6), shards=(40, 12)),
    "chunks wider than the rows": lambda folder: Layout(n_chunks=None).write(folder, chunks=(8, 24)),
    "index first": lambda folder: other_inner(folder, index_location="start"),
    "index of big-endian numbers": lambda folder: other_inner(folder, index_codecs=(BIG, Crc32cCodec())),
    "index without checksum": lambda folder: other_inner(folder, index_codecs=(LITTLE,)),
    "complex numbers": lambda folder: Layout(dtype="complex64").write(folder),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_arrays_are_unknown(name: str, tmp_path: Path) -> None:
    assert Shards.of(UNKNOWN[name](tmp_path).async_array) is None


@pytest.mark.parametrize("missing", ["preadv", "posix_fadvise"])
def test_other_systems_read_the_same(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has no preadv, and macOS no posix_fadvise."""
    array = Layout().write(tmp_path)
    monkeypatch.delattr(os, missing)
    monkeypatch.setattr(files, "IS_SUPPORTED", hasattr(os, "preadv"))
    own = Shards.of(array.async_array)
    assert (own is None) == (missing == "preadv")
    if own is not None:
        np.testing.assert_array_equal(read_all(own), Layout().values())


def test_each_chunk_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small runs of one chunk, and chunks that follow each other, are one read."""
    own = known(Layout(codec="lz4", has_checksums=True).write(tmp_path))
    rows = np.arange(0, 150, 2)
    expected = Layout().values()[rows]
    np.testing.assert_array_equal(read(own, rows), expected)
    n_reads, preadv = 0, os.preadv

    def counted(*arguments: Any) -> int:
        nonlocal n_reads
        n_reads += 1
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", counted)
    np.testing.assert_array_equal(read(own, rows[::-1]), expected[::-1])
    assert n_reads == 4  # of 4 shards


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, n_open, most = known(Layout(chunk=1, n_chunks=1).write(tmp_path)), 0, 0
    begin, end = os.open, os.close

    def opened(*arguments: Any) -> int:
        nonlocal n_open, most
        n_open += 1
        most = max(most, n_open)
        return begin(*arguments)

    def closed(file: int) -> None:
        nonlocal n_open
        n_open -= 1
        end(file)

    monkeypatch.setattr(chunk_reader, "_MOST_FILES", 10)
    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "close", closed)
    np.testing.assert_array_equal(read_all(own), Layout().values())
    assert (most, n_open) == (10, 0)


def test_copies_read_indexes_again(tmp_path: Path) -> None:
    """Workers don't get the indexes that a loader has read, which may be large."""
    own = known(Layout(n_rows=4_000, chunk=1, n_chunks=1_000).write(tmp_path))
    size = len(pickle.dumps(own))
    expected = read_all(own)
    content = pickle.dumps(own)
    assert len(content) < size + 100  # numbers that are computed once
    np.testing.assert_array_equal(read_all(pickle.loads(content)), expected)


# Missing chunks and files


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("n_chunks", [None, 5])
def test_chunks_that_are_not_stored_have_the_fill_value(codec: str, n_chunks: int | None, tmp_path: Path) -> None:
    """Or raise, if the array was opened without missing chunks."""
    layout = Layout(codec=codec, n_chunks=n_chunks)
    values = layout.values()
    values[8:16] = values[80:120] = 7
    layout.write(tmp_path, values, fill_value=7)
    assert not (tmp_path / "c" / ("10" if n_chunks is None else "2") / "0").exists()
    np.testing.assert_array_equal(read_all(known(zarr.open_array(LocalStore(tmp_path), mode="r"))), values)
    with zarr.config.set({"array.read_missing_chunks": False}):
        own = known(zarr.open_array(LocalStore(tmp_path), mode="r"))
    np.testing.assert_array_equal(read(own, [3, 20]), values[[3, 20]])
    for rows, start, stop in (([3, 9], 8, 16), ([90, 100], 88, 96)):
        with pytest.raises(DamagedChunkError, match=r"c/\d+/0 is damaged: chunk \d: it isn't stored") as raised:
            read(own, rows)
        assert (raised.value.start, raised.value.stop) == (start, stop)


# Files that change


def test_replaced_files_are_read_as_they_are_then(tmp_path: Path) -> None:
    """If a store is written again while it is open, its new values are read, wherever its chunks begin."""
    layout = Layout(codec="lz4")
    own, values = known(layout.write(tmp_path)), Layout().values()
    np.testing.assert_array_equal(read_all(own), values)
    for new in (values + 1, np.repeat(values[::-1, :1], 12, axis=1)):
        shutil.rmtree(tmp_path)
        layout.write(tmp_path, new)
        np.testing.assert_array_equal(read_all(own), new)


def test_chunks_in_any_order_are_read(tmp_path: Path) -> None:
    """The index of a shard says where its chunks are."""
    own = known(Layout().write(tmp_path))
    path, n_bytes, n_chunks = tmp_path / "c" / "1" / "0", 8 * 12 * 4, 5
    content = path.read_bytes()
    chunks = [content[at : at + n_bytes] for at in range(0, n_chunks * n_bytes, n_bytes)]
    index = np.array([[(n_chunks - 1 - number) * n_bytes, n_bytes] for number in range(n_chunks)], dtype="<u8")
    path.write_bytes(b"".join(chunks[::-1]) + with_checksum(index))
    np.testing.assert_array_equal(read_all(own), Layout().values())


def with_checksum(index: Any) -> bytes:
    content: bytes = index.tobytes()
    return content + int(google_crc32c.value(content)).to_bytes(4, "little")


def test_store_written_again_in_larger_shards_raises(tmp_path: Path) -> None:
    """The end of another index is none of this shard, also where its entries would fit."""
    own = known(Layout().write(tmp_path))
    shutil.rmtree(tmp_path)
    Layout(n_rows=300, n_chunks=10).write(tmp_path)
    with pytest.raises(DamagedChunkError, match=r"c/0/0 is damaged, or was written again .* checksum of its index"):
        read_all(own)


# Damage


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("n_chunks", [None, 5])
def test_flipped_bit_raises_for_its_chunk(codec: str, n_chunks: int | None, tmp_path: Path) -> None:
    """Each of 200 single flipped bits in chunks with checksums is noticed, also in part of a chunk."""
    layout = Layout(codec=codec, n_chunks=n_chunks, has_checksums=True)
    own, rng = known(layout.write(tmp_path)), np.random.default_rng(0)
    values = layout.values()
    paths = sorted(path for path in (tmp_path / "c").rglob("*") if path.is_file())
    for _ in range(200):
        path = paths[rng.integers(len(paths))]
        content = bytearray(path.read_bytes())
        content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
        before = path.read_bytes()
        path.write_bytes(content)
        with pytest.raises(DamagedChunkError, match=f"^{path} is damaged") as raised:
            read_all(own)
        start, stop = raised.value.start, raised.value.stop
        assert 0 < stop - start <= (n_chunks or 1) * layout.chunk
        with pytest.raises(DamagedChunkError):
            read(own, [rng.integers(start, stop)])
        path.write_bytes(before)
        rows = np.delete(np.arange(layout.n_rows), np.arange(start, stop))
        np.testing.assert_array_equal(read(own, rows), values[rows])


def cut_short(content: bytes) -> bytes:
    return content[:768]


def with_offset_beyond_the_file(content: bytes) -> bytes:
    index = np.array([[10**6 + number * 384, 384] for number in range(5)], dtype="<u8")
    return content[: 5 * 384] + with_checksum(index)


def with_another_size(content: bytes) -> bytes:
    index = np.array([[number * 384, 380] for number in range(5)], dtype="<u8")
    return content[: 5 * 384] + with_checksum(index)


def with_another_offset(content: bytes) -> bytes:
    return content[:-84] + bytes(64) + b"\x10" + content[-19:]


DAMAGES = [cut_short, lambda _: b"", with_offset_beyond_the_file, with_another_size, with_another_offset]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_index_raises(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """An index that doesn't fit its file is noticed without checksums of chunks, too."""
    own = known(Layout().write(tmp_path))
    path = tmp_path / "c" / "2" / "0"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DamagedChunkError, match=f"^{path} is damaged") as raised:
        read_all(own)
    assert (raised.value.start, raised.value.stop) == (80, 120)


@pytest.mark.parametrize("codec", ["lz4", "blosc zstd", "zstd"])
@pytest.mark.parametrize("content", [b"", b"no chunk", bytes(100)])
def test_chunk_that_cannot_be_decoded_raises(content: bytes, codec: str, tmp_path: Path) -> None:
    own = known(Layout(codec=codec, n_chunks=None).write(tmp_path))
    path = tmp_path / "c" / "3" / "0"
    path.write_bytes(content)
    with pytest.raises(DamagedChunkError, match=f"^{path} is damaged: (chunk 0|it is empty)") as raised:
        read_all(own)
    assert (raised.value.start, raised.value.stop) == (24, 32)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_chunk_of_another_size_raises(codec: str, tmp_path: Path) -> None:
    """A chunk that decodes to fewer values than a chunk has would leave the rest as it was in memory."""
    own = known(Layout(codec=codec, n_chunks=None).write(tmp_path / "cells"))
    Layout(codec=codec, n_chunks=None, chunk=4).write(tmp_path / "others")
    shutil.copy(tmp_path / "others" / "c" / "3" / "0", tmp_path / "cells" / "c" / "3" / "0")
    with pytest.raises(DamagedChunkError, match="chunk 0: it has 192 bytes"):
        read_all(own)


@pytest.mark.parametrize("has_checksums", [True, False])
def test_checksums_can_be_switched_off(has_checksums: bool, tmp_path: Path) -> None:
    """As in zarrs, by its setting."""
    layout = Layout(has_checksums=has_checksums)
    own = known(layout.write(tmp_path))
    path = tmp_path / "c" / "0" / "0"
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)
    with zarr.config.set({"codec_pipeline.validate_checksums": False}):
        assert (read_all(own) != layout.values()).sum() == 1


@pytest.mark.parametrize("layout", [Layout(), Layout(codec="lz4")])
def test_failed_read_names_the_file(layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    own = known(layout.write(tmp_path))
    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(OSError, match=r"Input/output error: '.*/c/0/0'"):
        read_all(own)


@pytest.mark.parametrize("layout", [Layout(), Layout(codec="lz4")])
def test_file_that_ends_while_it_is_read_raises(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, preadv = known(layout.write(tmp_path)), os.preadv
    read_all(own)

    def cut_first(file: int, buffers: Any, offset: int) -> int:
        os.truncate(tmp_path / "c" / "1" / "0", 10)
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut_first)
    with pytest.raises(OSError, match=r"c/1/0 ended at byte [\d,]+ while it was read"):
        read_all(own)


@pytest.mark.parametrize("layout", [Layout(), Layout(codec="lz4", has_checksums=True)])
def test_reads_continue_after_a_part(layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may read fewer bytes than asked for."""
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:7]], offset))
    np.testing.assert_array_equal(read_all(known(layout.write(tmp_path))), layout.values())


def test_error_in_a_thread_is_raised_after_all_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output isn't written to after an error was raised."""
    layout = Layout(codec="lz4", has_checksums=True)
    own = known(layout.write(tmp_path))
    path = tmp_path / "c" / "3" / "0"
    path.write_bytes(b"\x01" + path.read_bytes()[1:])
    monkeypatch.setattr(chunk_reader, "_WORTH_A_THREAD", 1)
    with zarr.config.set({"threading.max_workers": 4}):
        for _ in range(20):
            with pytest.raises(DamagedChunkError, match="c/3/0"):
                read_all(own)


@pytest.mark.parametrize(
    ("most", "in_worker", "n_threads"),
    [(None, False, 3), (None, True, 1), (2, False, 2), (2, True, 2), (1, False, 1)],
)
def test_chunks_are_decoded_in_the_threads_that_zarr_allows(
    most: int | None, in_worker: bool, n_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, in one for each core, but in one in a worker, of which there is one for each core."""
    read, asked_for = chunk_reader._run, []

    def run(fill: Any, reads: Any, n_threads: int) -> None:
        asked_for.append(n_threads)
        read(fill, reads, n_threads)

    monkeypatch.setattr(chunk_reader, "_run", run)
    monkeypatch.setattr(chunk_reader, "n_cores", lambda: 3)
    monkeypatch.setattr(chunk_reader, "_WORTH_A_THREAD", 1)
    own = known(Layout(codec="lz4").write(tmp_path))
    with zarr.config.set({"threading.max_workers": most}), as_worker(0, 1) if in_worker else nullcontext():
        read_all(own)
    assert asked_for == [n_threads]
