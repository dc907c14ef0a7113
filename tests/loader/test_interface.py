"""The interface of every kind of loader, as training loops and frameworks use it."""

from __future__ import annotations

import copy
import pickle
from itertools import islice
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from annbatch.samplers import RandomSampler

from annbatch_distributed import AlignedLoader, CellSets, DistributedSampler, MixedLoader, Rank, StatefulLoader
from tests.meeting import agreement, met_in_threads
from tests.simulated.workers import InThread

if TYPE_CHECKING:
    from collections.abc import Callable

#: Number of steps of an epoch on two ranks.
N_STEPS = 12


def source(rank: Rank, n_rows: int = 96, n_genes: int = 1, name: str = "cell", **options: Any) -> StatefulLoader:
    """Create a loader in which each value is the number of its row."""
    prefetch = options.pop("prefetch", 0)
    sampler = DistributedSampler(RandomSampler(4, 2, 4), dist_info=rank, **{"seed": 0, "remainder": "exact"} | options)
    loader = StatefulLoader(batch_sampler=sampler, return_index=True, preload_to_gpu=False, prefetch=prefetch)
    obs = pd.DataFrame({"donor": np.arange(n_rows) % 3}, index=[f"{name} {row}" for row in range(n_rows)])
    return loader.add_adata(ad.AnnData(np.repeat(np.arange(float(n_rows))[:, None], n_genes, axis=1), obs=obs))


def stateful(rank: Rank, **options: Any) -> StatefulLoader:
    return source(rank, **options)


def prefetching(rank: Rank, **options: Any) -> StatefulLoader:
    return source(rank, prefetch=2, **options)


def of_sets(rank: Rank, n_sets: int = 96, prefetch: int = 1, **options: Any) -> StatefulLoader:
    """Create a loader of sets of two cells with two controls."""
    n_rows, first = 2 * n_sets + 10, options.pop("mask", slice(0, None)).stop
    obs = pd.DataFrame({"donor": np.arange(n_rows) % 3, "drug": ["a", "b"] * n_sets + ["DMSO"] * 10})
    mask = np.arange(n_rows) % (2 * n_sets) < (first or 2 * n_sets)
    sets = CellSets.from_obs(obs, by="drug", set_size=2, chunk_size=1, controls={"drug": "DMSO"}, mask=mask, seed=0)
    sampler = DistributedSampler(
        RandomSampler(1, 8, 4), dist_info=rank, sets=sets, **{"seed": 0, "remainder": "exact"} | options
    )
    loader = StatefulLoader(batch_sampler=sampler, return_index=True, preload_to_gpu=False, prefetch=prefetch)
    obs.index = pd.Index([f"cell {row}" for row in range(n_rows)])
    return loader.add_adata(ad.AnnData(np.arange(float(n_rows))[:, None], obs=obs))


def dataloader(rank: Rank, **options: Any) -> Any:
    return source(rank, **options).to_dataloader()


def workers(rank: Rank, **options: Any) -> Any:
    return InThread(source(rank, **options), num_workers=2)


def forked(rank: Rank, **options: Any) -> Any:
    options_of_torch = {"multiprocessing_context": "fork", "persistent_workers": False}
    return source(rank, **options).to_dataloader(num_workers=2, **options_of_torch)


def mixed(rank: Rank, **options: Any) -> MixedLoader:
    sources = {"tahoe": source(rank, 40, 2, name="tahoe", prefetch=1, **options), "census": source(rank, **options)}
    return MixedLoader(sources, weights={"tahoe": 2, "census": 1}, n_steps=N_STEPS)


def mixed_until(rank: Rank, **options: Any) -> MixedLoader:
    sources = {"tahoe": source(rank, 64, name="tahoe", **options), "census": source(rank, 160, **options)}
    # with this seed, each of the first epochs has N_STEPS steps
    return MixedLoader(sources, weights={"tahoe": 2, "census": 1}, stopping_strategy="first_exhausted", seed=4)


def mixed_with_sets(rank: Rank, **options: Any) -> MixedLoader:
    sources = {"tahoe": source(rank, 40, name="tahoe", **options), "census": of_sets(rank, 24, **options)}
    return MixedLoader(sources, weights={"tahoe": 2, "census": 1}, n_steps=N_STEPS)


def within_batch(rank: Rank, **options: Any) -> MixedLoader:
    sources = {"tahoe": source(rank, 40, name="tahoe", **options), "census": source(rank, **options)}
    return MixedLoader(sources, n_steps=N_STEPS, within_batch=True)


def aligned(rank: Rank, **options: Any) -> AlignedLoader:
    stores = {"rna": stateful(rank, **options), "protein": source(rank, n_genes=3, **options)}
    return AlignedLoader(stores, batch_sampler=stores["rna"].sampler)


MAKERS = [
    *(stateful, prefetching, of_sets, dataloader, workers),
    *(mixed, mixed_until, mixed_with_sets, within_batch, aligned),
]
every = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
can_be_copied = pytest.mark.parametrize(  # torch's DataLoader can't be copied
    "make", [make for make in MAKERS if make not in (dataloader, workers)], ids=lambda make: make.__name__
)
type Make = Callable[..., Any]


def contents(batch: Any) -> Any:
    """Return the source and the rows of a batch, or of each part of a batch."""
    if "index" not in batch:
        return [(name, contents(part)) for name, part in batch.items()]
    assert batch["X"][:, 0].tolist() == batch["index"].tolist()
    return batch.get("source"), batch["index"].tolist()


def read(loader: Any, n_steps: int | None = None) -> list[Any]:
    return [contents(batch) for batch in islice(loader, n_steps)]


def epochs(make: Make, n_epochs: int) -> list[list[Any]]:
    """Return the batches of each epoch."""
    loader, batches = make(Rank(0, 2)), []
    for epoch in range(n_epochs):
        loader.set_epoch(epoch)
        batches.append(read(loader))
    return batches


#: Names that a training loop or a framework may use of any loader.
INTERFACE = {
    *("sampler", "batch_sampler", "n_obs", "n_var", "set_epoch", "next_epoch", "batches_done", "__len__", "__iter__"),
    *("step_done", "state_dict", "load_state_dict", "reshard", "plan", "cells_of", "check_ranks_agree"),
    "check_epoch_read",
}


@every
def test_loader_has_interface(make: Make) -> None:
    loader = make(Rank(0, 2))
    assert set(dir(loader)) >= INTERFACE
    whole = epochs(make, 3)
    loader.sampler.set_epoch(2)  # as frameworks do
    assert loader.next_epoch == 2
    assert len(loader) == len(whole[2])
    assert read(loader) == whole[2]
    assert loader.next_epoch == 3
    assert loader.n_obs > 0
    assert str(loader.plan())
    if make not in (dataloader, workers, forked):
        assert loader.batch_sampler.batch_size == (8 if make is within_batch else 4)


@every
def test_length_in_a_loop_is_of_its_epoch(make: Make) -> None:
    """len() in a loop is the length of the resumed epoch, even if the next epoch has more steps."""
    loader, after = make(Rank(0, 3)), make(Rank(0, 1))
    read(loader, 3)
    after.load_state_dict(loader.state_dict())
    n_steps = len(after)
    assert [len(after) for _ in after] == [n_steps] * (n_steps - 3)
    if make not in (mixed, mixed_until, mixed_with_sets, within_batch):
        assert len(after) > n_steps


@every
def test_state_counts_steps_that_are_done(make: Make) -> None:
    whole, loader = epochs(make, 1)[0], make(Rank(0, 2))
    for step, _ in enumerate(loader):
        within = loader.state_dict()
        if step == 4:
            break
        loader.step_done()
    for state, n_done in ((within, 4), (loader.state_dict(batches_done=3), 3)):
        after = make(Rank(0, 2))
        after.load_state_dict(state)
        assert read(after) == whole[n_done:]
    with pytest.raises(ValueError, match="batches_done must be"):
        loader.state_dict(batches_done=10**3)


@every
def test_state_belongs_to_its_owner(make: Make) -> None:
    """Changing a state changes neither the loader nor later states."""

    def spoil(part: dict[str, Any]) -> None:
        for value in part.values():
            if isinstance(value, dict):
                spoil(value)
        part.clear()

    loader = make(Rank(0, 2))
    state = loader.state_dict()
    original = copy.deepcopy(state)
    spoil(state)
    assert loader.state_dict() == original


@can_be_copied
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_copy_is_where_its_original_is(make: Make, duplicate: Any) -> None:
    whole, loader = epochs(make, 1)[0], make(Rank(0, 2))
    batches = iter(loader)
    first = [contents(batch) for batch in islice(batches, 5)]
    other = duplicate(loader)
    assert other.state_dict() == loader.state_dict()
    other.load_state_dict(other.state_dict())
    assert read(other) == whole[5:]
    assert first + [contents(batch) for batch in batches] == whole


@pytest.mark.parametrize("make", [forked, mixed_until])  # simulated jobs have the other kinds
@pytest.mark.parametrize(("rank", "is_open"), [(Rank(1, 3), True), (Rank(0, 1), False)])
@pytest.mark.parametrize("n_read", [1, 5])
def test_resharded_loader_reads_like_resumed_loader(make: Make, rank: Rank, n_read: int, is_open: bool) -> None:
    """reshard() is the same as saving and loading a state, in the same loop and in a new loop."""
    loader, after = make(Rank(0, 2)), make(rank)
    loader.set_epoch(1)
    batches = iter(loader)
    for step in range(n_read):
        next(batches)
        if step < n_read - 1:
            loader.step_done()
    state = loader.state_dict()
    after.load_state_dict(state)
    loader.reshard(rank)
    assert loader.state_dict() == after.state_dict()
    rest = [contents(batch) for batch in (batches if is_open and n_read else loader)]
    assert rest == read(after)
    for one in (loader, after):
        one.step_done()
    assert loader.next_epoch == after.next_epoch == 2
    assert loader.state_dict() == after.state_dict()
    assert read(loader) == read(after)  # without set_epoch


@every
def test_reshard_goes_back_before_earlier_change(make: Make) -> None:
    """reshard(batches_done=...) can go back over two changes of ranks if no batch was read since; a mixture can't."""
    loader, after = make(Rank(0, 3)), make(Rank(0, 1))
    batches = iter(loader)
    states: list[Any] = [None]
    for _ in range(3):
        next(batches)
        states.append(loader.state_dict())
    loader.reshard(Rank(0, 2))
    next(batches)
    with pytest.raises(ValueError, match="batches_done must be"):
        loader.state_dict(batches_done=1)
    loader.reshard(Rank(0, 1))
    if isinstance(loader, MixedLoader):
        with pytest.raises(ValueError, match=r"batches_done must be from 4, .* by a different number of ranks"):
            loader.reshard(batches_done=1)
        return
    for n_done in (1, 3):
        loaded = []
        for state in (states[n_done], loader.state_dict(batches_done=n_done)):
            after.load_state_dict(state)
            loaded.append(after.state_dict())
        assert loaded[0] == loaded[1]
    loader.reshard(batches_done=1)
    after.load_state_dict(states[1])
    assert [contents(batch) for batch in batches] == read(after)


@every
def test_older_loop_does_not_continue(make: Make) -> None:
    """After a change of ranks, an iterator raises once a newer iterator has started."""
    loader, after = make(Rank(0, 2)), make(Rank(0, 1))
    older = iter(loader)
    next(older)
    after.load_state_dict(loader.state_dict())
    loader.reshard(Rank(0, 1))
    newer = iter(loader)
    first = contents(next(newer))
    with pytest.raises(RuntimeError, match=r"ranks have changed|has ended"):
        next(older)
    assert [first, *map(contents, newer)] == read(after)


@every
def test_pass_whose_rank_changes_unnoticed_raises(make: Make) -> None:
    """An iterator raises if the process group is created again and reshard() is not called."""
    places = [Rank(0, 2)]
    loader = make(lambda: (places[-1].rank, places[-1].world_size))
    batches = iter(loader)
    next(batches)
    places.append(Rank(0, 3))
    with pytest.raises(RuntimeError, match=r"and is now .*world_size=3\)"):
        list(batches)


@every
def test_rank_is_asked_again(make: Make) -> None:
    place = [Rank(0, 2)]
    loader, after = make(lambda: place[0]), make(Rank(2, 3))
    batches = iter(loader)
    next(batches)
    after.load_state_dict(loader.state_dict())
    place[0] = Rank(2, 3)
    loader.reshard()
    assert [contents(batch) for batch in batches] == read(after)


@every
def test_failed_reshard_changes_nothing(make: Make) -> None:
    """A reshard() that raises leaves the loader unchanged."""
    loader, options = make(Rank(0, 2), virtual_ranks=4), {"virtual_ranks": 4}
    whole, batches = read(make(Rank(0, 2), **options)), iter(loader)
    first = [contents(batch) for batch in islice(batches, 5)]
    state = loader.state_dict()
    with pytest.raises(ValueError, match="must be a multiple of the world size, 3"):
        loader.reshard(Rank(0, 3))
    assert loader.state_dict() == state
    assert first + [contents(batch) for batch in batches] == whole


@every
def test_reshard_after_set_epoch_ends_open_iterator(make: Make) -> None:
    """An open iterator raises if the ranks change after set_epoch."""
    loader, after = make(Rank(0, 2)), make(Rank(0, 1))
    batches = iter(loader)
    next(batches)
    loader.set_epoch(1)
    after.load_state_dict(loader.state_dict())
    loader.reshard(Rank(0, 1))
    with pytest.raises(RuntimeError, match="ranks have changed"):
        next(batches)
    assert read(loader) == read(after)


@every
def test_pass_ends_the_one_before(make: Make) -> None:
    loader = make(Rank(0, 2))
    older = iter(loader)
    next(older)
    next(iter(loader))
    with pytest.raises(RuntimeError, match="has ended"):
        list(older)


@every
def test_cells_of_names_read_cells(make: Make) -> None:
    """cells_of() has the source, the name and the labels of each cell that the ranks read."""
    ranks = [make(Rank(rank, 2)) for rank in range(2)]
    frame = ranks[0].cells_of(slice(None), "donor")
    for rank, loader in enumerate(ranks):
        for step, batch in enumerate(read(loader)):
            own = frame[(frame["step"] == step) & (frame["rank"] == rank)]
            # a batch is (source, rows), or [(name, (None, rows)), ...] of several sources or stores
            parts = [(name, rows) for name, (_, rows) in batch] if isinstance(batch, list) else [batch]
            if make is aligned:
                parts = [(None, parts[0][1])]
            assert sum(len(rows) for _, rows in parts) == len(own)
            for name, rows in parts:
                of_source = own[own["source"] == name] if name is not None else own
                assert of_source["row"].tolist() == rows
                prefix = "tahoe" if name == "tahoe" else "cell"
                assert of_source["cell"].tolist() == [f"{prefix} {row}" for row in rows]
                assert of_source["donor"].tolist() == [row % 3 for row in rows]
    with pytest.raises(IndexError, match="The epoch has no step 1000000"):
        ranks[0].cells_of(10**6)
    with pytest.raises(KeyError, match="no columns plate in obs"):
        ranks[0].cells_of(0, "plate")


@every
def test_ranks_that_differ_are_named(make: Make) -> None:
    ranks = [make(Rank(rank, 2)) for rank in range(2)]
    assert agreement(ranks) == ["", ""]
    read(ranks[1], 5)
    state = ranks[1].state_dict()
    other = make(Rank(1, 2))
    other.load_state_dict(state)
    (message,) = set(agreement([ranks[0], other]))
    assert "done" in message
    assert "on rank 0" in message
    (message,) = set(agreement([ranks[0], make(Rank(1, 2), mask=slice(0, 32))]))
    assert "rows" in message or "sets.mask" in message


@every
def test_epoch_that_was_read_is_checked(make: Make) -> None:
    ranks = [make(Rank(rank, 2)) for rank in range(2)]
    for loader in ranks:
        read(loader)
    (message,) = set(met_in_threads([loader.check_epoch_read for loader in ranks]))
    assert ", as planned. Each of the " in message


@every
def test_state_of_different_kind_is_refused(make: Make) -> None:
    loader, whole = make(Rank(0, 2)), epochs(make, 1)[0]
    read(loader, 3)
    state = loader.state_dict()
    is_mixture = isinstance(loader, MixedLoader)
    others = [make(Rank(0, 2), seed=1), mixed(Rank(0, 2)) if not is_mixture else stateful(Rank(0, 2))]
    for other in others:
        read(other, 2)
    for wrong in (*(other.state_dict() for other in others), {}, {**state, "version": 10**6}, {**state, "epoch": -1}):
        with pytest.raises(ValueError, match="state"):
            loader.load_state_dict(wrong)
    with pytest.raises(TypeError, match="must be a dict"):
        loader.load_state_dict(None)
    assert loader.state_dict() == state
    loader.load_state_dict(state)
    assert read(loader) == whole[3:]


def test_number_of_genes_must_be_common() -> None:
    assert stateful(Rank(0, 2)).n_var == within_batch(Rank(0, 2)).n_var == 1
    for loader, message in ((mixed(Rank(0, 2)), "census 1, tahoe 2"), (aligned(Rank(0, 2)), "rna 1, protein 3")):
        with pytest.raises(ValueError, match=f"n_var must be the same for all loaders, got {message}"):
            _ = loader.n_var
    assert mixed(Rank(0, 2)).n_obs == 136
    assert aligned(Rank(0, 2)).n_obs == 96
