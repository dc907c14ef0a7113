"""One JAX process: ``python -m tests.processes.job_agreement_jax RESULTS COORDINATOR PROCESSES PROCESS``."""

import sys
from pathlib import Path

import jax

from tests.processes.disagreements import check_all

if __name__ == "__main__":
    results, coordinator, n_processes, process = sys.argv[1:]
    jax.distributed.initialize(coordinator, int(n_processes), int(process), coordinator_bind_address=coordinator)
    check_all("jax", int(process), int(n_processes)).write(Path(results))
    jax.distributed.shutdown()
