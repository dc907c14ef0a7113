"""Ranks that check each other: whatever one of three has that the others don't, all hear the same of it, at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.processes.disagreements import N_OBS, ODD_READINGS, ODD_SAMPLERS, Heard, Told
from tests.processes.launch import forked, forked_ranks, free_port, run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(500)

#: No job takes nearly as long; a rank that waits for another hears a TimeoutError instead of what is expected.
SECONDS = 200
MEETINGS = ["torch", "jax", "gather"]

#: By what one rank has that the others don't: what is said of it.
SAID = {
    "seed": "seed: 0 on ranks 0 and 2; 1 on rank 1",
    "mask": "mask: 0: on ranks 0 and 2; 0:190 on rank 1",
    "batch_size": "batch_size: 4 on ranks 0 and 2; 8 on rank 1",
    "remainder": "remainder: drop on ranks 0 and 2; exact on rank 1",
    "sharding": "sharding: Shuffled(block_size=4) on ranks 0 and 2; Shuffled(block_size=5) on rank 1",
    "sampler": "in_memory_size=16, num_samples=None, preload_nchunks=4, replacement=False, shuffle=True) on rank 1",
    "epoch": "epoch: 0 on ranks 0 and 2; 3 on rank 1",
    "batches done": "batches done: none on ranks 0 and 2; 2 on 3 ranks on rank 1",
    "passes since set_epoch": "passes since set_epoch: 0 on ranks 0 and 2; 1 on rank 1",
    "world size": "world size: 3 on ranks 0 and 2; 4 on rank 1",
    "rank": "rank 0 is that of processes 0 and 1\n  rank 1 is that of no process\n",
    "a configuration that can't run": "ValueError: The window has 2 rows, too few for one full batch on every rank",
    "call": " (process 1)\nAll of them must make the same calls in the same order.",
    "n_obs": "n_obs: 200 on ranks 0 and 2; 199 on rank 1",
    "version of annbatch": "version of annbatch: even on ranks 0 and 2; odd on rank 1",
    "a batch left out": "rank 1 has read 64 rows in 16 batches, not 67 rows in 17 batches",
    "a batch read twice": "rank 1 has read 71 rows in 18 batches, not 67 rows in 17 batches",
    "a row read in place of another": "rank 1 has read 67 rows in 17 batches as planned, but other rows",
    "batches of other sizes": "rank 1 has read 67 rows in 1 batch, not 67 rows in 17 batches",
    "no pass begun": "no pass was begun since the epoch was set or a state loaded; check before set_epoch (rank 1)",
}


@pytest.fixture(scope="module")
def torch_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what each rank of a torch job told."""
    results = tmp_path_factory.mktemp("results")
    for meeting in ("torch", "gather"):
        (results / meeting).mkdir()
    run(*forked_ranks("-m", "tests.processes.job_agreement_torch", results, ranks=3), seconds=SECONDS)
    return results


@pytest.fixture(scope="module")
def torch(torch_folder: Path) -> list[Told]:
    """What each rank told that met in the store of torch's processes."""
    return [Told.read(path) for path in sorted((torch_folder / "torch").iterdir())]


@pytest.fixture(scope="module")
def gather(torch_folder: Path) -> list[Told]:
    """What each rank told whose texts were gathered by a function of the user's."""
    return [Told.read(path) for path in sorted((torch_folder / "gather").iterdir())]


@pytest.fixture(scope="module")
def jax(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    """What each JAX process told."""
    results = tmp_path_factory.mktemp("results")
    job = "-m", "tests.processes.job_agreement_jax", results, f"127.0.0.1:{free_port()}", 3
    run(*(forked(*job, process) for process in range(3)), seconds=SECONDS)
    return [Told.read(path) for path in sorted(results.iterdir())]


@pytest.fixture(params=MEETINGS)
def told(request: pytest.FixtureRequest) -> list[Told]:
    """What each rank of a job told."""
    ranks: list[Told] = request.getfixturevalue(request.param)
    assert [one.rank for one in ranks] == [0, 1, 2]
    return ranks


def test_everything_that_was_tried_is_looked_at_here() -> None:
    assert SAID.keys() | {"nothing", "all rows read"} == {
        *ODD_SAMPLERS,
        *ODD_READINGS,
        "call",
        "n_obs",
        "version of annbatch",
    }


@pytest.mark.parametrize("name", SAID)
def test_what_one_rank_has_that_the_others_do_not_is_the_same_error_on_all_of_them(told: list[Told], name: str) -> None:
    (message,) = {one.heard[name].message for one in told}
    assert {one.heard[name].kind for one in told} == {"ValueError"}
    assert SAID[name] in message


def test_ranks_that_are_alike_agree(told: list[Told]) -> None:
    assert all(one.heard["nothing"].kind == one.heard["nothing"].message == "" for one in told)


def test_ranks_that_have_read_the_plan_hear_that_they_have(told: list[Told]) -> None:
    rows = f"3 ranks have read {N_OBS} rows in 51 batches, as planned. Each of the {N_OBS} rows was read once"
    assert {one.heard["all rows read"].message for one in told} == {f"epoch 0: {rows}"}


@pytest.mark.parametrize("meeting", ["torch", "jax"])
def test_a_job_of_some_of_the_processes_needs_no_other(request: pytest.FixtureRequest, meeting: str) -> None:
    first, _, last = [one.heard for one in request.getfixturevalue(meeting)]
    assert first["nothing in a part"] == last["nothing in a part"] == Heard("", "")
    assert first["seed in a part"] == last["seed in a part"]
    assert "seed: 0 on rank 0; 2 on rank 1\n" in first["seed in a part"].message


@pytest.mark.parametrize("meeting", ["torch", "jax"])
def test_a_rank_that_never_comes_is_named_on_all_others(request: pytest.FixtureRequest, meeting: str) -> None:
    heard = [one.heard.get("a rank") for one in request.getfixturevalue(meeting)]
    assert heard[1] is None
    assert {one.kind for one in heard if one} == {"TimeoutError"}
    (message,) = {one.message for one in heard if one}
    assert message.startswith("The ranks can't be checked: of 3 processes, process 1 didn't come within 3 seconds.")


@pytest.mark.parametrize("meeting", ["torch", "jax"])
def test_a_rank_that_comes_too_late_is_named_to_itself_too_and_then_all_can_go_on(
    request: pytest.FixtureRequest, meeting: str
) -> None:
    told: list[Told] = request.getfixturevalue(meeting)
    (heard,) = {one.heard["a rank in time"] for one in told}
    assert heard.kind == "TimeoutError"
    assert "process 1 didn't come within 3 seconds." in heard.message
    assert {one.heard["nothing any more"].kind for one in told} == {""}
