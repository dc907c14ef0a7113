"""Types of the public names: checked by mypy and pyright, never run.

If a type is missing, for instance because a lazily imported name is Any, ``assert_type`` fails. If a wrong call becomes
valid, the comment that ignores its error fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

import numpy as np
import numpy.typing as npt
import pandas as pd
from annbatch.types import LoadRequest

import annbatch_distributed
from annbatch_distributed import (
    CellSets,
    DistributedSampler,
    EpochPlan,
    Rank,
    Rows,
    Shuffled,
    StatefulLoader,
    deferred,
)
from annbatch_distributed.checks import Tally
from annbatch_distributed.core.sharding import Contiguous, Independent
from annbatch_distributed.core.sharding import Shuffled as ShuffledThere
from annbatch_distributed.integrations.jax import global_batch
from annbatch_distributed.loader.workers import WorkerDataLoader
from annbatch_distributed.ranks import RankSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from annbatch.abc import Sampler
    from jax.sharding import Mesh, NamedSharding
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from annbatch_distributed.core.lanes import Remainder


def lazy_names_have_types_of_their_modules() -> None:
    assert_type(annbatch_distributed.Shuffled(64), ShuffledThere)
    assert_type(annbatch_distributed.Rank(0, 2), Rank)
    annbatch_distributed.Distributed  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018  # no such name


def sets_are_created_from_obs(obs: pd.DataFrame, sampler: Sampler) -> None:
    sets = CellSets.from_obs(
        obs, by="donor", set_size=64, controls={"drug": ["DMSO"]}, mask=obs["drug"].notna(), remainder="pad"
    )
    assert_type(sets, CellSets)
    assert_type(len(sets), int)
    assert_type(sets.groups, pd.Categorical)
    CellSets.from_obs(obs, by="donor", set_size=64, remainder="exact")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # no such remainder
    DistributedSampler(sampler, dist_info="torch", sets=sets)


def ranks_come_from_every_dist_info(
    sampler: Sampler, group: ProcessGroup, torch_mesh: DeviceMesh, jax_mesh: Mesh, sharding: NamedSharding
) -> None:
    assert_type(Rank(0, 2).rank, int)
    assert_type(Rank(0, 2).world_size, int)
    assert_type(deferred("torch"), RankSource)
    assert_type(Rank.from_mesh(torch_mesh, "dp"), Rank)
    assert_type(Rank.from_mesh(jax_mesh, ("dp", "fsdp")), Rank)
    assert_type(Rank.from_mesh(sharding), Rank)
    DistributedSampler(sampler, dist_info="torch")
    DistributedSampler(sampler, dist_info="jax")
    DistributedSampler(sampler, dist_info="env")
    DistributedSampler(sampler, dist_info=Rank(0, 2))
    DistributedSampler(sampler, dist_info=lambda: (0, 2))
    DistributedSampler(sampler, dist_info=group)
    DistributedSampler(sampler, dist_info=torch_mesh)
    DistributedSampler(sampler, dist_info=Rank.from_mesh(sharding))
    DistributedSampler(sampler, dist_info=deferred(lambda: Rank(0, 2)))
    DistributedSampler(sampler, dist_info="trch")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # no such source of ranks
    DistributedSampler(sampler)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]  # no rank


def distributed_sampler_is_a_sampler_of_annbatch(
    sampler: DistributedSampler, wrapped: Sampler, remainder: Remainder
) -> None:
    as_sampler: Sampler = sampler
    assert_type(as_sampler.n_batches(100), int)
    DistributedSampler(wrapped, dist_info="env", remainder=remainder, sharding="shuffled", mask=slice(0, 9), seed=0)
    DistributedSampler(wrapped, dist_info="env", remainder="pad", sharding=Shuffled(64), mask=[slice(0, 9)])
    DistributedSampler(wrapped, dist_info="env", enforce_equal_batches=False, sharding=Contiguous())
    DistributedSampler(wrapped, dist_info="env", sharding=Independent())
    DistributedSampler(wrapped, dist_info="env", remainder="dorp")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # no such policy
    DistributedSampler(wrapped, dist_info="env", sharding=Rank(0, 2))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # a rank is no sharding
    DistributedSampler(wrapped, dist_info="env", mask=pd.Series([True, False]), max_gap=0)
    DistributedSampler(wrapped, dist_info="env", mask=np.array([True, False]))
    DistributedSampler(wrapped, dist_info="env", mask=Rows.from_mask([True, False]))
    DistributedSampler(wrapped, dist_info="env", mask="train")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # a string is no mask
    assert_type(sampler.rank, int)
    assert_type(sampler.world_size, int)
    assert_type(sampler.batch_size, int | None)
    assert_type(sampler.shuffle, bool)
    assert_type(sampler.mask, slice | list[slice] | Rows)
    assert_type(sampler.rng, np.random.Generator)
    assert_type(sampler.epoch, int)
    assert_type(sampler.next_epoch, int)
    assert_type(sampler.batches_done, int)
    assert_type(sampler.sampler, DistributedSampler)
    assert_type(sampler.plan(100), EpochPlan)
    for request in sampler.sample(100):
        assert_type(request, LoadRequest)
    sampler.mask = [slice(0, 9), slice(20, 30)]
    sampler.rng = np.random.default_rng(0)
    sampler.set_epoch(1)
    sampler.validate(100)
    state = sampler.state_dict(batches_done=1)
    assert_type(state, dict[str, Any])
    sampler.load_state_dict(state, strict=False)
    sampler.state_dict()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]  # the number of batches is unknown


def ranks_check_each_other(sampler: DistributedSampler, loader: StatefulLoader) -> None:
    def gather(text: str) -> list[str]:
        return [text]

    tally = Tally()
    tally.add(np.arange(3))
    sampler.check_ranks_agree(100, timeout=60, gather=gather)
    loader.check_ranks_agree(gather=gather)
    assert_type(sampler.check_epoch_read(100, tally, timeout=60), str)
    assert_type(loader.check_epoch_read(), str)
    assert_type(loader.check_epoch_read(tally, gather=gather), str)
    assert_type(tally.n_rows, int)
    assert_type(tally + tally, Tally)
    sampler.check_ranks_agree(100, gather=len)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # len gathers nothing


def loader_has_a_state(loader: StatefulLoader, wrapped: Sampler) -> None:
    StatefulLoader(batch_sampler=DistributedSampler(wrapped, dist_info="env"), return_index=True)
    StatefulLoader(batch_sampler=wrapped)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # no DistributedSampler
    assert_type(loader.sampler, DistributedSampler)
    assert_type(loader.batch_sampler, DistributedSampler)
    assert_type(loader.next_epoch, int)
    assert_type(loader.cells_of(slice(3, 5), "donor", ranks=[0]), pd.DataFrame)
    assert_type(loader.sampler.rows_of(100, [3, 4], epoch=1), pd.DataFrame)
    assert_type(len(loader), int)
    loader.set_epoch(1)
    assert_type(loader.state_dict(), dict[str, Any])
    loader.load_state_dict(loader.state_dict(batches_done=3), strict=False)
    batches = loader.to_dataloader(num_workers=2, prefetch_factor=2)
    assert_type(batches, WorkerDataLoader)
    assert_type(batches.sampler, DistributedSampler)
    assert_type(batches.state_dict(), dict[str, Any])
    assert_type(len(batches), int)
    batches.set_epoch(2)


def plan_has_rows_of_ranks(plan: EpochPlan) -> None:
    assert_type(plan.n_obs, int)
    assert_type(plan.n_streams, int)
    assert_type(plan.epoch, int)
    assert_type(plan.n_batches(0), int)
    assert_type(plan.selected, Rows)
    assert_type(plan.dropped, Rows)
    assert_type(plan.n_dropped, int)
    assert_type(plan.n_repeated, int)
    assert_type(plan.shard(1).rows, Rows)
    assert_type(plan.shard(1).repeated, Rows)
    assert_type(plan.composition(np.array(["a", "b"])), pd.DataFrame)
    assert_type(str(plan), str)


def reverse(rows: Rows, *, epoch: int, seed: int | None) -> Rows:
    """Order rows in reverse, as a custom sharding."""
    return Rows.from_indices(rows.to_array()[::-1])


def functions_are_shardings(wrapped: Sampler) -> None:
    assert_type(Rows.from_indices([1, 2]).to_array(), npt.NDArray[np.int64])
    assert_type(Rows.from_indices(np.arange(3)).cyclic(0, 2), Rows)
    assert_type(Rows.from_indices([1, 2]).within(0, 1), Rows)
    assert_type(Rows.from_indices([1, 2]).to_global(np.array([0])), npt.NDArray[np.int64])
    assert_type(next(iter(Rows.from_indices([1, 2]))), int)
    DistributedSampler(wrapped, dist_info="env", sharding=reverse)
    DistributedSampler(wrapped, dist_info="env", sharding=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # a number is no sharding


def batches_become_jax_arrays(batch: Mapping[str, object], sharding: NamedSharding, mesh: Mesh) -> None:
    global_batch(batch, sharding)
    global_batch(batch, mesh)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # a mesh is no sharding
