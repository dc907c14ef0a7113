"""The member that this process is, as the variables say that its launcher set.

1. Each launcher in a table says a rank and a world size, or nothing. Half of that, or anything else, is an error.
2. The innermost launcher is taken. One further out must say the same, unless it only started the inner one's daemons.
   A process that ``multiprocessing`` has started is none of those that mpirun or srun have; ``RANK`` can be its own.
3. Where no launcher says anything there is no rank: a batch script under Slurm has variables too, but is no task.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from itertools import groupby, pairwise
from typing import NamedTuple

from annbatch_distributed.ranks.rank import Placement, Rank
from annbatch_distributed.ranks.worker import current_worker


class _Launcher(NamedTuple):
    """What starts the processes of a job, and the variables that it sets in each."""

    name: str
    rank: str
    world_size: str
    has_daemons: bool = False
    """Whether it lets Slurm start a daemon on each node, and the daemons start the ranks."""


_TORCHRUN = _Launcher("torchrun or alike", "RANK", "WORLD_SIZE")
_PMI = _Launcher("MPICH or alike", "PMI_RANK", "PMI_SIZE", has_daemons=True)
_SLURM = _Launcher("Slurm", "SLURM_PROCID", "SLURM_NTASKS")
_INNERMOST_FIRST = (
    _TORCHRUN,
    _Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", has_daemons=True),
    _PMI,
    _SLURM,
)

# torch itself recognizes a process of torchrun by it; RANK and WORLD_SIZE alone are often exported by hand
_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
# the number of torchruns of the job, which another launcher may have started
_N_TORCHRUNS = "GROUP_WORLD_SIZE"
# srun --pty sets them: its one process is a shell, to which the number of tasks says nothing of what is started in it
_OF_A_TERMINAL = "SLURM_PTY_PORT", "SLURM_PTY_WIN_COL"
# the numbers above are Slurm's own, for batch scripts, external processes and shells of salloc
_LAST_STEP = 0xFFFF_FFF0
# int() takes signs, blanks and other alphabets' digits too, and fails on thousands of digits
_NATURAL = re.compile("[0-9]{1,18}")


def launcher() -> Placement:
    """Return which member of a job this process is, as its launcher's variables say: see :func:`launched`."""
    variables: Mapping[str, str] = os.environ
    if multiprocessing.parent_process() is not None and current_worker() is None:
        # only what was set for this process itself; all others are those of the process that has started it
        variables = {name: value for name, value in variables.items() if name in {_TORCHRUN.rank, _TORCHRUN.world_size}}
    return launched(variables)


def launched(variables: Mapping[str, str]) -> Placement:
    """Return which member of a job a process with these environment variables is.

    A RuntimeError if no launcher has set any, a ValueError if they are no rank of a job or contradict each other.

    >>> slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
    >>> launched(slurm).source
    'Slurm (SLURM_PROCID=1, SLURM_NTASKS=2)'
    >>> launched(slurm | {"OMPI_COMM_WORLD_RANK": "7", "OMPI_COMM_WORLD_SIZE": "8"}).rank
    Rank(rank=7, world_size=8)
    """
    # Slurm sets SLURM_PROCID=0 in batch scripts too, which are no ranks: only numbered steps of srun are
    step = variables.get("SLURM_STEP_ID", "")
    in_step = _NATURAL.fullmatch(step) is not None and int(step) <= _LAST_STEP
    launchers = [
        launcher
        for launcher in _INNERMOST_FIRST
        if (launcher.rank in variables or launcher.world_size in variables) and (launcher is not _SLURM or in_step)
    ]
    if not launchers:
        raise RuntimeError(_no_launcher(variables))
    if _SLURM in launchers and variables.get(_SLURM.world_size) != "1" and any(map(variables.get, _OF_A_TERMINAL)):
        launchers.remove(_SLURM)
        # Slurm sets PMI's variables as well, if it is to; mpirun and torchrun in the shell have ranks of their own
        copies = all(variables.get(own) == variables.get(its) for own, its in zip(_PMI[1:3], _SLURM[1:3], strict=True))
        if not launchers or (launchers == [_PMI] and copies):
            raise ValueError(
                f"srun --pty has started one process here, a shell, but {_SLURM.world_size}="
                f"{shlex.quote(variables.get(_SLURM.world_size, ''))} is the number of tasks: the others' rows would "
                "never be read. Start the script by srun without --pty, for a rank in each task; or, if this process "
                "is the whole job, pass dist_info=Rank(0, 1)."
            )
    innermost, *others = launchers
    if innermost is _TORCHRUN and _BY_TORCHRUN in variables:
        member = _read(variables, _TORCHRUN)
        # 2 nodes with a torchrun each, which mpirun or srun has started, and 8 ranks: their world size is 2, or 1 if
        # they have started nothing but a shell
        n_torchruns = variables.get(_N_TORCHRUNS)
        if n_torchruns is not None and any(
            variables.get(other.world_size) not in {"1", n_torchruns} for other in others
        ):
            raise _contradiction(_read(variables, launcher) for launcher in launchers)
        return member
    members = [_read(variables, launcher) for launcher in launchers]
    # of neighbors that say the same, the outermost counts: Slurm sets PMI's variables as well, if it is to
    pairs = zip(launchers, members, strict=True)
    distinct = [[*group][-1] for _, group in groupby(pairs, key=lambda pair: pair[1].rank)]
    for (inner, own), (outer, other) in pairwise(distinct):
        # mpirun has Slurm start one daemon on each node: fewer than there are ranks
        if not (inner.has_daemons and outer is _SLURM and other.rank.world_size < own.rank.world_size):
            raise _contradiction(members)
    return members[0]


def _read(variables: Mapping[str, str], launcher: _Launcher) -> Placement:
    """Return the member that a launcher says this process is."""
    rank, world_size = (variables.get(name, "") for name in (launcher.rank, launcher.world_size))
    if not (_NATURAL.fullmatch(rank) and _NATURAL.fullmatch(world_size) and int(rank) < int(world_size)):
        raise ValueError(
            f"{launcher.name} sets {launcher.rank} and {launcher.world_size} to two integers, the first below the "
            f"second, got {_as_shell(variables, launcher.rank, launcher.world_size)}. Set both, or unset both."
        )
    if launcher is _SLURM and variables.get("SLURM_STEP_NUM_TASKS", world_size) != world_size:
        raise ValueError(
            "srun sets SLURM_NTASKS and SLURM_STEP_NUM_TASKS to the same number, got "
            f"{_as_shell(variables, 'SLURM_NTASKS', 'SLURM_STEP_NUM_TASKS')}. A batch script that was submitted "
            "within a step still has that step's variables: start the script with srun."
        )
    member = Rank(int(rank), int(world_size))
    source = f"{launcher.name} ({launcher.rank}={member.rank}, {launcher.world_size}={member.world_size})"
    return Placement(member, source)


def _as_shell(variables: Mapping[str, str], *names: str) -> str:
    """Write variables as a shell would."""
    return ", ".join(f"{name}={shlex.quote(variables[name])}" if name in variables else f"no {name}" for name in names)


def _contradiction(members: Iterable[Placement]) -> ValueError:
    sources = ", ".join(member.source for member in members)
    return ValueError(
        f"The variables of different launchers contradict each other: {sources}. Unset those that didn't start this "
        "process (what a batch script or another job exports is the same in all of them), or give "
        '"torch" or a callable that returns (rank, world_size) as dist_info.'
    )


def _no_launcher(variables: Mapping[str, str]) -> str:
    pairs = "; ".join(f"{launcher.rank} and {launcher.world_size} ({launcher.name})" for launcher in _INNERMOST_FIRST)
    no_srun = ""
    if any(name in variables for name in ("SLURM_JOB_ID", _SLURM.rank, _SLURM.world_size)):
        shown = _as_shell(variables, "SLURM_JOB_ID", "SLURM_STEP_ID", _SLURM.rank, _SLURM.world_size)
        no_srun = (
            f"Slurm's are set ({shown}), but not by srun, so that they don't tell processes apart: in a batch "
            "script or a shell of salloc, start the script with srun. "
        )
    return (
        f"dist_info='env' found the variables of no launcher. It looked for: {pairs}, within a step of srun. {no_srun}"
        "Start every process of the job with torchrun, mpirun, mpiexec or srun; what multiprocessing has started, as "
        "torch.multiprocessing.spawn does, needs RANK and WORLD_SIZE of its own. A process that is no part of a job "
        "says so outright: dist_info=Rank(0, 1)."
    )
