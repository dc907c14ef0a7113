"""Resolving ``dist_info``: from an argument of a user to the :class:`Placement` of this process.

There is no fallback to rank 0: in a job of several processes it would give every one of them all rows.

Frameworks' own objects (a trainer, an accelerator, a training context) are known by the names of their types, so that
none has to be installed, or imported before its time. Their answer is compared with torch's default process group, or
else with the launcher's variables: a trainer that was made for one device would give each of several processes all
rows.

Frameworks such as Lightning build loaders before there is a process group. :func:`deferred` asks at first use; all that
doesn't depend on the rank is checked at once.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, cast

from annbatch_distributed.ranks import environment, jax, torch
from annbatch_distributed.ranks.rank import Placement, Rank
from annbatch_distributed.ranks.worker import current_worker

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass
class FrameworkObject:
    """A framework's object that is asked which member of the job this process is."""

    thing: Any
    """None in a worker, which is told its rank by the process that started it."""
    ask: Callable[[Any], Placement]
    """Function that asks it."""

    def __call__(self) -> Placement:
        """Return the placement; a RuntimeError if the framework has not started its processes yet."""
        if self.thing is None:
            raise RuntimeError(
                "A trainer, or what else knows the rank, stays in the process that dist_info was given to. This one "
                "was started by it: give dist_info='torch' there, or another one that this process can ask by itself."
            )
        return self.ask(self.thing)

    def __getstate__(self) -> dict[str, Any]:
        thing = self.thing
        if get_spawning_popen() is not None:
            # if it can't answer yet, ranks are about to be started, which ask a trainer of their own
            with suppress(RuntimeError):
                self()
                thing = None
        return vars(self) | {"thing": thing}


def _asker_of(thing: object) -> Callable[[Any], Placement] | None:
    """Return the function that asks a framework's object for the rank; None if it is no object that knows one."""
    # a user's subclass of Trainer is asked as Trainer is: "lightning.Trainer", without the modules between
    names = (f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}" for kind in type(thing).__mro__)
    return next((_ASKERS[name] for name in names if name in _ASKERS), None)


def _lightning(trainer: Any) -> Placement:  # noqa: ANN401 a Trainer or a Fabric
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
    # what Lightning itself would pass to torch's DistributedSampler
    own = strategy.distributed_sampler_kwargs
    if own is None:  # one process for several devices
        return _compared(Rank(0, 1), source)
    rank = Rank(own["rank"], own["num_replicas"])
    if rank == torch.default_group().rank:
        return _compared(rank, source)
    # ranks that split up a model read the same rows
    return replace(torch.mesh(strategy.device_mesh, ("data_parallel",)), source=source)


def _accelerate(state: Any) -> Placement:  # noqa: ANN401 an Accelerator or one of its states
    source = f"accelerate's {type(state).__name__}"
    mesh = getattr(state, "torch_device_mesh", None) or getattr(state, "device_mesh", None)
    if mesh is None:
        return _compared(Rank(state.process_index, state.num_processes), source)
    names = [name for name in ("dp_replicate", "dp_shard") if name in (mesh.mesh_dim_names or ())]
    if names:
        return replace(torch.mesh(mesh, names), source=source)
    # all ranks split up a model
    everyone = dict.fromkeys(mesh.mesh.flatten().tolist(), 0)
    return Placement.of_ranks(everyone, state.process_index, source, "torch")


def _ray(context: Any) -> Placement:  # noqa: ANN401 of either version of Ray Train
    return _compared(Rank(context.get_world_rank(), context.get_world_size()), "Ray Train's context")


def _compared(rank: Rank, source: str) -> Placement:
    """Return a placement, as one of torch's default process group if there is one; raise if others say otherwise."""
    # whoever else knows the processes of this job: torch, or the launcher if this seems to be the only process
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
    return Placement(rank, source) if other is None else replace(other, source=source)


#: By the package and the name of its type, as frameworks move their modules about.
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


def mesh_ranks(mesh: DeviceMesh | Mesh | NamedSharding, names: str | Sequence[str] | None = None) -> Placement:
    """Return which share of the data this process has in a mesh of torch or JAX, as ``dist_info``.

    Four processes in a mesh of 2 x 2, of which the first dimension is data-parallel::

        process             0  1  2  3
        place in the mesh  00 01 10 11
        rank                0  0  1  1    of a world of 2

    Parameters
    ----------
    mesh
        A torch ``DeviceMesh``, a JAX ``Mesh``, or a JAX ``NamedSharding`` of the batches.
    names
        The data-parallel dimensions by name, in a list if they are several, of which the first varies slowest. None if
        the mesh has one dimension only, or for the axes along which a ``NamedSharding`` splits rows.

    Raises
    ------
    TypeError
        If ``mesh`` is something else, or ``names`` are no names.
    ValueError
        If there are no such dimensions; the message lists those there are. If this process isn't in the mesh. If the
        rows of two JAX processes would overlap without being the same.
    RuntimeError
        If JAX is not initialised.

    Examples
    --------
    A job of torch, of which this is the only process:

    >>> import torch.distributed as dist
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from annbatch_distributed import mesh_ranks
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = init_device_mesh(
    ...     "cpu", (1, 1, 1), mesh_dim_names=("dp_replicate", "dp_shard", "tp")
    ... )
    >>> mesh_ranks(mesh, ("dp_replicate", "dp_shard")).rank
    Rank(rank=0, world_size=1)
    >>> dist.destroy_process_group()
    """
    if isinstance(names, str):
        names = [names]
    # a set has another order in every process
    elif names is not None and not (isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)):
        raise TypeError(f"names must be a name, or a list of names of the dimensions that split rows, got {names!r}.")
    return torch.mesh(mesh, names) if torch.is_mesh(mesh) else jax.mesh(mesh, names)


class _Trainer(Protocol):
    """Lightning's ``Trainer`` or ``Fabric``."""

    @property
    def strategy(self) -> object: ...


class _Accelerator(Protocol):
    """accelerate's ``Accelerator`` or ``PartialState``."""

    @property
    def process_index(self) -> int: ...
    @property
    def num_processes(self) -> int: ...


class _TrainContext(Protocol):
    """The context of Ray Train."""

    def get_world_rank(self) -> int: ...
    def get_world_size(self) -> int: ...


type _Framework = _Trainer | _Accelerator | _TrainContext
type _Known = Rank | Placement | ProcessGroup | DeviceMesh | Mesh | NamedSharding | _Framework
type DistInfo = Literal["torch", "jax", "env"] | Callable[[], tuple[int, int] | list[int] | _Known] | _Known

_SOURCES: dict[str, Callable[[], Placement]] = {
    "torch": torch.default_group,
    "jax": jax.all_processes,
    "env": environment.launcher,
}


def resolve(dist_info: DistInfo) -> Placement:
    """Return which member of a job this process is, as a ``dist_info`` of :class:`DistributedSampler` says.

    >>> resolve(lambda: (1, 2)).rank
    Rank(rank=1, world_size=2)
    """
    return source_of(dist_info)()


def source_of(dist_info: DistInfo) -> Callable[[], Placement]:
    """Return the function that says which member this process is; a TypeError or a ValueError if there is none.

    What has a place for this process already is asked at once.
    """
    if isinstance(dist_info, str):
        if dist_info not in _SOURCES:
            raise ValueError(f"Unknown dist_info {dist_info!r}. {_EXPECTED}")
        return _SOURCES[dist_info]
    if (source := _source_of_object(dist_info)) is not None:
        return source
    if not callable(dist_info) or inspect.isclass(dist_info):
        hint = " Pass an instance, not the class." if inspect.isclass(dist_info) else ""
        raise TypeError(f"Unknown dist_info {dist_info!r}. {_EXPECTED}{hint}")
    try:
        parameters = inspect.signature(dist_info)
    except (TypeError, ValueError):  # builtins needn't have any
        parameters = inspect.Signature()
    try:
        parameters.bind()
    except TypeError as error:
        name = getattr(dist_info, "__qualname__", repr(dist_info))
        raise TypeError(
            f"A callable as dist_info is called without arguments, and returns (rank, world_size), but {name}"
            f"{parameters} can't be: {error}. Pass one that needs none, such as a lambda that calls it."
        ) from None
    return partial(
        _call, cast("Callable[[], object]", dist_info)
    )  # a Mesh can be called too, but is none of these any more


_EXPECTED = (
    f"Expected one of {', '.join(map(repr, _SOURCES))}, a callable that returns (rank, world_size), a Rank, a torch "
    "ProcessGroup or DeviceMesh, a JAX Mesh or NamedSharding, what mesh_ranks or deferred returns, Lightning's Trainer "
    "or Fabric, accelerate's Accelerator or PartialState, or Ray Train's context."
)


def _source_of_object(thing: object) -> Callable[[], Placement] | None:
    """Return the function that says which member an object names, whose answer most have already; else None."""
    if (ask := _asker_of(thing)) is not None:
        return FrameworkObject(thing, ask)
    if isinstance(thing, Placement):
        placement = thing
    elif isinstance(thing, Rank):
        placement = Placement(thing, source="a Rank")
    elif torch.is_group(thing):
        placement = torch.group(thing)
    elif torch.is_mesh(thing) or jax.is_mesh(thing):
        placement = mesh_ranks(thing)
    else:
        return None
    return partial(copy.copy, placement)  # can be pickled, unlike a lambda


def _call(function: Callable[[], object]) -> Placement:
    """Return what a user's callable says."""
    answer = function()
    if (source := _source_of_object(answer)) is not None:
        return source()
    expected = "The dist_info callable must return a tuple of two integers (rank, world_size)"
    if not isinstance(answer, tuple | list):
        raise TypeError(f"{expected}, got {answer!r} of type {type(answer).__name__}.")
    if len(answer) != 2:
        raise ValueError(f"{expected}, got {len(answer)} values: {answer!r}.")
    try:
        return Placement(Rank(*answer), source="a callable", can_be_asked=True)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{expected} with 0 <= rank < world_size, got {answer!r}: {error}") from None


class Deferred:
    """What :func:`deferred` returns. All copies within a process ask once, together, or again if it was too early."""

    def __init__(self, ask: Callable[[], Placement]) -> None:
        self._ask = ask
        self._answer: Placement | None = None
        self._answer_of_parent: Placement | None = None

    @property
    def framework_object(self) -> object:
        """The framework's object that is asked; None if another thing is."""
        return getattr(self._ask, "thing", None)

    @property
    def is_known(self) -> bool:
        """Whether it was asked already."""
        return self._answer is not None

    def placement(self) -> Placement:
        """Return which member of a job this process is."""
        if self._answer is None:
            # a DataLoader's worker is in no process group, and belongs to the rank that has started it
            self._answer = (self._answer_of_parent if current_worker() is not None else None) or self._ask()
        return self._answer

    def unanswered(self) -> Deferred:
        """Return another one that hasn't asked yet."""
        return Deferred(self._ask)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        # another process may be another rank, and asks for itself, unless it turns out to be a DataLoader's worker
        of_parent = self._answer
        if get_spawning_popen() is not None:
            with suppress(Exception):  # if it is too early here, a worker that asks again says so
                of_parent = self.placement()
        return {"_ask": self._ask, "_answer": None, "_answer_of_parent": of_parent}


def deferred(dist_info: DistInfo | Deferred) -> Deferred:
    """Have a ``dist_info`` asked when the rank is first needed, instead of when the sampler is made.

    Parameters
    ----------
    dist_info
        Any ``dist_info``. Where it can't be made before its time either, as a process group or a mesh, pass a callable
        that makes it.

    Raises
    ------
    TypeError, ValueError
        If it is nothing that can be asked.

    Examples
    --------
    >>> from annbatch.samplers import SequentialSampler
    >>> from annbatch_distributed import DistributedSampler, deferred
    >>> who = {}
    >>> sampler = DistributedSampler(
    ...     SequentialSampler(2, 1, 2), dist_info=deferred(lambda: (who["rank"], 2))
    ... )
    >>> who["rank"] = 1  # only now does the job begin
    >>> sampler.rank
    1
    """
    return dist_info if isinstance(dist_info, Deferred) else Deferred(source_of(dist_info))


def placement_of(dist_info: DistInfo | Deferred) -> Placement | Deferred:
    """Ask a ``dist_info`` which member this process is, but for a framework's object that may not know it yet."""
    if isinstance(dist_info, Deferred):
        return dist_info
    return deferred(dist_info) if _asker_of(dist_info) is not None else resolve(dist_info)


def placement_again(dist_info: DistInfo | Deferred) -> Placement | Deferred:
    """Ask a ``dist_info`` that may have been asked before; copies of a deferred one keep the answer they have."""
    return placement_of(dist_info.unanswered() if isinstance(dist_info, Deferred) else dist_info)


def rank_now(dist_info: DistInfo | Deferred | None, known: Placement) -> Rank:
    """Return the rank that a ``dist_info`` gives now, if it can be asked at any time; else the known one."""
    if dist_info is None or not known.can_be_asked or (known.framework == "torch" and not torch.is_initialized()):
        return known.rank
    answer = placement_again(dist_info)
    return (answer.placement() if isinstance(answer, Deferred) else answer).rank
