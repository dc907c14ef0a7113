"""Which rank a process is by the variables of its launchers: what launches set, and everything else."""

from __future__ import annotations

import os
import shlex
from itertools import product
from multiprocessing import get_context
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from annbatch_distributed import Rank
from annbatch_distributed.ranks import resolve
from annbatch_distributed.ranks.environment import launched

if TYPE_CHECKING:
    from collections.abc import Iterator

type Variables = dict[str, str]

HAND = "RANK", "WORLD_SIZE"
OPEN_MPI = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
PMI = "PMI_RANK", "PMI_SIZE"
SLURM = "SLURM_PROCID", "SLURM_NTASKS"
PAIRS = [HAND, OPEN_MPI, PMI, SLURM]
STEP = {"SLURM_STEP_ID": "0"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}

RANKS = [Rank(rank, world_size) for world_size in (1, 2, 3) for rank in range(world_size)]
SPECIAL_STEPS = ["4294967290", "4294967291", "4294967292", "4294967293", "-6", "-5", "batch", ""]


def pair(names: tuple[str, str], rank: Rank) -> Variables:
    return dict(zip(names, (str(rank.rank), str(rank.world_size)), strict=True))


def slurm(rank: Rank) -> Variables:
    return STEP | pair(SLURM, rank)


# Launchers that start one another, each adding its variables to those that it was started with: every way in which
# that can happen to one process, and which rank it then is.


def by_slurm() -> Iterator[tuple[Variables, Rank | None]]:
    """Outside of Slurm, outside of a step, and in a step of srun, which sets PMI's variables too if told to."""
    yield {}, None
    for rank in RANKS:
        yield pair(SLURM, rank), None
        yield slurm(rank), rank
        yield slurm(rank) | pair(PMI, rank), rank


def by_mpi() -> Iterator[tuple[Variables, Rank | None]]:
    """Without MPI; or started by its daemons, fewer than there are ranks; or by Slurm, which then says the same."""
    for outer, its in by_slurm():
        yield outer, its
        for names, rank in product([OPEN_MPI, PMI], RANKS):
            if its is None or its.world_size < rank.world_size or its == rank:
                yield outer | pair(names, rank), rank
                if names == OPEN_MPI and not set(PMI) & set(outer):
                    yield outer | pair(OPEN_MPI, rank) | pair(PMI, rank), rank


def by_hand() -> Iterator[tuple[Variables, Rank | None]]:
    """With a script around each process that exports for torch what the process has been told."""
    for outer, its in by_mpi():
        yield outer, its
        for rank in RANKS:
            if its is None or its == rank:
                yield outer | pair(HAND, rank), rank


LAUNCHES = {frozenset(variables.items()): rank for variables, rank in by_hand() if rank is not None}


def test_every_launch_says_which_rank_this_is_and_every_other_setting_raises() -> None:
    for said in product([None, *RANKS], repeat=4):
        variables: Variables = {}
        for names, rank in zip(PAIRS, said, strict=True):
            variables |= {} if rank is None else pair(names, rank)
        for step in ({}, STEP) if said[3] else ({},):
            expected = LAUNCHES.get(frozenset((variables | step).items()))
            # without torch's own variables, torchrun's name means nothing
            for more in ({}, TORCHRUN) if said[0] is None else ({},):
                if expected is None:
                    with pytest.raises((ValueError, RuntimeError)):
                        launched(variables | step | more)
                else:
                    assert launched(variables | step | more).rank == expected
            if said[0]:
                assert launched(variables | step | TORCHRUN).rank == said[0]


def test_among_these_settings_are_launches_and_others() -> None:
    n_settings = (len(RANKS) + 1) ** 3 * (2 * len(RANKS) + 1)
    assert n_settings // 20 < len(LAUNCHES) < n_settings // 2


@pytest.mark.parametrize(
    ("variables", "source"),
    [
        (pair(HAND, Rank(1, 4)) | TORCHRUN, "torchrun or alike (RANK=1, WORLD_SIZE=4)"),
        (pair(OPEN_MPI, Rank(1, 4)), "Open MPI (OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=4)"),
        (pair(PMI, Rank(1, 4)), "MPICH or alike (PMI_RANK=1, PMI_SIZE=4)"),
        (slurm(Rank(1, 4)), "Slurm (SLURM_PROCID=1, SLURM_NTASKS=4)"),
        (slurm(Rank(0, 1)) | pair(PMI, Rank(1, 4)), "MPICH or alike (PMI_RANK=1, PMI_SIZE=4)"),
    ],
)
def test_the_source_names_the_launcher_that_was_taken_and_its_variables(variables: Variables, source: str) -> None:
    assert launched(variables).source == source


def test_the_environment_of_this_process_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (pair(HAND, Rank(1, 4)) | TORCHRUN).items():
        monkeypatch.setenv(name, value)
    placement = resolve("env")
    assert placement.rank == Rank(1, 4)
    assert (placement.framework, placement.processes) == (None, None)


def test_of_torchrun_only_what_started_torchrun_itself_may_say_something_else() -> None:
    # one torchrun in each task of a step, or all within one task; but not what a rank of torchrun has started
    within = pair(HAND, Rank(1, 4)) | TORCHRUN | {"GROUP_WORLD_SIZE": "2"}
    for outer in (Rank(0, 1), Rank(0, 2), Rank(1, 2)):
        assert launched(within | slurm(outer)).rank == launched(within | pair(OPEN_MPI, outer)).rank == Rank(1, 4)
    for outer in (Rank(0, 3), Rank(3, 4)):
        for others in (slurm(outer), pair(OPEN_MPI, outer)):
            with pytest.raises(
                ValueError, match=r"contradict each other: torchrun or alike \(RANK=1, WORLD_SIZE=4\), "
            ):
                launched(within | others)


def _spawned(variables: Variables) -> tuple[int, int] | str:
    """What a process that multiprocessing has started takes itself for."""
    os.environ.update(variables)
    try:
        rank = resolve("env").rank
    except RuntimeError as error:
        return str(error)
    return rank.rank, rank.world_size


def test_a_process_that_multiprocessing_has_started_is_not_the_task_of_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in HAND:
        monkeypatch.delenv(name, raising=False)
    for name, value in (slurm(Rank(0, 1)) | pair(PMI, Rank(0, 1))).items():
        monkeypatch.setenv(name, value)
    assert resolve("env").rank == Rank(0, 1)
    with get_context("spawn").Pool(1) as pool:
        said = pool.apply_async(_spawned, [{}]).get(60)
        assert isinstance(said, str)
        assert "needs RANK and WORLD_SIZE of its own" in said
        assert pool.apply_async(_spawned, [pair(HAND, Rank(1, 2))]).get(60) == (1, 2)


def test_what_a_batch_script_exports_to_all_tasks_raises_in_every_task_but_the_one_it_is_true_of() -> None:
    exported = pair(HAND, Rank(0, 4)) | {"LOCAL_WORLD_SIZE": "4"}
    assert launched(exported | slurm(Rank(0, 4))).rank == Rank(0, 4)
    for rank in (1, 2, 3):
        with pytest.raises(ValueError, match=rf"RANK=0, WORLD_SIZE=4.*SLURM_PROCID={rank}, SLURM_NTASKS=4.*Unset"):
            launched(exported | slurm(Rank(rank, 4)))


@pytest.mark.parametrize("step", SPECIAL_STEPS)
@pytest.mark.parametrize("others", [{}, {"SLURM_STEP_NUM_TASKS": "1"}])
def test_slurms_own_steps_are_no_tasks_and_the_error_says_to_use_srun(step: str, others: Variables) -> None:
    variables = {"SLURM_STEP_ID": step, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"} | others
    with pytest.raises(RuntimeError, match="start the script with srun"):
        launched(variables)
    assert launched(variables | pair(OPEN_MPI, Rank(1, 2))).rank == Rank(1, 2)


def test_the_last_step_that_srun_can_begin_is_a_task() -> None:
    assert launched(pair(SLURM, Rank(1, 2)) | {"SLURM_STEP_ID": "4294967280"}).rank == Rank(1, 2)


@pytest.mark.parametrize("variables", [{"SLURM_JOB_ID": "3"}, {"SLURM_NTASKS": "2"}, pair(SLURM, Rank(0, 2))])
def test_a_batch_script_is_told_its_variables_and_to_use_srun(variables: Variables) -> None:
    with pytest.raises(RuntimeError, match=r"no SLURM_STEP_ID.*start the script with srun") as raised:
        launched(variables)
    assert all(f"{name}={value}" in str(raised.value) for name, value in variables.items())


def test_a_batch_script_that_has_inherited_a_step_is_no_task_of_it() -> None:
    inherited = STEP | {"SLURM_STEP_NUM_TASKS": "1"}
    with pytest.raises(ValueError, match=r"SLURM_NTASKS=4, SLURM_STEP_NUM_TASKS=1.*with srun"):
        launched(inherited | pair(SLURM, Rank(0, 4)))


@pytest.mark.parametrize("variables", [{}, STEP, TORCHRUN, {"LOCAL_RANK": "0", "HOME": "/"}])
def test_outside_of_any_job_the_error_lists_what_was_looked_for_and_how_to_start_one(variables: Variables) -> None:
    with pytest.raises(RuntimeError, match="the variables of no launcher") as raised:
        launched(variables)
    assert "start the script with srun" not in str(raised.value)
    for text in (*HAND, *OPEN_MPI, *PMI, *SLURM, "torchrun", "mpirun", "mpiexec", "srun", "dist_info=Rank(0, 1)"):
        assert text in str(raised.value)


@pytest.mark.parametrize("names", PAIRS, ids=["torchrun", "open mpi", "pmi", "slurm"])
@pytest.mark.parametrize("which", [0, 1])
def test_one_variable_of_two_is_an_error_that_names_both(names: tuple[str, str], which: int) -> None:
    with pytest.raises(ValueError, match=rf"{names[which]}=0\b|no {names[which]}") as raised:
        launched(STEP | {names[which]: "0"})
    assert f"no {names[1 - which]}" in str(raised.value)


@pytest.mark.parametrize("names", PAIRS, ids=["torchrun", "open mpi", "pmi", "slurm"])
@pytest.mark.parametrize(
    ("rank", "world_size"),
    [
        *[(bad, "2") for bad in ("", " 1", "-1", "1.0", "1_0", "\u0660", "1" * 5000)],
        *[("0", "0"), ("0", "two"), ("2", "2"), ("", "")],
    ],
)
def test_what_is_no_rank_of_a_job_is_an_error_that_shows_it_even_to_ranks_within(
    names: tuple[str, str], rank: str, world_size: str
) -> None:
    variables = STEP | {names[0]: rank, names[1]: world_size}
    for all_variables in (variables, pair(HAND, Rank(1, 4)) | variables):
        with pytest.raises(ValueError, match="the first below the second") as raised:
            launched(all_variables)
        assert f"{names[0]}={shlex.quote(rank)}, {names[1]}={shlex.quote(world_size)}" in str(raised.value)
    if names != HAND:
        assert launched(variables | pair(HAND, Rank(1, 4)) | TORCHRUN).rank == Rank(1, 4)


values = st.integers(0, 4).map(str) | st.sampled_from(["", "-1", "x", "2.0"])
settings = st.fixed_dictionaries(
    {},
    optional={name: values for names in PAIRS for name in names}
    | {
        "SLURM_STEP_ID": st.sampled_from(["0", "3", *SPECIAL_STEPS]),
        "SLURM_STEP_NUM_TASKS": values,
        "SLURM_JOB_ID": values,
        "TORCHELASTIC_RUN_ID": values,
        "LOCAL_WORLD_SIZE": values,
    },
)


@given(settings)
@example({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"})
def test_any_setting_gives_the_innermost_launchers_rank_or_an_error_that_shows_it(variables: Variables) -> None:
    in_a_step = variables.get("SLURM_STEP_ID") in {"0", "3"}
    speaking = [names for names in PAIRS if set(names) & set(variables) and (names != SLURM or in_a_step)]
    if not speaking:
        with pytest.raises(RuntimeError):
            launched(variables)
        return
    try:
        rank = launched(variables).rank
    except ValueError as error:
        message = str(error)
    else:
        assert (str(rank.rank), str(rank.world_size)) == tuple(variables[name] for name in speaking[0])
        return
    assert any(f"{name}={shlex.quote(value)}" in message for name, value in variables.items())
