"""StatefulLoader.from_collection: the sampler and the sizes that it chooses."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from annbatch import DatasetCollection
from annbatch.samplers import RandomSampler

from annbatch_distributed import AlignedLoader, DistributedSampler, Rank, StatefulLoader, suggest_sizes

N_ROWS = 3_000


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> DatasetCollection:
    folder = tmp_path_factory.mktemp("cells")
    cells: Any = sp.random(N_ROWS, 50, density=0.3, format="csr", dtype=np.float32, random_state=0)
    obs = pd.DataFrame({"donor": np.arange(N_ROWS) % 5, "split": "train"}, [f"c{row}" for row in range(N_ROWS)])
    ad.AnnData(cells, obs=obs).write_h5ad(folder / "cells.h5ad")
    DatasetCollection(folder / "cells.zarr").add_adatas([folder / "cells.h5ad"], shuffle=False)
    return DatasetCollection(folder / "cells.zarr", mode="r")


def ranks(collection: DatasetCollection, world_size: int, **options: Any) -> list[StatefulLoader]:
    return [
        StatefulLoader.from_collection(collection, dist_info=Rank(rank, world_size), return_index=True, **options)
        for rank in range(world_size)
    ]


def rows(loaders: list[StatefulLoader]) -> list[list[int]]:
    """Return the rows of each batch, rank by rank."""
    return [batch["index"].tolist() for loader in loaders for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    """Return the rows of all batches, in order."""
    return list(chain.from_iterable(batches))


@pytest.mark.parametrize("batch_size", [1, 100, 256, 4_096])
def test_from_collection_reads_each_selected_cell_once(batch_size: int, collection: DatasetCollection) -> None:
    """All ranks together read each selected cell once, in a different order in each epoch."""
    mask = collection.obs(["donor"])["donor"] != 3
    loaders = ranks(collection, 2, batch_size=batch_size, mask=mask)
    epochs = []
    for epoch in range(2):
        for loader in loaders:
            loader.set_epoch(epoch)
        read = rows(loaders)
        assert max(map(len, read)) == min(batch_size, len(read[0]))
        assert len({len(loader) for loader in loaders}) == 1
        assert sorted(flat(read)) == np.flatnonzero(mask).tolist()
        epochs.append(flat(read))
    assert epochs[0] != epochs[1]
    assert epochs[0] != flat(rows(ranks(collection, 2, batch_size=batch_size, mask=mask, seed=1)))
    # by default, every process has the same order
    assert epochs[0] == flat(rows(ranks(collection, 2, batch_size=batch_size, mask=mask)))


def test_from_collection_without_shuffle_keeps_order(collection: DatasetCollection) -> None:
    """With shuffle=False, cells are read in the order of the collection."""
    assert flat(rows(ranks(collection, 3, shuffle=False))) == list(range(N_ROWS))


def test_fewer_cells_than_a_batch_are_read(collection: DatasetCollection) -> None:
    assert sorted(flat(rows(ranks(collection, 2, mask=slice(0, 30))))) == list(range(30))


def test_more_memory_makes_larger_load_requests(collection: DatasetCollection) -> None:
    n_rows = [ranks(collection, 1, memory=memory)[0].plan().rows_in_memory for memory in (200_000, 10**6)]
    row_bytes = 50 * 0.3 * 8
    assert n_rows[0] is not None
    assert n_rows[1] is not None
    assert n_rows[0] < 200_000 / row_bytes
    assert n_rows[0] < n_rows[1] < 10**6 / row_bytes
    # one rank may run all virtual ranks
    of_eight = ranks(collection, 1, memory=10**6, virtual_ranks=8, batch_size=64)[0].plan().rows_in_memory
    assert of_eight is not None
    assert of_eight < 10**6 / row_bytes
    with pytest.raises(ValueError, match=r"batch of 256 rows.* more than the memory of 10,000 bytes"):
        ranks(collection, 1, memory=10_000)


def test_from_collection_cuts_chunks_to_fit_memory(collection: DatasetCollection) -> None:
    """Batches are read even if whole chunks don't fit into the memory."""
    options: dict[str, Any] = {"batch_size": 999, "memory": 10**6}
    assert sorted(flat(rows(ranks(collection, 2, **options)))) == list(range(N_ROWS))
    n_rows = ranks(collection, 1, **options)[0].plan().rows_in_memory
    assert n_rows is not None
    assert n_rows < 10**6 / (50 * 0.3 * 8)


def test_from_collection_counts_over_read_rows(collection: DatasetCollection) -> None:
    """Scattered cells take more memory, because rows in gaps are read too."""
    mask, options = np.arange(N_ROWS) % 40 == 0, {"batch_size": 32, "memory": 200_000}
    with pytest.raises(ValueError, match="batch of 32 rows"):
        ranks(collection, 1, mask=mask, **options)
    assert len(ranks(collection, 1, mask=mask, max_gap=0, **options)[0]) == 3


def test_from_collection_passes_options(collection: DatasetCollection) -> None:
    """Options are passed to the sampler or to annbatch's Loader."""

    def donors(group: Any) -> ad.AnnData:
        obs: Any = ad.io.read_elem(group["obs"])
        return ad.AnnData(ad.io.sparse_dataset(group["X"]), obs=obs[["donor"]])

    loader = StatefulLoader.from_collection(
        collection, dist_info=Rank(0, 1), virtual_ranks=2, remainder="drop", to="torch", load_adata=donors
    )
    assert loader.plan().n_batches(1) == 5
    batch = next(iter(loader))
    assert [*batch["obs"]] == ["donor"]
    assert batch["X"].to_dense().shape == (2 * 256, 50)
    assert 'remainder="keep"' in str(ranks(collection, 1, enforce_equal_batches=False)[0].plan())


def test_misspelled_argument_names_the_function(collection: DatasetCollection) -> None:
    """An unknown argument is blamed on the function that the user called, with a similar name."""
    with pytest.raises(TypeError, match=r"^from_collection\(\) got .* 'btach_size'. Did you mean 'batch_size'\?$"):
        StatefulLoader.from_collection(collection, dist_info=Rank(0, 1), btach_size=3)
    with pytest.raises(TypeError, match=r"^from_collection\(\) chooses chunk_size by memory"):
        StatefulLoader.from_collection(collection, dist_info=Rank(0, 1), chunk_size=3)
    for name in ("sampler", "batch_sampler", "rng", "drop_last"):
        with pytest.raises(TypeError, match=rf"^from_collection\(\) got an unexpected keyword argument '{name}'"):
            StatefulLoader.from_collection(collection, dist_info=Rank(0, 1), **{name: None})
    with pytest.raises(TypeError, match=r"^from_loader\(\) got .* 'prefech'. Did you mean 'prefetch'\?$"):
        StatefulLoader.from_loader(StatefulLoader.from_collection(collection, dist_info=Rank(0, 1)), prefech=2)
    with pytest.raises(TypeError, match="virtual_ranks must be an integer, got '4'"):
        StatefulLoader.from_collection(collection, dist_info=Rank(0, 1), virtual_ranks="4")
    assert StatefulLoader.from_collection(collection, dist_info=Rank(0, 1), remainder=None).sampler.remainder == "exact"
    sampler = DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 1), seed=0)
    with pytest.raises(TypeError, match=r"^StatefulLoader\(\) got .* 'return_idx'. Did you mean 'return_index'\?$"):
        StatefulLoader(batch_sampler=sampler, return_idx=True)


def test_collection_is_a_path_a_group_or_an_object(collection: DatasetCollection, tmp_path: Path) -> None:
    """A collection can be named by its path, its zarr group, or annbatch's object."""
    group = zarr.open_group(next(iter(collection)).store, mode="r")
    folder = Path(str(group.store.root))  # type: ignore[attr-defined]  # a local store
    states = [
        StatefulLoader.from_collection(named, dist_info=Rank(0, 2)).state_dict()
        for named in (collection, group, folder, str(folder))
    ]
    assert states == [states[0]] * 4
    assert suggest_sizes(str(folder)) == suggest_sizes(collection)
    assert suggest_sizes(collection, memory="1 MiB") == suggest_sizes(collection, memory=1 << 20)
    aligned = AlignedLoader.from_collections({"one": folder, "two": group}, dist_info=Rank(0, 2))
    assert aligned.n_obs == collection.obs().shape[0]
    zarr.open_group(tmp_path / "empty.zarr", mode="w")
    (tmp_path / "cells.h5ad").touch()
    for named, kind, message in (
        (tmp_path / "none.zarr", FileNotFoundError, "none.zarr doesn't exist. Write h5ad files"),
        (tmp_path / "cells.h5ad", FileNotFoundError, "cells.h5ad must be the folder of a collection, got a file"),
        (
            (tmp_path / "none.zarr").as_uri(),
            OSError,
            "none.zarr must be the URL of a collection, but obstore can't open",
        ),
        (tmp_path, FileNotFoundError, "must be a collection, got no zarr group there"),
        (tmp_path / "empty.zarr", ValueError, "empty.zarr must have datasets of annbatch, got none"),
        (3, TypeError, "must be a path or URL, a zarr group, or an annbatch DatasetCollection, got 3 of type int"),
    ):
        with pytest.raises(kind, match=message):
            StatefulLoader.from_collection(named, dist_info=Rank(0, 2))
    with pytest.raises(ValueError, match="memory must be a number of bytes or a string such as '4GB', got '4 bits'"):
        suggest_sizes(collection, memory="4 bits")


def test_cells_without_values_have_sizes(tmp_path: Path) -> None:
    """A collection whose cells are all 0 is read like any other."""
    ad.AnnData(sp.csr_matrix((50, 6), dtype="float32")).write_h5ad(tmp_path / "cells.h5ad")
    collection = DatasetCollection(tmp_path / "cells.zarr").add_adatas([tmp_path / "cells.h5ad"])
    loader = StatefulLoader.from_collection(collection, dist_info=Rank(0, 1))
    assert sum(batch["X"].shape[0] for batch in loader) == 50
