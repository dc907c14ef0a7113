"""The rank of a process from the variables of launchers: a table of jobs, and a table of errors."""

from __future__ import annotations

import multiprocessing
import re
from shlex import quote
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from annbatch_distributed import Rank
from annbatch_distributed.ranks import RankSource
from annbatch_distributed.ranks.environment import launched

if TYPE_CHECKING:
    from collections.abc import Callable

type Variables = dict[str, str]

NAMES = {
    "hand": ("RANK", "WORLD_SIZE"),
    "open_mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "pmi": ("PMI_RANK", "PMI_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS"),
}
STEP = {"SLURM_STEP_ID": "0"}
#: Slurm's special steps, and values that are not the number of a step.
SPECIAL_STEPS = ["4294967281", "4294967290", "4294967293", "-6", "batch", ""]


def setting(launcher: str) -> Callable[..., Variables]:
    """Return a function from a rank and a world size to the variables of a launcher."""
    return lambda *pair: dict(zip(NAMES[launcher], map(str, pair), strict=True))


hand, open_mpi, pmi, tasks = map(setting, NAMES)


#: Variables of the shell that srun --pty starts.
TERMINAL = {"SLURM_PTY_PORT": "41233", "SLURM_PTY_WIN_COL": "120"}


def slurm(rank: int, world_size: int) -> Variables:
    return STEP | tasks(rank, world_size)


def torchrun(rank: int, world_size: int, n_torchruns: int | None = None) -> Variables:
    n_groups = {} if n_torchruns is None else {"GROUP_WORLD_SIZE": str(n_torchruns)}
    return hand(rank, world_size) | {"TORCHELASTIC_RUN_ID": "none"} | n_groups


#: Variables of rank 1 of 4, and the beginning of their source.
JOBS: dict[str, tuple[Variables, str]] = {
    "torchrun": (torchrun(1, 4), "torchrun or similar (RANK=1, WORLD_SIZE=4)"),
    "Open MPI": (open_mpi(1, 4), "Open MPI (OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=4)"),
    "MPICH": (pmi(1, 4), "MPICH or similar (PMI_RANK=1, PMI_SIZE=4)"),
    "srun": (slurm(1, 4), "Slurm (SLURM_PROCID=1, SLURM_NTASKS=4)"),
    "the last step of srun": (slurm(1, 4) | {"SLURM_STEP_ID": "4294967280"}, "Slurm"),
    "srun that sets PMI": (slurm(1, 4) | pmi(1, 4), "MPICH"),
    "Open MPI that sets PMI": (open_mpi(1, 4) | pmi(1, 4), "Open MPI"),
    "mpirun by one daemon of Slurm": (open_mpi(1, 4) | slurm(0, 1) | {"SLURM_STEP_NUM_TASKS": "1"}, "Open MPI"),
    "mpiexec by three daemons of Slurm": (pmi(1, 4) | slurm(2, 3), "MPICH"),
    "mpirun by a daemon that has PMI": (open_mpi(1, 4) | pmi(0, 1) | slurm(0, 1), "Open MPI"),
    "mpirun in a batch script": (open_mpi(1, 4) | tasks(0, 4), "Open MPI"),
    "a script within srun": (hand(1, 4) | slurm(1, 4), "torchrun"),
    "a script within mpirun": (hand(1, 4) | open_mpi(1, 4) | slurm(0, 2), "torchrun"),
    "a script with the variables of one task": (hand(1, 4) | {"LOCAL_WORLD_SIZE": "4"} | slurm(1, 4), "torchrun"),
    "torchrun in one task": (torchrun(1, 4, n_torchruns=2) | slurm(0, 1), "torchrun"),
    "torchrun in each of two tasks": (torchrun(1, 4, n_torchruns=2) | slurm(1, 2), "torchrun"),
    "torchrun by mpirun": (torchrun(1, 4, n_torchruns=2) | open_mpi(0, 2), "torchrun"),
    "torchrun without GROUP_WORLD_SIZE": (torchrun(1, 4) | slurm(0, 3), "torchrun"),
    "torchrun within a malformed rank": (torchrun(1, 4) | pmi(2, 2), "torchrun"),
    "only TORCHELASTIC_RUN_ID": ({"TORCHELASTIC_RUN_ID": "none"} | slurm(1, 4), "Slurm"),
    "torchrun in a shell of srun": (torchrun(1, 4, n_torchruns=1) | slurm(0, 3) | TERMINAL, "torchrun"),
    "torchrun in a shell of four tasks": (torchrun(1, 4, n_torchruns=1) | slurm(0, 4) | TERMINAL, "torchrun"),
    "mpirun in a shell of four tasks": (open_mpi(1, 4) | slurm(0, 4) | TERMINAL, "Open MPI"),
    "mpirun in a shell of srun": (open_mpi(1, 4) | slurm(0, 3) | TERMINAL, "Open MPI"),
    **{f"mpirun in step {step!r}": (open_mpi(1, 4) | {"SLURM_STEP_ID": step}, "Open MPI") for step in SPECIAL_STEPS},
}


@pytest.mark.parametrize(("variables", "source"), JOBS.values(), ids=JOBS)
def test_launched_is_rank_of_innermost_launcher(variables: Variables, source: str) -> None:
    placement = launched(variables)
    assert placement == Rank(1, 4)
    assert placement.source.startswith(source)


NO_JOB = "needs the variables of a launcher"
#: Invalid pairs of a rank and a world size.
NO_RANKS = [
    *[(rank, "2") for rank in ("", " 1", "-1", "1.0", "1_0", "\u0660", "1" * 5000)],
    *[("0", "0"), ("0", "two"), ("2", "2"), ("", "")],
]
CONTRADICTION = "launchers contradict each other: "
#: Variables outside of a job, the type of the error, and a part of its message.
WRONG: dict[str, tuple[Variables, type[Exception], str]] = {
    "no variables": ({}, RuntimeError, NO_JOB),
    "only a step": (STEP, RuntimeError, NO_JOB),
    "only TORCHELASTIC_RUN_ID": ({"TORCHELASTIC_RUN_ID": "none"}, RuntimeError, NO_JOB),
    "other variables": ({"LOCAL_RANK": "0", "HOME": "/"}, RuntimeError, NO_JOB),
    "salloc": ({"SLURM_JOB_ID": "3"}, RuntimeError, "SLURM_JOB_ID=3, no SLURM_STEP_ID.*start the script with srun"),
    "sbatch": (tasks(0, 2), RuntimeError, "no SLURM_STEP_ID, SLURM_PROCID=0, SLURM_NTASKS=2.*with srun"),
    **{
        f"step {step!r}": (slurm(0, 1) | {"SLURM_STEP_ID": step}, RuntimeError, "start the script with srun")
        for step in SPECIAL_STEPS
    },
    "sbatch within a step": (
        slurm(0, 4) | {"SLURM_STEP_NUM_TASKS": "1"},
        ValueError,
        "SLURM_NTASKS=4, SLURM_STEP_NUM_TASKS=1.*with srun",
    ),
    "a shell of srun": (
        slurm(0, 4) | TERMINAL,
        ValueError,
        r"a shell, but SLURM_NTASKS=4.*without --pty.*Rank\(0, 1\)",
    ),
    "a shell of srun that sets PMI": (slurm(0, 4) | pmi(0, 4) | TERMINAL, ValueError, "a shell, but SLURM_NTASKS=4"),
    # a variable that a batch script exports is the same in every task
    "exported": (hand(0, 4) | slurm(1, 4), ValueError, "RANK=0, WORLD_SIZE=4.*PROCID=1, SLURM_NTASKS=4.*Unset"),
    "exported, of fewer tasks": (hand(1, 4) | slurm(1, 2), ValueError, CONTRADICTION),
    "exported, within mpirun": (hand(0, 4) | open_mpi(1, 4), ValueError, CONTRADICTION),
    "Open MPI and PMI": (open_mpi(1, 4) | pmi(0, 2), ValueError, CONTRADICTION),
    "as many daemons as ranks": (open_mpi(1, 4) | slurm(0, 4), ValueError, CONTRADICTION),
    "more daemons than ranks": (pmi(1, 4) | slurm(1, 5), ValueError, CONTRADICTION),
    "torchrun with different tasks": (
        torchrun(1, 4, n_torchruns=2) | slurm(0, 3),
        ValueError,
        rf"{CONTRADICTION}torchrun or similar \(RANK=1, WORLD_SIZE=4\), ",
    ),
    "within a rank of torchrun": (torchrun(1, 4, n_torchruns=2) | open_mpi(3, 4), ValueError, CONTRADICTION),
    "only a rank": ({"RANK": "0"}, ValueError, "the first below the second, got RANK=0, no WORLD_SIZE"),
    "only a world size": ({"PMI_SIZE": "2"}, ValueError, "got no PMI_RANK, PMI_SIZE=2"),
    "malformed rank of an outer launcher": (hand(1, 4) | pmi(2, 2), ValueError, "got PMI_RANK=2, PMI_SIZE=2"),
    **{
        f"{launcher}, {number}": (
            STEP | setting(launcher)(*pair),
            ValueError,
            re.escape(f"got {NAMES[launcher][0]}={quote(pair[0])}, {NAMES[launcher][1]}={quote(pair[1])}."),
        )
        for launcher in NAMES
        for number, pair in enumerate(NO_RANKS)
    },
}


@pytest.mark.parametrize(("variables", "error", "message"), WRONG.values(), ids=WRONG)
def test_launched_raises_outside_of_a_job(variables: Variables, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        launched(variables)
    if message == NO_JOB:
        assert "start the script with srun" not in str(raised.value)
        names = [name for pair in NAMES.values() for name in pair]
        for text in (*names, "torchrun", "mpirun", "mpiexec", "srun", "dist_info=Rank(0, 1)"):
            assert text in str(raised.value)


values = st.integers(0, 4).map(str) | st.sampled_from(["", "-1", "x", "2.0"])
settings = st.fixed_dictionaries(
    {},
    optional={name: values for names in NAMES.values() for name in names}
    | {
        "SLURM_STEP_ID": st.sampled_from(["0", "3", *SPECIAL_STEPS]),
        "SLURM_STEP_NUM_TASKS": values,
        "SLURM_JOB_ID": values,
        "TORCHELASTIC_RUN_ID": values,
        "LOCAL_WORLD_SIZE": values,
    },
)


def test_shell_of_one_task_is_its_rank() -> None:
    assert launched(slurm(0, 1) | TERMINAL) == Rank(0, 1)


@given(settings)
@example({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"})
def test_any_setting_is_innermost_rank_or_an_error(variables: Variables) -> None:
    in_a_step = variables.get("SLURM_STEP_ID") in {"0", "3"}
    launchers = [
        names for kind, names in NAMES.items() if set(names) & set(variables) and (kind != "slurm" or in_a_step)
    ]
    if not launchers:
        with pytest.raises(RuntimeError):
            launched(variables)
        return
    try:
        rank = launched(variables)
    except ValueError as error:
        message = str(error)
    else:
        assert (str(rank.rank), str(rank.world_size)) == tuple(variables[name] for name in launchers[0])
        return
    assert any(f"{name}={quote(value)}" in message for name, value in variables.items())


def test_env_is_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of multiprocessing uses only RANK and WORLD_SIZE; it inherits other variables from its parent."""
    for name in NAMES["hand"]:
        monkeypatch.delenv(name, raising=False)
    for name, value in (slurm(0, 1) | pmi(0, 1)).items():
        monkeypatch.setenv(name, value)
    placement = RankSource.of("env").placement
    assert placement == Rank(0, 1)
    assert (placement.framework, placement.processes) == (None, None)
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    with pytest.raises(RuntimeError, match="set RANK and WORLD_SIZE"):
        RankSource.of("env")
    for name, value in hand(1, 2).items():
        monkeypatch.setenv(name, value)
    assert RankSource.of("env").placement == Rank(1, 2)
