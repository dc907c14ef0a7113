"""The benchmarks run, and at a small size within the tests; what they measure is not judged here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_sampling_benchmark_compares_every_configuration_and_answers() -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "sampling.py"
    run = subprocess.run([sys.executable, script, "--small"], capture_output=True, text=True, check=True, timeout=110)
    lines = run.stdout.splitlines()
    assert sum("of annbatch's time" in line for line in lines) == 4
    assert [line.split(" at ")[0] for line in lines[4:]] == ["n_batches", "plan", "str(plan)"]
