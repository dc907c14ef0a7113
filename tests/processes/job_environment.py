"""One rank that reads the variables of its launcher, and then runs a script, whose rows `logging_rows` logs.

``-m tests.processes.job_environment RESULTS [SCRIPT [ARGUMENT...]]``
"""

import runpy
import sys
from pathlib import Path

from annbatch.samplers import SequentialSampler

from annbatch_distributed import DistributedSampler
from tests.processes.logging_rows import logging
from tests.processes.results import write_result
from tests.samplers import batches, flat

N_OBS = 21

if __name__ == "__main__":
    _, folder, *sys.argv = sys.argv
    sampler = DistributedSampler(SequentialSampler(2, 1, 2), dist_info="env", remainder="keep")
    rows = flat(batches(sampler.sample(N_OBS)))
    write_result(Path(folder), sampler.rank, {"world_size": sampler.world_size, "rows": rows})
    if sys.argv:
        with logging(Path(folder)):
            runpy.run_path(sys.argv[0], run_name="__main__")
