"""Start the processes of a job, wait for all of them, and leave none behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    "TQDM_DISABLE": "1",
}

#: Open MPI's launcher, which the tests bring along.
MPIRUN = str(Path(sys.executable).with_name("mpirun"))
# it asks for these, old or new, where a job has more ranks than cores, or belongs to root
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def python(*arguments: object) -> list[str]:
    """Return the command that runs this Python with arguments."""
    return [sys.executable, *map(str, arguments)]


def torchrun(*arguments: object, ranks: int, restarts: int = 0) -> list[str]:
    """Return the command that runs something on several ranks of this machine."""
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    return python("-m", "torch.distributed.run", *options, *arguments)


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(
    *commands: Sequence[str],
    seconds: float,
    environments: Sequence[Mapping[str, str]] = (),
    expect: int | Sequence[int] = 0,
) -> list[subprocess.CompletedProcess[str]]:
    """Run commands side by side, and return how each went.

    Parameters
    ----------
    commands
        Run in the root of the repository, each in a process group of its own.
    seconds
        After so long, everything is ended, and an error says what had been printed.
    environments
        What each command has in its environment besides `ENVIRONMENT`.
    expect
        The exit code of every command, or of each; another one is an error, and ends the others.
    """
    codes = [expect] * len(commands) if isinstance(expect, int) else expect
    with ExitStack() as stack:
        outputs = [
            (stack.enter_context(tempfile.TemporaryFile("w+")), stack.enter_context(tempfile.TemporaryFile("w+")))
            for _ in commands
        ]
        processes = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | ENVIRONMENT | dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            for command, environment, (stdout, stderr) in zip(
                commands, environments or [{}] * len(commands), outputs, strict=True
            )
        ]
        deadline = time.monotonic() + seconds
        try:
            while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
                if any(process.poll() not in {None, code} for process, code in zip(processes, codes, strict=True)):
                    deadline = min(deadline, time.monotonic() + 5)
                time.sleep(0.05)
            late = any(process.poll() is None for process in processes)
        finally:
            for process in processes:
                _end(process)
        done = []
        for command, process, streams in zip(commands, processes, outputs, strict=True):
            for stream in streams:
                stream.seek(0)
            stdout, stderr = (stream.read() for stream in streams)
            done.append(subprocess.CompletedProcess(list(command), process.returncode, stdout, stderr))
        problems = [f"{' '.join(one.args)}\nexit code {one.returncode}\n{one.stdout}\n{one.stderr}" for one in done]
        assert not late, "not done in time:\n" + "\n".join(problems)
        assert [one.returncode for one in done] == list(codes), "\n".join(problems)
        return done


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group: first in a way that torchrun takes as a reason to end its ranks."""
    for end, wait in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, end)
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            continue
