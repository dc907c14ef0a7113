"""Resolution of ``dist_info``: from the argument of a user to the :class:`Placement` of this process.

There is no fallback to rank 0, since every process of a job would then read all rows.

Objects of frameworks (a trainer, an accelerator, a training context) are recognized by the names of their types, so
that no framework is imported. Their rank is compared with PyTorch's default process group, or else with the launcher's
variables: otherwise, with a trainer for one device, each of several processes would read all rows.

Frameworks such as Lightning make loaders before there is a process group. :func:`deferred` asks at first use;
everything that doesn't depend on the rank is checked at once.
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
    """Source of the rank: an object of a framework, such as a trainer."""

    thing: Any
    """Object of the framework; None in a worker, which gets its rank from its parent process."""
    ask: Callable[[Any], Placement]
    """Function that returns the placement for the object."""

    def __call__(self) -> Placement:
        """Return the placement; a RuntimeError if the framework hasn't started its processes."""
        if self.thing is None:
            raise RuntimeError(
                "dist_info is an object of a framework, such as a Trainer, which can't be sent to a child process. "
                "Pass dist_info='torch', or another source that this process can ask itself."
            )
        return self.ask(self.thing)

    def __getstate__(self) -> dict[str, Any]:
        thing = self.thing
        if get_spawning_popen() is not None:
            # if it can't answer yet, the spawned processes are ranks, which ask their own trainer
            with suppress(RuntimeError):
                self()
                thing = None
        return vars(self) | {"thing": thing}


def _asker_of(thing: object) -> Callable[[Any], Placement] | None:
    """Return the function that asks a framework's object for the rank; None for other objects."""
    # "lightning.Trainer" for Trainer and its subclasses: the package and the class, without submodules
    names = (f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}" for kind in type(thing).__mro__)
    return next((_ASKERS[name] for name in names if name in _ASKERS), None)


def _lightning(trainer: Any) -> Placement:  # noqa: ANN401 a Trainer or a Fabric
    """Return the placement that Lightning gives to PyTorch's own sampler."""
    source = f"Lightning's {type(trainer).__name__}"
    strategy = trainer.strategy
    if not hasattr(type(strategy), "distributed_sampler_kwargs"):
        return _compared(Rank(0, 1), source)
    if not torch.is_initialized():
        raise RuntimeError(
            f"{source} with strategy {type(strategy).__name__} has not started its processes yet. Use the loader in "
            "a hook of the trainer, such as train_dataloader, or after fabric.launch()."
        )
    # the arguments that Lightning would pass to PyTorch's DistributedSampler
    arguments = strategy.distributed_sampler_kwargs
    if arguments is None:  # one process for several devices
        return _compared(Rank(0, 1), source)
    rank = Rank(arguments["rank"], arguments["num_replicas"])
    if rank == torch.default_group().rank:
        return _compared(rank, source)
    # ranks that split up a model read the same rows
    return replace(torch.mesh(strategy.device_mesh, ("data_parallel",)), source=source)


def _accelerate(state: Any) -> Placement:  # noqa: ANN401 an Accelerator or one of its states
    source = f"Accelerate's {type(state).__name__}"
    mesh = getattr(state, "torch_device_mesh", None) or getattr(state, "device_mesh", None)
    if mesh is None:
        return _compared(Rank(state.process_index, state.num_processes), source)
    names = [name for name in ("dp_replicate", "dp_shard") if name in (mesh.mesh_dim_names or ())]
    if names:
        return replace(torch.mesh(mesh, names), source=source)
    # all ranks split up a model
    rank_of = dict.fromkeys(mesh.mesh.flatten().tolist(), 0)
    return Placement.of_ranks(rank_of, state.process_index, source, "torch")


def _ray(context: Any) -> Placement:  # noqa: ANN401 of either version of Ray Train
    return _compared(Rank(context.get_world_rank(), context.get_world_size()), "Ray Train's context")


def _compared(rank: Rank, source: str) -> Placement:
    """Return the placement of a rank; raise if PyTorch's default group or the launcher contradict it."""
    # a second source: PyTorch, or the launcher if this seems to be the only process
    other = None
    if torch.is_initialized():
        other = torch.default_group()
    elif rank.world_size == 1:
        with suppress(RuntimeError, ValueError):  # there is no launcher, or its variables are invalid
            other = environment.launcher()
    if other is not None and other.rank != rank:
        raise ValueError(
            f"This process is rank {rank.rank} of {rank.world_size} for {source}, but rank {other.rank.rank} of "
            f"{other.rank.world_size} for {other.source}. Configure {source} for all processes (Accelerate without "
            "GPUs needs cpu=True), or pass dist_info='torch', 'env' or Rank(...)."
        )
    return Placement(rank, source) if other is None else replace(other, source=source)


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


def mesh_ranks(mesh: DeviceMesh | Mesh | NamedSharding, names: str | Sequence[str] | None = None) -> Placement:
    """Return the data-parallel rank of this process in a PyTorch or JAX mesh.

    Pass the result as ``dist_info``. Processes with the same coordinates along the data-parallel dimensions have the
    same rank and read the same rows. For four processes in a mesh of 2 x 2 whose first dimension is data-parallel::

        process              0  1  2  3
        mesh coordinates    00 01 10 11
        rank                 0  0  1  1    (world size 2)

    Parameters
    ----------
    mesh
        PyTorch ``DeviceMesh``, JAX ``Mesh``, or JAX ``NamedSharding`` of the batches.
    names
        Name or list of names of the data-parallel dimensions; the first one varies slowest. None takes the only
        dimension of the mesh, or the axes along which a ``NamedSharding`` splits rows (default).

    Returns
    -------
    ~annbatch_distributed.ranks.Placement
        Rank and world size, for ``dist_info``.

    Raises
    ------
    TypeError
        If ``mesh`` is not a mesh, or ``names`` is not a name or a list of names.
    ValueError
        If the mesh has no such dimensions, or this process isn't in the mesh, or the rows of two JAX processes would
        overlap partly.
    RuntimeError
        If JAX is not initialized.

    Examples
    --------
    A PyTorch job with a single process:

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
    # a set has a different order in every process
    elif names is not None and not (isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)):
        raise TypeError(f"names must be a name or a list of names of data-parallel dimensions, got {names!r}.")
    return torch.mesh(mesh, names) if torch.is_mesh(mesh) else jax.mesh(mesh, names)


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


type _Framework = _Trainer | _Accelerator | _TrainContext
type _Known = Rank | Placement | ProcessGroup | DeviceMesh | Mesh | NamedSharding | _Framework
type DistInfo = Literal["torch", "jax", "env"] | Callable[[], tuple[int, int] | list[int] | _Known] | _Known

_SOURCES: dict[str, Callable[[], Placement]] = {
    "torch": torch.default_group,
    "jax": jax.all_processes,
    "env": environment.launcher,
}


def resolve(dist_info: DistInfo) -> Placement:
    """Return the placement of this process for a ``dist_info`` of :class:`DistributedSampler`.

    >>> resolve(lambda: (1, 2)).rank
    Rank(rank=1, world_size=2)
    """
    return source_of(dist_info)()


def source_of(dist_info: DistInfo) -> Callable[[], Placement]:
    """Return a function that returns the placement of this process; a TypeError or a ValueError if there is none.

    Objects that know the rank already, such as a process group, are asked at once.
    """
    if isinstance(dist_info, str):
        if dist_info not in _SOURCES:
            raise ValueError(f"{_EXPECTED}, got {dist_info!r}.")
        return _SOURCES[dist_info]
    if (source := _source_of_object(dist_info)) is not None:
        return source
    if not callable(dist_info) or inspect.isclass(dist_info):
        hint = " Pass an instance, not the class." if inspect.isclass(dist_info) else ""
        raise TypeError(f"{_EXPECTED}, got {dist_info!r}.{hint}")
    try:
        parameters = inspect.signature(dist_info)
    except (TypeError, ValueError):  # some builtins have no signature
        parameters = inspect.Signature()
    try:
        parameters.bind()
    except TypeError as error:
        name = getattr(dist_info, "__qualname__", repr(dist_info))
        raise TypeError(
            f"A dist_info callable must need no arguments, got {name}{parameters}: {error}. Pass a lambda that calls "
            "it with its arguments."
        ) from None
    return partial(_call, cast("Callable[[], object]", dist_info))  # a Mesh is callable too, but was handled above


_EXPECTED = (
    f"dist_info must be {', '.join(map(repr, _SOURCES))}, a callable that returns (rank, world_size), a Rank, a "
    "PyTorch ProcessGroup or DeviceMesh, a JAX Mesh or NamedSharding, the result of mesh_ranks or deferred, "
    "Lightning's Trainer or Fabric, Accelerate's Accelerator or PartialState, or Ray Train's context"
)


def _source_of_object(thing: object) -> Callable[[], Placement] | None:
    """Return a function that returns the placement that an object names; None for other objects."""
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
    """Return the placement that a user's callable returns."""
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
    """Result of :func:`deferred`.

    All copies in a process share one answer, and ask until there is one.
    """

    def __init__(self, ask: Callable[[], Placement]) -> None:
        self._ask = ask
        self._answer: Placement | None = None
        self._answer_of_parent: Placement | None = None

    @property
    def framework_object(self) -> object:
        """Object of a framework that is asked; None for other sources."""
        return getattr(self._ask, "thing", None)

    @property
    def is_known(self) -> bool:
        """True once the source has answered."""
        return self._answer is not None

    def placement(self) -> Placement:
        """Return the placement of this process."""
        if self._answer is None:
            # a worker of a DataLoader is in no process group, and has the rank of the process that started it
            self._answer = (self._answer_of_parent if current_worker() is not None else None) or self._ask()
        return self._answer

    def unanswered(self) -> Deferred:
        """Return a copy without an answer."""
        return Deferred(self._ask)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        # a child process may be a different rank, which asks itself, or a worker, which takes the parent's answer
        of_parent = self._answer
        if get_spawning_popen() is not None:
            with suppress(Exception):  # if it is too early, asking again in a worker raises
                of_parent = self.placement()
        return {"_ask": self._ask, "_answer": None, "_answer_of_parent": of_parent}


def deferred(dist_info: DistInfo | Deferred) -> Deferred:
    """Return a ``dist_info`` that is asked when the rank is first needed.

    Use it if the sampler is made before the job is initialized.

    Parameters
    ----------
    dist_info
        Any ``dist_info`` of :class:`DistributedSampler`. For a process group or a mesh that doesn't exist yet, pass a
        callable that returns it.

    Returns
    -------
    ~annbatch_distributed.ranks.Deferred
        Source of the rank, for ``dist_info``.

    Raises
    ------
    TypeError, ValueError
        If ``dist_info`` is invalid.

    Examples
    --------
    >>> from annbatch.samplers import SequentialSampler
    >>> from annbatch_distributed import DistributedSampler, deferred
    >>> job = {}
    >>> sampler = DistributedSampler(
    ...     SequentialSampler(2, 1, 2), dist_info=deferred(lambda: (job["rank"], 2))
    ... )
    >>> job["rank"] = 1  # the job is initialized later
    >>> sampler.rank
    1
    """
    return dist_info if isinstance(dist_info, Deferred) else Deferred(source_of(dist_info))


def placement_of(dist_info: DistInfo | Deferred) -> Placement | Deferred:
    """Return the placement for a ``dist_info``, or a deferred one for an object of a framework."""
    if isinstance(dist_info, Deferred):
        return dist_info
    return deferred(dist_info) if _asker_of(dist_info) is not None else resolve(dist_info)


def placement_again(dist_info: DistInfo | Deferred) -> Placement | Deferred:
    """Ask a ``dist_info`` again; copies of a deferred one keep their answer."""
    return placement_of(dist_info.unanswered() if isinstance(dist_info, Deferred) else dist_info)


def rank_now(dist_info: DistInfo | Deferred | None, known: Placement) -> Rank:
    """Return the current rank for a ``dist_info`` that can be asked at any time; else the known rank."""
    if dist_info is None or not known.can_be_asked or (known.framework == "torch" and not torch.is_initialized()):
        return known.rank
    answer = placement_again(dist_info)
    return (answer.placement() if isinstance(answer, Deferred) else answer).rank
