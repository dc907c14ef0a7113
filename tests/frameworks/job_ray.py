"""Run a script that starts Ray, and log the rows that its workers read.

``python -m tests.frameworks.job_ray FOLDER SCRIPT [ARGUMENT...]``, with the files that `logging_rows` writes.
"""

from __future__ import annotations

import os
import runpy
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import ray

from tests.processes.logging_rows import logging


def log() -> None:
    """Start the log in a worker process."""
    logging(Path(os.environ["LOGGED_ROWS"])).start()


if __name__ == "__main__":
    _, os.environ["LOGGED_ROWS"], *sys.argv = sys.argv
    hook = {"worker_process_setup_hook": "tests.frameworks.job_ray.log"}
    with mock.patch("ray.init", partial(ray.init, runtime_env=hook)):
        runpy.run_path(sys.argv[0], run_name="__main__")
