"""The member that this process is by a framework's own object: a trainer, an accelerator, a training context.

Frameworks are known by the names of their types, so that none has to be installed, or imported before its time. What
they say is compared with torch's default process group, or else with the launcher's variables: in a job of several
processes, a trainer that was made for one device would give each of them all rows.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

from annbatch_distributed.ranks import environment, torch
from annbatch_distributed.ranks.membership import Membership
from annbatch_distributed.ranks.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FrameworkObject", "knows_rank"]


@dataclass
class FrameworkObject:
    """A framework's object that is asked which member of the job this process is."""

    thing: Any
    """None in a worker, which is told its rank by the process that started it."""

    def __call__(self) -> Membership:
        """Return the membership; a RuntimeError if the framework has not started its processes yet."""
        if self.thing is None:
            raise RuntimeError(
                "A trainer, or what else knows the rank, stays in the process that dist_info was given to. This one "
                "was started by it: give dist_info='torch' there, or another one that this process can ask by itself."
            )
        return _KINDS[_kind(self.thing) or ""](self.thing)

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None:
            return {"thing": self.thing}
        try:
            self()
        except RuntimeError:  # ranks are about to be started, which ask a trainer of their own
            return {"thing": self.thing}
        return {"thing": None}


def knows_rank(thing: object) -> bool:
    """Whether something is an object of a framework that knows the rank."""
    return _kind(thing) is not None


def _kind(thing: object) -> str | None:
    """Return the name by which a type, or one that it is made of, is listed below."""
    names = (f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}" for kind in type(thing).__mro__)
    return next(filter(_KINDS.__contains__, names), None)


def _lightning(trainer: Any) -> Membership:  # noqa: ANN401 a Trainer or a Fabric
    """Ask what Lightning gives torch's own sampler."""
    source = f"Lightning's {type(trainer).__name__}"
    strategy = trainer.strategy
    if not hasattr(type(strategy), "distributed_sampler_kwargs"):
        return _compared(Rank(0, 1), source)
    if not torch.is_initialized():
        raise RuntimeError(
            f"{source} has not started its processes yet, with strategy {type(strategy).__name__}. Ask for batches, "
            "lengths and plans in a hook that it calls, such as train_dataloader, or after fabric.launch()."
        )
    own = strategy.distributed_sampler_kwargs
    if own is None:  # one process for several devices
        return _compared(Rank(0, 1), source)
    rank = Rank(own["rank"], own["num_replicas"])
    if rank == torch.default_group().rank:
        return _compared(rank, source)
    # ranks that split up a model read the same rows
    return replace(torch.mesh(strategy.device_mesh, ("data_parallel",)), source=source)


def _accelerate(state: Any) -> Membership:  # noqa: ANN401 an Accelerator or one of its states
    source = f"accelerate's {type(state).__name__}"
    mesh = getattr(state, "torch_device_mesh", None) or getattr(state, "device_mesh", None)
    if mesh is None:
        return _compared(Rank(state.process_index, state.num_processes), source)
    names = [name for name in ("dp_replicate", "dp_shard") if name in (mesh.mesh_dim_names or ())]
    if names:
        return replace(torch.mesh(mesh, names), source=source)
    # all ranks split up a model
    everyone = dict.fromkeys(mesh.mesh.flatten().tolist(), 0)
    return Membership.of_ranks(everyone, state.process_index, source, "torch")


def _ray(context: Any) -> Membership:  # noqa: ANN401 of either version of Ray Train
    return _compared(Rank(context.get_world_rank(), context.get_world_size()), "Ray Train's context")


def _compared(rank: Rank, source: str) -> Membership:
    """Return a membership, as one of torch's default process group if there is one; raise if others say otherwise."""
    other = None
    if torch.is_initialized():
        other = torch.default_group()
    elif rank.world_size == 1:
        with suppress(RuntimeError, ValueError):  # there is no launcher, or none that is sure
            other = environment.launcher()
    if other is not None and other.rank != rank:
        raise ValueError(
            f"{source} says that this process is rank {rank.rank} of {rank.world_size}, and {other.source} that it is "
            f"rank {other.rank.rank} of {other.rank.world_size}. Have {source} start as many processes (accelerate "
            "without GPUs needs cpu=True for that), or pass what is right for the data as dist_info: 'torch', 'env' or "
            "Rank(...)."
        )
    return Membership(rank, source) if other is None else replace(other, source=source)


#: By the package and the name of its type, as frameworks move their modules about.
_KINDS: dict[str, Callable[[Any], Membership]] = {
    "accelerate.Accelerator": _accelerate,
    "accelerate.AcceleratorState": _accelerate,
    "accelerate.PartialState": _accelerate,
    "lightning.Fabric": _lightning,
    "lightning.Trainer": _lightning,
    "lightning_fabric.Fabric": _lightning,
    "pytorch_lightning.Trainer": _lightning,
    "ray.TrainContext": _ray,
}
