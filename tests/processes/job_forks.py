"""A process that forks children before and after zarrs was in use: ``-m tests.processes.job_forks COLLECTION``.

It prints the number of rows that each child read, or the error that the child raised.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import zarr
from annbatch import DatasetCollection
from annbatch.samplers import SequentialSampler

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader

if TYPE_CHECKING:
    from collections.abc import Callable


def opened(collection: str) -> StatefulLoader:
    """Open the collection."""
    sampler = DistributedSampler(SequentialSampler(4, 2, 4), dist_info=Rank(0, 1))
    loader = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False)
    return loader.use_collection(DatasetCollection(collection, mode="r"))


def n_rows(loader: StatefulLoader) -> int:
    """Read all rows, and return their number."""
    return sum(len(batch["X"].toarray()) for batch in loader)


def in_child(read: Callable[[], Any]) -> Any:
    """Return what a function returns in a forked child, or its error; SIGALRM ends a child that waits."""
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            result = read()
        except RuntimeError as error:
            result = str(error)
        os.write(sender, json.dumps(result).encode())
        os._exit(0)
    os.close(sender)
    text = os.read(receiver, 10_000).decode()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else f"ended by signal {status}"


def with_zarrs_own_codecs(collection: str) -> int:
    """Read with zarr's own codecs."""
    zarr.config.set({"codec_pipeline.path": "zarr.core.codec_pipeline.BatchedCodecPipeline"})
    return n_rows(opened(collection))


def main(collection: str) -> None:
    """Fork children at different times."""
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
    results = {"before zarr was used": in_child(lambda: n_rows(opened(collection)))}
    DatasetCollection(collection, mode="r").obs(["src_path"])
    results["after obs was read"] = in_child(lambda: n_rows(opened(collection)))
    results["with zarr's own codecs"] = in_child(lambda: with_zarrs_own_codecs(collection))
    loader = opened(collection)
    results["with a loader opened before"] = in_child(lambda: n_rows(loader))
    results["in a child's child"] = in_child(lambda: in_child(lambda: n_rows(opened(collection))))
    results["in the parent"] = n_rows(loader)
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
