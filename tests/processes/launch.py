"""Start the processes of a job, wait for all of them, and leave none behind.

A Python that imports this package, torch and JAX takes four seconds of CPU to start. `torchrun` and `python` start such
processes; `forked` has them forked by one process that has imported everything, which takes no time. Where a test is
about ranks and not about a launcher, they are forked.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from unittest import mock

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from multiprocessing.context import ForkServerContext

ROOT = Path(__file__).parents[2]
#: Whatever takes longer hangs: a machine that does much else takes several times what an idle one does.
SECONDS = 900
#: What is to end early has ended by then: ranks that wait for others give up by themselves after 300 seconds.
EARLY = 240
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    "TQDM_DISABLE": "1",
}

#: What the fork server imports. None of it starts a thread that matters after a fork, or initialises JAX's backends.
PRELOADED = [
    "accelerate",
    "annbatch_distributed.integrations.jax",
    "annbatch_distributed.loader",
    "jax.experimental.multihost_utils",
    "lightning",
    "scvi",
    "torch.distributed.device_mesh",
    "torchdata.stateful_dataloader",
    "zarrs",
]

#: torchrun, but for the end of its own interpreter, in which torch 2.15 has stayed after all ranks had ended well.
TORCHRUN = "import os; from torch.distributed.run import main; main(); os._exit(0)"

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


def torchrun(*arguments: object, ranks: int) -> list[str]:
    """Return the command that runs something on several ranks of this machine."""
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}", "--max-restarts=0"]
    return python("-c", TORCHRUN, *options, *arguments)


@dataclass(frozen=True)
class Forked:
    """A command of Python, as `python` takes it, that the fork server carries out."""

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


def forked(*arguments: object) -> Forked:
    """Return the command that runs something in a forked process."""
    return Forked(list(map(str, arguments)))


def forked_ranks(*arguments: object, ranks: int) -> list[Forked]:
    """Return the commands of the ranks of a job, with the variables that torchrun sets on one machine."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    job |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    job |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_USE_AGENT_STORE": False}
    return [
        Forked(
            list(map(str, arguments)),
            {name: str(value) for name, value in (job | {"RANK": rank, "LOCAL_RANK": rank}).items()},
        )
        for rank in range(ranks)
    ]


def free_port() -> int:
    """Return a port of this machine that nobody listens on.

    It is below the ports that Linux and macOS give to whoever asks for any: one of them may be taken until it is used.
    """
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def run(
    *commands: Sequence[str] | Forked,
    environments: Sequence[Mapping[str, str]] = (),
    expect: int | Sequence[int] = 0,
) -> list[subprocess.CompletedProcess[str]]:
    """Run commands side by side, and return how each went.

    After `SECONDS`, or `EARLY` where one is to fail, they are ended, and an error says what they had printed.

    Parameters
    ----------
    commands
        Run in the root of the repository, each in a process group of its own.
    environments
        What each command has in its environment besides `ENVIRONMENT`.
    expect
        The exit code of every command, or of each; another one is an error, and ends the others.
    """
    codes = [expect] * len(commands) if isinstance(expect, int) else expect
    with ExitStack() as stack:
        outputs = [
            (
                stack.enter_context(tempfile.NamedTemporaryFile("w+")),
                stack.enter_context(tempfile.NamedTemporaryFile("w+")),
            )
            for _ in commands
        ]
        processes = [
            _start(command, os.environ | ENVIRONMENT | dict(environment), Path(stdout.name), Path(stderr.name))
            for command, environment, (stdout, stderr) in zip(
                commands, environments or [{}] * len(commands), outputs, strict=True
            )
        ]
        deadline = time.monotonic() + (EARLY if any(codes) else SECONDS)
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
            stdout, stderr = (Path(stream.name).read_text() for stream in streams)
            arguments = command.arguments if isinstance(command, Forked) else command
            done.append(subprocess.CompletedProcess(list(arguments), process.poll() or 0, stdout, stderr))
        problems = [f"{' '.join(one.args)}\nexit code {one.returncode}\n{one.stdout}\n{one.stderr}" for one in done]
        assert not late, "not done in time:\n" + "\n".join(problems)
        assert [one.returncode for one in done] == list(codes), "\n".join(problems)
        return done


class _Process(Protocol):
    """What there is of `subprocess.Popen` for a process however it was started."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> object: ...


def _start(command: Sequence[str] | Forked, environment: Mapping[str, str], stdout: Path, stderr: Path) -> _Process:
    if isinstance(command, Forked):
        return _Rank(command.arguments, {**environment, **command.environment}, stdout, stderr)
    with stdout.open("w") as out, stderr.open("w") as error:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=error,
            start_new_session=True,
        )


@cache
def fork_server() -> ForkServerContext:
    """Start the process that ranks are forked from, the only one of this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, ENVIRONMENT):  # libraries count their threads when they are loaded
        forkserver.ensure_running()
    return context


class _Rank:
    """A process of the fork server."""

    def __init__(self, *job: object) -> None:
        self._process = fork_server().Process(target=_carry_out, args=job)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked rank", timeout or 0)


def _carry_out(arguments: Sequence[str], environment: Mapping[str, str], stdout: Path, stderr: Path) -> None:
    """Do in a forked process what ``python`` does with arguments."""
    os.setsid()
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    for path, stream in ((stdout, sys.stdout), (stderr, sys.stderr)):
        with path.open("a") as file:
            os.dup2(file.fileno(), stream.fileno())
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")


def _end(process: _Process) -> None:
    """End a process and its group: first in a way that torchrun takes as a reason to end its ranks."""
    for end, wait in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError):  # a forked process that has no group of its own yet
            os.killpg(process.pid, end)
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            continue


@contextmanager
def none_left(text: str, *, seconds: float) -> Iterator[None]:
    """Kill the processes that have a text in their command lines so many seconds after the end; any is an error."""
    yield
    deadline = time.monotonic() + seconds
    while (left := _processes_with(text)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert not left, "processes that outlived their job"


def _processes_with(text: str) -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if any(text in word for word in process.info["cmdline"] or [])]
