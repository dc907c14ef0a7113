"""Parts of files: several processes, interrupted runs, and memory."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import anndata as ad
import h5py
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from annbatch import DatasetCollection

from annbatch_distributed.cli import main
from annbatch_distributed.collect import Problems, collect, steps
from annbatch_distributed.collect.write import blocks as blocks_of_files
from annbatch_distributed.collect.write import parts
from annbatch_distributed.collect.write.folders import folder_of_parts
from tests.collect.test_files import GENES, cells_of, collected, counts, quiet

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three files of 60 cells."""
    paths = [tmp_path / f"{name}.h5ad" for name in "abc"]
    for seed, path in enumerate(paths):
        cells_of(path.stem, counts(60, 12, seed), GENES, type=[*"xyz"] * 20).write_h5ad(path)
    return paths


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[parts.Part]:
    """The parts that are written, of a few rows each."""
    seen: list[parts.Part] = []
    write, blocks = parts._written, blocks_of_files.blocks_of

    def spied(own: list[parts.Part]) -> Any:
        seen.extend(own)
        return write(own)

    monkeypatch.setattr(parts, "_written", spied)
    monkeypatch.setattr(parts, "blocks_of", lambda stored, _: blocks(stored, 1_000))
    return seen


def test_parts_make_no_difference(files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collection is the same whether files are read as a whole or in blocks, in one process or in two."""
    one, obs = collected(collect(files, tmp_path / "one.zarr", tell=quiet))
    blocks = blocks_of_files.blocks_of
    monkeypatch.setattr(parts, "blocks_of", lambda stored, _: blocks(stored, 1_000))
    for jobs in (1, 2):
        lines: list[str] = []
        collection = collect(files, tmp_path / f"{jobs}.zarr", jobs=jobs, tell=lines.append)
        read, obs_read = collected(collection)
        pd.testing.assert_frame_equal(read, one)
        pd.testing.assert_frame_equal(obs_read, obs)
        assert sorted(lines[:3]) == [f"{path}: 60 cells, 12 genes, float32" for path in files]


def test_interrupted_run_continues(
    files: list[Path], tmp_path: Path, written: list[parts.Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run continues with the parts of an interrupted run, except for files that have changed."""
    expected, _ = collected(collect(files, tmp_path / "whole.zarr", tell=quiet))
    n_parts = len(written)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    def run(stop: str | None, **options: Any) -> int:
        """Run, and return how many parts were written."""
        written.clear()
        with monkeypatch.context() as patch:
            if stop == "shuffling":
                patch.setattr(steps, "write_dataset", interrupted)
            elif stop == "reading":
                read = blocks_of_files.read_blocks

                def some(*arguments: Any) -> Any:
                    return interrupted() if len(written) > 4 else read(*arguments)

                patch.setattr(parts, "read_blocks", some)
            if stop is None:
                collect(files, tmp_path / "cells.zarr", tell=quiet, **options)
            else:
                with pytest.raises(KeyboardInterrupt):
                    collect(files, tmp_path / "cells.zarr", tell=quiet, **options)
        return len(written)

    assert run("reading") == 5
    assert not [*(tmp_path / "cells.zarr.parts").glob("*.unfinished")]
    assert run("shuffling") == n_parts - 4
    assert run("shuffling", restart=True) == n_parts
    assert not (tmp_path / "cells.zarr").exists()
    os.utime(files[1], ns=(1, 1))
    of_changed = sum(part.source.path == files[1] for part in written)
    assert run(None, na_values=["x"]) == of_changed
    read, obs = collected(DatasetCollection(tmp_path / "cells.zarr", mode="r"))
    assert (read.loc[expected.index] == expected).all(axis=None)
    assert obs["type"].isna().sum() == 60
    assert not (tmp_path / "cells.zarr.parts").exists()


def test_processes_share_memory(files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process has its part of the memory, and reads blocks of a quarter of it."""
    blocks, sizes = blocks_of_files.blocks_of, list[int]()

    def spied(values: Any, n_bytes: int) -> Any:
        sizes.append(n_bytes)
        return blocks(values, n_bytes)

    def without_datasets(*arguments: Any) -> list[Any]:
        *_, n_bytes, _ = arguments
        sizes.append(n_bytes)
        return []

    monkeypatch.setattr(parts, "blocks_of", spied)
    monkeypatch.setattr(steps, "executor_of", lambda *_: nullcontext())  # this process does the work of both
    monkeypatch.setattr(steps, "datasets_of", without_datasets)
    collect(files, tmp_path / "cells.zarr", memory="8kB", jobs=2, tell=quiet)
    assert sizes == [1_000] * 3 + [4_000]


def test_changed_zarr_folder_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file anywhere in a zarr folder counts as a change."""
    cells = cells_of("a", counts(20, 12, 0), GENES)
    cells.write_zarr(tmp_path / "a.zarr")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(steps, "write_dataset", interrupted)
        with pytest.raises(KeyboardInterrupt):
            collect(tmp_path / "a.zarr", tmp_path / "cells.zarr", tell=quiet)
    zarr.open_array(tmp_path / "a.zarr" / "X" / "data")[:] = 7
    values, _ = collected(collect(tmp_path / "a.zarr", tmp_path / "cells.zarr", tell=quiet))
    assert (values.loc[cells.obs_names] == 7 * (cells.to_df() > 0)).all(axis=None)


def test_two_runs_at_once_are_refused(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "cells.zarr"
    with (
        folder_of_parts(out, restart=False),
        pytest.raises(Problems, match=f"{out}: another collect is writing it"),
    ):
        collect(files, out, tell=quiet)
    assert not out.exists()


def test_values_that_change_their_kind_are_refused_at_the_end(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values that the first look doesn't see decide as well, and parts of other files are kept."""
    monkeypatch.setattr("annbatch_distributed.collect.matrices._N_SAMPLED", 1)
    cells = ad.read_h5ad(files[1])
    cells.X.data[len(cells.X.data) // 3] = -2
    cells.write_h5ad(files[1])
    with pytest.raises(Problems, match=r"got counts in .*; negative values in .*b.h5ad \(X\)"):
        collect(files, tmp_path / "cells.zarr", tell=quiet)
    folder = tmp_path / "cells.zarr.parts"
    assert len([*folder.glob("*.zarr")]) == 3
    assert main(["collect", *map(str, files), "--out", str(tmp_path / "cells.zarr")]) == 2
    assert (
        f"annbatch-distributed: the next run continues with the parts in {folder}; or remove" in capsys.readouterr().err
    )


def test_damaged_values_name_file_and_rows(files: list[Path], tmp_path: Path) -> None:
    with h5py.File(files[1], "r+") as file:
        file["X/indices"][-1] = 99
    with pytest.raises(Problems, match=r"b.h5ad: cells 0 to 59 of X can't be read: ValueError: .*indices"):
        collect(files, tmp_path / "cells.zarr", tell=quiet)


def test_file_in_columns_is_read_twice(files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once to find its parts, and once to write all of them; or, after an interruption, those that are missing."""
    cells = ad.read_h5ad(files[0])
    cells.X = sp.csc_matrix(cells.X)
    cells.write_h5ad(files[0])
    expected, _ = collected(collect(files[:1], tmp_path / "whole.zarr", tell=quiet))
    pieces, write = blocks_of_files._pieces, parts._write
    read, written, limit = list[int](), list[parts.Part](), 3

    def counted(*arguments: Any) -> Any:
        read.append(len(written))
        return pieces(*arguments)

    def stopped(part: parts.Part, block: Any) -> Any:
        if len(written) == limit:
            raise KeyboardInterrupt
        written.append(part)
        return write(part, block)

    monkeypatch.setattr(blocks_of_files, "_pieces", counted)
    monkeypatch.setattr(parts, "_write", stopped)
    with pytest.raises(KeyboardInterrupt):
        collect(files[:1], tmp_path / "cells.zarr", memory="5kB", tell=quiet)
    assert read == [0, 0]
    assert {path.name for path in (tmp_path / "cells.zarr.parts").iterdir()} == {
        "lock",
        *(part.path.name for part in written),
    }
    limit = 100
    values, _ = collected(collect(files[:1], tmp_path / "cells.zarr", memory="5kB", tell=quiet))
    assert read == [0, 0, 3, 3]
    assert len(written) == len({*written}) > 5
    pd.testing.assert_frame_equal(values.loc[expected.index], expected)
