"""Columns of all datasets: the same values as of NumPy, from any rows, or an error that names the cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.codecs import BytesCodec, Crc32cCodec, ZstdCodec

from annbatch_distributed.core.values import SHARD_DIGESTS
from annbatch_distributed.loader.columns import Chunking, Column
from annbatch_distributed.loader.shards import Shards

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RNG = np.random.default_rng(0)


def written(folder: Path, values: Any, *, chunk: int = 8, **options: Any) -> Any:
    """Write an array in one shard, as ``collect`` does."""
    shard = chunk * -(-len(values) // chunk)
    options = {"shards": (shard,), "compressors": (Crc32cCodec(),), "fill_value": 0} | options
    with zarr.config.set({"array.write_empty_chunks": True}):
        array = zarr.create_array(folder, shape=values.shape, dtype=values.dtype, chunks=(chunk,), **options)
        array[:] = values
    return zarr.open_array(folder, mode="r")


def column_of(arrays: list[Any]) -> Column | None:
    return Column.of([Shards.of(array.async_array) for array in arrays])


@given(data=st.data())
def test_values_are_those_of_the_arrays(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """In any order of rows within a dataset, also repeated ones, of some of the datasets."""
    folder, draw = tmp_path_factory.mktemp("column"), data.draw
    dtype = draw(st.sampled_from(["int8", "bool", "uint16", "int64", "float32"]))
    chunk = draw(st.integers(1, 9))
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    options = {
        "compressors": draw(st.sampled_from([(), (Crc32cCodec(),)])),
        "serializer": BytesCodec(endian=draw(st.sampled_from(["big", "little"]))),
    }
    values = [RNG.integers(0, 100, length).astype(dtype) for length in lengths]
    arrays = [written(folder / str(number), own, chunk=chunk, **options) for number, own in enumerate(values)]
    rows_of = {
        number: np.array(draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=30)))
        for number, length in enumerate(lengths)
        if number == 0 or draw(st.booleans())
    }
    column = column_of(arrays)
    assert column is not None
    read = column.read(Chunking(chunk, lengths).places(rows_of))
    expected = np.concatenate([values[number][rows] for number, rows in rows_of.items()])
    np.testing.assert_array_equal(read, expected)
    assert read.dtype == expected.dtype


UNKNOWN: dict[str, dict[str, Any]] = {
    "compressed": {"compressors": (ZstdCodec(),)},
    "several files": {"shards": (16,)},
    "no shards": {"shards": None},
    "large chunks": {"chunk": 8_192},
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_other_arrays_are_no_columns(kind: str, tmp_path: Path) -> None:
    values = np.arange(100)
    assert column_of([written(tmp_path / "known", values)]) is not None
    assert column_of([written(tmp_path / "other", values, **UNKNOWN[kind])]) is None


def test_datasets_of_different_forms_are_no_column(tmp_path: Path) -> None:
    values = np.arange(100)
    arrays = [written(tmp_path / "a", values), written(tmp_path / "b", values, chunk=16)]
    assert column_of(arrays) is None
    assert column_of([arrays[0], written(tmp_path / "c", values.astype("int32"))]) is None
    assert column_of([arrays[0], written(tmp_path / "d", values, compressors=())]) is None


def test_missing_chunks_are_no_column(tmp_path: Path) -> None:
    """zarr reads them as the fill value, also if the whole file is missing."""
    values = np.repeat([0, 1], 8)
    array = zarr.create_array(
        tmp_path / "x", shape=(16,), dtype="int64", chunks=(8,), shards=(16,), compressors=(), fill_value=0
    )
    array[:] = values
    assert column_of([zarr.open_array(tmp_path / "x", mode="r")]) is None
    (tmp_path / "x" / "c" / "0").unlink()
    assert column_of([zarr.open_array(tmp_path / "x", mode="r")]) is None


def with_index(file: Path, change: Callable[[Any], Any]) -> None:
    """Change the index of the chunks of a shard of two chunks, with its checksum."""
    content = file.read_bytes()
    index = change(np.frombuffer(content[-36:-4], "<u8").reshape(2, 2)).tobytes()
    file.write_bytes(content[:-36] + index + google_crc32c.value(index).to_bytes(4, "little"))


def test_chunk_of_a_collection_that_is_not_stored_raises(tmp_path: Path) -> None:
    """Digests of files tell that all chunks were stored."""
    written(tmp_path / "x", np.arange(16), attributes={SHARD_DIGESTS: [""]})
    with_index(tmp_path / "x" / "c" / "0", lambda index: np.where([[False], [True]], 2**64 - 1, index))
    with pytest.raises(OSError, match=r"x/c/0 is damaged: chunk 1: it isn't stored. .* cells 8, 9, .* of dataset 0"):
        column_of([zarr.open_array(tmp_path / "x", mode="r")])


def test_chunks_in_another_order_are_no_column(tmp_path: Path) -> None:
    """A writer may store chunks of a shard in any order."""
    array = written(tmp_path / "x", np.arange(16), compressors=())
    with_index(tmp_path / "x" / "c" / "0", lambda index: index[::-1])
    assert array[:2].tolist() == [8, 9]
    assert column_of([array]) is None


def test_column_that_changes_its_form_while_it_is_open_raises(tmp_path: Path) -> None:
    column = column_of([written(tmp_path / "x", np.arange(16))])
    assert column is not None
    places = Chunking(8, [16]).places({0: np.array([3])})
    assert column.read(places).tolist() == [3]
    written(tmp_path / "y", np.repeat([0, 1], 8), compressors=())
    (tmp_path / "y" / "c" / "0").replace(tmp_path / "x" / "c" / "0")
    with pytest.raises(OSError, match=r"x/c/0 is damaged.* It has values of the cells 0, 1, .* of dataset 0"):
        column.read(places)


def test_checksums_may_be_switched_off(tmp_path: Path) -> None:
    column = column_of([written(tmp_path / "x", np.arange(16, dtype="int8"))])
    assert column is not None
    file = tmp_path / "x" / "c" / "0"
    content = bytearray(file.read_bytes())
    content[3] ^= 64
    file.write_bytes(content)
    places = Chunking(8, [16]).places({0: np.array([3])})
    with pytest.raises(OSError, match="its checksum is wrong"):
        column.read(places)
    with zarr.config.set({"codec_pipeline.validate_checksums": False}):
        assert column.read(places).tolist() == [3 ^ 64]
