"""Checks of reading with zarrs, by annbatch: it would hang in a forked process, and is slow on object storage."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

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


def is_by_zarrs(array: AsyncArray[Any]) -> bool:
    """Return True if zarr decodes an array through zarrs."""
    return type(array.codec_pipeline).__module__.partition(".")[0] == "zarrs"


def is_far_by_zarrs(array: AsyncArray[Any]) -> bool:
    """Return True if zarrs reads an array from a store that isn't a local disk."""
    pipeline: Any = array.codec_pipeline
    return is_by_zarrs(array) and pipeline.impl is not None and type(array.store_path.store) is not LocalStore
