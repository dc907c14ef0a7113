"""``check --data``: what isn't as it was written is found, in any file of a collection, with its cells."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from annbatch import DatasetCollection, Loader
from zarr.storage import MemoryStore

from annbatch_distributed import Rank, StatefulLoader
from annbatch_distributed.cli import main
from annbatch_distributed.collect import collect
from annbatch_distributed.loader.damage import Damage, cells_with, damage_in, files_of
from tests.cli.page import check_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PIPELINES = "zarrs.ZarrsCodecPipeline", "zarr.core.codec_pipeline.BatchedCodecPipeline"
N_OBS, N_VAR = 700, 30
RNG = np.random.default_rng(0)


def cells() -> ad.AnnData:
    values = RNG.integers(1, 50, (N_OBS, N_VAR)) * (RNG.random((N_OBS, N_VAR)) < 0.4)
    values[:40] = 0  # chunks of fill values only
    obs = pd.DataFrame(
        {
            "kind": pd.Categorical(RNG.choice(["a", "b"], N_OBS)),
            "zero": 0.0,
            "flag": pd.array([True, None] * (N_OBS // 2), dtype="boolean"),
            "text": [f"text {number}" for number in range(N_OBS)],
        },
        index=[f"cell {number}" for number in range(N_OBS)],
    )
    return ad.AnnData(sp.csr_matrix(values.astype("float32")), obs=obs)


@pytest.fixture(scope="module", params=["lz4", "zstd", "none", "dense"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Collect cells in one form."""
    folder, kind = tmp_path_factory.mktemp("data"), request.param
    adata = cells()
    if kind == "dense":
        adata.X = RNG.normal(size=(N_OBS, N_VAR)).astype("float32")
    adata.write_h5ad(folder / "cells.h5ad")
    collect(
        folder / "cells.h5ad",
        folder / "cells.zarr",
        compression="lz4" if kind == "dense" else kind,
        tell=lambda _: None,
    )
    return folder / "cells.zarr"


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "cells.zarr")
    return tmp_path / "cells.zarr"


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_collect_writes_all_chunks(pipeline: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also those of fill values, which zarrs leaves out."""
    cells()[:40].write_h5ad(tmp_path / "cells.h5ad")
    with zarr.config.set({"codec_pipeline.path": pipeline}):
        collect(tmp_path / "cells.h5ad", tmp_path / "cells.zarr", tell=lambda _: None)
    assert checked(tmp_path / "cells.zarr", capsys)["ok"]
    (group,) = DatasetCollection(tmp_path / "cells.zarr", mode="r")
    array: Any = group["obs/zero"]
    assert array.nchunks_initialized == array.nchunks == 1


def shards_in(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name != "zarr.json")


def checked(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    code = main(["check", str(path), "--data", "--jobs", "1", *options, "--json"])
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    check_schema("check_data", content)
    assert code == (0 if content["ok"] else 1)
    return content


def test_intact_collection_has_no_damage(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = checked(written, capsys)
    assert content == {"ok": True, "n_files": len(shards_in(written)), "damaged": [], "without_checksums": []}


def test_any_flipped_bit_is_found_in_its_file(copied: Path) -> None:
    """Each of some flips, in each file."""
    (group,) = DatasetCollection(copied, mode="r")
    files, rng = [*files_of(group)], np.random.default_rng(1)
    assert len(files) == len(shards_in(copied)) > 20
    for number in range(4 * len(files)):
        stored = files[number % len(files)]
        file = Path(stored.folder) / "c" / str(stored.number)
        file = file if file.is_file() else file / "0"  # of two dimensions
        content = file.read_bytes()
        at = rng.integers(len(content))
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << int(rng.integers(8))]) + content[at + 1 :])
        damages = damage_in(stored)
        assert damages
        assert {str(file) in damage.problem for damage in damages} == {True}
        file.write_bytes(content)
        assert not damage_in(stored)


def flipped(file: Path, _: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:9] + bytes([content[9] ^ 16]) + content[10:])


DAMAGES: dict[str, Callable[[Path, Path], Any]] = {
    "flipped": flipped,
    "cut": lambda file, _: os.truncate(file, file.stat().st_size - 5),
    "empty": lambda file, _: file.write_bytes(b""),
    "deleted": lambda file, _: file.unlink(),
    "another": lambda file, other: shutil.copy(other, file),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cells_are_listed(damage: str, copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cells that are listed have all values of the file, also for a whole shard in another's place."""
    name = "X/data" if (copied / "dataset_0" / "X" / "data").exists() else "X"
    files = shards_in(copied / "dataset_0" / name)
    DAMAGES[damage](files[1], files[2])
    content = checked(copied, capsys)
    assert {line["array"] for line in content["damaged"]} == {name}
    listed = {cell for line in content["damaged"] for cell in range(line["start"], line["stop"])}
    # about a 16th of the cells is in a shard; a flipped bit is in one chunk
    assert 0 < len(listed) < (100 if damage != "flipped" else 70)
    if damage == "another":
        assert "isn't the file that was written here" in content["damaged"][0]["problem"]
    # none but these cells is refused by a loader, or wrong
    loader = StatefulLoader.from_collection(copied, dist_info=Rank(0, 1), mask=_but(listed), max_gap=0, batch_size=32)
    assert sum(batch["X"].shape[0] for batch in loader) == N_OBS - len(listed)
    if damage != "another":
        loader = StatefulLoader.from_collection(copied, dist_info=Rank(0, 1), batch_size=32)
        with pytest.raises(OSError, match="is damaged"):
            list(loader)


def _but(cells: set[int]) -> Any:
    flags = np.ones(N_OBS, bool)
    flags[sorted(cells)] = False
    return flags


@pytest.mark.parametrize(("values", "rows"), [((0, 3), (0, 1)), ((2, 4), (0, 3)), ((3, 5), (2, 3)), ((4, 9), (2, 3))])
def test_cells_of_values_are_those_between_their_pointers(values: tuple[int, int], rows: tuple[int, int]) -> None:
    """Rows of 3, 0 and 2 values; the last chunk may be longer than the array."""
    group = zarr.create_group(MemoryStore())
    ad.io.write_elem(group, "X", sp.csr_matrix([[1, 1, 1], [0, 0, 0], [1, 1, 0]]))
    assert cells_with(Damage("", *values), "X/data", group) == rows


def test_damage_of_names_concerns_all_cells(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = shards_in(copied / "dataset_0" / "obs" / "kind" / "categories")
    flipped(file, file)
    (line,) = checked(copied, capsys)["damaged"]
    assert (line["array"], line["start"], line["stop"]) == ("obs/kind/categories", 0, N_OBS)


@pytest.mark.parametrize("written", ["lz4"], indirect=True)
def test_command_prints_damage_from_several_processes(
    copied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command prints the damage that two processes find as lines, also for a relative path."""
    (file,) = shards_in(copied / "dataset_0" / "obs" / "zero")
    content = file.read_bytes()
    file.write_bytes(content[:3000] + bytes([content[3000] ^ 1]) + content[3001:])
    monkeypatch.chdir(copied.parent)
    file = file.relative_to(copied.parent)
    assert main(["check", copied.name, "--data", "--jobs", "2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"dataset_0/obs/zero, cells 0 to 699: {file} is damaged: chunk 0: its checksum is wrong.",
        f"1 damaged part in {len(shards_in(copied))} files. Copy these files again, or write the collection again.",
    ]


def test_collection_without_checksums_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What can't be decoded is found; a changed value may not be."""
    cells().write_h5ad(tmp_path / "cells.h5ad")
    DatasetCollection(tmp_path / "cells.zarr").add_adatas([tmp_path / "cells.h5ad"])
    content = checked(tmp_path / "cells.zarr", capsys)
    assert content["ok"]
    assert {"dataset_0/X/data", "dataset_0/obs/kind/codes"} <= {*content["without_checksums"]}
    assert main(["check", str(tmp_path / "cells.zarr"), "--data", "--jobs", "1"]) == 0
    assert "only what can't be decoded was found there" in capsys.readouterr().out
    file = shards_in(tmp_path / "cells.zarr" / "dataset_0" / "X" / "indices")[0]
    file.write_bytes(file.read_bytes()[:-30])
    assert not checked(tmp_path / "cells.zarr", capsys)["ok"]


def test_options_are_checked(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "s3://atlas/cells.zarr", "--data"]) == 2
    assert "--data reads files of a folder on this machine" in capsys.readouterr().err
    assert main(["check", str(copied), "--jobs", "2"]) == 2
    assert "--jobs is the number of processes of --data" in capsys.readouterr().err


@pytest.fixture(params=PIPELINES)
def pipeline(request: pytest.FixtureRequest) -> Iterator[None]:
    with zarr.config.set({"codec_pipeline.path": request.param}):
        yield


@pytest.mark.usefixtures("pipeline")
def test_others_read_a_collection_with_checksums(written: Path) -> None:
    """annbatch's Loader, anndata and zarr, with zarr's codecs and with those of zarrs."""
    (group,) = DatasetCollection(written, mode="r")
    adata: Any = ad.io.read_elem(group)
    values = adata.X.toarray() if sp.issparse(adata.X) else adata.X
    loader = Loader(batch_size=32, chunk_size=16, preload_nchunks=4, return_index=True, preload_to_gpu=False)
    for batch in loader.use_collection(DatasetCollection(written, mode="r")):
        read = batch["X"].toarray() if sp.issparse(batch["X"]) else batch["X"]
        np.testing.assert_array_equal(read, values[batch["index"]])
        pd.testing.assert_frame_equal(batch["obs"], adata.obs.iloc[batch["index"]][batch["obs"].columns])
