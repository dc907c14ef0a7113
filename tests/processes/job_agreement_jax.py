"""One JAX process: ``python -m tests.processes.job_agreement_jax RESULTS COORDINATOR PROCESSES PROCESS``."""

import sys
from pathlib import Path

import jax

from annbatch_distributed.checks.stores import store_of
from tests.processes.disagreements import check_all

if __name__ == "__main__":
    results, coordinator, n_processes, process = sys.argv[1:]
    jax.distributed.initialize(coordinator, int(n_processes), int(process), coordinator_bind_address=coordinator)
    store = store_of("jax")
    for text in ("first", "second"):  # as two processes do that give up at the same time
        store.compare_set(f"of {process}", "", text)
    assert store.get(f"of {process}") == b"first"
    check_all("jax", int(process), int(n_processes)).write(Path(results))
    jax.distributed.shutdown()
