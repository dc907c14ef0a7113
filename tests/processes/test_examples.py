"""The examples, run as in their docstrings: their output, and the rows that each rank read."""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections import Counter
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from annbatch import DatasetCollection
from scipy.stats import chisquare

from tests.object_storage import serving
from tests.processes.configurations import LABELED
from tests.processes.launch import ROOT, forked, forked_ranks, free_port, run
from tests.processes.rows import BATCH_SIZE, check_reads_everything, read
from tests.samplers import flat


def test_jax_example_trains_on_disjoint_rows(collection: Path, tmp_path: Path) -> None:
    """Processes train on disjoint rows, in batches that span all devices."""
    script = "-m", "tests.processes.logging_rows", tmp_path, "examples/jax_jit.py", "--collection", collection
    job = "--label", "label", "--num-processes", 2, "--coordinator", f"127.0.0.1:{free_port()}", "--epochs", 2
    first, _ = run(*(forked(*script, *job, "--process-id", process) for process in range(2)))

    check_reads_everything(tmp_path, epochs=2, among=LABELED, drops=True)
    assert set(flat(read(tmp_path, "train-0"))) != set(flat(read(tmp_path, "train-1")))
    assert f"batches of {2 * BATCH_SIZE} on 4 devices" in first.stdout
    assert "epoch 1: 2 ranks have read 320 rows in 10 batches, as planned" in first.stdout


@pytest.fixture(scope="module")
def of_page(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder and output of the script that the page about two ranks runs."""
    folder = tmp_path_factory.mktemp("page") / "job"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    (done,) = run(["examples/from_h5ad/run.sh", str(folder)], environments=[{"PATH": path}])
    return folder, done.stdout


def test_h5ad_example_prints_output_of_page(of_page: tuple[Path, str]) -> None:
    """A job that is killed twice and ends on three ranks prints the output of the page."""
    folder, stdout = of_page
    output = stdout.splitlines()
    page = (ROOT / "docs/two-ranks.md").read_text()
    (block,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    shown = block.splitlines()  # of the job; the lines of collect come before
    # other processors round differently, so one more cell may be right
    percent = re.compile(r"[\d.]+%")
    assert [percent.sub("", line) for line in output[-len(shown) :]] == [percent.sub("", line) for line in shown]
    (first, last) = (float(share) for share in re.findall(r"([\d.]+)% of", stdout))
    assert min(first, last) > 90

    # the rows after the checkpoint at step 60, and all rows of an epoch
    obs = DatasetCollection(folder / "cells.zarr", mode="r").obs(["donor"])
    n_rows = int((~obs["donor"].isin(["d09", "d10"])).sum())
    assert f"3 ranks have read {n_rows - 60 * 2 * 32:,} rows" in stdout
    assert f"3 ranks have read {n_rows:,} rows" in stdout
    assert f"of {len(obs) - n_rows:,} held-out cells" in stdout


def test_checkpoint_of_a_newer_job_is_not_overwritten(tmp_path: Path) -> None:
    save = runpy.run_path(str(ROOT / "examples/from_h5ad/train.py"))["save"]
    checkpoint, layer = tmp_path / "last.pt", torch.nn.Linear(1, 1)
    (tmp_path / "last.job").write_text("newer")
    with pytest.raises(RuntimeError, match=r"newer job"):
        save(checkpoint, {"model": layer}, "older")
    assert not checkpoint.exists()
    save(checkpoint, {"model": layer}, "newer")
    assert torch.load(checkpoint, weights_only=True)["model"].keys() == layer.state_dict().keys()


def test_readme_script_prints_its_output(of_page: tuple[Path, str], tmp_path: Path) -> None:
    """The script prints a line like that of the README in each epoch."""
    cells, readme = of_page[0] / "cells.zarr", (ROOT / "README.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert script.count('"cells.zarr"') == 1
    (tmp_path / "train.py").write_text(script.replace('"cells.zarr"', repr(str(cells))))
    done, _ = run(*forked_ranks(tmp_path / "train.py", ranks=2))
    (shown,) = re.findall(r"train.py\n((?:epoch .*\n)+)", readme)
    n_rows = len(DatasetCollection(cells, mode="r").obs(["donor"]))
    shown = re.sub(r"\d+ batches", "N batches", shown.replace("20,000", f"{n_rows:,}"))
    lines = [re.sub(r"\d+ batches", "N batches", line) for line in done.stdout.splitlines()]
    assert lines == shown.splitlines()


def test_mixture_example_logs_each_step_once(tmp_path: Path) -> None:
    """The log has the sources that the job printed, each step once, and no epoch of a source has a cell twice."""
    # as if a job had been killed after a log and before its checkpoint: the next one replaces the log
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "epoch0-step000020.csv").write_text("epoch,step,source,rank,cell\n0,20,tahoe,0,cell 0\n")
    options = "--epochs", 2, "--n-steps", 40
    done, _ = run(*forked_ranks("examples/mixture_ddp.py", tmp_path, *options, ranks=2))

    lines = done.stdout.splitlines()
    sources = [name for line in lines if line.startswith("steps ") for name in line.partition(": ")[2].split()]
    assert len(sources) == 80
    log = pd.concat(map(pd.read_csv, sorted((tmp_path / "cells").iterdir())), ignore_index=True)
    # the sources and ranks of all steps: tahoe 0, tahoe 1 in a step of two ranks
    batches = log[["epoch", "step", "source", "rank"]].drop_duplicates()
    expected = [(source, rank) for source in sources for rank in range(2)]
    assert [*zip(batches["source"], batches["rank"], strict=True)] == expected
    for source, n_cells in (("tahoe", 2_000), ("census", 700)):
        names = log.loc[log["source"] == source, "cell"].tolist()
        assert len(names) // n_cells == 1
        # epochs of the source are consecutive, and no epoch has a cell twice
        epochs = [names[start : start + n_cells] for start in range(0, len(names), n_cells)]
        assert [len({*epoch}) for epoch in epochs] == [len(epoch) for epoch in epochs]
    for source, n_cells, n_batches in (("tahoe", 2_000, 64), ("census", 700, 22)):
        planned = f"2 ranks have read {n_cells:,} rows in {n_batches} batches, as planned"
        assert f"{source}, epoch 0: {planned}. Each of the {n_cells:,} rows was read once" in lines


def test_multiome_example_aligns_proteins(tmp_path: Path) -> None:
    """Each cell of an epoch is read once, with its RNA and its proteins."""
    done, _ = run(*forked_ranks("examples/multiome_ddp.py", tmp_path / "job", ranks=2))
    *lines, last = done.stdout.splitlines()
    error = "squared error on rank 0: "
    read = "2 ranks have read 3,000 rows in 94 batches, as planned. Each of the 3,000 rows was read once"
    assert [error if line.startswith(error) else line for line in lines] == [
        "epoch 0 from step 0, world size 2",
        f"epoch 0: {read}",
        error,
        "epoch 1 from step 0, world size 2",
        f"epoch 1: {read}",
    ]
    # the variance of the proteins is 1: given the RNA of wrong cells, no model has a smaller error
    assert float(last.removeprefix(error)) < 0.05


def test_sets_example_matches_controls(tmp_path: Path) -> None:
    """Each treated cell is in one set of an epoch, with as many controls of its line."""
    done, _ = run(*forked_ranks("examples/perturbation_sets.py", tmp_path, ranks=2))

    cells = pd.concat(map(pd.read_csv, sorted((tmp_path / "cells").iterdir())), ignore_index=True)
    obs = DatasetCollection(tmp_path / "cells.zarr", mode="r").obs(["line", "drug"])
    treated = sorted(obs.index[obs["drug"] != "DMSO"])
    for _, own in cells.groupby("epoch"):
        assert {*own.groupby("step")["rank"].nunique()} == {2}
        assert sorted(own.loc[~own["is_control"], "cell"]) == treated
        for _, one in own.groupby(["step", "rank", "set"]):
            controls = one[one["is_control"]]
            assert len(controls) == len(one) - len(controls) <= 16
            assert set(controls["drug"]) == {"DMSO"}
            assert one["line"].nunique() == one.loc[~one["is_control"], "drug"].nunique() == 1
    assert cells["epoch"].unique().tolist() == [0, 1, 2, 3]

    lines = done.stdout.splitlines()
    assert lines[0] == "epoch 0 from step 0, world size 2"
    assert lines[1].endswith("Each of the 109 sets was read once")
    # a set of 16 cells has an error of about 0.05, whatever the model
    assert float(lines[-1].removeprefix("squared error on rank 0: ")) < 0.15


def test_object_storage_example_reads_every_cell(tmp_path: Path) -> None:
    """Two ranks read each cell of a bucket once, and save a checkpoint."""
    n_rows, checkpoint = 2_000, tmp_path / "last.pt"
    obs = pd.DataFrame(index=[f"cell {number}" for number in range(n_rows)])
    ad.AnnData(np.ones((n_rows, 5), dtype="float32"), obs=obs).write_h5ad(tmp_path / "cells.h5ad")
    DatasetCollection(tmp_path / "cells.zarr").add_adatas([tmp_path / "cells.h5ad"])
    with serving() as server:
        server.put(tmp_path / "cells.zarr", "atlas", "cells.zarr")
        script = "examples/object_storage.py", "s3://atlas/cells.zarr", "--checkpoint", checkpoint, "--epochs", 1
        done, _ = run(*forked_ranks(*script, ranks=2), environments=[server.environment] * 2)
    first, read = done.stdout.splitlines()
    assert first == "epoch 0 from step 0 of 16"
    assert read.endswith(f"Each of the {n_rows:,} rows was read once")
    assert torch.load(checkpoint, weights_only=True)["loader"]["segments"] == [[2, 1, 10]]


def test_class_weights_example_samples_by_weight(tmp_path: Path) -> None:
    """Classes are sampled by their weights, from h5ad files of donors."""
    # shuffled cells, some without a label; a type with cells of only one donor, and a type with too few cells
    types = np.repeat(np.array(["B cell", "NK cell", "T cell", "platelet", None]), [400, 30, 900, 7, 63])
    rng = np.random.default_rng(0)
    rng.shuffle(types)
    donors = np.where(types == "NK cell", 1, rng.integers(4, size=len(types)))
    for donor in range(4):
        obs = pd.DataFrame({"cell_type": pd.Categorical(types[donors == donor])})
        counts = rng.poisson(1, size=(len(obs), 9))
        ad.AnnData(counts, obs=obs.set_index(f"d{donor}-" + obs.index.astype(str))).write_h5ad(
            tmp_path / f"d{donor}.h5ad"
        )
    cells, n_samples = tmp_path / "cells.zarr", 64_000
    script = "examples/class_weights.py", cells
    files = sorted(tmp_path.glob("*.h5ad"))
    run(forked("-m", "annbatch_distributed", "collect", *files, "--out", cells, "--group-by", "cell_type"))
    logged = "-m", "tests.processes.logging_rows", tmp_path, *script, "--num-samples", n_samples
    first, _ = run(*forked_ranks(*logged, ranks=2))

    labels = DatasetCollection(cells, mode="r").obs(["cell_type"])["cell_type"].to_numpy()
    by_rank = read(tmp_path, "train-0")
    assert [len(rows) for rows in by_rank] == [n_samples // 2] * 2
    assert by_rank[0] != by_rank[1]
    weights = np.sqrt([400, 30, 900])
    for rows in by_rank:
        n_by_type = Counter(labels[rows])
        assert n_by_type.keys() == {"B cell", "NK cell", "T cell"}
        # samples are chunks of 16 cells of one type
        n_chunks = np.array([n_by_type["B cell"], n_by_type["NK cell"], n_by_type["T cell"]]) / 16
        assert is_sampled_by(weights, n_chunks)
        assert not is_sampled_by(np.ones(3), n_chunks)  # as without weights
        assert not is_sampled_by(weights**2, n_chunks)  # as in the data

    lines = first.stdout.splitlines()
    assert lines[0] == "cells that aren't sampled: {nan: 63, 'platelet': 7}"
    assert lines[-1] == "2 ranks sampled 64,000 cells"


def is_sampled_by(weights: np.ndarray, counts: np.ndarray) -> bool:
    """Return True if counts fit samples with these weights, except in one of a million cases."""
    return bool(chisquare(counts, counts.sum() * weights / weights.sum()).pvalue > 1e-6)


# what is wrong with a command, and what the one line about it says
REFUSED = {
    "torchrun_ddp.py --collection . --hold-out d1": "torchrun --standalone --nproc-per-node 2 examples/torchrun_ddp.py",
    "torchrun_ddp.py --epochs 0": "--epochs: must be 1 or more, got 0",
    "class_weights.py cells.zarr": "torchrun --standalone --nproc-per-node 2 examples/class_weights.py",
    "accelerate_ddp.py --collection .": "torchrun --standalone --nproc-per-node 2 examples/accelerate_ddp.py",
    "custom_ranks.py --ranks env . sums": "needs the variables of a launcher",
    "jax_jit.py --collection . --num-processes 2 --coordinator 127.0.0.1:9 --process-id 2": "must be from 0 to 1",
    "lightning_ddp.py --collection .": "required: --hold-out",
    "mixture_ddp.py job": "torchrun --standalone --nproc-per-node 2 mixture_ddp.py job/",
    "perturbation_sets.py job": "torchrun --standalone --nproc-per-node 2 perturbation_sets.py job/",
    "multiome_ddp.py job": "torchrun --standalone --nproc-per-node 2 multiome_ddp.py job/",
    "scvi_ddp.py --collection .": "torchrun --standalone --nproc-per-node=2 examples/scvi_ddp.py",
    "from_h5ad/train.py --collection . --checkpoint last.pt --hold-out d1": "--nproc-per-node 2 train.py ...",
    "from_h5ad/train.py --collection none.zarr --checkpoint last.pt": "--collection: 'none.zarr' doesn't exist",
    "stop_at_nan.py cells.zarr": "torchrun --standalone --nproc-per-node 2 examples/stop_at_nan.py",
    "ray_train.py --workers 0": "--workers: must be 1 or more, got 0",
}


@pytest.mark.parametrize("command", REFUSED)
def test_example_with_wrong_arguments_exits_with_2(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An example that is started wrongly prints one line and exits with code 2."""
    name, *options = command.split()
    monkeypatch.setattr(sys, "argv", [name, *options])
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(SystemExit) as ended:  # before it has started or changed anything
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert ended.value.code == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{Path(name).name}: error: ")
    assert REFUSED[command] in line


def test_examples_and_pages_load_nothing_but_weights() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.py")]
    calls = [call for page in pages for call in re.findall(r"torch\.load\((?:[^()]|\([^()]*\))*\)", page.read_text())]
    assert len(calls) >= 2
    assert [call for call in calls if "weights_only=True" not in call] == []
