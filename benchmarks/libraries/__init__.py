"""Libraries that are compared, each used as its own documentation says, and each in processes of its own.

A module here is about one library. It may have some of these functions:

- ``write(source, folder)`` writes cells in the library's own format, once.
- ``loaders(folder, configuration, rank, world_size)`` returns ways to read them, by name. A way begins an epoch, and
  yields the cells of each batch, a matrix.
- ``plan(n_obs, configuration, rank, world_size)`` goes as far as the first rows of a shuffled epoch.
- ``resume(...)``, with the same arguments and the world size that goes on, makes a state in the middle of an epoch, and
  returns a function that goes on from it as far as the first rows.

Versions that can't be installed side by side are compared all the same: each library has an environment of its own,
which uv makes and keeps in its cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

ROOT = Path(__file__).parents[2]
#: Of each library, what uv installs for it; annbatch's environment is the one that this runs in.
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "annbatch": (),
    "annbatch_distributed": (),
    "grain": ("grain==0.2.18",),
    "litdata": ("litdata==0.2.76",),
    "mosaicml_streaming": ("mosaicml-streaming==0.13.0",),
    "scdataset": ("scDataset==0.3.0", "anndata==0.13.4"),
    "tiledbsoma_ml": ("tiledbsoma-ml==0.1.0", "tiledbsoma==2.3.0", "anndata<0.13"),
    "torch": (),
}
#: A library may take so long to be installed and imported, or for an answer.
SECONDS = 900


def command(library: str, *arguments: object) -> list[str]:
    """Return the command that runs ``python -m benchmarks.libraries`` in a library's environment."""
    run = [sys.executable]
    if requirements := REQUIREMENTS[library]:
        uv = ["uv", "run", "--quiet", "--isolated", "--no-project", f"--python={sys.executable}"]
        run = [*uv, *(f"--with={requirement}" for requirement in requirements), "python"]
    return [*run, "-m", "benchmarks.libraries", library, *map(str, arguments)]


def run(library: str, *arguments: object) -> dict[str, Any]:
    """Run a task in a process of its own, and return its answer, with the versions of its library."""
    with Ranks(library, *arguments, world_size=1) as job:
        (answer,) = job.answers()
    assert isinstance(answer, dict)
    return answer


class Ranks:
    """The processes of a job, one a rank, that do together what they are told.

    Parameters
    ----------
    library, arguments
        What they run: a task of a library.
    world_size
        How many there are. They have the variables that torchrun sets, but for an address: they meet at a file in
        their folder of temporary files, because a port that is free now may not be when a library has been installed.

    Raises
    ------
    RuntimeError
        Where an answer is asked for, if a rank has failed or takes too long.
    """

    def __init__(self, library: str, *arguments: object, world_size: int) -> None:
        self._library = library
        # libraries leave files there
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        job: dict[str, object] = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "OMP_NUM_THREADS": 1}
        job |= {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0", "TMPDIR": self._folder.name}
        self._processes = [
            subprocess.Popen(
                command(library, *arguments),
                cwd=ROOT,
                env=os.environ
                | {name: str(value) for name, value in (job | {"RANK": rank, "LOCAL_RANK": rank}).items()},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the processes: they end where they are told no more, or else are made to."""
        for process in self._processes:
            with suppress(BrokenPipeError):
                _open(process.stdin).close()
        for process in self._processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                self._end()
                process.wait(60)
        self._folder.cleanup()

    def ask(self, **request: object) -> list[Any]:
        """Send a request to all ranks, and return their answers."""
        for process in self._processes:
            with suppress(BrokenPipeError):  # it has no answer then
                print(json.dumps(request), file=_open(process.stdin), flush=True)
        return self.answers()

    def answers(self) -> list[Any]:
        """Return what each rank says next."""
        too_late = threading.Timer(SECONDS, self._end)
        too_late.start()
        with ThreadPoolExecutor(len(self._processes)) as threads:
            lines = list(threads.map(self._line_of, self._processes))
        too_late.cancel()
        if not all(lines):
            raise RuntimeError(f"A rank of {self._library} has failed, or took more than {SECONDS} seconds.")
        return [json.loads(line) for line in lines]

    def _line_of(self, process: subprocess.Popen[str]) -> str:
        line = _open(process.stdout).readline()
        if not line:
            self._end()  # others may wait for it
        return line

    def _end(self) -> None:
        for process in self._processes:
            process.terminate()  # not killed, or what uv has started would live on


def _open(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
