"""Agreement: whether all processes of a job have the same configuration, and which differ in what.

1. Each process describes itself by texts and numbers, or says why it can't.
2. All hear the descriptions of all.
3. Comparing them is arithmetic, so that all raise the same error, in the same words, or none.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from importlib import metadata
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from annbatch_distributed.checks.exchange import gather_texts, initialized, listed, seconds_of
from annbatch_distributed.ranks import Membership, Rank
from annbatch_distributed.state import bounded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from annbatch_distributed.checks.exchange import Gather, Kind, Timeout
    from annbatch_distributed.plan import EpochPlan
    from annbatch_distributed.state import Position

    type Values = Mapping[str, int | str | None]

__all__ = ["Description", "compare", "disagreement", "ranks_agree"]

#: What the rows, their order and what is read of them follow from, besides settings.
_LIBRARIES = "annbatch-distributed", "annbatch", "anndata", "numpy", "zarr"
#: How many rows of each rank stand for all of them.
_SOME = 16
#: How many problems, and values of one thing, are listed at most.
_MOST = 10

_ROOT = "randomness (a seed makes it the same)"
_PLAN = "plan, which must depend on something else in a sampler or a sharding of your own"


@dataclass(frozen=True)
class Description:
    """What a process says of its configuration."""

    rank: int
    """Which rank it is; ranks within ranks are numbered through."""
    world_size: int
    """How many ranks there are."""
    n_peers: int | None
    """How many processes have the same share, this one included; None if as many as there are for each rank."""
    same: dict[str, Any] = field(default_factory=dict)
    """What must be the same in all processes, by name."""
    plan: str = ""
    """What tells plans apart; they follow from those, unless a sampler or sharding of a user's own does otherwise."""
    same_for_peers: dict[str, Any] = field(default_factory=dict)
    """What must be the same in all processes that have the same share."""
    read: dict[str, Any] = field(default_factory=dict)
    """What it has read and what was planned for it, if that is asked."""
    problem: str = ""
    """Why it couldn't be described; empty if it could."""

    @property
    def in_all(self) -> dict[str, Any]:
        """What must be the same in all processes, with how many there are."""
        return {"world size": self.world_size, "processes for each rank": self.n_peers, **self.same}

    @classmethod
    def of(cls, job: Membership, identity: Values, position: Position, plan: EpochPlan, more: Values) -> Self:
        """Return what a process says of the configuration with which a pass begins at a position.

        ``identity`` is what the rows and their order follow from, of which the ``"root"`` must be the same for peers
        only, and ``more`` what else must be the same in all processes.
        """
        same = {name: bounded(value) for name, value in identity.items() if name != "root"}
        done = [
            f"{done} on {n_lanes} ranks" + f" of {n_workers} workers" * (n_workers > 1)
            for n_lanes, n_workers, done in position.without_idle_segments().segments
        ]
        same |= {"epoch": position.epoch, "batches done": bounded(", ".join(done) or "none")}
        if position.leaves_out:
            same["left out"] = bounded(", ".join(f"{a}:{b} from step {step} on" for step, a, b in position.leaves_out))
        same |= {f"version of {name}": _version(name) for name in _LIBRARIES}
        peers = {"dist_info": bounded(job.source), _ROOT: identity["root"]}
        return cls(job.rank.rank, job.rank.world_size, job.n_peers, {**same, **more}, _digest(plan), peers)


def ranks_agree(
    member: Callable[[], Membership],
    describe: Callable[[Membership], Description],
    *,
    timeout: Timeout,
    gather: Gather | None,
    call: str = "check_ranks_agree",
) -> dict[int, Description]:
    """Return what all processes say of themselves, by number; or raise the same in all unless they agree.

    ``member`` returns which process this is, and ``describe`` what it says. All processes hear of it if one of them
    raises, or if ``timeout`` or ``gather``, which are as the user passed them, are wrong. ``call`` is the user's.
    """
    seconds, job, problem = 300.0, Membership(Rank(0, 1), source=""), None
    try:
        try:
            job = member()
        finally:
            seconds = seconds_of(timeout)
        if gather is not None and not callable(gather):
            raise TypeError(
                "gather must be a function that takes a text and returns the texts of all processes, got "
                f"{shortened(gather)}."
            )
        description = describe(job)
    except Exception as error:
        if not callable(gather) and initialized() is None:  # there is nobody to tell
            raise
        problem = error
        text = f"{type(error).__name__}: {error}"
        description = Description(job.rank.rank, job.rank.world_size, job.n_peers, problem=text)
    # another version of this package may say other things
    said = {"call": f"{call} of {_LIBRARIES[0]} {_version(_LIBRARIES[0])}", "said": asdict(description)}
    try:
        texts = gather_texts(json.dumps(said), job, seconds=seconds, gather=gather if callable(gather) else None)
    except TimeoutError:
        if problem is not None:  # nobody has heard it
            raise problem from None
        raise
    processes = _read(texts)
    compare(processes)
    return processes


def _read(texts: Mapping[int, str]) -> dict[int, Description]:
    """Return what processes, by number, say of themselves; a ValueError unless they make the same call."""
    try:
        said = {number: json.loads(text) for number, text in texts.items()}
        calls = _grouped({number: message["call"] for number, message in said.items()})
        if len(calls) == 1:
            return {number: Description(**message["said"]) for number, message in said.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "What the processes of this job say can't be read. Their store, or gather, must hand on texts as they are, "
            f"got {shortened(texts)}."
        ) from error
    different = [f"{name} ({listed('process', who)})" for name, who in calls.items()]
    advice = "All of them must make the same calls in the same order."
    raise disagreement("The processes of this job make different calls:", different, advice)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # it runs from a folder that was put on the path
        return "not installed"


def _digest(plan: EpochPlan) -> str:
    """Return a few letters that are others for another plan: of its batches, and of some rows of each rank."""
    parts: list[object] = [[int(number) for number in plan.sampler_batches], int(plan.n_lost)]
    for rank in range(plan.world_size):
        rows = plan.shard(rank).rows
        some = np.linspace(0, len(rows), _SOME, endpoint=False, dtype=np.int64)[: len(rows)]
        parts.append((len(rows), rows.to_global(some).tolist()))
    return blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def compare(described: Mapping[int, Description]) -> None:
    """Raise a ValueError unless processes, by number, agree, and each is another one of the job.

    >>> ranks = {rank: Description(rank, 2, 1, {"n_obs": 100 - rank}) for rank in range(2)}
    >>> compare(ranks)
    Traceback (most recent call last):
    ...
    ValueError: The ranks of this job don't agree:
      n_obs: 100 on rank 0; 99 on rank 1
    Every process must make its sampler with the same arguments, and be in the same epoch.
    """
    # a process is called by its rank where each has its own, and else by its number
    by_rank = [process.rank for process in described.values()] == [*range(len(described))]
    kind: Kind = "rank" if by_rank else "process"
    named = dict(enumerate(described.values())) if by_rank else described
    failed = _grouped({name: process.problem for name, process in named.items()})
    if failed.keys() != {""}:
        problems = [f"{problem} ({listed(kind, who)})" for problem, who in failed.items() if problem]
        raise disagreement("The ranks of this job can't be compared:", problems)
    problems = _unequal({name: process.in_all for name, process in named.items()}, kind) or _misplaced(described)
    if not problems:
        problems = _unequal({name: {_PLAN: process.plan} for name, process in named.items()}, kind)
        for rank, peers in _grouped({number: process.rank for number, process in described.items()}).items():
            own = {number: described[number].same_for_peers for number in peers}
            problems += _unequal(own, "process", f", of rank {rank}")
    if problems:
        advice = "Every process must make its sampler with the same arguments, and be in the same epoch."
        raise disagreement("The ranks of this job don't agree:", problems, advice)


def disagreement(title: str, problems: Sequence[str], advice: str = "") -> ValueError:
    """Return the error that something is wrong."""
    more = ["..."] if len(problems) > _MOST else []
    return ValueError("\n".join([title, *(f"  {problem}" for problem in [*problems[:_MOST], *more]), advice]).rstrip())


def _misplaced(described: Mapping[int, Description]) -> list[str]:
    """Return which ranks are not those of as many processes as they should be."""
    n_processes, any_of_them = len(described), next(iter(described.values()))
    world_size = any_of_them.world_size
    n_peers = any_of_them.n_peers or max(1, n_processes // world_size)
    if n_processes != world_size * n_peers:
        several = f" with {n_peers} processes for each rank" if n_peers > 1 else ""
        there_are = "there is 1 process" if n_processes == 1 else f"there are {n_processes} processes"
        return [f"{there_are}, and the world size is {world_size}{several}"]
    peers = _grouped({number: process.rank for number, process in described.items()})
    return [
        f"rank {rank} is that of {listed('process', peers[rank]) if rank in peers else 'no process'}"
        for rank in range(world_size)
        if len(peers.get(rank, ())) != n_peers
    ]


def _unequal(tables: Mapping[int, Values], kind: Kind, whose: str = "") -> list[str]:
    """Return what not all have the same, each as a text with the values and who has them."""
    problems = []
    for what in dict.fromkeys(what for table in tables.values() for what in table):
        groups = _grouped({name: table.get(what, "(not said)") for name, table in tables.items()})
        if len(groups) > 1:
            texts = [f"{value} on {listed(kind, who)}" for value, who in groups.items()]
            problems.append(f"{what}{whose}: {'; '.join(texts[:_MOST])}" + ("; ..." if len(texts) > _MOST else ""))
    return problems


def _grouped[T](values: Mapping[int, T]) -> dict[T, list[int]]:
    """Return for each value the names of those who have it."""
    groups = defaultdict(list)
    for name, value in values.items():
        groups[value].append(name)
    return dict(groups)
