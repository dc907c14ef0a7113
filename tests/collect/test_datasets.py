"""Datasets: their cells are of any files, in random order, or sorted by columns with random order among equal cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata as ad
import pandas as pd
import pytest

from annbatch_distributed.collect import collect
from annbatch_distributed.collect.write import datasets, storage
from tests.collect.test_files import GENES, cells_of, counts, quiet

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[pd.DataFrame]]:
    """Collect two files of 60 cells to several datasets, of slices of 5 cells, and return ``obs`` of each dataset."""
    monkeypatch.setattr(datasets, "_SLICE", 5)
    files = [tmp_path / f"{name}.h5ad" for name in "ab"]
    for seed, file in enumerate(files):
        cells_of(file.stem, counts(60, 12, seed), GENES, type=[*"xyz"] * 20).write_h5ad(file)

    def collected(name: str, **options: Any) -> list[pd.DataFrame]:
        collection: Any = collect(files, tmp_path / name, memory="5kB", jobs=1, tell=quiet, **options)
        return [ad.io.read_elem(group["obs"]) for group in collection]

    return collected


def test_each_dataset_has_cells_of_all_files_in_random_order(tables: Callable[..., list[pd.DataFrame]]) -> None:
    found = tables("cells.zarr")
    assert len(found) > 2
    names = [name for obs in found for name in obs.index]
    assert len({*names}) == 120
    for obs in found:
        assert obs["src_path"].nunique() == 2
        # neither the files nor the slices of 5 cells are in order
        assert [*obs.index] != sorted(obs.index)
        assert obs["src_path"].cat.codes.diff().ne(0).sum() > len(obs) / 5
    assert [[*obs.index] for obs in tables("other.zarr", seed=1)] != [[*obs.index] for obs in found]


def test_cells_of_a_group_are_in_random_order(tables: Callable[..., list[pd.DataFrame]]) -> None:
    for obs in tables("cells.zarr", group_by=["type"]):
        assert obs["type"].cat.codes.is_monotonic_increasing
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
