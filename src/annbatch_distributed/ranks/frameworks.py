"""Frameworks: the rank of this process from a trainer, an accelerator or a training context.

These objects are recognized by the names of their types, so that no framework is imported. Their rank is compared with
PyTorch's default process group, or else with the launcher's variables: otherwise, with a trainer for one device, each
of several processes would read all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from annbatch_distributed.core.rank import Placement
from annbatch_distributed.ranks import environment, torch


class _Trainer(Protocol):
    """Lightning's ``Trainer`` or ``Fabric``."""

    @property
    def strategy(self) -> object: ...


class _Accelerator(Protocol):
    """Accelerate's ``Accelerator`` or ``PartialState``."""

    @property
    def process_index(self) -> int: ...
    @property
    def num_processes(self) -> int: ...


class _TrainContext(Protocol):
    """Ray Train's context."""

    def get_world_rank(self) -> int: ...
    def get_world_size(self) -> int: ...


type AnyFramework = _Trainer | _Accelerator | _TrainContext


def asker_of(thing: object) -> Callable[[Any], Placement] | None:
    """Return the function that asks a framework's object for the rank; None for other objects."""
    # "lightning.Trainer" for Trainer and its subclasses: the package and the class, without submodules
    names = (f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}" for kind in type(thing).__mro__)
    return next((_ASKERS[name] for name in names if name in _ASKERS), None)


def _lightning(trainer: Any) -> Placement:  # noqa: ANN401 a Trainer or a Fabric
    """Return the placement that Lightning gives to PyTorch's own sampler."""
    source = f"Lightning's {type(trainer).__name__}"
    strategy = trainer.strategy
    if not hasattr(type(strategy), "distributed_sampler_kwargs"):
        return _compared(Placement(0, 1, source))
    if not torch.is_initialized():
        raise RuntimeError(
            f"{source} with strategy {type(strategy).__name__} has not started its processes yet. Use the loader in "
            "a hook of the trainer, such as train_dataloader, or after fabric.launch()."
        )
    # the arguments that Lightning would pass to PyTorch's DistributedSampler
    arguments = strategy.distributed_sampler_kwargs
    if arguments is None:  # one process for several devices
        return _compared(Placement(0, 1, source))
    placement = Placement(arguments["rank"], arguments["num_replicas"], source)
    if placement == torch.default_group():
        return _compared(placement)
    # ranks that split up a model read the same rows
    return torch.mesh(strategy.device_mesh, ("data_parallel",)).with_source(source)


def _accelerate(state: Any) -> Placement:  # noqa: ANN401 an Accelerator or one of its states
    source = f"Accelerate's {type(state).__name__}"
    mesh = getattr(state, "torch_device_mesh", None) or getattr(state, "device_mesh", None)
    if mesh is None:
        return _compared(Placement(state.process_index, state.num_processes, source))
    names = [name for name in ("dp_replicate", "dp_shard") if name in (mesh.mesh_dim_names or ())]
    if names:
        return torch.mesh(mesh, names).with_source(source)
    # all ranks split up a model
    rank_of = dict.fromkeys(mesh.mesh.flatten().tolist(), 0)
    return Placement.of_ranks(rank_of, state.process_index, source, "torch")


def _ray(context: Any) -> Placement:  # noqa: ANN401 of either version of Ray Train
    return _compared(Placement(context.get_world_rank(), context.get_world_size(), "Ray Train's context"))


def _compared(placement: Placement) -> Placement:
    """Return a placement with the processes of its job; raise if PyTorch's group or the launcher contradict it."""
    source = placement.source
    # a second source: PyTorch, or the launcher if this seems to be the only process
    other = None
    if torch.is_initialized():
        other = torch.default_group()
    elif placement.world_size == 1:
        with suppress(RuntimeError, ValueError):  # there is no launcher, or its variables are invalid
            other = environment.launcher()
    if other is not None and other != placement:
        raise ValueError(
            f"This process is rank {placement.rank} of {placement.world_size} for {source}, but rank {other.rank} of "
            f"{other.world_size} for {other.source}. Configure {source} for all processes (Accelerate without "
            "GPUs needs cpu=True), or pass dist_info='torch', 'env' or Rank(...)."
        )
    return placement if other is None else other.with_source(source)


#: By package and class, without submodules, which frameworks rename.
_ASKERS: dict[str, Callable[[Any], Placement]] = {
    "accelerate.Accelerator": _accelerate,
    "accelerate.AcceleratorState": _accelerate,
    "accelerate.PartialState": _accelerate,
    "lightning.Fabric": _lightning,
    "lightning.Trainer": _lightning,
    "lightning_fabric.Fabric": _lightning,
    "pytorch_lightning.Trainer": _lightning,
    "ray.TrainContext": _ray,
}
