"""What commands say of the past of a job, from its state."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from enum import Enum
from functools import partial
from traceback import StackSummary
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from annbatch import DatasetCollection
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler

from annbatch_distributed import (
    AlignedLoader,
    CellSets,
    DistributedSampler,
    MixedLoader,
    Rank,
    Shuffled,
    StatefulLoader,
)
from annbatch_distributed.cli import main
from tests.cli.page import check_schema
from tests.cli.test_commands import said
from tests.processes.configurations import CLASSES, DONORS

if TYPE_CHECKING:
    from pathlib import Path

    from annbatch.abc import Sampler


def made(
    path: Path, sampler: Sampler | None = None, *, rank: int = 0, world_size: int = 2, **options: Any
) -> StatefulLoader:
    """A rank of the job."""
    sampler = RandomSampler(4, 4, 8) if sampler is None else sampler
    distributed = DistributedSampler(sampler, dist_info=Rank(rank, world_size), **{"seed": 3} | options)
    loader = StatefulLoader(batch_sampler=distributed, return_index=True, preload_to_gpu=False)
    return loader.use_collection(DatasetCollection(path, mode="r"))


def saved(loader: StatefulLoader, folder: Path, n_done: int = 3) -> Path:
    """The file with the state of a job that has done some steps of epoch 2."""
    loader.set_epoch(2)
    for _ in zip(range(n_done), loader, strict=False):
        pass
    path = folder / "state.json"
    path.write_text(json.dumps(loader.state_dict()))
    return path


def sets(**options: Any) -> CellSets:
    """Sets of cells of a donor, with cells of type 3 as controls."""
    obs = pd.DataFrame({"donor": DONORS, "cell_type": CLASSES.astype(str)})
    defaults = {"by": "donor", "set_size": 2, "chunk_size": 1, "controls": {"cell_type": "3"}, "remainder": "keep"}
    return CellSets.from_obs(obs, **defaults | options)


JOBS: dict[str, tuple[Any, dict[str, Any]]] = {
    "random": (RandomSampler(4, 4, 8), {}),
    "drawn": (RandomSampler(8, 2, 4, replacement=True, num_samples=40), {"sharding": "independent"}),
    "sequential": (SequentialSampler(5, 2, 5), {"remainder": "keep", "mask": [slice(3, 90), slice(120, None)]}),
    "shuffled": (RandomSampler(4, 4, 8), {"sharding": Shuffled(6), "remainder": "exact"}),
    "drawn root": (RandomSampler(4, 4, 8, rng=np.random.default_rng(5)), {"seed": None, "remainder": "pad"}),
    "virtual ranks": (RandomSampler(4, 4, 8), {"virtual_ranks": 4}),
    "sets": (RandomSampler(1, 4, 2), {"sets": sets(), "sharding": "shuffled"}),
    "controls by cell": (RandomSampler(1, 4, 2), {"sets": sets(by="cell_type", match=["donor"])}),
    "sets with a mask": (RandomSampler(1, 4, 2), {"sets": sets(mask=slice(40, 300), match=["donor"], seed=4)}),
}


@pytest.mark.parametrize("name", JOBS)
def test_cells_needs_only_state(
    name: str, collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command cells lists the cells of a job from its state alone."""
    sampler, options = JOBS[name]
    loader = made(collection, sampler, **options)
    arguments = collection, "--state", saved(loader, tmp_path), "--ranks", 2
    cells = json.loads(said(capsys, "cells", *arguments, "--steps", "1:5", "--obs", "donor", "--json"))
    assert cells["epoch"] == 2
    expected = loader.cells_of(slice(1, 5), ["donor"])
    pd.testing.assert_frame_equal(pd.DataFrame(cells["cells"]), expected, check_dtype=False, check_categorical=False)
    check_schema("cells", cells)
    text = said(capsys, "cells", *arguments, "--steps", 1)
    of_sets = ["set", "is_control"] if "sets" in options else []
    assert text.splitlines()[0].split() == ["step", "rank", "row", *of_sets, "dataset", "cell"]
    assert len(text.splitlines()) == 1 + len(loader.cells_of(1))
    ranks = options.get("virtual_ranks", 2)  # other epochs of virtual ranks are listed for these
    other = json.loads(said(capsys, "cells", *arguments[:-1], ranks, "--steps", 1, "--epoch", 0, "--json"))
    assert [cell["row"] for cell in other["cells"]] == loader.cells_of(1, [], epoch=0)["row"].tolist()


@pytest.mark.parametrize("remainder", ["drop", "exact"])
def test_cells_of_other_epochs_name_their_ranks(
    remainder: str, collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The cells of an epoch that the state isn't of are those of --ranks, or of a number that a note or error names."""
    job = partial(made, collection, remainder=remainder)
    arguments: list[Any] = [collection, "--state", saved(job(world_size=4), tmp_path, 7), "--steps", 1, "--json"]

    def listed(*more: object) -> tuple[list[int], str]:
        assert main([*map(str, ["cells", *arguments, *more])]) == 0
        out, err = capsys.readouterr()
        return [cell["row"] for cell in json.loads(out)["cells"]], err

    for epoch in (0, 5):
        for ranks in (2, 3, 4):
            expected = job(world_size=ranks).cells_of(1, epoch=epoch)["row"].tolist()
            rows, note = listed("--epoch", epoch, "--ranks", ranks)
            assert rows == expected
            assert ("listed for" in note) == (ranks != 4)
        assert rows != listed("--epoch", epoch, "--ranks", 2)[0]
        rows, note = listed("--epoch", epoch)
        assert rows == expected
        assert f"epoch {epoch} is listed for 4 ranks, which the state has in epoch 2. If it ran on" in note
    line = said(capsys, "cells", *arguments, "--ranks", 3, code=2)
    assert "--ranks must divide the 4 ranks that the state has in epoch 2" in line
    resumed = job()
    resumed.load_state_dict(json.loads((tmp_path / "state.json").read_text()))
    saved(resumed, tmp_path, 2)
    line = said(capsys, "cells", *arguments, "--epoch", 0, code=2)
    assert "on how many ranks epoch 0 ran, since the number changed in epoch 2 (4, 2). Pass it as --ranks" in line
    assert listed("--epoch", 0, "--ranks", 4)[0] == job(world_size=4).cells_of(1, epoch=0)["row"].tolist()


def test_by_counts_cells_and_share_of_epoch(
    collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mask = np.flatnonzero(DONORS != "d4")
    loader = made(collection, mask=mask)
    arguments: list[Any] = [collection, "--state", saved(loader, tmp_path), "--steps", "2:4", "--by", "donor"]
    line = said(capsys, "cells", *arguments, code=2)
    assert "the mask can't be restored" in line
    assert "Pass them as --rows or --where" in line
    donors = sorted(set(DONORS[mask]))
    arguments += [part for donor in donors for part in ("--where", f"donor={donor}")]
    counted = json.loads(said(capsys, "cells", *arguments, "--json"))
    check_schema("cells", counted)
    frame = loader.cells_of(slice(2, 4), ["donor"])
    assert counted["steps"] == [2, 3]
    assert counted["labels"] == sorted(set(DONORS))  # and none for missing labels, of which there are none
    for step, counts, distance in zip(counted["steps"], counted["counts"], counted["distance"], strict=True):
        own = frame[frame["step"] == step]["donor"]
        assert counts == [int((own == label).sum()) for label in counted["labels"]]
        shares = [float((DONORS[mask] == label).mean()) for label in counted["labels"]]
        assert counted["share"] == pytest.approx(shares)
        assert distance == pytest.approx(np.abs(np.array(counts) / sum(counts) - shares).sum() / 2)
    other = json.loads(said(capsys, "cells", *arguments, "--epoch", 0, "--ranks", 2, "--json"))
    assert other["epoch"] == 0
    assert other["share"] == counted["share"]
    assert other["counts"] != counted["counts"]
    text = said(capsys, "cells", *arguments)
    assert len(text.splitlines()) == 3 + len(counted["labels"])
    line = said(capsys, "cells", *arguments[:-2], code=2)
    assert "rows." in line


def test_cells_refuses_undescribed_sets(collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command cells refuses sets that the state doesn't describe."""
    flags = CLASSES.astype(str) == "3"
    loader = made(collection, RandomSampler(1, 4, 2), sets=sets(controls=flags))
    line = said(capsys, "cells", collection, "--state", saved(loader, tmp_path), "--steps", 1, code=2)
    assert "the controls can't be restored" in line
    mask = DONORS != "d4"
    state = saved(made(collection, RandomSampler(1, 4, 2), sets=sets(mask=mask)), tmp_path)
    assert "the mask can't be restored" in said(capsys, "cells", collection, "--state", state, "--steps", 1, code=2)
    named = [part for donor in sorted(set(DONORS[mask])) for part in ("--where", f"donor={donor}")]
    assert said(capsys, "cells", collection, "--state", state, "--steps", 1, *named)
    line = said(capsys, "cells", collection, "--state", state, "--steps", 1, *named, "--by", "donor", code=2)
    assert "--by can't count cells of sets" in line


def test_cells_names_missing_or_contradicting_settings(
    collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command cells names settings that the state lacks or contradicts."""
    classes = ClassSampler(4, 2, 8, classes=pd.Categorical(CLASSES), num_samples=48)

    def order(rows: Any, *, epoch: int, seed: int | None) -> Any:
        return rows

    for loader, message in (
        (made(collection, classes, sharding="independent"), "can't be restored from the state"),
        (made(collection, sharding=order), "can't be restored from the state"),
        (made(collection, weights=np.ones(len(CLASSES))), "the weights can't be restored from the state"),
    ):
        assert message in said(capsys, "cells", collection, "--state", saved(loader, tmp_path), "--steps", 1, code=2)
    state = saved(made(collection), tmp_path)
    for arguments, message in (
        (["--rows", "0:10"], "in the state and '[[0, 10]]' here"),
        (["--ranks", 3], "--ranks must divide the 2 ranks that the state has"),
        (["--obs", "none"], "has no columns none in obs"),
        (["--steps", 999], "The epoch has no step 999: it has 21 steps"),
        (["--steps", "900:999"], "--steps must have a step of epoch 2"),
    ):
        assert message in said(capsys, "cells", collection, "--state", state, "--steps", 1, *arguments, code=2)
    whole = json.loads(state.read_text())
    for damaged in (
        {},
        whole | {"identity": {}},
        whole | {"identity": whole["identity"] | {"sampler": {}}},
        whole | {"identity": whole["identity"] | {"rows": None}},
        [],
        "[" * 100_000,
    ):
        state.write_text(damaged if isinstance(damaged, str) else json.dumps(damaged))
        line = said(capsys, "cells", collection, "--state", state, "--steps", 1, code=2)
        assert "--state" in line
        assert "strict=False" not in line  # which the command has no option for


def test_state_is_found_in_a_checkpoint_of_torch(
    collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = made(collection)
    state = json.loads(saved(loader, tmp_path).read_text())
    arguments = "cells", collection, "--state", tmp_path / "last.pt", "--steps", 1, "--json"
    checkpoint: dict[str, Any] = {"model": {"weight": torch.zeros(3)}, "loaders": [{"training": state}]}
    torch.save(checkpoint, tmp_path / "last.pt")
    cells = json.loads(said(capsys, *arguments))["cells"]
    assert [cell["row"] for cell in cells] == loader.cells_of(1)["row"].tolist()
    (tmp_path / "last.pt").write_text("a = 1")
    assert "the file must be JSON or a PyTorch checkpoint, but Expecting value" in said(capsys, *arguments, code=2)
    torch.save({"model": {}}, tmp_path / "last.pt")
    assert "must have one state of a loader, got none" in said(capsys, *arguments, code=2)
    (tmp_path / "last.pt").write_bytes((tmp_path / "last.pt").read_bytes()[:300])
    assert "PyTorch can't read it" in said(capsys, *arguments, code=2)


@pytest.mark.parametrize(
    ("name", "write"), [("last.pt", torch.save), ("last.json", lambda state, path: path.write_text(json.dumps(state)))]
)
def test_state_key_names_one_of_several_states(
    name: str, write: Any, collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file with several states needs --state-key; the error lists the keys with what tells the states apart."""
    loader, mixture = made(collection), MixedLoader({"tahoe": made(collection)}, weights={"tahoe": 1}, n_steps=4)
    state = json.loads(saved(loader, tmp_path).read_text())
    write({"loaders": [mixture.state_dict(), {"training": state}], "epoch": 2}, tmp_path / name)
    arguments = "cells", collection, "--state", tmp_path / name, "--steps", 1, "--json"
    listed = "got loaders.0 (mixture of tahoe), loaders.1.training (347 cells). Pass one of them as --state-key."
    assert f"must have one state of a loader, {listed}" in said(capsys, *arguments, code=2)
    line = said(capsys, *arguments, "--state-key", "loaders.1", code=2)
    assert f"must have one state of a loader at loaders.1, {listed}" in line
    cells = json.loads(said(capsys, *arguments, "--state-key", "loaders.1.training"))["cells"]
    assert [cell["row"] for cell in cells] == loader.cells_of(1)["row"].tolist()


def test_equal_states_need_no_key(collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint that has one state twice, as Lightning and a data module save it, needs no --state-key."""
    loader = made(collection)
    state = json.loads(saved(loader, tmp_path).read_text())
    arguments = "cells", collection, "--state", tmp_path / "last.pt", "--steps", 1, "--json"
    torch.save({"loops": {"combined_loader": [state]}, "Cells": dict(state)}, tmp_path / "last.pt")
    cells = json.loads(said(capsys, *arguments))["cells"]
    assert [cell["row"] for cell in cells] == loader.cells_of(1)["row"].tolist()
    torch.save({"loops": {"combined_loader": [state]}, "Cells": state | {"epoch": 1}}, tmp_path / "last.pt")
    assert "got loops.combined_loader.0 (347 cells), Cells (347 cells)" in said(capsys, *arguments, code=2)


class Level(Enum):
    LOW = 1


def test_checkpoint_may_have_objects_of_any_class(
    collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The state is read from a checkpoint with objects of other classes, whose code doesn't run."""
    loader = made(collection)
    state = json.loads(saved(loader, tmp_path).read_text())
    gone = type("Gone", (), {"__module__": "no_such_module", "__qualname__": "Gone"})
    sys.modules["no_such_module"] = SimpleNamespace(Gone=gone)  # type: ignore[assignment]  # torch.save looks it up
    others = [Namespace(lr=0.1, level=Level.LOW), tmp_path, partial(Level, 1), np.float32(2), made, gone()]
    torch.save({"hyper_parameters": others, "loops": {"loader": state}}, tmp_path / "last.ckpt")
    del sys.modules["no_such_module"]
    arguments = "cells", collection, "--state", tmp_path / "last.ckpt", "--steps", 1, "--json"
    cells = json.loads(said(capsys, *arguments))["cells"]
    assert [cell["row"] for cell in cells] == loader.cells_of(1)["row"].tolist()


def test_unsafe_checkpoint_says_how_to_write_its_state(
    collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error about a checkpoint that PyTorch can't load safely has a line that writes the state."""
    loader = made(collection)
    state = json.loads(saved(loader, tmp_path).read_text())
    path = tmp_path / "my last.ckpt"
    # a class that PyTorch neither loads safely nor lets a placeholder stand for
    torch.save({"settings": StackSummary("a"), "weights": torch.zeros(3), ("a", 1): 2, "loader": state}, path)
    line = said(capsys, "cells", collection, "--state", path, "--steps", 1, code=2)
    assert "its objects of traceback.StackSummary safely" in line
    assert "it must be of somebody you trust" in line
    assert "\x1b" not in line
    (command,) = re.findall(r"with (python -c '.*?'), and pass --state state\.json", line)
    monkeypatch.chdir(tmp_path)
    _, *rest = shlex.split(command)
    subprocess.run([sys.executable, *rest], check=True, timeout=120)
    arguments = "cells", collection, "--state", "state.json", "--steps", 1, "--json"
    cells = json.loads(said(capsys, *arguments))["cells"]
    assert [cell["row"] for cell in cells] == loader.cells_of(1)["row"].tolist()


def test_numbers_of_obs_are_exact_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has the values of obs, without rounding; values that are missing or not finite are null."""
    n = np.arange(16)
    columns = {
        "p_value": 10.0**-n,
        "single": np.random.default_rng(0).random(16, dtype="float32"),
        "large": n + 2**60 + 1,
        "unsigned": n.astype("uint64") + np.uint64(2**63 + 1),
        "flag": n % 2 == 0,
        "missing": np.where(n % 2, np.nan, 1 / 3),
        "infinite": np.where(n % 3, -1e300, np.inf),
        "nullable": pd.array([None, *n[1:] + 2**60], dtype="Int64"),
        "category": pd.Categorical(1 / (1.0 + n)),
        "name": [None, *map(str, n[1:])],
    }
    ad.AnnData(np.ones((16, 2), "f4"), pd.DataFrame(columns, index=n.astype(str))).write_h5ad(tmp_path / "a.h5ad")
    DatasetCollection(tmp_path / "a.zarr").add_adatas([tmp_path / "a.h5ad"])
    capsys.readouterr()  # progress bars
    state = saved(made(tmp_path / "a.zarr", RandomSampler(4, 2, 8), world_size=1), tmp_path, 1)
    text = said(capsys, "cells", tmp_path / "a.zarr", "--state", state, "--steps", ":", "--obs", *columns, "--json")
    cells = json.loads(text, parse_constant=pytest.fail)
    check_schema("cells", cells)
    assert len(cells["cells"]) == 16
    for cell in cells["cells"]:
        number = int(cell["cell"])
        for name, values in columns.items():
            value = values[number]
            assert cell[name] == (None if pd.isna(value) or value == np.inf else value)
        assert isinstance(cell["flag"], bool)
        assert isinstance(cell["unsigned"], int)


def test_cells_takes_a_store_of_an_aligned_state(
    collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The state of an AlignedLoader is replayed from the collection of any of its stores."""
    stores = {name: made(collection, world_size=1) for name in ("rna", "protein")}
    loader = AlignedLoader(stores, batch_sampler=stores["rna"].sampler)
    batches = iter(loader)
    read = [next(batches)["rna"]["index"].tolist() for _ in range(3)]
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    text = said(capsys, "cells", collection, "--state", tmp_path / "state.json", "--steps", "2", "--json")
    assert [cell["row"] for cell in json.loads(text)["cells"]] == read[2]


def test_cells_refuses_a_mixture(collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The state of a mixture names the method that lists its cells; in a checkpoint, it is one state."""
    mixture = MixedLoader({"tahoe": made(collection)}, weights={"tahoe": 1}, n_steps=4)
    for suffix, write in ((".json", lambda state, path: path.write_text(json.dumps(state))), (".pt", torch.save)):
        path = tmp_path / f"state{suffix}"
        write(mixture.state_dict(), path)
        line = said(capsys, "cells", collection, "--state", path, "--steps", 1, code=2)
        assert "the state is of a mixture of tahoe" in line
        assert "Call mixture.cells_of" in line
