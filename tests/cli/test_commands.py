"""The command line: what it prints, its exit codes, and that whatever is wrong is one line."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import zarr
from annbatch import DatasetCollection
from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from annbatch_distributed.cli import main
from annbatch_distributed.cli.check import interrupts_held
from tests.processes.configurations import N_OBS

if TYPE_CHECKING:
    from pathlib import Path

SMALL = "--chunk-size", "8", "--batch-size", "8"


def said(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """Run a command, and return what it prints: on stdout if all is right, else the line on stderr."""
    assert main(list(map(str, arguments))) == code
    out, err = capsys.readouterr()
    if not code:
        assert not err
        return out
    assert not out
    (line,) = err.splitlines()
    assert line.startswith("annbatch-distributed: ")
    return line


def planned(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    return json.loads(said(capsys, "plan", *arguments, "--json"))


def rows_of(ranges: list[list[int]]) -> list[int]:
    return [row for start, stop in ranges for row in range(start, stop)]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_output_is_printed_in_any_encoding(encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters that the encoding of the output lacks are escaped."""
    obs = pd.DataFrame({"type": pd.Categorical(["CD8 \u03b1\u03b2", "\u00e4"] * 8)}, index=list("abcdefghijklmnop"))
    ad.AnnData(np.ones((16, 2), "f4"), obs).write_h5ad(tmp_path / "a.h5ad")
    collection = tmp_path / "\u03b1.zarr"
    DatasetCollection(collection).add_adatas([tmp_path / "a.h5ad"])
    for column, name, code in (("type", "stdout", 0), ("\u03b1\u03b2", "stderr", 2)):
        written = io.BytesIO()
        stream = io.TextIOWrapper(written, encoding, write_through=True)
        with monkeypatch.context() as patched:
            patched.setattr(sys, name, stream)
            assert main(["plan", str(collection), "--ranks", "1", "--batch-size", "2", "--by", column]) == code
        text = written.getvalue().decode(encoding)
        assert ("\u03b1\u03b2" if encoding == "utf-8" else r"\u03b1\u03b2") in text


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_closed_output_stops_no_command(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command whose output nobody reads any more does its work, and ends with its exit code."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as stream, monkeypatch.context() as patched:
        patched.setattr(sys, name, stream)
        arguments = ["plan", "--n-obs", "1000000", "--plot", str(tmp_path / "plan.svg")]
        assert main(arguments) == 0
        assert main([*arguments, "--ranks", "0"]) == 2
        assert main([*arguments, "--epochs", "3"]) == 0
        with pytest.raises(SystemExit, match="0"):
            main(["--help"])
        print("more", file=stream)
    assert (tmp_path / "plan.svg").exists()


def test_a_plan_is_printed_as_python_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    sampler = DistributedSampler(RandomSampler(64, 32, 256), dist_info=Rank(0, 4), seed=0, remainder="drop")
    expected = str(sampler.plan(20_000)).replace('remainder="exact"', "--remainder exact")
    text = said(capsys, "plan", "--n-obs", 20_000, "--ranks", 4, "--remainder", "drop")
    assert text == expected.replace('remainder="drop"', "--remainder drop") + "\n"
    assert "to drop none: --remainder exact\n" in text


def test_commands_plan_what_from_collection_reads(collection: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without options, the commands have the defaults of `from_collection`."""
    loader = StatefulLoader.from_collection(collection, dist_info=Rank(0, 2))
    assert said(capsys, "plan", collection) == f"{loader.sampler.plan(loader.n_obs)}\n".replace(
        'remainder="exact"', "--remainder exact"
    )
    found = planned(capsys, collection)
    identity = loader.state_dict()["identity"]
    assert (found["remainder"], found["sharding"], found["seed"]) == (identity["remainder"], "contiguous", 0)
    sizes = {name: found[name] for name in ("chunk_size", "preload_nchunks", "batch_size")}
    assert sizes == {name: identity["sampler"][name] for name in sizes}
    small, large = (planned(capsys, collection, "--batch-size", 16, "--memory", size) for size in ("3kB", "1GB"))
    assert small["chunk_size"] * small["preload_nchunks"] < large["chunk_size"] * large["preload_nchunks"]
    # a rank may run all 8 virtual ranks, so each of them has an eighth of the memory
    virtual, eighth = (
        planned(capsys, collection, "--batch-size", 16, "--memory", size, *more)
        for size, more in (("64kB", ("--virtual-ranks", 8)), ("8kB", ()))
    )
    assert {name: virtual[name] for name in sizes} == {name: eighth[name] for name in sizes}


def test_every_epoch_has_its_plan(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "plan", "--n-obs", 20_000, "--epoch", 3, "--epochs", 2)
    assert re.findall(r"^epoch (\d+)", text, flags=re.MULTILINE) == ["3", "4"]
    found = planned(capsys, "--n-obs", 20_000, "--epoch", 3, "--epochs", 2, "--remainder", "drop")["epochs"]
    assert [epoch["epoch"] for epoch in found] == [3, 4]
    assert found[0]["dropped"] != found[1]["dropped"]  # others in each epoch


@pytest.mark.parametrize(("remainder", "sharding"), [("drop", "contiguous"), ("pad", "shuffled")])
def test_json_of_plan_covers_each_row_once(capsys: pytest.CaptureFixture[str], remainder: str, sharding: str) -> None:
    """In JSON, each row is in one shard or dropped, and batches are full."""
    options = "--n-obs", 1_003, "--ranks", 3, "--remainder", remainder, "--sharding", sharding, *SMALL
    (epoch,) = planned(capsys, *options)["epochs"]
    counts = Counter(row for shard in epoch["shards"] for row in rows_of(shard["ranges"]))
    lost = rows_of(epoch["dropped"]["ranges"])

    assert sorted([*counts, *lost]) == list(range(1_003))
    assert (
        epoch["repeated"] == sum(counts.values()) - len(counts) == sum(shard["repeated"] for shard in epoch["shards"])
    )
    assert epoch["dropped"]["rows"] == len(lost) == (1_003 % (3 * 8) if remainder == "drop" else 0)
    for shard in epoch["shards"]:
        assert len(rows_of(shard["ranges"])) == shard["rows"] == 8 * shard["batches"]


def test_json_lists_first_thousand_ranges(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--n-obs", 100_000, "--ranks", 2, "--sharding", "shuffled", *SMALL
    (epoch,) = planned(capsys, *options)["epochs"]
    assert [len(shard["ranges"]) for shard in epoch["shards"]] == [1_000, 1_000]
    assert all(shard["rows"] == 50_000 and not shard["all_ranges"] for shard in epoch["shards"])
    assert epoch["dropped"]["all_ranges"]


def test_mask_and_where_select_rows(capsys: pytest.CaptureFixture[str], collection: Path) -> None:
    """--rows and --where select the rows that are sharded."""
    conditions = "--where", "donor=d1", "donor=d3", "--where", "cell_type=3"
    masks = "--rows", "210:260", "--rows", "300:"
    (epoch,) = planned(capsys, collection, *conditions, *masks, "--ranks", 2, "--remainder", "exact", *SMALL)["epochs"]

    obs = DatasetCollection(collection, mode="r").obs()
    wanted = [
        row
        for row, (donor, kind) in enumerate(zip(obs["donor"], obs["cell_type"], strict=True))
        if donor in {"d1", "d3"} and kind == "3" and (210 <= row < 260 or row >= 300)
    ]
    assert 16 < len(wanted) < 60
    assert epoch["selected"] == len(wanted)
    assert sorted(row for shard in epoch["shards"] for row in rows_of(shard["ranges"])) == wanted


def test_where_selects_missing_or_any_value(capsys: pytest.CaptureFixture[str], collection: Path) -> None:
    """--where selects rows without a value, or with any value."""
    obs = DatasetCollection(collection, mode="r").obs()
    for conditions, selected in (
        (["donor!=d1"], obs["donor"] != "d1"),
        (["donor!=d1", "donor!=d3"], ~obs["donor"].isin(["d1", "d3"])),
        (["label"], obs["label"].notna()),
        (["label", "donor!=d1", "donor=d1"], obs["donor"] != obs["donor"]),
    ):
        command = "--ranks", 2, "--remainder", "exact", *(part for each in conditions for part in ("--where", each))
        if selected.any():
            (epoch,) = planned(capsys, collection, *command, *SMALL)["epochs"]
            rows = sorted(row for shard in epoch["shards"] for row in rows_of(shard["ranges"]))
            assert rows == selected.to_numpy().nonzero()[0].tolist()
        else:
            assert "select" in said(capsys, "plan", collection, *command, code=2)


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"annbatch-distributed {version('annbatch-distributed')}\n"


def test_by_counts_cells_of_each_rank(capsys: pytest.CaptureFixture[str], collection: Path) -> None:
    """--by counts the cells of each rank by a column."""
    (epoch,) = planned(capsys, collection, "--by", "donor", "--ranks", 2, *SMALL)["epochs"]
    donors = DatasetCollection(collection, mode="r").obs()["donor"].tolist()
    labels = epoch["composition"]["labels"]
    for shard, counts in zip(epoch["shards"], epoch["composition"]["rows"], strict=True):
        assert Counter(donors[row] for row in rows_of(shard["ranges"])) == dict(zip(labels, counts, strict=True))
    assert all(0 < distance < 0.2 for distance in epoch["composition"]["distance"])

    text = said(capsys, "plan", collection, "--by", "donor", "--ranks", 2, *SMALL)
    for label, counts in zip(labels, zip(*epoch["composition"]["rows"], strict=True), strict=True):
        assert re.search(rf"{label} +{counts[0]} +{counts[1]}$", text, flags=re.MULTILINE)
    virtual = "--ranks", 1, "--virtual-ranks", 2, *SMALL
    assert "virtual rank" in said(capsys, "plan", collection, "--by", "donor", *virtual)
    found = planned(capsys, collection, *virtual)
    assert (found["n_obs"], found["virtual_ranks"], len(found["epochs"][0]["shards"])) == (N_OBS, 2, 2)


def test_load_requests_make_whole_batches_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    for chunk_size, batch_size in [(64, 256), (64, 4096), (48, 100), (1, 7)]:
        options = "--n-obs", 10**7, "--chunk-size", chunk_size, "--batch-size", batch_size
        n_chunks = planned(capsys, *options)["preload_nchunks"]
        assert n_chunks >= 32
        assert chunk_size * n_chunks % batch_size == 0
    assert planned(capsys, "--n-obs", 20_000, "--preload-nchunks", 4)["preload_nchunks"] == 4


def test_plans_are_drawn_into_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert planned(
        capsys, "--n-obs", 20_000, "--ranks", 8, "--epochs", 2, "--remainder", "drop", "--plot", tmp_path / "plans.svg"
    )
    assert (tmp_path / "plans.svg").read_text().count("dropped: 7.8%") == 2


WRONG = {
    "no command": ([], "required: COMMAND"),
    "no such command": (["plam"], "invalid choice: 'plam'"),
    "no such option": (["plan", "--rank", "2"], "unrecognized arguments: --rank"),
    "neither rows nor a collection": (["plan"], "PATH of a collection or --n-obs, got none"),
    "rows and a collection": (["plan", "{collection}", "--n-obs", "5"], "got both"),
    "a number that is none": (["plan", "--n-obs", "many"], "--n-obs: must be an integer of at least 1, got 'many'"),
    "a column without a collection": (["plan", "--n-obs", "5", "--by", "donor"], "--by need the PATH"),
    "no such path": (
        ["check", "{folder}/none.zarr"],
        "none.zarr: can't be read as a collection",
    ),
    "a group that is no collection": (["check", "{folder}/group.zarr"], "must have datasets of annbatch"),
    "a damaged collection": (["check", "{folder}/matrix.zarr"], "as a collection: JSONDecodeError"),
    "damaged annotations": (["plan", "{folder}/obs.zarr", "--by", "donor"], "as a collection: JSONDecodeError"),
    "cells by columns, planned": (["plan", "{folder}/csc.zarr"], "dataset_0/X must be a CSR matrix, got a CSC matrix"),
    "no such column": (
        ["plan", "{collection}", "--by", "doner"],
        "obs has no column 'doner'. It has cell_type, donor",
    ),
    "a column that names each cell": (["plan", "{folder}/names.zarr", "--by", "name"], "at most 1000 values, got 1200"),
    "no such value": (
        ["plan", "{collection}", "--where", "donor=d9"],
        "column 'donor' has no value 'd9'. It has 'd0', 'd1'",
    ),
    "no column": (["plan", "{collection}", "--where", "=d1"], "--where must be COLUMN=VALUE"),
    "more ranks than rows": (
        ["check", "{collection}", "--ranks", "400", "--remainder", "exact"],
        "too few for 400 ranks",
    ),
    "rows after the last": (
        ["plan", "{collection}", "--rows", f"{N_OBS}:"],
        f"--rows {N_OBS}: must lie within the {N_OBS} rows",
    ),
    "a range without rows": (["plan", "{collection}", "--rows", "5:5"], "START:STOP with START below STOP, got '5:5'"),
    "no such picture": (["plan", "--n-obs", "5000", "--plot", "{folder}/plan.docx"], "'docx' is not supported"),
    "no folder for a picture": (["plan", "--n-obs", "5000", "--plot", "{folder}/none/plan.png"], "No such file"),
}


def test_misspelled_column_is_named_in_error(collection: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelled column is named in the error, not reported as an unreadable collection."""
    line = said(capsys, "plan", collection, "--where", "dnor=d1", code=2)
    assert line.startswith(f"annbatch-distributed: {collection}: obs has no column 'dnor'. It has cell_type, donor")


@pytest.fixture(scope="module")
def unusable(collection: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Paths that can't be planned or checked, and a collection that can be."""
    import anndata as ad
    import numpy as np
    import scipy.sparse as sp

    folder = tmp_path_factory.mktemp("unusable")
    zarr.open_group(folder / "group.zarr", mode="w")
    for name, file in (("matrix.zarr", "dataset_1/X/zarr.json"), ("obs.zarr", "dataset_1/obs/donor/zarr.json")):
        shutil.copytree(collection, folder / name)
        (folder / name / file).write_text("{broken")
    obs = pd.DataFrame({"name": [f"cell {number}" for number in range(1_200)]}, index=np.arange(1_200).astype(str))
    obs["kind"] = pd.Categorical(["a" if number % 4 else None for number in range(1_200)])
    ad.AnnData(np.ones((1_200, 1), np.float32), obs=obs).write_h5ad(folder / "names.h5ad")
    DatasetCollection(folder / "names.zarr").add_adatas([folder / "names.h5ad"])
    ad.AnnData(sp.csc_matrix(np.eye(30, 7, dtype=np.float32))).write_h5ad(folder / "csc.h5ad")
    DatasetCollection(folder / "csc.zarr").add_adatas([folder / "csc.h5ad"], shuffle_chunk_size=10)
    return {"folder": folder, "collection": collection}


def test_where_handles_many_and_missing_values(capsys: pytest.CaptureFixture[str], unusable: dict[str, Path]) -> None:
    """--where selects by columns with many values and with missing values."""
    options = unusable["folder"] / "names.zarr", "--by", "kind", "--ranks", 1, "--remainder", "keep", *SMALL
    (named,) = planned(capsys, *options, "--where", "name=cell 7", "--where", "name=cell 9")["epochs"]
    names = DatasetCollection(unusable["folder"] / "names.zarr", mode="r").obs()["name"].tolist()
    assert [names[row] for row in rows_of(named["shards"][0]["ranges"])] in (
        ["cell 7", "cell 9"],
        ["cell 9", "cell 7"],
    )
    (all_cells,) = planned(capsys, *options)["epochs"]
    (selected,) = planned(capsys, *options, "--where", "kind=a")["epochs"]
    assert selected["selected"] == 900
    assert all_cells["composition"] == {"labels": ["a", None], "rows": [[900, 300]], "distance": [0.0]}


@pytest.mark.parametrize("what", WRONG)
def test_invalid_option_exits_with_code_2(
    capsys: pytest.CaptureFixture[str], unusable: dict[str, Path], what: str
) -> None:
    """An invalid option is one line on stderr, and exit code 2."""
    arguments, problem = WRONG[what]
    line = said(capsys, *(argument.format(**unusable) for argument in arguments), code=2)
    assert problem in line


def interrupted_while_held() -> list[str]:
    """Get an interrupt in another thread while interrupts are held, and return what was done after it."""
    is_held, done = threading.Event(), []

    def interrupt() -> None:
        is_held.wait()
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    (other := threading.Thread(target=interrupt, daemon=True)).start()
    try:
        with interrupts_held():
            is_held.set()
            other.join()
            done.append("all ranks were started")
    except KeyboardInterrupt:
        done.append("interrupted")
    return done


@pytest.mark.usefixtures("interruptible")
def test_interrupt_waits_while_ranks_start() -> None:
    """An interrupt takes effect after all ranks were started, whichever thread gets it."""
    assert interrupted_while_held() == ["all ranks were started", "interrupted"]


@pytest.mark.usefixtures("interruptible")
def test_ignored_interrupt_stays_ignored() -> None:
    """A job that a shell started in the background is not interrupted."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert interrupted_while_held() == ["all ranks were started"]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_servers_start_with_interrupts_held() -> None:
    """A fork server that is started while interrupts are held gets none, also in a process that had no other child."""
    code = (
        "import signal; from multiprocessing import forkserver; "
        "from annbatch_distributed.cli.check import interrupts_held\n"
        "with interrupts_held():\n"
        "    forkserver.ensure_running()\n"
        "    assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
