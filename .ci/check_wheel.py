"""Check the installed wheel, in an environment with only its dependencies."""

import importlib.util
import re
import subprocess
import sys
from importlib.metadata import metadata
from importlib.resources import files
from pathlib import Path

import anndata as ad
import numpy as np
from annbatch.samplers import SequentialSampler

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader

frameworks = {"torch", "jax"}
installed = {name for name in frameworks if importlib.util.find_spec(name)}
assert not installed, f"this check is for an environment without {installed}"
assert not frameworks & sys.modules.keys()
assert (files("annbatch_distributed") / "py.typed").is_file()

readme = metadata("annbatch-distributed").json["description"]
links = re.findall(r"\]\(([^)]*)\)", str(readme))
assert len(links) > 15, links
assert [link for link in links if not link.startswith("https://")] == []

command = Path(sys.executable).with_name("annbatch-distributed")
said = subprocess.run([command, "--help"], capture_output=True, text=True, timeout=60, check=False)
assert said.returncode == 0, said

base = SequentialSampler(chunk_size=2, preload_nchunks=2, batch_size=2)
rows = [
    row
    for rank in range(2)
    for request in DistributedSampler(base, dist_info=Rank(rank, 2)).sample(8)
    for part in request["requests"]
    for row in range(part.start, part.stop)
]
assert sorted(rows) == list(range(8)), rows
loader = StatefulLoader(batch_sampler=DistributedSampler(base, dist_info=Rank(0, 2)), preload_to_gpu=False)
batches = list(loader.add_adata(ad.AnnData(np.arange(8.0)[:, np.newaxis])))
assert [batch["X"][:, 0].tolist() for batch in batches] == [[0, 1], [2, 3]], batches
print("the wheel works without torch and jax")
