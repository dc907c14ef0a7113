"""Load requests read from a local disk without annbatch: the same batches as annbatch's, and its errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from annbatch import Loader, write_sharded
from annbatch.samplers import RandomSampler, SequentialSampler
from zarr.storage import LocalStore, MemoryStore

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from annbatch_distributed.loader.local_reader import LocalReader
from tests.loader.test_annbatch import check_same

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

N_OBS, N_VAR = 150, 12
RNG = np.random.default_rng(0)
#: Cells of which a third of the values are 0; some rows and the last load requests have only zeros.
VALUES = RNG.integers(1, 100, (N_OBS, N_VAR)) * (RNG.random((N_OBS, N_VAR)) < 0.67)
VALUES[[0, 3, 4, 70]] = VALUES[100:] = 0
FLOATS = VALUES.astype("float32")
FLOATS[[5, 20, 60], [2, 0, 11]] = np.nan, -0.0, -np.inf


type Cells = Any


def dense(folder: Path, *, dtype: str = "float32", rows: slice = slice(None), **layout: Any) -> Cells:
    values = (FLOATS if np.dtype(dtype).kind == "f" else VALUES)[rows]
    array = zarr.create_array(LocalStore(folder), name="X", shape=values.shape, dtype=dtype, **layout)
    array[:] = values
    return zarr.open_array(LocalStore(folder), path="X", mode="r")


def sparse(folder: Path, *, rows: slice = slice(None), indptr: str = "int32", **layout: Any) -> Cells:
    values = sp.csr_matrix(FLOATS[rows])
    group = zarr.create_group(LocalStore(folder)).create_group("X")
    group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": list(values.shape)})
    for name, dtype in (("data", "float32"), ("indices", "uint16"), ("indptr", indptr)):
        part = getattr(values, name).astype(dtype)
        array = group.create_array(name, shape=part.shape, dtype=dtype, **layout if name != "indptr" else {})
        array[:] = part
    return ad.io.sparse_dataset(zarr.open_group(LocalStore(folder), path="X", mode="r"))


def written_by_annbatch(folder: Path, **options: Any) -> Cells:
    write_sharded(zarr.open_group(folder), ad.AnnData(FLOATS), n_obs_per_chunk=8, **options)
    return zarr.open_group(folder, mode="r")["X"]


def at_root(folder: Path) -> Cells:
    array = zarr.create_array(LocalStore(folder), shape=VALUES.shape, dtype="float32", chunks=(16, N_VAR))
    array[:] = FLOATS
    return zarr.open_array(LocalStore(folder), mode="r")


PIPELINES = "zarrs.ZarrsCodecPipeline", "zarr.core.codec_pipeline.BatchedCodecPipeline"


#: Datasets that this package reads, by layout.
READ_HERE: dict[str, Callable[[Path], list[Cells]]] = {
    "written by annbatch": lambda folder: [written_by_annbatch(folder)],
    "at the root of a store": lambda folder: [at_root(folder)],
    "dense, chunks": lambda folder: [dense(folder, chunks=(7, N_VAR))],
    "dense, shards": lambda folder: [dense(folder, chunks=(8, N_VAR), shards=(64, N_VAR), dtype="int16")],
    "dense, big-endian": lambda folder: [
        dense(folder, chunks=(9, N_VAR), dtype="float64", serializer=zarr.codecs.BytesCodec(endian="big"))
    ],
    "dense, bool": lambda folder: [dense(folder, chunks=(9, N_VAR), dtype="bool")],
    "sparse, chunks": lambda folder: [sparse(folder, chunks=(50,))],
    "sparse, shards": lambda folder: [sparse(folder, chunks=(16,), shards=(64,), indptr="uint64")],
    "dense, missing chunks": lambda folder: [missing(folder, chunks=(10, N_VAR))],
    "dense, missing shards": lambda folder: [missing(folder, chunks=(2, N_VAR), shards=(10, N_VAR))],
    "sparse, no values": lambda folder: [sparse(folder, rows=slice(100, None), chunks=(50,))],
    "dense, several": lambda folder: [
        dense(folder / str(size), chunks=(size, N_VAR), rows=slice(size, None)) for size in (5, 40)
    ],
    "dense, uncompressed": lambda folder: [written_by_annbatch(folder, compressors=None, shard_size=40)],
    "sparse, uncompressed": lambda folder: [sparse(folder, chunks=(16,), shards=(64,), compressors=None)],
    "sparse, uncompressed, several": lambda folder: [
        sparse(folder / str(size), chunks=(8,), shards=(size,), rows=slice(size, None), compressors=None)
        for size in (16, 32)
    ],
    "sparse, several": lambda folder: [
        sparse(folder / str(size), chunks=(size,), rows=slice(size, None), indptr=f"int{2 * size}") for size in (16, 32)
    ],
}


def missing(folder: Path, **layout: Any) -> Cells:
    """Store cells of which some chunks are missing, and so have the fill value."""
    array = dense(folder, fill_value=7, **layout)
    for number in range(0, 15, 2):  # each load request has rows of one
        (folder / "X" / "c" / str(number) / "0").unlink()
    return array


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the load requests read by this package (here) and by annbatch."""
    counts, here, by_annbatch = {"here": 0, "annbatch": 0}, LocalReader.read, Loader._index_datasets

    def read(self: Any, loader: Any, rows_of: Any) -> Any:
        values = here(self, loader, rows_of)
        counts["here"] += values is not None
        return values

    def index_datasets(loader: Any, rows_of: Any) -> Any:
        counts["annbatch"] += 1
        return by_annbatch(loader, rows_of)

    monkeypatch.setattr(LocalReader, "read", read)
    monkeypatch.setattr(Loader, "_index_datasets", index_datasets)
    return counts


def sampler(mask: Any = None) -> DistributedSampler:
    return DistributedSampler(RandomSampler(8, 2, 4), dist_info=Rank(0, 1), seed=0, mask=mask, max_gap=0)


def loaders(cells: list[Cells], *, prefetch: int = 0, mask: Any = None) -> tuple[StatefulLoader, Loader]:
    """Create this package's loader, and annbatch's loader with an equal sampler."""
    options: dict[str, Any] = {"preload_to_gpu": False, "return_index": True}
    ours = StatefulLoader(batch_sampler=sampler(mask), prefetch=prefetch, **options)
    theirs = Loader(batch_sampler=sampler(mask), **options)
    for each in cells:
        ours.add_dataset(each)
        theirs.add_dataset(each)
    return ours, theirs


def check_same_bytes(batches: list[Any], others: list[Any]) -> None:
    """Check that batches have the same bytes, shapes and dtypes."""
    check_same(batches, others)
    for batch, other in zip(batches, others, strict=True):
        for one, another in zip(arrays_in(batch["X"]), arrays_in(other["X"]), strict=True):
            assert (one.dtype, one.shape, one.tobytes()) == (another.dtype, another.shape, another.tobytes())


def arrays_in(cells: Any) -> list[Any]:
    return [cells.data, cells.indices, cells.indptr] if sp.issparse(cells) else [cells]


@pytest.mark.parametrize("layout", READ_HERE)
@pytest.mark.parametrize(("prefetch", "is_masked"), [(1, False), (0, True)])
def test_local_reader_reads_like_annbatch(
    layout: str, prefetch: int, is_masked: bool, tmp_path: Path, reads: dict[str, int]
) -> None:
    cells = READ_HERE[layout](tmp_path)
    n_obs = sum(each.shape[0] for each in cells)
    # single rows, pairs of rows, and gaps between them
    mask = np.resize([True, False, True, True, False, False, True], n_obs) if is_masked else None
    ours, theirs = loaders(cells, prefetch=prefetch, mask=mask)
    n_load_requests = len(list(sampler(mask).sample(n_obs)))
    for epoch in (1, 2):
        batches = list(ours)
        assert reads == {"here": epoch * n_load_requests, "annbatch": (epoch - 1) * n_load_requests}
        check_same_bytes(batches, list(theirs))


@pytest.mark.parametrize("name", ["data", "indices"])
def test_indptr_beyond_the_values_raises(name: str, tmp_path: Path) -> None:
    sparse(tmp_path, rows=slice(90), chunks=(50,))
    values = zarr.open_array(LocalStore(tmp_path), path=f"X/{name}", mode="r+")
    values.resize((values.shape[0] - 30,))
    ours, _ = loaders([ad.io.sparse_dataset(zarr.open_group(LocalStore(tmp_path), path="X", mode="r"))])
    with pytest.raises(
        ValueError, match=r"indptr of dataset 0 is damaged: it has rows up to the value [\d,]+ of [\d,]+"
    ):
        list(ours)


def text(folder: Path) -> Cells:
    layout: Any = {"chunks": (20, N_VAR), "compressors": None}
    array = zarr.create_array(LocalStore(folder), name="X", shape=VALUES.shape, dtype=str, **layout)
    array[:] = VALUES.astype(str).astype(object)
    return zarr.open_array(LocalStore(folder), path="X", mode="r")


def in_memory_of_zarr(_: Path) -> list[Cells]:
    array = zarr.create_array(MemoryStore(), shape=VALUES.shape, chunks=(16, N_VAR), dtype="float32")
    array[:] = FLOATS
    return [array]


#: Datasets that annbatch reads.
LEFT_TO_ANNBATCH: dict[str, Callable[[Path], list[Cells]]] = {
    "chunks wider than the array": lambda folder: [dense(folder, chunks=(7, 2 * N_VAR))],
    "zarr 2": lambda folder: [dense(folder, chunks=(20, N_VAR), zarr_format=2)],
    "zarr 2, column-major": lambda folder: [dense(folder, chunks=(20, N_VAR), zarr_format=2, order="F")],
    "not a local store": in_memory_of_zarr,
    "in memory": lambda _: [FLOATS],
    "in memory, sparse": lambda _: [sp.csr_matrix(FLOATS)],
    "several dtypes": lambda folder: [dense(folder / dtype, dtype=dtype) for dtype in ("float32", "int64")],
    "complex numbers": lambda folder: [dense(folder, dtype="complex64")],
    "text": lambda folder: [text(folder)],
}


@pytest.mark.filterwarnings("ignore:Adding dataset with dtype", "ignore:Array is unsupported by ZarrsCodecPipeline")
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("layout", LEFT_TO_ANNBATCH)
def test_other_cells_are_read_by_annbatch(layout: str, pipeline: str, tmp_path: Path, reads: dict[str, int]) -> None:
    with zarr.config.set({"codec_pipeline.path": pipeline}):
        ours, theirs = loaders(LEFT_TO_ANNBATCH[layout](tmp_path))
        batches = list(ours)
        assert reads == {"here": 0, "annbatch": len(list(sampler().sample(ours.n_obs)))}
        check_same(batches, list(theirs))


def test_annbatch_reads_all_datasets_or_none(tmp_path: Path) -> None:
    """If one dataset can't be read here, annbatch reads all of them."""
    ours, _ = loaders([dense(tmp_path)])
    rows, reader = np.array([3, 4, 9]), LocalReader()
    np.testing.assert_array_equal(reader.read(ours, {0: rows}), FLOATS[rows])
    ours.add_datasets(in_memory_of_zarr(tmp_path))
    assert reader.read(ours, {0: rows}) is reader.read(ours, {1: rows}) is None


def test_dataset_of_another_dtype_that_is_added_later_is_converted(tmp_path: Path) -> None:
    """annbatch converts all datasets, then, also those that were read here before."""
    ours, theirs = loaders([dense(tmp_path / "float32")])
    list(ours)
    added = dense(tmp_path / "int64", dtype="int64")
    for loader in (ours, theirs):
        with pytest.warns(UserWarning, match="Adding dataset with dtype"):
            loader.add_dataset(added)
    batches = list(ours)
    assert {batch["X"].dtype for batch in batches} == {np.dtype("float64"), np.dtype("float32"), np.dtype("int64")}


@pytest.mark.parametrize("layout", [{"chunks": (10, N_VAR)}, {"chunks": (2, N_VAR), "shards": (10, N_VAR)}])
def test_missing_chunks_raise_where_zarr_shall_raise(layout: Any, tmp_path: Path) -> None:
    """Chunks may not be missing from arrays that are opened with read_missing_chunks=False."""
    missing(tmp_path, **layout)
    with zarr.config.set({"array.read_missing_chunks": False}):
        ours, _ = loaders([zarr.open_array(LocalStore(tmp_path), path="X", mode="r")])
    with pytest.raises(OSError, match=r"X/c/\d+/0 is damaged: chunk 0: it isn't stored"):
        list(ours)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_unreadable_chunk_raises_at_its_batch(prefetch: int, tmp_path: Path) -> None:
    """An unreadable chunk raises at the batch that needs it, with its cells."""
    cells = dense(tmp_path, chunks=(8, N_VAR))
    path = tmp_path / "X" / "c" / "12" / "0"
    path.parent.mkdir(exist_ok=True)  # all its values are 0
    path.write_bytes(b"no chunk")
    distributed = DistributedSampler(SequentialSampler(8, 2, 4), dist_info=Rank(0, 1), seed=0)
    ours = StatefulLoader(batch_sampler=distributed, preload_to_gpu=False, prefetch=prefetch).add_dataset(cells)
    batches = iter(ours)
    for _ in range(24):  # the load requests before the broken chunk have 96 rows
        next(batches)
    with pytest.raises(OSError, match=f"^{path} is damaged: .* cells 96, 97, .* of dataset 0") as raised:
        next(batches)
    assert "none of its batches was yielded" in raised.value.__notes__[0]


@pytest.mark.parametrize("compressors", ["auto", None])
@pytest.mark.parametrize("to", [None, "torch"])
@pytest.mark.parametrize(("row", "change"), [(20, 30), (0, -1)])
def test_damaged_indptr_raises(row: int, change: int, to: Any, compressors: Any, tmp_path: Path) -> None:
    """Rows with a negative number of values, or before the first value, make no batch; SciPy and PyTorch make one."""
    cells = sparse(tmp_path, chunks=(64,), shards=(256,), compressors=compressors)
    indptr = zarr.open_array(LocalStore(tmp_path), path="X/indptr", mode="r+")
    changed: Any = indptr[:]
    changed[row] += change
    indptr[:] = changed
    loader = StatefulLoader(batch_sampler=sampler(), to=to, preload_to_gpu=False).add_dataset(cells)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"indptr of .* is damaged"):
            list(loader)


def test_damaged_chunk_of_indptr_raises_with_its_cells(tmp_path: Path) -> None:
    cells = sparse(tmp_path, chunks=(16,), shards=(64,))
    path = tmp_path / "X" / "indptr" / "c" / "0"
    path.write_bytes(b"no chunk")
    ours, _ = loaders([cells])
    with pytest.raises(OSError, match=rf"^{path} is damaged: .* cells 0, 1, .* of dataset 0"):
        list(ours)
