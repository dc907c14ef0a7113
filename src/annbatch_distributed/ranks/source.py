"""Sources of the rank: from the ``dist_info`` of a user to the :class:`Placement` of this process.

There is no fallback to rank 0, since every process of a job would then read all rows.

Frameworks such as Lightning make loaders before there is a process group. :func:`deferred` asks at first use, and so do
objects of frameworks; everything that doesn't depend on the rank is checked at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from multiprocessing.context import get_spawning_popen
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from annbatch_distributed.core.rank import Placement
from annbatch_distributed.core.worker import current_worker
from annbatch_distributed.ranks import environment, frameworks, jax, torch
from annbatch_distributed.ranks.frameworks import AnyFramework
from annbatch_distributed.ranks.rank import Rank, placement_of

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


type _Known = Rank | Placement | ProcessGroup | DeviceMesh | Mesh | NamedSharding | AnyFramework
type DistInfo = (
    Literal["torch", "jax", "env"] | Callable[[], tuple[int, int] | list[int] | _Known] | _Known | RankSource
)


class RankSource:
    """Source of the rank of this process: a ``dist_info``, and its answer.

    All copies in a process share one answer, and ask until there is one.

    >>> RankSource.of(lambda: (1, 2)).placement
    Rank(rank=1, world_size=2)
    """

    def __init__(self, dist_info: DistInfo, answer: Placement | None = None) -> None:
        # None in a process that received this source without it
        self._dist_info: DistInfo | None = dist_info
        # a deferred source is asked at first use, and again in every process
        self._is_deferred = answer is None
        self._answer = answer
        self._answer_of_parent: Placement | None = None
        self._lock = RLock()

    @classmethod
    def of(cls, dist_info: DistInfo) -> RankSource:
        """Return the source for a ``dist_info``; a TypeError or a ValueError if it is invalid.

        It has answered, unless it is deferred or an object of a framework.
        """
        if isinstance(dist_info, RankSource) or frameworks.asker_of(dist_info) is not None:
            return deferred(dist_info)
        return cls(dist_info, _ask(_checked(dist_info)))

    @property
    def placement(self) -> Placement:
        """Placement of this process."""
        with self._lock:  # threads that ask at the same time hear the same answer
            return self._asked()

    def _asked(self) -> Placement:
        if self._answer is None:
            # a worker of a DataLoader is in no process group, and has the rank of the process that started it
            of_parent = self._answer_of_parent if current_worker() is not None else None
            self._answer = of_parent or _ask(self._dist_info)
        return self._answer

    @property
    def is_known(self) -> bool:
        """True once the source has answered."""
        return self._answer is not None

    @property
    def framework_object(self) -> object:
        """Object of a framework that is asked; None for other sources."""
        return self._dist_info if frameworks.asker_of(self._dist_info) is not None else None

    def again(self) -> RankSource:
        """Return a source that asks the same ``dist_info`` again; copies of this one keep their answer.

        A ValueError if this source was unpickled without its ``dist_info``.
        """
        if self._dist_info is None:
            raise ValueError(
                "This sampler was unpickled, which dist_info doesn't survive. Pass it again: reshard(dist_info=...)."
            )
        return RankSource(self._dist_info) if self._is_deferred else RankSource.of(self._dist_info)

    def current_placement(self) -> Placement:
        """Return the current placement if the ``dist_info`` can be asked at any time; else the known one."""
        known = self.placement
        can_be_asked = known.can_be_asked and (known.framework != "torch" or torch.is_initialized())
        return self.again().placement if can_be_asked and self._dist_info is not None else known

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        if not self._is_deferred:
            # a function or a process group stays in this process, since no other one can query it
            return vars(self) | {"_dist_info": None, "_lock": None}
        # a child process may be a different rank, which asks itself, or a worker, which takes the parent's answer
        dist_info, of_parent = self._dist_info, self._answer
        is_object = self.framework_object is not None
        if get_spawning_popen() is not None:
            # if it is too early, a spawned rank asks its own trainer, and asking again in a worker raises
            with suppress(RuntimeError if is_object else Exception):
                of_parent = self.placement
                if is_object:
                    # asked now, since a job may have begun after the answer; a worker doesn't need the object
                    _ask(dist_info)
                    dist_info = None
        return vars(self) | {"_dist_info": dist_info, "_answer": None, "_answer_of_parent": of_parent, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=RLock())


def deferred(dist_info: DistInfo) -> RankSource:
    """Return a ``dist_info`` that is asked when the rank is first needed.

    Use it if the sampler is made before the job is initialized.

    Parameters
    ----------
    dist_info
        Any ``dist_info`` of :class:`DistributedSampler`. For a process group or a mesh that doesn't exist yet, pass a
        callable that returns it.

    Returns
    -------
    ~annbatch_distributed.ranks.RankSource
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
    return dist_info if isinstance(dist_info, RankSource) else RankSource(_checked(dist_info))


_SOURCES: dict[str, Callable[[], Placement]] = {
    "torch": torch.default_group,
    "jax": jax.all_processes,
    "env": environment.launcher,
}

_EXPECTED = (
    f"dist_info must be {', '.join(map(repr, _SOURCES))}, a callable that returns (rank, world_size), a Rank, a "
    "PyTorch ProcessGroup or DeviceMesh, a JAX Mesh or NamedSharding, the result of deferred, "
    "Lightning's Trainer or Fabric, Accelerate's Accelerator or PartialState, or Ray Train's context"
)


def _checked(dist_info: DistInfo) -> DistInfo:
    """Return a ``dist_info`` that can be asked; a TypeError or a ValueError if it is invalid.

    Objects that know the rank already, such as a process group, are asked at once, and replaced by their answer.
    """
    if isinstance(dist_info, str):
        if dist_info not in _SOURCES:
            similar = get_close_matches(dist_info, _SOURCES, 1)
            hint = f" Did you mean {similar[0]!r}?" if similar else ""
            raise ValueError(f"Unknown dist_info {dist_info!r}.{hint} {_EXPECTED}.")
        return dist_info
    if frameworks.asker_of(dist_info) is not None:
        return dist_info
    if (placement := _named_by(dist_info)) is not None:
        return placement
    if not callable(dist_info) or inspect.isclass(dist_info):
        hint = " Pass an instance, not the class." if inspect.isclass(dist_info) else ""
        if isinstance(dist_info, tuple | list):
            hint = f" Pass Rank({', '.join(map(repr, dist_info))})."
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
    return dist_info


def _named_by(thing: object) -> Placement | None:
    """Return the placement that an object names; None for other objects."""
    if (ask := frameworks.asker_of(thing)) is not None:
        return ask(thing)
    if isinstance(thing, Placement):
        return thing
    if isinstance(thing, Rank):
        return placement_of(thing)
    if torch.is_group(thing):
        return torch.group(thing)
    if torch.is_mesh(thing) or jax.is_mesh(thing):
        return placement_of(Rank.from_mesh(thing))
    return None


def _ask(dist_info: DistInfo | None) -> Placement:
    """Return the placement of this process for a checked ``dist_info``."""
    if dist_info is None:
        raise RuntimeError(
            "dist_info is an object of a framework, such as a Trainer, which can't be sent to a child process. "
            "Pass dist_info='torch', or another source that this process can ask itself."
        )
    if isinstance(dist_info, str):
        return _SOURCES[dist_info]()
    if (placement := _named_by(dist_info)) is not None:
        return placement
    # a Mesh is callable too, but was handled above
    answer = cast("Callable[[], object]", dist_info)()
    if (placement := _named_by(answer)) is not None:
        return placement
    expected = "The dist_info callable must return a tuple of two integers (rank, world_size)"
    if not isinstance(answer, tuple | list):
        raise TypeError(f"{expected}, got {answer!r} of type {type(answer).__name__}.")
    if len(answer) != 2:
        raise ValueError(f"{expected}, got {len(answer)} values: {answer!r}.")
    try:
        rank, world_size = answer
        return Placement(rank, world_size, source="a callable", can_be_asked=True)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{expected} with 0 <= rank < world_size, got {answer!r}: {error}") from None
