"""One JAX process: ``python -m tests.processes.job_jax COLLECTION RESULTS COORDINATOR PROCESSES PROCESS``."""

import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental.multihost_utils import assert_equal

from tests.processes.rank import ask_too_early, read_all


def keep_step(step: int) -> None:
    """Compare the step of all processes."""
    assert_equal(np.array(step), "the processes are not in the same step")


if __name__ == "__main__":
    collection, results, coordinator, n_processes, process = sys.argv[1:]
    uninitialised = ask_too_early("jax")
    jax.distributed.initialize(coordinator, int(n_processes), int(process), coordinator_bind_address=coordinator)
    read_all(Path(collection), "jax", uninitialised=uninitialised, keep_step=keep_step).write(Path(results))
    jax.distributed.shutdown()
