"""Datasets: their cells are of any files, in random order, or sorted by columns with random order among equal cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata as ad
import pytest

from annbatch_distributed.collect import collect
from annbatch_distributed.collect.write import datasets
from tests.collect.test_files import GENES, cells_of, counts, quiet

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pandas as pd


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
