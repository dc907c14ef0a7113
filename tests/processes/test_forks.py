"""zarrs in forked processes: read where it can be, and an error at once where it would wait for ever."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from tests.processes.launch import forked, run

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_forked_process_raises_if_zarrs_was_in_use(collection: Path) -> None:
    (done,) = run(forked("-m", "tests.processes.job_forks", collection))
    results = json.loads(done.stdout)
    n_rows = results["in the parent"]
    assert n_rows > 0
    assert results["before zarr was used"] == results["with zarr's own codecs"] == n_rows
    for name in ("after obs was read", "of a loader that was opened before", "of a child's child"):
        assert "This process was forked while zarrs was in use" in str(results[name]), name
        assert "'spawn'" in results[name]
        assert "zarr.core.codec_pipeline.BatchedCodecPipeline" in results[name]
