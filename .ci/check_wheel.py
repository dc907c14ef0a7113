"""Check the installed wheel, in an environment that holds nothing but the wheel and what it depends on."""

import importlib.util
import sys
from importlib.resources import files

from annbatch.samplers import SequentialSampler

from annbatch_distributed import DistributedSampler, Rank

frameworks = {"torch", "jax"}
installed = {name for name in frameworks if importlib.util.find_spec(name)}
assert not installed, f"this check is for an environment without {installed}"
assert not frameworks & sys.modules.keys()
assert (files("annbatch_distributed") / "py.typed").is_file()
assert importlib.util.find_spec("annbatch_distributed.localize")  # a door to what is elsewhere

base = SequentialSampler(chunk_size=2, preload_nchunks=2, batch_size=2)
rows = [
    row
    for rank in range(2)
    for request in DistributedSampler(base, dist_info=Rank(rank, 2)).sample(8)
    for stretch in request["requests"]
    for row in range(stretch.start, stretch.stop)
]
assert sorted(rows) == list(range(8)), rows
print("the wheel works without torch and jax")
