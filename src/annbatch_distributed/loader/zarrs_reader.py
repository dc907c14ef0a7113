"""Reader for arrays that zarrs decodes: calls zarrs directly, and tells it which part of which chunk goes where.

The entry point of zarrs is private. Versions that may have changed it are left to annbatch, and
``tests/loader/test_local_reader.py`` fails for them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import version
from typing import Any

import numpy.typing as npt
from zarr import AsyncArray
from zarr.storage import LocalStore


class _Fork:
    """Record of whether zarrs was in use before a fork, which leaves it without threads in the child."""

    was_at_work = is_cut_off = False

    @classmethod
    def before(cls) -> None:
        """Record in the parent whether zarr was used while zarrs was imported."""
        cls.was_at_work = "zarrs" in sys.modules and "zarr_io" in {thread.name for thread in threading.enumerate()}

    @classmethod
    def in_child(cls) -> None:
        """Apply the record of the parent."""
        cls.is_cut_off |= cls.was_at_work


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(before=_Fork.before, after_in_child=_Fork.in_child)


def check_zarrs_answers(asks: Callable[[], bool]) -> None:
    """Raise a RuntimeError if a read through zarrs would hang, in a forked process."""
    if _Fork.is_cut_off and asks():
        raise RuntimeError(
            "This process was forked while zarrs was in use, and reading would hang, because a fork doesn't copy the "
            "threads of zarrs. Start ranks and workers by spawn (multiprocessing_context='spawn', "
            "strategy='ddp_spawn'), or use zarr's own codecs: before you open the collection, call "
            "zarr.config.set({'codec_pipeline.path': 'zarr.core.codec_pipeline.BatchedCodecPipeline'})."
        )


def read(array: AsyncArray[Any], parts: Iterable[tuple[int, int, int, int]], out: npt.NDArray[Any]) -> bool:
    """Read parts of shards, or of chunks without sharding, into ``out``; return False if zarrs can't decode them."""
    # older versions of zarr always read missing chunks as the fill value
    if (zarrs := _zarrs_of(array)) is None or not getattr(array.config, "read_missing_chunks", True):
        return False
    from zarrs._internal import ChunkItem

    chunks = array.shards or array.chunks
    # every chunk has all columns of its rows, as check_layout has checked
    columns = [slice(0, n_columns) for n_columns in out.shape[1:]]
    # keys of chunks, as encoding takes long and several runs may be in one chunk
    keys: dict[int, str] = {}
    items = []
    for number, first, end, before in parts:
        if number not in keys:
            key = array.metadata.encode_chunk_key((number, *(0 for _ in columns)))
            keys[number] = (array.store_path / key).path
        in_chunk, in_out = slice(first, end), slice(before, before + end - first)
        items.append(ChunkItem(keys[number], [in_chunk, *columns], chunks, [in_out, *columns], out.shape))
    zarrs.retrieve_chunks_and_apply_index(items, out)
    return True


def _zarrs_of(array: AsyncArray[Any]) -> Any:  # noqa: ANN401 a private class of zarrs, which may not be installed
    """Return the reader of zarrs for an array; None if zarrs can't read it, or has an unknown interface."""
    pipeline: Any = array.codec_pipeline
    return pipeline.impl if is_by_zarrs(array) and _zarrs_is_known() else None


def is_by_zarrs(array: AsyncArray[Any]) -> bool:
    """Return True if zarr decodes an array through zarrs."""
    return type(array.codec_pipeline).__module__.partition(".")[0] == "zarrs"


def is_far_by_zarrs(array: AsyncArray[Any]) -> bool:
    """Return True if zarrs reads an array from a store that isn't a local disk."""
    pipeline: Any = array.codec_pipeline
    return is_by_zarrs(array) and pipeline.impl is not None and type(array.store_path.store) is not LocalStore


@cache
def _zarrs_is_known() -> bool:
    """Return True if zarrs has the private interface of 0.2.2 and 0.2.3."""
    from zarrs import _internal

    part = getattr(_internal, "ChunkItem", None)
    arguments = getattr(part, "__text_signature__", None)
    return version("zarrs").startswith("0.2.") and arguments == "(key, chunk_subset, chunk_shape, subset, shape)"
