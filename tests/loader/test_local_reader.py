"""Load requests read from a local disk, uncompressed or with zarrs: the same batches as annbatch's."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
import zarrs
from annbatch import Loader, write_sharded
from annbatch.samplers import RandomSampler, SequentialSampler
from hypothesis import given
from hypothesis import strategies as st
from zarr.storage import LocalStore, MemoryStore

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from annbatch_distributed.core.rows import runs
from annbatch_distributed.loader import local_reader, zarrs_reader
from tests.loader.test_annbatch import check_same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

N_OBS, N_VAR = 150, 12
RNG = np.random.default_rng(0)
#: Cells of which a third of the values are 0; some rows and the last load requests have only zeros.
VALUES = RNG.integers(1, 100, (N_OBS, N_VAR)) * (RNG.random((N_OBS, N_VAR)) < 0.67)
VALUES[[0, 3, 4, 70]] = VALUES[100:] = 0
FLOATS = VALUES.astype("float32")
FLOATS[[5, 20, 60], [2, 0, 11]] = np.nan, -0.0, -np.inf


@pytest.fixture(autouse=True)
def _zarrs() -> Iterator[None]:
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        yield


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 12))
def test_parts_of_chunks_cover_rows_in_order(rows: list[int], chunk_size: int) -> None:
    """Parts cover the rows in order, and no part has rows of two chunks."""
    starts, stops = runs(np.array(rows))
    # the number of runs is the smallest possible
    assert len(starts) == 1 + sum(after != before + 1 for before, after in pairwise(rows))
    covered: list[int] = []
    for number, first, end, before in local_reader.parts_of(starts.tolist(), stops.tolist(), chunk_size):
        assert 0 <= first < end <= chunk_size
        assert before == len(covered)
        covered += [number * chunk_size + row for row in range(first, end)]
    assert covered == rows


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


#: Datasets that this package reads, by layout.
READ_HERE: dict[str, Callable[[Path], list[Cells]]] = {
    "written by annbatch": lambda folder: [written_by_annbatch(folder)],
    "at the root of a store": lambda folder: [at_root(folder)],
    "dense, chunks": lambda folder: [dense(folder, chunks=(7, N_VAR))],
    "dense, chunks wider than the array": lambda folder: [dense(folder, chunks=(7, 2 * N_VAR))],
    "dense, shards": lambda folder: [dense(folder, chunks=(8, N_VAR), shards=(64, N_VAR), dtype="int16")],
    "dense, zarr 2": lambda folder: [dense(folder, chunks=(20, N_VAR), zarr_format=2)],
    "dense, zarr 2, column-major": lambda folder: [dense(folder, chunks=(20, N_VAR), zarr_format=2, order="F")],
    "dense, big-endian": lambda folder: [
        dense(folder, chunks=(9, N_VAR), dtype="float64", serializer=zarr.codecs.BytesCodec(endian="big"))
    ],
    "dense, bool": lambda folder: [dense(folder, chunks=(9, N_VAR), dtype="bool")],
    "dense, missing chunks": lambda folder: [missing(folder)],
    "sparse, chunks": lambda folder: [sparse(folder, chunks=(50,))],
    "sparse, shards": lambda folder: [sparse(folder, chunks=(16,), shards=(64,), indptr="uint64")],
    "dense, several": lambda folder: [
        dense(folder / str(size), chunks=(size, N_VAR), rows=slice(size, None)) for size in (5, 40)
    ],
    "dense, uncompressed": lambda folder: [written_by_annbatch(folder, compressors=None, shard_size=40)],
    "dense, uncompressed, missing chunks": lambda folder: [uncompressed_with_missing(folder)],
    "sparse, uncompressed": lambda folder: [sparse(folder, chunks=(16,), shards=(64,), compressors=None)],
    "sparse, uncompressed, several": lambda folder: [
        sparse(folder / str(size), chunks=(8,), shards=(size,), rows=slice(size, None), compressors=None)
        for size in (16, 32)
    ],
    "sparse, no values": lambda folder: [sparse(folder, rows=slice(100, None), chunks=(50,))],
    "sparse, several": lambda folder: [
        sparse(folder / str(size), chunks=(size,), rows=slice(size, None), indptr=f"int{2 * size}") for size in (16, 32)
    ],
}


def missing(folder: Path) -> Cells:
    """Store cells of which some chunks are missing, and so have the fill value."""
    array = dense(folder, chunks=(10, N_VAR), fill_value=7)
    for number in (2, 3, 14):
        (folder / "X" / "c" / str(number) / "0").unlink()
    return array


def uncompressed_with_missing(folder: Path) -> Cells:
    """Store cells of which two chunks have the fill value, and one shard is missing."""
    values = FLOATS.copy()
    values[8:16] = values[80:88] = 7
    array = zarr.create_array(
        LocalStore(folder),
        name="X",
        shape=values.shape,
        dtype="float32",
        chunks=(8, N_VAR),
        shards=(40, N_VAR),
        compressors=None,
        fill_value=7,
    )
    array[:] = values
    (folder / "X" / "c" / "3" / "0").unlink()
    return zarr.open_array(LocalStore(folder), path="X", mode="r")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the load requests read by this package (here) and by annbatch."""
    counts, here, by_annbatch = {"here": 0, "annbatch": 0}, local_reader.read, Loader._index_datasets

    def read(loader: Any, rows_of: Any) -> Any:
        values = here(loader, rows_of)
        counts["here"] += values is not None
        return values

    def index_datasets(loader: Any, rows_of: Any) -> Any:
        counts["annbatch"] += 1
        return by_annbatch(loader, rows_of)

    monkeypatch.setattr(local_reader, "read", read)
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
    batches, n_load_requests = list(ours), len(list(sampler(mask).sample(n_obs)))
    # annbatch reads the first load request of sparse cells, together with their indptr
    by_annbatch = 1 if "sparse" in layout else 0
    assert reads == {"here": n_load_requests - by_annbatch, "annbatch": by_annbatch}
    check_same_bytes(batches, list(theirs))
    batches = list(ours)
    assert reads["here"] == 2 * n_load_requests - by_annbatch
    check_same_bytes(batches, list(theirs))


@pytest.mark.parametrize("name", ["data", "indices"])
def test_missing_values_raise_error_of_annbatch(name: str, tmp_path: Path, reads: dict[str, int]) -> None:
    """Missing values raise the same error as in annbatch."""
    sparse(tmp_path, rows=slice(90), chunks=(50,))
    values = zarr.open_array(LocalStore(tmp_path), path=f"X/{name}", mode="r+")
    values.resize((values.shape[0] - 30,))
    ours, _ = loaders([ad.io.sparse_dataset(zarr.open_group(LocalStore(tmp_path), path="X", mode="r"))])
    with pytest.raises(ValueError, match="shape of out argument"):
        list(ours)
    assert reads["annbatch"] >= 1


def with_zarrs_own_codecs(folder: Path) -> list[Cells]:
    with zarr.config.set({"codec_pipeline.path": "zarr.core.codec_pipeline.BatchedCodecPipeline"}):
        return [dense(folder)]


def with_errors_where_chunks_are_missing(folder: Path) -> list[Cells]:
    dense(folder)
    with zarr.config.set({"array.read_missing_chunks": False}):
        return [zarr.open_array(LocalStore(folder), path="X", mode="r")]


def in_memory_of_zarr(_: Path) -> list[Cells]:
    array = zarr.create_array(MemoryStore(), shape=VALUES.shape, chunks=(16, N_VAR), dtype="float32")
    array[:] = FLOATS
    return [array]


#: Datasets that annbatch reads.
LEFT_TO_ANNBATCH: dict[str, Callable[[Path], list[Cells]]] = {
    "codecs of zarr": with_zarrs_own_codecs,
    "not a local store": in_memory_of_zarr,
    "in memory": lambda _: [FLOATS],
    "in memory, sparse": lambda _: [sp.csr_matrix(FLOATS)],
    "several dtypes": lambda folder: [dense(folder / dtype, dtype=dtype) for dtype in ("float32", "int64")],
    "complex numbers": lambda folder: [dense(folder, dtype="complex64")],
}


@pytest.mark.filterwarnings("ignore:Adding dataset with dtype", "ignore:Array is unsupported by ZarrsCodecPipeline")
@pytest.mark.parametrize("layout", LEFT_TO_ANNBATCH)
def test_unsupported_reads_fall_back_to_annbatch(layout: str, tmp_path: Path, reads: dict[str, int]) -> None:
    """Reads that zarrs doesn't support fall back to annbatch."""
    ours, theirs = loaders(LEFT_TO_ANNBATCH[layout](tmp_path))
    batches = list(ours)
    assert reads == {"here": 0, "annbatch": len(list(sampler().sample(ours.n_obs)))}
    check_same(batches, list(theirs))


def test_one_unsupported_dataset_falls_back_whole_request(tmp_path: Path) -> None:
    """If zarrs can't read one dataset of a load request, annbatch reads all of it."""
    ours, _ = loaders([dense(tmp_path), *in_memory_of_zarr(tmp_path)])
    rows = np.array([3, 4, 9])
    values = local_reader.read(ours, {0: rows})
    np.testing.assert_array_equal(values, FLOATS[rows])
    assert local_reader.read(ours, {1: rows}) is local_reader.read(ours, {0: rows, 1: rows}) is None


def test_array_that_raises_for_missing_chunks_falls_back(tmp_path: Path, reads: dict[str, int]) -> None:
    """Arrays opened with read_missing_chunks=False are read by annbatch."""
    ours, _ = loaders(with_errors_where_chunks_are_missing(tmp_path))
    with pytest.raises(TypeError, match="NoneType"):  # zarr raises this for every array that zarrs reads
        list(ours)
    assert reads == {"here": 0, "annbatch": 1}


class Part:
    """A chunk item whose signature differs from the known versions of zarrs."""

    __text_signature__ = "(key, chunk_subset)"


@pytest.mark.parametrize("changed", [None, "version", "part", "no part"])
def test_known_versions_of_zarrs_are_used(
    changed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: dict[str, int]
) -> None:
    """If this fails with None, the installed zarrs is an unknown version: see loader/zarrs_reader.py."""
    monkeypatch.setattr(zarrs_reader, "_zarrs_is_known", zarrs_reader._zarrs_is_known.__wrapped__)
    ours, theirs = loaders([dense(tmp_path)])
    with monkeypatch.context() as patched:
        if changed == "version":
            patched.setattr(zarrs_reader, "version", {"zarrs": "0.3.0"}.get)
        elif changed == "part":
            patched.setattr(zarrs._internal, "ChunkItem", Part)
        elif changed is not None:
            patched.delattr(zarrs._internal, "ChunkItem")
        batches = list(ours)
    assert (reads["here"] > 0, reads["annbatch"] > 0) == (changed is None, changed is not None)
    check_same(batches, list(theirs))


@pytest.mark.parametrize("prefetch", [0, 1])
def test_unreadable_chunk_raises_at_its_batch(prefetch: int, tmp_path: Path, reads: dict[str, int]) -> None:
    """An unreadable chunk raises at the batch that needs it."""
    cells = dense(tmp_path, chunks=(8, N_VAR))
    (tmp_path / "X" / "c" / "12" / "0").write_bytes(b"no chunk")
    distributed = DistributedSampler(SequentialSampler(8, 2, 4), dist_info=Rank(0, 1), seed=0)
    ours = StatefulLoader(batch_sampler=distributed, preload_to_gpu=False, prefetch=prefetch).add_dataset(cells)
    theirs = Loader(batch_sampler=distributed, preload_to_gpu=False).add_dataset(cells)
    # the load requests before the broken chunk have 96 rows
    assert until_it_fails(ours) == (24, "Unknown frame descriptor")
    # with prefetch, the next load request may have started
    assert reads in [{"here": 6 + more, "annbatch": 0} for more in range(prefetch + 1)]
    assert until_it_fails(theirs) == (24, "Unknown frame descriptor")


def until_it_fails(loader: Loader) -> tuple[int, str]:
    """Return the number of batches before an error, and its message."""
    n_batches = 0
    try:
        for _ in loader:
            n_batches += 1
    except OSError as error:
        return n_batches, str(error)
    raise AssertionError("no error")


@pytest.mark.parametrize("compressors", ["auto", None])
@pytest.mark.parametrize("to", [None, "torch"])
def test_damaged_indptr_raises(to: Any, compressors: Any, tmp_path: Path) -> None:
    """A row with a negative number of values makes no batch, which SciPy and PyTorch would not notice."""
    cells = sparse(tmp_path, chunks=(64,), shards=(256,), compressors=compressors)
    indptr = zarr.open_array(LocalStore(tmp_path), path="X/indptr", mode="r+")
    changed: Any = indptr[:]
    changed[20] += 30
    indptr[:] = changed
    loader = StatefulLoader(batch_sampler=sampler(), to=to, preload_to_gpu=False).add_dataset(cells)
    for _ in range(2):  # annbatch reads the first load request of sparse cells
        with pytest.raises(ValueError, match=r"indptr of a sparse matrix is damaged: a row has -\d+ values|negative"):
            list(loader)
