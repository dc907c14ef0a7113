"""zarrs in forked processes: read where it can be, and an error at once where it would wait for ever."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

#: Each child is forked at another time, and says how many rows it read, or its error. SIGALRM ends one that waits.
SCRIPT = """
import json, os, signal, sys

import zarr, zarrs
from annbatch import DatasetCollection
from annbatch.samplers import SequentialSampler

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader

zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})

def opened():
    sampler = DistributedSampler(SequentialSampler(4, 2, 4), dist_info=Rank(0, 1))
    loader = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False)
    return loader.use_collection(DatasetCollection(sys.argv[1], mode="r"))

def rows_of(loader):
    return sum(len(batch["X"].toarray()) for batch in loader)

def in_child(read):
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            said = read()
        except RuntimeError as error:
            said = str(error)
        os.write(sender, json.dumps(said).encode())
        os._exit(0)
    os.close(sender)
    said = os.read(receiver, 10_000).decode()
    _, status = os.waitpid(child, 0)
    return json.loads(said or '"ended by signal %s"' % status)

def with_zarrs_own_codecs():
    zarr.config.set({"codec_pipeline.path": "zarr.core.codec_pipeline.BatchedCodecPipeline"})
    return rows_of(opened())

found = {"before zarr was used": in_child(lambda: rows_of(opened()))}
DatasetCollection(sys.argv[1], mode="r").obs(["src_path"])
found["after obs was read"] = in_child(lambda: rows_of(opened()))
found["with zarr's own codecs"] = in_child(with_zarrs_own_codecs)
loader = opened()
found["of a loader that was opened before"] = in_child(lambda: rows_of(loader))
found["of a child's child"] = in_child(lambda: in_child(lambda: rows_of(opened())))
found["in the parent"] = rows_of(loader)
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_process_raises_where_zarrs_was_in_use_before_and_reads_where_it_was_not(collection: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(collection)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    n_rows = found["in the parent"]
    assert n_rows > 0
    assert found["before zarr was used"] == found["with zarr's own codecs"] == n_rows
    for name in ("after obs was read", "of a loader that was opened before", "of a child's child"):
        assert "This process was forked while zarrs was in use" in str(found[name]), name
        assert "'spawn'" in found[name]
        assert "zarr.core.codec_pipeline.BatchedCodecPipeline" in found[name]
