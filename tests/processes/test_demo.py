"""The demo: training, its checks, and errors of one line."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from io import StringIO
from typing import TYPE_CHECKING
from unittest import mock

import anndata as ad
import numpy as np
import pandas as pd
import psutil
import pytest
import torch.distributed as dist
import typer
import zarr
from annbatch import DatasetCollection
from rich.console import Console
from torch._C._distributed_c10d import HashStore
from typer.testing import CliRunner

from demo.__main__ import demo
from demo.cells import PBMC_CELLS, PBMC_LABEL, check_collection, check_h5ad, pbmc, write_collection
from demo.job import Job
from demo.report import report, report_resume
from demo.train import run
from tests.processes.configurations import CLASSES
from tests.processes.launch import EARLY, ENVIRONMENT, ROOT, python

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from typer.testing import Result


def wait_for(condition: Callable[[], object]) -> bool:
    """Wait for a condition. Return True if it is met in time."""
    deadline = time.monotonic() + EARLY
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(result)


def runs(process: psutil.Process) -> bool:
    """Return True if a process has not ended yet."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def ports(processes: list[psutil.Process]) -> list[str]:
    """Return the addresses at which processes listen."""
    return [
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


def start(folder: Path, ranks: int) -> psutil.Popen:
    """Start a demo that doesn't end by itself, with its temporary files in a folder."""
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    folder.mkdir()
    with folder.with_suffix(".txt").open("wb") as output:
        return psutil.Popen(
            python("-m", "demo", "--cells", 30_000, "--epochs", 1_000, "--ranks", ranks),
            cwd=ROOT,
            env=environment | {"TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def test_demo_leaves_no_process_or_file(tmp_path: Path) -> None:
    """However the demo ends, it leaves nothing behind, and it listens on 127.0.0.1 only."""
    ends = {signal.SIGKILL: 2, signal.SIGTERM: 1}
    demos = {end: start(tmp_path / end.name, ranks) for end, ranks in ends.items()}
    started = [*demos.values()]
    try:
        for end, demo in demos.items():
            folder = tmp_path / end.name
            # rank 0 writes the cells, and the others wait for it
            assert wait_for(lambda: any(folder.glob("annbatch-distributed-*/collection.zarr")))  # noqa: B023 called now
            own = [demo, *demo.children(recursive=True)]
            started += own
            assert len(own) > ends[end]
            assert set(ports(own)) == {"127.0.0.1"}
            demo.send_signal(end)
            assert demo.wait(EARLY) != 0
            assert wait_for(lambda: not any(map(runs, own)))  # noqa: B023 called now
            # torch keeps a cache for all processes of a user
            left = {"torchinductor"}
            assert wait_for(lambda: {path.name.partition("_")[0] for path in folder.iterdir()} <= left)  # noqa: B023 called now
    finally:
        for process in filter(runs, started):
            process.kill()
        for demo in demos.values():
            demo.wait()


def train(job: Job, ranks: int) -> bool:
    """Train on one rank, in this process."""
    assert ranks == 1
    with mock.patch.dict(os.environ, ENVIRONMENT):
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        run(job)
    finally:
        dist.destroy_process_group()
    return True


def test_demo_learns_on_collection_and_virtual_ranks(tmp_path: Path) -> None:
    """The demo learns cell types on virtual ranks, from a collection that it doesn't change."""
    cells = tmp_path / "cells.zarr"
    write_collection(Job(str(cells), str(pbmc()), PBMC_CELLS, PBMC_LABEL, epochs=2, results=""))
    before = {path: path.stat().st_mtime_ns for path in cells.rglob("*")}
    done = ask("--collection", str(cells), "--ranks", "1", "--virtual-ranks", "4", "--epochs", "2", torchrun=train)

    assert done.exit_code == 0
    assert done.stdout.startswith("700 cells: 560 to train on, 140 held out; 1 Gloo rank with 4 virtual ranks\n")
    assert done.stdout.count("✓") == 5
    assert "cells/s" in done.stdout
    accuracies = [float(percent) for percent in re.findall(r"([\d.]+)%", done.stdout)]
    assert len(accuracies) == 2
    assert accuracies[-1] > 60  # the most frequent of the ten labels makes up 34%
    assert not re.search("Warning|Traceback", done.stderr)
    assert before == {path: path.stat().st_mtime_ns for path in cells.rglob("*")}


def test_demo_ends_without_report_if_training_fails() -> None:
    """The demo says what it trains on, and exits with code 1 if torchrun fails."""
    done = ask("--epochs", "2")
    assert done.stdout == "700 cells: 560 to train on, 140 held out; 2 Gloo ranks\n"
    assert done.exit_code == 1


def test_demo_simulates_sparse_labeled_cells(tmp_path: Path) -> None:
    """The demo simulates the given number of sparse cells with labels."""
    written = tmp_path / "cells.zarr"
    write_collection(Job(collection=str(written), h5ad=None, n_obs=1_234, label="type", epochs=1, results=""))

    assert check_collection(written, "type") == 1_234
    assert set(DatasetCollection(written, mode="r").obs()["type"]) == {f"type {code}" for code in range(10)}
    assert zarr.open_group(written)["dataset_0/X"].attrs["encoding-type"] == "csr_matrix"


def test_demo_reads_sparse_file_with_string_labels(collection: Path, tmp_path: Path) -> None:
    """A file with a sparse matrix and string labels becomes a collection."""
    file = collection.with_suffix(".h5ad")
    n_obs = check_h5ad(file, "cell_type")
    written = tmp_path / "cells.zarr"
    write_collection(Job(collection=str(written), h5ad=str(file), n_obs=n_obs, label="cell_type", epochs=1, results=""))

    assert check_collection(written, "cell_type") == n_obs
    labels = DatasetCollection(written, mode="r").obs()["cell_type"]
    assert Counter(labels) == Counter(CLASSES.astype(str).tolist())
    assert labels.tolist() != CLASSES.astype(str).tolist()  # the rows are shuffled


UNUSABLE = {
    "a file that isn't there": (["--h5ad", "{folder}/none.h5ad"], "none.h5ad: no such file"),
    "a file that isn't h5ad": (["--h5ad", __file__], "must be an h5ad file"),
    "a file without a matrix": (["--h5ad", "{folder}/no-matrix.h5ad"], "with a matrix X"),
    "a file without genes": (["--h5ad", "{folder}/no-genes.h5ad"], "40 cells and 0 genes"),
    "a column that isn't there": (
        ["--label", "cell_tpye"],
        "no column 'cell_tpye'; pass --label with one of bulk_labels",
    ),
    "a column of floats": (["--label", "n_counts"], "'n_counts' must hold labels"),
    "a collection that isn't there": (["--collection", "{folder}/none.zarr"], "none.zarr: no such folder"),
    "a folder without zarr": (["--collection", "{folder}"], "must be an annbatch collection"),
    "a zarr group that isn't a collection": (["--collection", "{folder}/group.zarr"], "not an annbatch collection"),
    "a collection with a broken dataset": (["--collection", "{damaged}"], "can't be read: JSONDecodeError"),
    "a collection without the column": (["--collection", "{collection}"], "no column 'bulk_labels'"),
    "too many ranks": (["--ranks", "36"], "700 cells are too few for 36 ranks"),
    "virtual ranks": (["--ranks", "3", "--virtual-ranks", "4"], "multiple of --ranks, 3, got 4"),
    "too many virtual ranks": (["--virtual-ranks", "36"], "700 cells are too few for 36 ranks"),
    "two sources": (["--cells", "100", "--h5ad", "{folder}/none.h5ad"], "pass only one"),
}


@pytest.fixture(scope="module")
def unusable(collection: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write files and folders, most of which the demo can't use."""
    folder = tmp_path_factory.mktemp("unusable")
    zarr.open_group(folder / "group.zarr", mode="w")
    shutil.copytree(collection, folder / "damaged.zarr")
    (folder / "damaged.zarr/dataset_0/zarr.json").write_text("{broken")
    obs = pd.DataFrame({"bulk_labels": ["a", "b"] * 20}, index=np.arange(40).astype(str))
    ad.AnnData(obs=obs).write_h5ad(folder / "no-matrix.h5ad")
    ad.AnnData(np.zeros((40, 0), np.float32), obs=obs).write_h5ad(folder / "no-genes.h5ad")
    return {"folder": folder, "damaged": folder / "damaged.zarr", "collection": collection}


def ask(*options: str, torchrun: Callable[..., bool] = lambda *_, **__: False) -> Result:
    """Run the demo with options in this process, and a function in the place of torchrun."""
    app = typer.Typer(add_completion=False)
    app.command()(demo)
    with mock.patch("demo.__main__._torchrun", torchrun):
        return CliRunner().invoke(app, options)


@pytest.mark.parametrize("what", UNUSABLE)
def test_demo_refuses_unusable_cells(unusable: dict[str, Path], what: str) -> None:
    """Cells that can't be trained on print one line to stderr, and exit with code 2."""
    options, problem = UNUSABLE[what]
    done = ask(*(option.format(**unusable) for option in options))
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit)  # any other exception would be a traceback
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("demo: ")
    assert re.search(problem, line)


@pytest.mark.parametrize("option", ["--cells", "--ranks", "--epochs"])
@pytest.mark.parametrize("number", ["0", "1.5", "9" * 20])
def test_demo_names_option_with_invalid_number(option: str, number: str) -> None:
    """An invalid number is refused with the name of its option."""
    done = ask(option, number)
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit)
    assert f"'{option}'" in done.stderr or f"too few for {number} ranks" in done.stderr


# rows of two ranks: 32 of 40 rows are for training, in batches of 16
TRAINED = [np.arange(16), np.arange(16, 32)]
VALIDATED = [np.arange(32, 36), np.arange(36, 40)]


@pytest.mark.parametrize(
    ("trained", "validated", "counted", "wrong"),
    [
        (TRAINED, VALIDATED, 8, []),
        ([TRAINED[0], TRAINED[0]], VALIDATED, 8, ["no row was read by two ranks"]),
        ([TRAINED[0], TRAINED[1] + 1], VALIDATED, 8, ["no held-out row was trained on"]),
        ([TRAINED[0], TRAINED[1][:15]], VALIDATED, 8, ["0 rows were dropped"]),
        (TRAINED, [VALIDATED[0], VALIDATED[1][1:]], 8, ["each of the 8 held-out cells was counted once"]),
        (TRAINED, VALIDATED, 9, ["each of the 8 held-out cells was counted once"]),
    ],
)
def test_demo_report_finds_wrong_rows(
    tmp_path: Path, trained: list[np.ndarray], validated: list[np.ndarray], counted: int, wrong: list[str]
) -> None:
    """The report finds rows that were read wrongly."""
    for rank, (training, validation) in enumerate(zip(trained, validated, strict=True)):
        np.savez(
            tmp_path / f"rank{rank}.npz",
            **{
                "training rows 0": training,
                "training batches 0": [len(training)],
                "validation rows 0": validation,
                "validation batches 0": [len(validation)],
            },
        )
    (tmp_path / "history.json").write_text(json.dumps([{"right": 4, "counted": counted, "seconds": 1.0}]))
    job = Job(collection="", h5ad=None, n_obs=40, label="", epochs=1, results=str(tmp_path))
    shown = StringIO()

    assert report(job, 2, Console(file=shown)) is (not wrong)

    failed = [line for line in shown.getvalue().splitlines() if line.startswith("✗")]
    assert all(text in line for text, line in zip(wrong, failed, strict=True))


@pytest.mark.parametrize("holds", [True, False])
def test_demo_reports_steps_before_and_after_kill(*, holds: bool, tmp_path: Path) -> None:
    """Steps after the checkpoint count for the ranks that resumed, and each row must have been read once."""
    # of 10 training rows, two ranks read 4 in step 0; they also ran step 1, which three ranks ran again
    for rank in range(3):
        steps = [{"step": 0, "rows": [2 * rank, 2 * rank + 1]}, {"step": 1, "rows": [4 + rank]}]
        if rank < 2:
            (tmp_path / f"2ranks-{rank}.jsonl").write_text("\n".join(map(json.dumps, steps)))
        own = [{"step": 1, "rows": [4 + rank]}, {"step": 2, "rows": [7 + rank - (rank == 2 and not holds)]}]
        (tmp_path / f"3ranks-{rank}.jsonl").write_text("\n".join(map(json.dumps, own)))
    shown = StringIO()
    job = Job(collection="", h5ad=None, n_obs=13, label="", epochs=1, results=str(tmp_path))
    assert report_resume(job, Console(file=shown, width=100)) is holds
    assert shown.getvalue() == (
        "  steps 0 to 0 on 2 ranks, 1 to 2 on 3 ranks\n"
        f"{'✓' if holds else '✗'} each of the 10 training cells of that epoch was read once\n"
    )
