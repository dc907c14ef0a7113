"""Launchers: the rank of this process from environment variables.

1. Each launcher in a table sets a rank and a world size, or neither. Anything else raises.
2. The innermost launcher counts. An outer launcher must set the same rank, unless it only started the daemons of the
   inner one. Processes of ``multiprocessing`` inherit the variables of mpirun and srun, so only ``RANK`` and
   ``WORLD_SIZE`` count in them.
3. Without a launcher, there is no rank: a batch script under Slurm has variables too, but isn't a task.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from itertools import groupby, pairwise
from typing import NamedTuple

from annbatch_distributed.core.rank import Placement
from annbatch_distributed.core.worker import current_worker


class _Launcher(NamedTuple):
    """Launcher of a job, with the variables that it sets in each process."""

    name: str
    rank: str
    world_size: str
    has_daemons: bool = False
    """True if Slurm starts a daemon of the launcher on each node, and the daemons start the ranks."""


_TORCHRUN = _Launcher("torchrun or similar", "RANK", "WORLD_SIZE")
_PMI = _Launcher("MPICH or similar", "PMI_RANK", "PMI_SIZE", has_daemons=True)
_SLURM = _Launcher("Slurm", "SLURM_PROCID", "SLURM_NTASKS")
_INNERMOST_FIRST = (
    _TORCHRUN,
    _Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", has_daemons=True),
    _PMI,
    _SLURM,
)

# set by torchrun; RANK and WORLD_SIZE alone are often exported by hand
_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
# the number of torchruns of the job, which may be tasks of another launcher
_N_TORCHRUNS = "GROUP_WORLD_SIZE"
# set by srun --pty, whose only process is a shell, although the number of tasks may be larger
_OF_A_TERMINAL = "SLURM_PTY_PORT", "SLURM_PTY_WIN_COL"
# larger numbers are special steps of Slurm: batch scripts, external processes and shells of salloc
_LAST_STEP = 0xFFFF_FFF0
# int() would also accept signs, spaces and digits of other alphabets, and fails for thousands of digits
_NATURAL = re.compile("[0-9]{1,18}")


def launcher() -> Placement:
    """Return the placement of this process, from the variables of its launcher; see :func:`launched`."""
    variables: Mapping[str, str] = os.environ
    if multiprocessing.parent_process() is not None and current_worker() is None:
        # only variables that may be set for this process; the other ones belong to its parent
        variables = {name: value for name, value in variables.items() if name in {_TORCHRUN.rank, _TORCHRUN.world_size}}
    return launched(variables)


def launched(variables: Mapping[str, str]) -> Placement:
    """Return the placement of a process with these environment variables.

    A RuntimeError if no launcher has set variables, a ValueError if they are invalid or contradict each other.

    >>> slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
    >>> launched(slurm).source
    'Slurm (SLURM_PROCID=1, SLURM_NTASKS=2)'
    >>> launched(slurm | {"OMPI_COMM_WORLD_RANK": "7", "OMPI_COMM_WORLD_SIZE": "8"})
    Rank(rank=7, world_size=8)
    """
    # Slurm also sets SLURM_PROCID=0 in batch scripts, which are no ranks, so only numbered steps of srun count
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
        # Slurm can set the variables of PMI as well; mpirun and torchrun in the shell set their own
        copies = all(
            variables.get(pmi) == variables.get(slurm) for pmi, slurm in zip(_PMI[1:3], _SLURM[1:3], strict=True)
        )
        if not launchers or (launchers == [_PMI] and copies):
            raise ValueError(
                f"srun --pty has started a single process, a shell, but {_SLURM.world_size}="
                f"{shlex.quote(variables.get(_SLURM.world_size, ''))}, so rows of the other tasks would never be read. "
                "Start the script with srun without --pty; or, if this process is the whole job, pass "
                "dist_info=Rank(0, 1)."
            )
    innermost, *others = launchers
    if innermost is _TORCHRUN and _BY_TORCHRUN in variables:
        placement = _read(variables, _TORCHRUN)
        # for 8 ranks on 2 nodes with one torchrun each, the world size of mpirun or srun is 2, the number of torchruns,
        # or 1 if mpirun or srun has started only a shell
        n_torchruns = variables.get(_N_TORCHRUNS)
        if n_torchruns is not None and any(
            variables.get(other.world_size) not in {"1", n_torchruns} for other in others
        ):
            raise _contradiction(_read(variables, launcher) for launcher in launchers)
        return placement
    placements = [_read(variables, launcher) for launcher in launchers]
    # of neighbors with the same rank, the outermost counts, since Slurm can set the variables of PMI as well
    pairs = zip(launchers, placements, strict=True)
    distinct = [[*group][-1] for _, group in groupby(pairs, key=lambda pair: pair[1])]
    for (inner, of_inner), (outer, of_outer) in pairwise(distinct):
        # Slurm starts one daemon of mpirun on each node, so it has fewer tasks than there are ranks
        if not (inner.has_daemons and outer is _SLURM and of_outer.world_size < of_inner.world_size):
            raise _contradiction(placements)
    return placements[0]


def _read(variables: Mapping[str, str], launcher: _Launcher) -> Placement:
    """Return the placement of this process from the variables of one launcher."""
    rank, world_size = (variables.get(name, "") for name in (launcher.rank, launcher.world_size))
    if not (_NATURAL.fullmatch(rank) and _NATURAL.fullmatch(world_size) and int(rank) < int(world_size)):
        raise ValueError(
            f"{launcher.rank} and {launcher.world_size} must be two integers, the first below the second, got "
            f"{_as_shell(variables, launcher.rank, launcher.world_size)}. Set both, or unset both."
        )
    if launcher is _SLURM and variables.get("SLURM_STEP_NUM_TASKS", world_size) != world_size:
        raise ValueError(
            "SLURM_NTASKS and SLURM_STEP_NUM_TASKS must be the same number, got "
            f"{_as_shell(variables, 'SLURM_NTASKS', 'SLURM_STEP_NUM_TASKS')}. A batch script that was submitted within "
            "a step inherits the variables of the step. Start the script with srun."
        )
    source = f"{launcher.name} ({launcher.rank}={int(rank)}, {launcher.world_size}={int(world_size)})"
    return Placement(int(rank), int(world_size), source)


def _as_shell(variables: Mapping[str, str], *names: str) -> str:
    """Format variables as in a shell."""
    return ", ".join(f"{name}={shlex.quote(variables[name])}" if name in variables else f"no {name}" for name in names)


def _contradiction(placements: Iterable[Placement]) -> ValueError:
    sources = ", ".join(placement.source for placement in placements)
    return ValueError(
        f"The variables of different launchers contradict each other: {sources}. Unset the variables that a batch "
        "script or another job has exported, or pass dist_info='torch' or a callable that returns (rank, world_size)."
    )


def _no_launcher(variables: Mapping[str, str]) -> str:
    pairs = "; ".join(f"{launcher.rank} and {launcher.world_size} ({launcher.name})" for launcher in _INNERMOST_FIRST)
    no_srun = ""
    if any(name in variables for name in ("SLURM_JOB_ID", _SLURM.rank, _SLURM.world_size)):
        shown = _as_shell(variables, "SLURM_JOB_ID", "SLURM_STEP_ID", _SLURM.rank, _SLURM.world_size)
        no_srun = (
            f"Variables of Slurm are set ({shown}), but not by srun, so they are the same in all processes. In a batch "
            "script or a shell of salloc, start the script with srun. "
        )
    return (
        f"dist_info='env' needs the variables of a launcher, got none of {pairs}. Variables of Slurm count only within "
        f"a step of srun. {no_srun}Start every process of the job with torchrun, mpirun, mpiexec or srun; in processes "
        "of multiprocessing or torch.multiprocessing.spawn, set RANK and WORLD_SIZE. For a single process, pass "
        "dist_info=Rank(0, 1)."
    )
