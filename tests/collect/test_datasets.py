"""Datasets: their cells are of any files, in random order, or sorted by columns with random order among equal cells."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from annbatch_distributed.collect import collect
from annbatch_distributed.collect.write import datasets, storage
from tests.collect.test_files import GENES, cells_of, collected, counts, quiet

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[pd.DataFrame]]:
    """Collect two files of 60 cells to several datasets, of slices of 5 cells, and return ``obs`` of each dataset."""
    monkeypatch.setattr(datasets, "_SLICE", 5)
    files = [tmp_path / f"{name}.h5ad" for name in "ab"]
    for seed, file in enumerate(files):
        # two cells of a file are of the batch "rare", which is a category of each dataset
        labels = {"type": [*"xyz"] * 20, "batch": ["rare", *["usual"] * 29] * 2}
        cells_of(file.stem, counts(60, 12, seed), GENES, **labels).write_h5ad(file)

    def tables_of(name: str, **options: Any) -> list[pd.DataFrame]:
        collection: Any = collect(files, tmp_path / name, memory="5kB", jobs=1, tell=quiet, **options)
        return [ad.io.read_elem(group["obs"]) for group in collection]

    return tables_of


def test_each_dataset_has_cells_of_all_files_in_random_order(tables: Callable[..., list[pd.DataFrame]]) -> None:
    found = tables("cells.zarr")
    assert len(found) > 2
    names = [name for obs in found for name in obs.index]
    assert len({*names}) == 120
    # the rows of a dataset take a fifth of the memory: 8 bytes each, and 5 for each value with its index
    n_values = sum(np.count_nonzero(counts(60, 12, seed)) for seed in (0, 1))
    assert max(map(len, found)) <= 1_000 / (8 + 5 * n_values / 120)
    for obs in found:
        assert obs["src_path"].nunique() == 2
        # neither the files nor the slices of 5 cells are in order
        assert [*obs.index] != sorted(obs.index)
        assert obs["src_path"].cat.codes.diff().ne(0).sum() > len(obs) / 5
    assert [[*obs.index] for obs in tables("other.zarr", seed=1)] != [[*obs.index] for obs in found]


def test_cells_of_a_group_are_in_random_order(tables: Callable[..., list[pd.DataFrame]]) -> None:
    """Cells are sorted by all columns of a group, whose categories are the same in each dataset."""
    for obs in tables("cells.zarr", group_by=["type", "batch"]):
        assert {*obs["batch"].cat.categories} == {"usual", "rare"}
        groups = [*zip(obs["type"].cat.codes, obs["batch"].cat.codes, strict=True)]
        assert groups == sorted(groups)
        for _, group in obs.groupby("type", observed=True):
            assert group["src_path"].cat.codes.diff().ne(0).sum() > 2


@pytest.mark.parametrize("seed", [0, 1])
def test_complete_datasets_are_kept(
    seed: int, tables: Callable[..., list[pd.DataFrame]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interruption, only datasets that aren't complete are written, unless others were asked for."""
    expected = tables("whole.zarr", seed=seed)
    write, written = storage.write_stored, list[str]()

    def until(number: int) -> Any:
        def stopped(path: Path, *arguments: Any) -> None:
            write(path, *arguments)
            written.append(path.name)
            if len(written) == number:
                raise KeyboardInterrupt

        return stopped

    monkeypatch.setattr(datasets, "write_stored", until(3))
    with pytest.raises(KeyboardInterrupt):
        tables("cells.zarr")
    assert not (tmp_path / "cells.zarr").exists()
    (tmp_path / "cells.zarr.parts" / "dataset_2.unfinished").mkdir()  # of a process that was killed
    written.clear()
    monkeypatch.setattr(datasets, "write_stored", until(-1))
    found = tables("cells.zarr", seed=seed)
    assert len(written) == len(expected) - 2 * (seed == 0)
    for one, other in zip(found, expected, strict=True):
        pd.testing.assert_frame_equal(one, other)
    files = {path.relative_to(tmp_path / "whole.zarr"): path for path in (tmp_path / "whole.zarr").rglob("*")}
    assert {path.relative_to(tmp_path / "cells.zarr") for path in (tmp_path / "cells.zarr").rglob("*")} == {*files}
    for name, path in files.items():
        assert path.is_dir() or path.read_bytes() == (tmp_path / "cells.zarr" / name).read_bytes()
    assert not (tmp_path / "cells.zarr.parts").exists()


@pytest.mark.parametrize("change", ["labels", "memory", "place", "order", "values"])
def test_values_of_different_runs_are_not_kept(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interruption, no part or dataset is kept if the files or arguments would give a different one."""
    monkeypatch.setattr(datasets, "_SLICE", 5)
    values = counts(20, 12, 0)

    def write(name: str, factor: int, seconds: int) -> None:
        cells = cells_of(name, factor * values, GENES)
        cells.layers["spliced"] = sp.csr_matrix(5 * values)
        cells.write_h5ad(tmp_path / f"{name}.h5ad")
        os.utime(tmp_path / f"{name}.h5ad", (seconds, seconds))

    def run(**options: Any) -> tuple[pd.DataFrame, pd.DataFrame]:
        arguments: dict[str, Any] = {"layer": "X", "memory": 4_600, "tell": quiet, **options}
        return collected(collect(tmp_path / "samples.csv", tmp_path / "cells.zarr", **arguments))

    # files of the same size and time
    for factor, name in enumerate("ab", 1):
        write(name, factor, 1)
    assert (tmp_path / "a.h5ad").stat().st_size == (tmp_path / "b.h5ad").stat().st_size
    lines = ["path,donor", "a.h5ad,A", "b.h5ad,B"]
    (tmp_path / "samples.csv").write_text("\n".join(lines))
    with monkeypatch.context() as patch:
        store = storage.write_stored

        def stopped(path: Path, *arguments: Any) -> None:
            if path.name.startswith("dataset_1"):
                raise KeyboardInterrupt
            store(path, *arguments)

        patch.setattr(datasets, "write_stored", stopped)
        with pytest.raises(KeyboardInterrupt):
            run()
    assert len([*tmp_path.glob("cells.zarr.parts/cells-*/dataset_0")]) == 1
    factors, donors, options = {"a": 1, "b": 2}, {"a": "A", "b": "B"}, dict[str, Any]()
    if change == "labels":
        donors["a"] = "C"
        (tmp_path / "samples.csv").write_text("\n".join(lines).replace(",A", ",C"))
    elif change == "memory":
        options["memory"] = 9_000  # still one part for each file
    elif change == "place":
        factors, options["layer"] = {"a": 5, "b": 5}, "spliced"
    elif change == "order":
        (tmp_path / "samples.csv").write_text("\n".join([lines[0], *lines[:0:-1]]))
    elif change == "values":
        factors["a"] = 3
        write("a", 3, 2)
    found, obs = run(**options)
    assert sorted(found.index) == sorted(f"{name}-{number}" for name in "ab" for number in range(20))
    for name in "ab":
        own = [f"{name}-{number}" for number in range(20)]
        np.testing.assert_array_equal(found.loc[own], factors[name] * values)
        assert {*obs.loc[own, "donor"]} == {donors[name]}
