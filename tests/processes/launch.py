"""Start the processes of a job, wait for all of them, and leave none behind.

A Python that imports this package, torch and JAX takes four seconds of CPU to start. `torchrun` and `python` start such
processes; `forked` forks them from one process that has imported everything, which takes no time. Tests of ranks, not
of a launcher, use forked processes.
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
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from multiprocessing.context import ForkServerContext

ROOT = Path(__file__).parents[2]
#: Time limit of a job, in seconds. A busy machine takes several times longer than an idle machine.
SECONDS = 900
#: Time limit of a job that must fail early. Ranks that wait for other ranks time out after 300 seconds.
EARLY = 240
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    "TQDM_DISABLE": "1",
}

#: Imports of the fork server. None of them starts a thread that matters after a fork, or initializes JAX's backends.
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

#: torchrun without the end of its interpreter, where torch 2.15 has hung after all ranks had succeeded.
TORCHRUN = "import os; from torch.distributed.run import main; main(); os._exit(0)"

#: Open MPI's launcher, a dependency of the tests.
MPIRUN = str(Path(sys.executable).with_name("mpirun"))
# old and new versions require these if a job has more ranks than cores, or runs as root
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
    """Return the command that runs torchrun with several ranks on this machine."""
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}", "--max-restarts=0"]
    return python("-c", TORCHRUN, *options, *arguments)


@dataclass(frozen=True)
class Forked:
    """A Python command, with the arguments of `python`, that the fork server runs."""

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


def forked(*arguments: object) -> Forked:
    """Return the command that runs Python with arguments in a forked process."""
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
    """Return a free port of this machine.

    It is below the ports that Linux and macOS assign if no port is given, and which may be taken meanwhile.
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
    meanwhile: Callable[[list[int]], object] = lambda _: None,
) -> list[subprocess.CompletedProcess[str]]:
    """Run commands in parallel, and return their results.

    After `SECONDS`, or `EARLY` if a command must fail, all commands are ended, and the error has their output.

    Parameters
    ----------
    commands
        Commands to run in the root of the repository, each in its own process group.
    environments
        Environment variables of each command, in addition to `ENVIRONMENT`.
    expect
        Exit code of all commands, or of each command. A different exit code is an error, and ends the other commands.
    meanwhile
        Function of the process ids of all commands, which is called again and again while the commands run.
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
                meanwhile([process.pid for process in processes])
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
    """The part of `subprocess.Popen` that all kinds of processes have."""

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
    """Start the process that ranks are forked from, once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, ENVIRONMENT):  # libraries count their threads when they are loaded
        forkserver.ensure_running()
    return context


class _Rank:
    """A process of the fork server."""

    def __init__(self, *job: object) -> None:
        self._process = fork_server().Process(target=_run_forked, args=job)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked rank", timeout or 0)


def _run_forked(arguments: Sequence[str], environment: Mapping[str, str], stdout: Path, stderr: Path) -> None:
    """Run arguments in a forked process, as ``python`` does."""
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
    """End a process and its group, first with a signal on which torchrun ends its ranks."""
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
    """Kill processes that have a text in their command lines after the given seconds; any is an error."""
    yield
    deadline = time.monotonic() + seconds
    while (left := _processes_with(text)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert not left, "processes that outlived their job"


def _processes_with(text: str) -> list[psutil.Process]:
    processes = psutil.process_iter(["cmdline"])
    return [process for process in processes if any(text in word for word in process.info["cmdline"] or [])]
