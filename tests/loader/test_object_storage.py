"""Collections in object storage: the same batches as on a local disk, and errors at their batch."""

from __future__ import annotations

import warnings
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from annbatch import DatasetCollection
from annbatch.samplers import RandomSampler
from obstore.exceptions import GenericError
from obstore.store import from_url
from zarr.storage import FsspecStore, LocalStore, ObjectStore

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from tests.object_storage import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from zarr.abc.store import Store

    from tests.object_storage import Server

N_OBS = 240


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a collection of dense cells and a collection of sparse cells to disk."""
    folder = tmp_path_factory.mktemp("cells")
    obs = pd.DataFrame(index=[f"cell {number}" for number in range(N_OBS)])
    counts = sp.random(N_OBS, 30, density=0.3, format="csr", dtype="float32", rng=np.random.default_rng(0))
    for kind, cells in {"sparse": counts, "dense": counts.toarray()}.items():
        ad.AnnData(cells, obs=obs).write_h5ad(folder / f"{kind}.h5ad")
        DatasetCollection(folder / kind / "cells.zarr").add_adatas([folder / f"{kind}.h5ad"], n_obs_per_chunk=8)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Server]:
    with serving() as server:
        for kind in ("sparse", "dense"):
            server.put(folder / kind / "cells.zarr", kind, "cells.zarr")
        yield server


@pytest.fixture
def server(served: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Set the environment variables by which clients find the server."""
    for name, value in served.environment.items():
        monkeypatch.setenv(name, value)
    return served


def by_obstore(kind: str, timeout: str = "60s") -> Store:
    retries: Any = {"max_retries": 2, "backoff": {"init_backoff": timedelta(milliseconds=10)}}
    options: Any = {"allow_http": True, "timeout": timeout}
    return ObjectStore(
        from_url(f"s3://{kind}/cells.zarr", retry_config=retries, client_options=options), read_only=True
    )


def by_fsspec(kind: str) -> Store:
    return FsspecStore.from_url(
        f"s3://{kind}/cells.zarr", storage_options={"skip_instance_cache": True}, read_only=True
    )


def loader(store: Store, rank: int = 0, prefetch: int = 0) -> StatefulLoader:
    sampler = DistributedSampler(RandomSampler(8, 4, 8), dist_info=Rank(rank, 2), seed=0, remainder="exact")
    empty = StatefulLoader(batch_sampler=sampler, return_index=True, preload_to_gpu=False, prefetch=prefetch)
    return empty.use_collection(DatasetCollection(zarr.open_group(store, mode="r")))


def read(batches: Any, n_batches: int | None = None) -> list[Any]:
    """Return the rows of each batch and their values."""
    return list(map(_read, islice(batches, n_batches)))


def _read(batch: Any) -> Any:
    values = batch["X"].toarray() if sp.issparse(batch["X"]) else batch["X"]
    return batch["index"].tolist(), values.tolist()


@pytest.mark.parametrize(
    ("client", "kind", "prefetch"), [(by_obstore, "sparse", 0), (by_obstore, "dense", 2), (by_fsspec, "sparse", 2)]
)
def test_object_storage_has_batches_of_local_collection(
    client: Callable[[str], Store], kind: str, prefetch: int, server: Server, folder: Path
) -> None:
    """Batches, and batches after a resume, equal the batches of a local collection."""
    local = LocalStore(folder / kind / "cells.zarr", read_only=True)
    for rank in range(2):
        whole = read(loader(local, rank))
        first, second = (loader(client(kind), rank, prefetch) for _ in range(2))
        assert read(first, 7) == whole[:7]
        second.load_state_dict(first.state_dict())
        assert read(second) == whole[7:]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("how", ["failing", "slow"])
def test_server_error_is_raised_at_its_batch(prefetch: int, how: str, server: Server, folder: Path) -> None:
    """A server error is raised at the batch that can't be read, names the store, and drops no batch."""
    whole = read(loader(LocalStore(folder / "sparse" / "cells.zarr", read_only=True)))
    cells = loader(by_obstore("sparse", timeout="1s"), prefetch=prefetch)
    batches = iter(cells)
    results = read(batches, 4)
    with (
        getattr(server, how)(),
        pytest.raises((GenericError, ExceptionGroup)) as caught,
    ):  # raised by the client or by zarr
        results.extend(map(_read, batches))
    (note,) = caught.value.__notes__
    assert 'object_store://S3Store(bucket="sparse", prefix="cells.zarr") failed' in note
    assert 0 < len(results) < len(whole)
    assert len(results) % 4 == 0  # a load request yields all of its batches, or none
    after = loader(by_obstore("sparse"))
    after.load_state_dict(cells.state_dict())
    assert results + read(after) == whole
    # as the note says: again from the beginning, unless the loader's own state is loaded
    assert note.endswith("call load_state_dict(state_dict()) first.")
    cells.load_state_dict(cells.state_dict())
    assert results + read(cells) == whole


def test_zarrs_with_object_storage_warns(server: Server, folder: Path) -> None:
    """Reading object storage through zarrs warns."""

    def warns(store: Store) -> bool:
        by_zarrs = zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})
        with by_zarrs, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader(store)
        return any("zarrs reads object_store://" in str(warning.message) for warning in caught)

    assert warns(by_obstore("sparse"))
    assert warns(by_obstore("dense"))
    assert not warns(by_fsspec("sparse"))  # zarrs leaves this store to zarr's codecs
    assert not warns(LocalStore(folder / "sparse" / "cells.zarr", read_only=True))
