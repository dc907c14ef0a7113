"""Storage: how the cells of a dataset are stored.

Each array is stored in shards of chunks. Each chunk ends with its checksum, chunks of fill values are written too, and
attributes of an array have a digest of each of its shards. So a reader notices a chunk that has changed or is missing,
and a check of the whole collection a shard in the place of another one.

Only the values of cells are compressed. Codes of categories, numbers, ``indptr`` and names are small, and a run of
cells is read from them faster without decoding. Their chunks are small too, but not smaller than pays: zarr takes about
80 us for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anndata as ad
import numpy as np
import zarr
from anndata.experimental import IOSpec, Write, write_dispatched
from zarr.abc.codec import BytesBytesCodec
from zarr.codecs import BloscCodec, Crc32cCodec

from annbatch_distributed.core.values import FILE_DTYPE, SHARD_DIGESTS, file_digest

#: Number of cells of a chunk of a sparse matrix. Runs of 64 cells then decode 1.25 times the values that they use, and
#: not twice as with annbatch's 64.
_CHUNK = 16
#: Number of cells of a chunk of a dense matrix, as of annbatch: a run of cells ends where a chunk ends.
_DENSE_CHUNK = 64
#: Number of rows of a chunk of columns and of ``indptr``, the same for all of them, so that a reader finds the chunks
#: of a run of cells once for all.
_COLUMN_CHUNK = 1_024
#: Number of names of cells in a chunk: all of them are decoded to read one; and of other strings, which are read whole.
_NAMES_CHUNK, _STRINGS_CHUNK = 256, 4_096
#: Number of shards of the values of cells: a shard is encoded in memory. Other arrays are small, and have one.
_N_SHARDS = 16
#: Codecs of zarr itself: zarrs leaves out chunks of fill values whatever the setting.
_PIPELINE = "zarr.core.codec_pipeline.BatchedCodecPipeline"
#: Names of dtypes that a user may choose.
DTYPES = "uint8", "int16", "int32", "int64", "float32", "float64"
#: Names of compressions, and the codecs of each.
COMPRESSORS: dict[str, tuple[BytesBytesCodec, ...]] = {
    "lz4": (BloscCodec(cname="lz4", clevel=3, shuffle="shuffle"),),
    "zstd": (BloscCodec(cname="zstd", clevel=3, shuffle="shuffle"),),
    "none": (),
}


class Storage(NamedTuple):
    """Form in which values are stored."""

    dtype: np.dtype[Any]
    """Dtype of the stored values."""
    file_dtype: np.dtype[Any]
    """Dtype of the files' values, in which loaders of this package yield them."""
    compression: str
    """Compression of the values: a key of ``COMPRESSORS``."""
    is_dense: bool
    """True for a dense matrix, False for a sparse one."""


class Stored(NamedTuple):
    """Form in which a collection is stored, to which others are added."""

    n_datasets: int
    file_dtype: np.dtype[Any]
    """Dtype of the files' values."""
    is_dense: bool


def stored_in(path: Path) -> Stored:
    """Return the form of a collection."""
    from annbatch import DatasetCollection  # not above, since processes that read files import this module

    groups: list[Any] = [*DatasetCollection(path, mode="r")]
    values = [group["X"] for group in groups]
    is_dense = isinstance(values[0], zarr.Array)
    dtypes = (one.attrs.get(FILE_DTYPE) or (one if is_dense else one["data"]).dtype for one in values)
    return Stored(len(groups), np.result_type(*dtypes), is_dense)


def smallest(most: float, own: np.dtype[Any]) -> np.dtype[Any]:
    """Return the smallest dtype for counts up to ``most``: uint8, int16 or int32, or else their own.

    >>> smallest(255, np.dtype("float32")), smallest(256, np.dtype("float32"))
    (dtype('uint8'), dtype('int16'))
    """
    # PyTorch can't make a sparse tensor of uint16 dense
    return next((np.dtype(kind) for kind in (np.uint8, np.int16, np.int32) if most <= np.iinfo(kind).max), own)


def write_stored(path: Path, cells: ad.AnnData, storage: Storage, files: Sequence[str]) -> None:
    """Write the cells of a dataset, whose genes were measured in some files."""
    # a store of its own, since other processes write theirs
    group = zarr.open_group(path, mode="w")
    cells.obs.index = cells.obs.index.astype(object)  # else pandas 3 has flags of missing names stored
    with (
        zarr.config.set({"array.write_empty_chunks": True, "codec_pipeline.path": _PIPELINE}),
        ad.settings.override(remove_unused_categories=False, write_csr_csc_indices_with_min_possible_dtype=True),
    ):
        write_dispatched(group, "/", cells, callback=partial(_write, storage=storage))
        if not storage.is_dense:
            _write_again(group["X"], "indptr")
    group = zarr.open_group(path, mode="r+", use_consolidated=False)
    group["varm/measured"].attrs["files"] = [*files]
    if storage.file_dtype != storage.dtype:
        group["X"].attrs[FILE_DTYPE] = str(storage.file_dtype)
    for array in _arrays_in(group):
        if array.shards is not None:
            metadata: Any = array.metadata
            numbers = range(-(-array.shape[0] // array.shards[0]))
            keys = (metadata.encode_chunk_key((number, *(0,) * (array.ndim - 1))) for number in numbers)
            array.attrs[SHARD_DIGESTS] = [file_digest(path / array.path / key) for key in keys]
    zarr.consolidate_metadata(group.store)


def _write(
    write: Write[Any],
    group: zarr.Group,
    name: str,
    element: Any,  # noqa: ANN401 any element of an AnnData
    *,
    dataset_kwargs: Mapping[str, Any],
    iospec: IOSpec,
    storage: Storage,
) -> None:
    """Write an element in shards, with checksums."""
    layout: dict[str, Any] = {}
    if name == "X":
        n_rows, codecs = element.shape[0], COMPRESSORS[storage.compression]
        layout = (
            _layout(n_rows, min(_DENSE_CHUNK, n_rows), element.shape[1:], codecs, _N_SHARDS)
            if storage.is_dense
            # about as many values as a chunk of cells has
            else _layout(element.nnz, min(_CHUNK, n_rows) * element.nnz // max(1, n_rows), (), codecs, _N_SHARDS)
        )
    elif iospec.encoding_type == "array":
        layout = _layout(element.shape[0], _COLUMN_CHUNK, element.shape[1:])
    elif iospec.encoding_type == "string-array":
        n_rows = element.shape[0]
        layout = _layout(n_rows, _NAMES_CHUNK if group.path == "obs" else min(_STRINGS_CHUNK, n_rows))
    write(group, name, element, dataset_kwargs={**dataset_kwargs, **layout})


def _layout(
    n_rows: int, chunk: int, width: Sequence[int] = (), codecs: Sequence[BytesBytesCodec] = (), n_shards: int = 1
) -> dict[str, Any]:
    """Return the chunks, codecs and shards of an array; the last shard is hardly padded."""
    chunk = max(1, chunk)
    shard = chunk * max(1, -(-n_rows // (chunk * n_shards)))
    return {"chunks": (chunk, *width), "shards": (shard, *width), "compressors": (*codecs, Crc32cCodec())}


def _write_again(group: Any, name: str) -> None:  # noqa: ANN401 a group of zarr's
    """Write an array of a sparse matrix again, as anndata gives it the chunks of the values."""
    values = group[name][:]
    layout = _layout(len(values), _COLUMN_CHUNK)
    group.create_array(name, shape=values.shape, dtype=values.dtype, overwrite=True, filters=None, **layout)[:] = values


def _arrays_in(group: zarr.Group) -> Iterator[zarr.Array[Any]]:
    """Yield the arrays of a group and of all groups in it."""
    for _, member in group.members(max_depth=None):
        if isinstance(member, zarr.Array):
            yield member
