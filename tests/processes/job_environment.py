"""One rank that reads the variables of its launcher: ``-m tests.processes.job_environment RESULTS``."""

import sys
from pathlib import Path

from annbatch.samplers import SequentialSampler

from annbatch_distributed import DistributedSampler
from tests.processes.results import write_result
from tests.samplers import batches, flat

N_OBS = 21

if __name__ == "__main__":
    sampler = DistributedSampler(SequentialSampler(2, 1, 2), dist_info="env", remainder="keep")
    rows = flat(batches(sampler.sample(N_OBS)))
    write_result(Path(sys.argv[1]), sampler.rank, {"world_size": sampler.world_size, "rows": rows})
