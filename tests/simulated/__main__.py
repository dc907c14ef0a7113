"""Simulated jobs: one step by step, or many until the first failure."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulated.run import drawn, failure, run


def main() -> None:
    """Run the jobs of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulated", description=__doc__)
    parser.add_argument("seed", type=int, help="seed of the job, or of the first of many")
    parser.add_argument("--jobs", type=int, help="number of seeds whose jobs to run, from SEED on")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="seconds after which no job begins")
    parser.add_argument("--keep-going", action="store_true", help="run the other jobs after a failure too")
    parser.add_argument("--no-shrinking", action="store_true", help="show a failure as it was found")
    arguments = parser.parse_args()
    if arguments.jobs is None:
        job, events = drawn(arguments.seed)
        print(job)
        print(run(job, events, print))
        return
    began, used, n_jobs, n_failed = time.monotonic(), time.process_time(), 0, 0
    while n_jobs < arguments.jobs and time.monotonic() - began < arguments.seconds:
        found = failure(arguments.seed + n_jobs, shrinks=not arguments.no_shrinking)
        n_jobs += 1
        if found is not None:
            n_failed += 1
            print(found, flush=True)
            if not arguments.keep_going:
                break
    print(f"{n_jobs} jobs, {n_failed} failed, {1e3 * (time.process_time() - used) / max(1, n_jobs):.0f} ms of CPU each")
    sys.exit(n_failed > 0)


if __name__ == "__main__":
    main()
