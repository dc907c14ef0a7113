"""Uncompressed arrays, read without decoding: which arrays, damaged files, and files that are replaced."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
from annbatch.samplers import RandomSampler
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec
from zarr.storage import LocalStore

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from annbatch_distributed.loader import raw_reader

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

N_OBS, N_VAR = 150, 12
CHUNK, SHARD = 8, 40
VALUES = np.random.default_rng(0).integers(1, 100, (N_OBS, N_VAR)).astype("float32")
LITTLE, BIG = BytesCodec(endian="little"), BytesCodec(endian="big")


def stored(folder: Path, values: Any = VALUES, **options: Any) -> zarr.Array[Any]:
    options = {"chunks": (CHUNK, N_VAR), "shards": (SHARD, N_VAR), "compressors": None} | options
    array = zarr.create_array(LocalStore(folder), shape=values.shape, dtype=values.dtype, overwrite=True, **options)
    array[:] = values
    return zarr.open_array(LocalStore(folder), mode="r")


def sharded(folder: Path, **options: Any) -> zarr.Array[Any]:
    """Store cells with options of the codec that makes shards."""
    codec = ShardingCodec(chunk_shape=(CHUNK, N_VAR), **{"codecs": (LITTLE,)} | options)
    return stored(folder, chunks=(SHARD, N_VAR), shards=None, serializer=codec)


def in_other_order(folder: Path) -> zarr.Array[Any]:
    """Store cells, and write the chunks of a shard again in reverse order."""
    array = stored(folder)
    path = folder / "c" / "1" / "0"
    n_bytes, n_chunks = CHUNK * N_VAR * 4, SHARD // CHUNK
    content = path.read_bytes()
    chunks = [content[at : at + n_bytes] for at in range(0, n_chunks * n_bytes, n_bytes)]
    index = np.array([[(n_chunks - 1 - number) * n_bytes, n_bytes] for number in range(n_chunks)], dtype="<u8")
    path.write_bytes(b"".join(chunks[::-1]) + with_checksum(index))
    return array


def with_checksum(index: Any) -> bytes:
    from google_crc32c import value

    content: bytes = index.tobytes()
    return content + int(value(content)).to_bytes(4, "little")


def rows_read(array: zarr.Array[Any], **options: Any) -> Any:
    """Return the rows of an epoch in the order of the collection."""
    sampler = DistributedSampler(RandomSampler(4, 8, 4), dist_info=Rank(0, 1), seed=0, remainder="exact")
    loader = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False, return_index=True, **options)
    batches = list(loader.add_dataset(array))
    values = np.empty((N_OBS, N_VAR), dtype=batches[0]["X"].dtype)
    values[np.concatenate([batch["index"] for batch in batches])] = np.concatenate([batch["X"] for batch in batches])
    return values


@pytest.fixture
def raw_reads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """List whether each array was read without decoding."""
    results, read = list[bool](), raw_reader.read

    def noted(*arguments: Any) -> bool:
        results.append(read(*arguments))
        return results[-1]

    monkeypatch.setattr(raw_reader, "read", noted)
    return results


ARRAYS: dict[str, tuple[bool, Callable[[Path], zarr.Array[Any]]]] = {
    "uncompressed": (True, stored),
    "several shards in a chunk of the sampler": (
        True,
        lambda folder: stored(folder, chunks=(1, N_VAR), shards=(2, N_VAR)),
    ),
    "one byte, of any byte order": (True, lambda folder: stored(folder, VALUES.astype("uint8"), serializer=BIG)),
    "compressed": (False, lambda folder: stored(folder, compressors="auto")),
    "filtered": (False, lambda folder: stored(folder, filters=(zarr.codecs.TransposeCodec(order=(1, 0)),))),
    "without shards": (False, lambda folder: stored(folder, shards=None)),
    "big-endian": (False, lambda folder: stored(folder, serializer=BIG)),
    "zarr 2": (False, lambda folder: stored(folder, shards=None, zarr_format=2)),
    "index first": (False, lambda folder: sharded(folder, index_location="start")),
    "index of big-endian numbers": (False, lambda folder: sharded(folder, index_codecs=(BIG, Crc32cCodec()))),
    "index without checksum": (False, lambda folder: sharded(folder, index_codecs=(LITTLE,))),
    "checksums of chunks": (False, lambda folder: sharded(folder, codecs=(LITTLE, Crc32cCodec()))),
    "chunks in another order": (False, in_other_order),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_uncompressed_shards_are_read_without_decoding(name: str, tmp_path: Path, raw_reads: list[bool]) -> None:
    is_raw, make = ARRAYS[name]
    array = make(tmp_path)
    np.testing.assert_array_equal(rows_read(array), VALUES)
    assert set(raw_reads) == {is_raw}


@pytest.mark.parametrize("missing", ["preadv", "posix_fadvise"])
def test_other_systems_read_the_same(
    missing: str, tmp_path: Path, raw_reads: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows has no preadv, and macOS no posix_fadvise."""
    monkeypatch.delattr(os, missing)
    np.testing.assert_array_equal(rows_read(stored(tmp_path)), VALUES)
    assert set(raw_reads) == {missing == "posix_fadvise"}


def test_many_shards_are_read_with_few_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array, n_open, most = stored(tmp_path, chunks=(1, N_VAR), shards=(1, N_VAR)), 0, 0
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

    monkeypatch.setattr(raw_reader, "_MOST_FILES", 10)
    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "close", closed)
    np.testing.assert_array_equal(rows_read(array), VALUES)
    assert (most, n_open) == (10, 0)


def test_threads_read_the_same(tmp_path: Path) -> None:
    np.testing.assert_array_equal(rows_read(stored(tmp_path), prefetch=3), VALUES)


def test_replaced_store_is_read_as_it_is_then(tmp_path: Path) -> None:
    """If a store is written again while a loader has it open, its new values are read, wherever chunks begin."""
    array = stored(tmp_path / "cells")
    np.testing.assert_array_equal(rows_read(array), VALUES)
    shutil.rmtree(tmp_path / "cells")
    stored(tmp_path / "cells", VALUES + 1)
    np.testing.assert_array_equal(rows_read(array), VALUES + 1)
    in_other_order(tmp_path / "cells")
    np.testing.assert_array_equal(rows_read(array), VALUES)


def test_few_known_shards_are_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of shards may be forgotten at any time, also while other threads read."""
    monkeypatch.setattr(raw_reader, "_MOST_FIRST_BYTES", 1)
    np.testing.assert_array_equal(rows_read(stored(tmp_path), prefetch=3), VALUES)


def test_store_written_again_in_larger_shards_raises(tmp_path: Path) -> None:
    """The end of another index is none of this shard, also where its entries would fit."""
    array = stored(tmp_path / "cells")
    shutil.rmtree(tmp_path / "cells")
    stored(tmp_path / "cells", np.concatenate([VALUES, VALUES]), shards=(2 * SHARD, N_VAR))
    with pytest.raises(
        OSError, match=r"cells/c/\d/0 is damaged, or was written again .* checksum of its index is wrong"
    ):
        rows_read(array)


def test_shard_of_missing_chunks_has_fill_values(tmp_path: Path) -> None:
    """A shard may have an index only."""
    array = stored(tmp_path)
    index = np.full((SHARD // CHUNK, 2), np.iinfo(np.uint64).max, dtype="<u8")
    (tmp_path / "c" / "1" / "0").write_bytes(with_checksum(index))
    np.testing.assert_array_equal(rows_read(array), [*VALUES[:SHARD], *np.zeros((SHARD, N_VAR)), *VALUES[2 * SHARD :]])


def test_failed_read_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    array = stored(tmp_path)
    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(OSError, match=r"Input/output error: '.*/c/\d/0'"):
        rows_read(array)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: 2 * CHUNK * N_VAR * 4])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def with_offset_beyond_the_file(path: Path) -> None:
    content, n_chunks = path.read_bytes(), SHARD // CHUNK
    n_bytes = CHUNK * N_VAR * 4
    index = np.array([[10**6 + number * n_bytes, n_bytes] for number in range(n_chunks)], dtype="<u8")
    path.write_bytes(content[: n_chunks * n_bytes] + with_checksum(index))


def with_another_offset(path: Path) -> None:
    content, index = path.read_bytes(), SHARD // CHUNK * 16 + 4
    path.write_bytes(content[:-index] + bytes(64) + b"\x10" + content[1 - index :])


@pytest.mark.parametrize("pipeline", ["zarrs.ZarrsCodecPipeline", "zarr.core.codec_pipeline.BatchedCodecPipeline"])
@pytest.mark.parametrize("damage", [cut_short, empty, with_offset_beyond_the_file, with_another_offset])
def test_damaged_file_raises_with_its_name(damage: Callable[[Path], None], pipeline: str, tmp_path: Path) -> None:
    with zarr.config.set({"codec_pipeline.path": pipeline}):
        array = stored(tmp_path)
        damage(tmp_path / "c" / "2" / "0")
        with pytest.raises(Exception, match="c/2/0") as raised:
            rows_read(array)
    assert str(tmp_path) in str(raised.value)


def test_file_that_ends_while_it_is_read_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array, read = stored(tmp_path), os.preadv

    def cut_first(file: int, buffers: Any, offset: int) -> int:
        os.truncate(tmp_path / "c" / "1" / "0", 10)
        return read(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut_first)
    with pytest.raises(OSError, match=r"c/1/0 ended at byte [\d,]+ while it was read. Write the collection again"):
        rows_read(array)


def test_reads_continue_after_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may read fewer bytes than asked for."""
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: read(file, [buffers[0][:7]], offset))
    np.testing.assert_array_equal(rows_read(stored(tmp_path)), VALUES)
