"""Processes that a rank starts: they read, or raise at once if they would wait forever."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from tests.processes.launch import forked, python, run

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_forked_process_reads_or_raises_if_zarrs_was_in_use(collection: Path) -> None:
    """Cells are read without zarrs, which a collection that is opened in a forked process would wait for."""
    (done,) = run(forked("-m", "tests.processes.job_forks", collection))
    results = json.loads(done.stdout)
    n_rows = results["in the parent"]
    assert n_rows > 0
    for name in ("before zarr was used", "with zarr's own codecs", "with a loader opened before"):
        assert results[name] == n_rows, name
    for name in ("after obs was read", "in a child's child"):
        assert "forked while zarrs was in use" in str(results[name]), name
        assert "'spawn'" in results[name]
        assert "zarr.core.codec_pipeline.BatchedCodecPipeline" in results[name]


#: A script that its worker would run again, with a loader that is larger than the buffer of a pipe.
WITHOUT_A_GUARD = """
import anndata as ad
import numpy as np
from annbatch.samplers import SequentialSampler
from annbatch_distributed import DistributedSampler, Rank, StatefulLoader

sampler = DistributedSampler(SequentialSampler(64, 1, 64), dist_info=Rank(0, 1))
loader = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False)
loader.add_adata(ad.AnnData(np.zeros((100_000, 5), dtype="float32")))
for batch in loader.to_dataloader(num_workers=1):
    pass
"""


def test_unguarded_script_raises_when_workers_die(tmp_path: Path) -> None:
    """A script without a __main__ guard raises when its workers have died."""
    # the second script only seems to have a guard: its workers die
    scripts = {"train.py": WITHOUT_A_GUARD, "commented.py": f"{WITHOUT_A_GUARD}\n# __name__\n"}
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
    without, commented = run(*(python(tmp_path / name) for name in scripts), expect=1)
    assert "train.py has no guard" in without.stderr.splitlines()[-1]
    assert "exited unexpectedly" in commented.stderr.splitlines()[-1]
