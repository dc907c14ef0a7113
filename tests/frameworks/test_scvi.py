"""scvi-tools on two ranks and on one, with its data module of annbatch's loaders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import zarr

from tests.processes.configurations import N_OBS
from tests.processes.launch import forked_ranks, run
from tests.processes.results import read_results
from tests.samplers import flat

if TYPE_CHECKING:
    from pathlib import Path


# the split of scvi-tools: the first rows are held out
N_TRAIN = 278
HELD_OUT, TRAINING = list(range(N_OBS - N_TRAIN)), list(range(N_OBS - N_TRAIN, N_OBS))
BATCH_SIZE = 8


@pytest.fixture(scope="module")
def folder(collection: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the results of each rank of a job."""
    results = tmp_path_factory.mktemp("scvi")
    run(*forked_ranks("-m", "tests.frameworks.job_scvi", collection, results, ranks=2))
    return results


def test_scvi_example_embeds_every_cell(collection: Path, tmp_path: Path) -> None:
    """The example saves checkpoints, and embeds every cell."""
    job = "examples/scvi_ddp.py", "--collection", collection, "--epochs", 2, "--checkpoints", tmp_path, "--every", 2
    done, _ = run(*forked_ranks(*job, ranks=2))
    # 311 rows to train on: 2 batches of up to 128 for each of two ranks
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["step-2.ckpt", "step-4.ckpt"]
    assert f"2 epochs; 10 latent dimensions for each of {N_OBS} cells" in done.stdout
    latent = zarr.open_array(tmp_path / "latent.zarr", mode="r")[:]
    assert latent.shape == (N_OBS, 10)
    assert not np.isnan(latent).any()


def test_scvi_ranks_train_on_shards(folder: Path) -> None:
    """Ranks train on their shards, and validate on each held-out row once."""
    ranks = [one["SCVI"] for one in read_results(folder)]
    epochs = []
    for epoch in "012":
        trained = [rank["train"][epoch] for rank in ranks]
        assert [len(batches) for batches in trained] == [-(-N_TRAIN // (2 * BATCH_SIZE))] * 2
        epochs.append(flat(flat(trained)))
        assert sorted(epochs[-1]) == TRAINING
        validated = [rank["validation"][epoch] for rank in ranks]
        assert sorted(flat(flat(validated))) == HELD_OUT
        assert len(validated[0]) == len(validated[1])
    assert epochs[0] != epochs[1] != epochs[2]
    assert ranks[0]["weights"] == ranks[1]["weights"]


def test_scvi_resumes_within_epoch_bitwise(folder: Path) -> None:
    """A job resumes in the middle of an epoch, bit for bit."""
    for rank in read_results(folder):
        whole, rest = rank["SCVI"], rank["resumed"]
        # 18 batches an epoch, of which 4 of the second are done
        assert rest["train"] == {"1": whole["train"]["1"][4:], "2": whole["train"]["2"]}
        assert rest["validation"] == {epoch: whole["validation"][epoch] for epoch in "12"}
        assert rest["weights"] == whole["weights"]


def test_scanvi_trains_on_every_row_under_exact(folder: Path) -> None:
    """Under "exact", SCANVI trains on every row, with the same number of batches per rank."""
    ranks = [one["SCANVI"] for one in read_results(folder)]
    trained = [rank["train"]["0"] for rank in ranks]
    assert sorted(flat(flat(trained))) == TRAINING
    assert len(trained[0]) == len(trained[1])
    assert sorted(flat([flat(rank["validation"]["0"]) for rank in ranks])) == HELD_OUT


def test_classes_are_sampled_for_whole_job(folder: Path) -> None:
    ranks = read_results(folder)
    assert all("independent" in rank["sharding"] for rank in ranks)
    sampled = [flat(rank["classes"]["train"]["0"]) for rank in ranks]
    assert set(flat(sampled)) <= set(TRAINING)
    # together, the ranks sample as many rows as a single rank
    assert len(sampled[0]) == len(sampled[1]) == N_TRAIN // 2
    assert sampled[0] != sampled[1]


def test_embedding_uses_weights_of_rank_zero(folder: Path) -> None:
    """All ranks embed with the weights of rank 0."""
    first, second = (rank["weights"] for rank in read_results(folder))
    assert first != second
    on_two, alone = (zarr.open_array(folder / f"{name}.zarr", mode="r")[:] for name in ("trained", "alone"))
    assert np.array_equal(on_two, alone)


def test_embedding_is_complete_with_slow_rank(folder: Path) -> None:
    """An embedding is complete, even if one rank is slower."""
    assert all(rank["complete"] for rank in read_results(folder))


def test_rest_of_embedding_is_repartitioned(folder: Path) -> None:
    """The remaining chunks of an embedding are divided among the ranks again."""
    # of 9 chunks of 5 batches, the even ones of rank 0 are complete; each rank also computes the first batch
    assert [rank["computed"] for rank in read_results(folder)] == [1 + 10, 1 + 10]


def test_embedding_with_different_ranks_raises_everywhere(folder: Path) -> None:
    """If ranks would write or read different cells, every rank raises the same error."""
    first, second = (rank["errors"] for rank in read_results(folder))
    assert first == second
    assert first[0].startswith("All ranks stop, because they differ: process 0 has")
    assert first[1] == "All ranks stop, because process 0 has failed: ZeroDivisionError: division by zero"
    assert first[2].startswith("All ranks stop, because process 1 has failed: TypeError: data must be an annbatch")
    assert first[3].startswith("All ranks stop, because process 1 has failed: ValueError: batch_size must be")
    assert first[4].startswith(
        "All ranks stop, because process 1 has failed: RuntimeError: Error(s) in loading state_dict"
    )
    assert "seed: 0 on rank 0; 1 on rank 1" in first[5]
