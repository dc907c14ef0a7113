"""Embeddings on any number of ranks, after interruptions, and of invalid models and cells."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anndata as ad
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse as sp
import torch
import zarr
from annbatch import Loader
from annbatch.samplers import RandomSampler
from hypothesis import example, given, settings
from hypothesis import strategies as st
from zarr.storage import LocalStore, MemoryStore

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader, deferred
from annbatch_distributed.integrations import embedding
from annbatch_distributed.integrations.embedding import embed

if TYPE_CHECKING:
    from pathlib import Path


def cells(n_obs: int, batch_size: int = 4, **options: Any) -> Loader:
    """Create a shuffled loader of cells, each with the number of its row as its only value."""
    sampler = RandomSampler(batch_size, 2, batch_size, mask=slice(0, n_obs // 2), rng=np.random.default_rng(0))
    loader = Loader(batch_sampler=sampler, preload_to_gpu=False, **options)
    return loader.add_adata(ad.AnnData(np.arange(n_obs, dtype="float32").reshape(-1, 1)))


class Killed(BaseException):
    """Exception that ends a rank."""


class Model:
    """A model that returns the row of each cell and the size of its batch, until it is killed."""

    def __init__(self, lives: int = 1 << 30) -> None:
        self.n_batches, self.lives = 0, lives

    def __call__(self, batch: Any) -> np.ndarray:
        if self.n_batches == self.lives:
            raise Killed
        self.n_batches += 1
        return np.column_stack([batch["X"], np.full(len(batch["X"]), len(batch["X"]))]).astype("float32")


def expected(n_obs: int, batch_size: int) -> np.ndarray:
    starts = range(0, n_obs, batch_size)
    sizes = np.concatenate([[min(batch_size, n_obs - start)] * min(batch_size, n_obs - start) for start in starts])
    return np.column_stack([np.arange(n_obs), sizes]).astype("float32")


@settings(max_examples=25)
@given(
    n_obs=st.integers(2, 300),
    batch_size=st.integers(1, 16),
    world_sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    lives=st.lists(st.integers(0, 12), min_size=5, max_size=5),
    most=st.integers(1, 100),
)
@example(n_obs=100, batch_size=4, world_sizes=(2, 3), lives=[8, 0, 0, 0, 0], most=1000)
def test_embed_writes_each_row_once_after_kill(
    n_obs: int, batch_size: int, world_sizes: tuple[int, int], lives: list[int], most: int
) -> None:
    """Each row is written once, whichever rank is killed and resumed."""
    store = MemoryStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedding, "_ROWS_OF_CHUNK", most)
        patch.setattr(embedding, "_ROWS_OF_REQUEST", 3 * batch_size)
        before, after = world_sizes
        for rank in range(before):
            model = Model(lives[rank])
            try:
                embed(model, cells(n_obs, batch_size), store, dist_info=Rank(rank, before), progress=False)
            except Killed:
                assert model.n_batches == lives[rank]
        n_there = 0
        if list(store._store_dict):
            array = zarr.open_array(store, mode="r")
            there = ~np.isnan(np.asarray(array[:]))
            assert np.array_equal(np.asarray(array[:])[there], expected(n_obs, batch_size)[there])
            n_there = len(np.unique(np.flatnonzero(there.all(axis=1)) // batch_size))
        models = [Model() for _ in range(after)]
        for rank, model in enumerate(models):
            array = embed(model, cells(n_obs, batch_size), store, dist_info=Rank(rank, after), progress=False)
    assert np.array_equal(np.asarray(array[:]), expected(n_obs, batch_size))
    # finished batches aren't computed again, except the first batch, which each rank computes
    assert sum(model.n_batches for model in models) == -(-n_obs // batch_size) - n_there + after


def test_embed_chunks_hold_whole_batches() -> None:
    """Chunks hold whole batches, and each rank has many chunks."""
    array = embed(Model(), cells(1_000), MemoryStore(), dist_info=Rank(0, 3), progress=False)
    assert array.chunks == (250 // (3 * 8) * 4, 2)
    assert embed(Model(), cells(1_000), MemoryStore(), batch_size=512, progress=False).chunks == (512, 2)


def test_embed_of_scvi_uses_data_module_and_model() -> None:
    """Batches come from the data module, and the latent representation from the model."""

    def tensors(batch: Any, dataloader_idx: int) -> dict[str, Any]:
        assert dataloader_idx == 0
        return {"X": batch["X"] * 2}

    def latent(*, dataloader: list[Any]) -> np.ndarray:
        (batch,) = dataloader
        return np.asarray(batch["X"])

    module = SimpleNamespace(dataset=cells(10), on_before_batch_transfer=tensors)
    model = SimpleNamespace(get_latent_representation=latent)
    assert np.asarray(embed(model, module, MemoryStore(), progress=False)[:, 0]).tolist() == list(range(0, 20, 2))


@pytest.mark.parametrize("dist_info", [None, Rank(0, 1), deferred(lambda: (0, 1))])
def test_each_source_of_rank_works(dist_info: Any, tmp_path: Path) -> None:
    array = embed(Model(), cells(20), str(tmp_path / "array.zarr"), dist_info=dist_info, progress=False)
    assert np.array_equal(np.asarray(array[:]), expected(20, 4))


def test_without_a_process_group_the_launcher_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    there = ~np.isnan(np.asarray(embed(Model(), cells(64), MemoryStore(), progress=False)[:, 0]))
    assert np.flatnonzero(there).tolist() == [row for row in range(64) if row // 4 % 2]


def test_rank_0_shows_how_many_cells_are_done(capsys: pytest.CaptureFixture[str]) -> None:
    embed(Model(), cells(64), MemoryStore(), dist_info=Rank(1, 2))
    assert not capsys.readouterr().err
    embed(Model(), cells(64), MemoryStore(), dist_info=Rank(0, 2))
    assert "32/32" in capsys.readouterr().err


def test_embed_continues_array_created_meanwhile() -> None:
    """An array that a different rank has created in the meantime is continued."""
    store = MemoryStore()

    def model(batch: Any) -> np.ndarray:
        if not list(store._store_dict):
            embed(Model(), cells(40), store, dist_info=Rank(1, 2), progress=False)
        return Model()(batch)

    array = embed(model, cells(40), store, dist_info=Rank(0, 2), progress=False)
    assert np.array_equal(np.asarray(array[:]), expected(40, 4))


def half_written() -> MemoryStore:
    store = MemoryStore()
    embed(Model(), cells(40), store, dist_info=Rank(0, 2), progress=False)
    return store


def test_embed_refuses_array_of_different_model() -> None:
    """An array of different cells or a different model raises, and stays unchanged."""
    store = half_written()
    there = np.asarray(zarr.open_array(store, mode="r")[:])
    with pytest.raises(ValueError, match=r"must be an embedding with .*'n_obs': 44.*got .*'n_obs': 40"):
        embed(Model(), cells(44), store, progress=False)
    with pytest.raises(ValueError, match="must be an embedding with"):
        embed(Model(), cells(40), store, batch_size=8, progress=False)
    others = [
        lambda batch: 1 + Model()(batch),
        lambda batch: Model()(batch).astype("float64"),
        lambda batch: Model()(batch)[:, :1],
    ]
    for other in others:
        for rank in range(2):  # the second rank has no finished rows
            with pytest.raises(ValueError, match="is of a different model or of different cells"):
                embed(other, cells(40), store, dist_info=Rank(rank, 2), progress=False)
    assert np.array_equal(np.asarray(zarr.open_array(store, mode="r")[:]), there, equal_nan=True)
    foreign = MemoryStore()
    zarr.create_array(foreign, shape=(40, 2), dtype="float32")
    with pytest.raises(ValueError, match="got None"):
        embed(Model(), cells(40), foreign, progress=False)
    group = MemoryStore()
    zarr.create_group(group)
    with pytest.raises(ValueError, match="must have an array or be empty"):
        embed(Model(), cells(40), group, progress=False)


def test_embed_writes_chunks_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """zarr-python writes the chunks, so a kill leaves no incomplete chunk."""
    written: list[str] = []
    put = LocalStore.set

    async def counted(self: LocalStore, key: str, value: Any) -> None:
        written.append(key)
        await put(self, key, value)

    monkeypatch.setattr(LocalStore, "set", counted)
    monkeypatch.setattr(LocalStore, "set_sync", None, raising=False)
    chunks = [f"c/{number}/0" for number in range(10)]
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        with pytest.raises(Killed):
            embed(Model(5), cells(40), tmp_path / "array.zarr", progress=False)
        assert [key for key in written if key.startswith("c/")] == chunks[:4]  # and the first batch was computed before
        embed(Model(), cells(40), tmp_path / "array.zarr", progress=False)  # resume the existing array
    assert [key for key in written if key.startswith("c/")] == chunks


def test_embed_random_numbers_do_not_depend_on_ranks() -> None:
    """Random numbers are the same on any number of ranks, and PyTorch's state is restored."""

    def random(batch: Any) -> torch.Tensor:
        return torch.rand(len(batch["X"]), 1, requires_grad=True)

    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    alone = embed(random, cells(40), MemoryStore(), progress=False)[:]
    store = MemoryStore()
    for rank in (1, 0):
        on_two = embed(random, cells(40), store, dist_info=Rank(rank, 2), progress=False)[:]
    assert np.array_equal(np.asarray(alone), np.asarray(on_two))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("value", [0, -np.inf, np.nan])
def test_embed_tolerates_rounding_not_different_model(value: float) -> None:
    """An array is continued despite different rounding, but not by a different model."""

    def model(factor: float) -> Any:
        return lambda batch: np.column_stack([Model()(batch) * factor, np.full(len(batch["X"]), value + factor - 1)])

    store = MemoryStore()
    embed(model(1), cells(40), store, dist_info=Rank(0, 2), progress=False)
    with pytest.raises(ValueError, match="is of a different model"):
        embed(model(2), cells(40), store, progress=False)
    array = embed(model(1 + 1e-9), cells(40), store, progress=False)
    assert not np.isnan(np.asarray(array[:, 0])).any()


def test_embed_keeps_chunk_that_begins_with_nan() -> None:
    """A finished chunk that begins with NaN is not computed again."""

    def model(batch: Any) -> np.ndarray:
        n_batches.append(1)
        return np.where(Model()(batch)[:, :1] % 4 == 0, np.nan, Model()(batch))

    n_batches: list[int] = []
    store = MemoryStore()
    embed(model, cells(40), store, progress=False)
    n_before = len(n_batches)
    embed(model, cells(40), store, progress=False)
    assert (n_before, len(n_batches)) == (1 + 10, 1 + 10 + 1)


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_batches_are_those_of_a_virtual_rank(n_ranks: int) -> None:
    sampler = DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, n_ranks), virtual_ranks=2, seed=0)
    loader = StatefulLoader.from_loader(cells(40), batch_sampler=sampler)
    array = embed(Model(), loader, MemoryStore(), dist_info=Rank(0, 1), progress=False)
    assert np.array_equal(np.asarray(array[:]), expected(40, 4))


def test_embed_of_scvi_needs_data_module() -> None:
    """A model of scvi-tools needs its data module."""
    kind = type("SCVI", (), {"__module__": "scvi.model", "get_latent_representation": None})
    with pytest.raises(TypeError, match="must be the data module of a scvi-tools model, got Loader"):
        embed(kind(), cells(8), MemoryStore(), progress=False)


WRONG: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "integers": (lambda _: np.zeros((4, 2), int), cells(8), TypeError, r"must return floats, .* got int64"),
    "no rows": (lambda _: np.zeros(4), cells(8), ValueError, r"of shape \(4, width\), got \(4,\)"),
    "fewer rows": (lambda _: np.zeros((3, 2)), cells(8), ValueError, r"of shape \(4, width\), got \(3, 2\)"),
    "different width": (
        lambda batch: np.zeros((len(batch["X"]), 2 + int(batch["X"][0, 0] > 3))),
        cells(8),
        ValueError,
        r"must return float64 of width 2, .* got float64 of width 3 for rows 4 to 7",
    ),
    "a tuple": (lambda _: (np.zeros((4, 2)), None), cells(8), TypeError, "must return a dense array .* got tuple"),
    "a sparse tensor": (lambda _: torch.zeros(4, 2).to_sparse(), cells(8), TypeError, "got a sparse Tensor"),
    "a sparse matrix": (lambda _: sp.csr_matrix((4, 2)), cells(8), TypeError, "got a sparse csr_matrix"),
    "no model": (3, cells(8), TypeError, r"must have get_latent_representation, .* got 3 of type int"),
    "no cells": (Model(), 3, TypeError, r"must be an annbatch Loader, .* got 3 of type int"),
}


@pytest.mark.parametrize("what", WRONG)
def test_embed_refuses_invalid_model_or_cells(what: str) -> None:
    """An invalid model or invalid cells raise."""
    model, data, error, message = WRONG[what]
    with pytest.raises(error, match=message):
        embed(model, data, MemoryStore(), progress=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float16", "float64"])
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_embed_stores_floats_of_any_width(library: str, dtype: str) -> None:
    """Floats that NumPy has no type for are stored as float32; the others keep their type."""

    def model(batch: Any) -> Any:
        values = np.asarray(batch["X"], dtype="float32") % 8
        if library == "torch":
            return torch.tensor(values, requires_grad=True).to(getattr(torch, dtype))
        return jnp.asarray(values).astype(getattr(jnp, dtype))

    stored = embed(model, cells(8), MemoryStore(), progress=False)
    known = dtype if dtype == "float16" or (dtype == "float64" and library == "torch") else "float32"
    assert stored.dtype == known
    assert np.asarray(stored[:])[:, 0].tolist() == [*range(8)]


def test_without_a_batch_size_one_must_be_given() -> None:
    loader = cells(8)
    loader._batch_sampler = SimpleNamespace(batch_size=None)  # type: ignore[assignment]  # only batch_size is needed
    with pytest.raises(ValueError, match="must have a batch size"):
        embed(Model(), loader, MemoryStore(), progress=False)
