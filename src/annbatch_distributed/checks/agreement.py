"""Agreement: whether all processes of a job have the same configuration, and which differ in what.

Each process describes itself by texts and numbers. Comparing the descriptions is arithmetic, and whoever does it comes
to the same verdict, in the same words.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from hashlib import blake2b
from importlib import metadata
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from annbatch_distributed.checks import messages
from annbatch_distributed.checks.exchange import Verdict, check_gather, exchange, initialized, listed, seconds_of
from annbatch_distributed.checks.messages import cut
from annbatch_distributed.ranks import Membership, Rank
from annbatch_distributed.resume.state import brief, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Literal

    from annbatch_distributed.checks.exchange import Gather, Timeout
    from annbatch_distributed.resume.state import Position
    from annbatch_distributed.sharding import EpochPlan

    type Kind = Literal["rank", "process"]
    type Values = Mapping[str, int | str | None]

__all__ = [
    "Description",
    "disagreement",
    "exchange_statements",
    "find_disagreement",
    "message",
    "ranks_agree",
    "read_all",
]

#: What the rows, their order and what is read of them follow from, besides settings.
_LIBRARIES = "annbatch-distributed", "annbatch", "anndata", "numpy", "zarr"

#: How many rows of each rank stand for all of them.
_SOME = 16

#: How many problems, and values of one thing, are listed at most.
_MOST = 10

#: How many characters a problem has at most, and any other text.
_LONGEST, _LONG = 4000, 400

#: Stands for what a process hasn't said.
_UNSAID = "(not said)"

#: What the root is called for those who compare it.
_ROOT = "randomness (a seed makes it the same)"


class _Statement(Protocol):
    """What a process says of itself in a check."""

    def to_json(self) -> str: ...

    @classmethod
    def of_content(cls, content: object) -> Self: ...

    def judge(self, texts: Sequence[str], numbers: Sequence[int]) -> Verdict: ...


@dataclass(frozen=True)
class Description:
    """What a process says of its configuration."""

    rank: int
    """Which rank it is; ranks within ranks are numbered through."""
    world_size: int
    """How many ranks there are."""
    n_peers: int | None
    """How many processes have the same share, this one included; None if as many as there are for each rank."""
    source: str
    """Where rank and world size are known from; the same in all processes where several have the same share."""
    same: dict[str, Any]
    """What must be the same in all processes, by name."""
    plan: str
    """What tells plans apart; they follow from those, unless a sampler or sharding of a user's own does otherwise."""
    same_for_peers: dict[str, Any]
    """What must be the same in all processes that have the same share."""
    problem: str = ""
    """Why it couldn't be described; empty if it could."""

    @classmethod
    def of(cls, job: Membership, identity: Values, position: Position, plan: EpochPlan, more: Values) -> Self:
        """Return what a process says of the configuration with which a pass begins at a position.

        ``identity`` is what the rows and their order follow from, of which the ``"root"`` must be the same for peers
        only, and ``more`` what else must be the same in all processes.
        """
        same = {name: brief(value) for name, value in identity.items() if name != "root"}
        done = [
            f"{done} on {world_size} ranks" + f" of {n_workers} workers" * (n_workers > 1)
            for world_size, n_workers, done in position.without_idle_segments().segments
        ]
        same |= {"epoch": position.epoch, "batches done": brief(", ".join(done) or "none")}
        same |= {f"version of {name}": _version(name) for name in _LIBRARIES}
        rank, source, peers = job.rank, str(brief(job.source)), {_ROOT: identity["root"]}
        own = rank.rank, rank.world_size, job.n_peers, source, {**same, **more}, _digest(plan), peers
        return cls(*own)

    @classmethod
    def of_failure(cls, job: Membership, error: Exception) -> Self:
        """Return what a process says that can't say more, since something is wrong."""
        problem = cut(f"{type(error).__name__}: {error}", _LONGEST)
        rank, source = job.rank, cut(job.source, _LONG)
        return cls(rank.rank, rank.world_size, job.n_peers, source, {}, "", {}, problem=problem)

    def to_json(self) -> str:
        """Return it as a message."""
        return message("check_ranks_agree", asdict(self))

    @classmethod
    def of_content(cls, content: object) -> Self:
        """Read what such a message holds, or raise a ValueError."""
        found = cls(**messages.record(content, _FIELDS))
        if found.rank >= found.world_size:
            raise ValueError(f"rank: must be below {found.world_size}, the world size, and is {found.rank}")
        return found

    def judge(self, texts: Sequence[str], numbers: Sequence[int]) -> Verdict:
        """Return the verdict on what all processes say."""
        return compare(texts, numbers)


def _value(content: object) -> int | str | None:
    """Read what a process has under a name that isn't known beforehand."""
    read: messages.Reader[int | str] = messages.count(least=-(2**63)) if type(content) is int else _TEXT
    return messages.optional(read)(content)


_TEXT = messages.text(_LONG)
_FIELDS: dict[str, Callable[[object], Any]] = {
    "rank": messages.count(),
    "world_size": messages.count(1),
    "n_peers": messages.optional(messages.count(1)),
    "source": _TEXT,
    "same": messages.table(_value),
    "plan": _TEXT,
    "same_for_peers": messages.table(_value),
    "problem": messages.text(_LONGEST),
}


def ranks_agree(
    member: Callable[[], Membership],
    description: Callable[[Membership], Description],
    *,
    timeout: Timeout,
    gather: Gather | None,
) -> None:
    """Raise in all processes unless all have described themselves alike: see :func:`exchange_statements`."""
    exchange_statements(member, description, lambda failure: failure, timeout=timeout, gather=gather)


def exchange_statements[S: _Statement](
    member: Callable[[], Membership],
    statement: Callable[[Membership], S],
    statement_of_failure: Callable[[Description], S],
    *,
    timeout: Timeout,
    gather: Gather | None,
) -> str:
    """Tell all processes of the job what this one states, and return or raise the verdict that all of them hear.

    ``member`` returns which process this is, and ``statement`` what it states. If one of them raises, or if ``timeout``
    or ``gather`` are wrong, which are as the user passed them, ``statement_of_failure`` makes a statement of that.
    """
    job, problem = Membership(Rank(0, 1), source=""), None
    seconds, wrong_timeout = _tried(lambda: seconds_of(timeout), 300.0)
    try:
        job = member()
        if wrong_timeout is not None:
            raise wrong_timeout
        check_gather(gather)
        stated = statement(job)
        stated.of_content(_call_and_content(stated.to_json())["said"])  # what others could not read is wrong here
    except Exception as error:
        if not callable(gather) and initialized() is None:  # there is nobody to tell
            raise
        stated, problem = statement_of_failure(Description.of_failure(job, error)), error
    usable = gather if callable(gather) else None
    verdict = exchange(stated.to_json(), stated.judge, job, seconds=seconds, gather=usable)
    if problem is not None and verdict.kind == "timeout":  # nobody has heard it
        raise problem
    return verdict.raise_or_return()


def _tried[T](compute: Callable[[], T], default: T) -> tuple[T, Exception | None]:
    """Return a value, and None; or a default, and why the value can't be computed."""
    try:
        return compute(), None
    except (TypeError, ValueError) as error:
        return default, error


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


def compare(texts: Sequence[str], numbers: Sequence[int]) -> Verdict:
    """Compare what processes with some numbers say of their configurations.

    >>> ranks = [
    ...     Description(rank, 2, 1, "", {"n_obs": 100 - rank}, "plan", {})
    ...     for rank in range(2)
    ... ]
    >>> print(compare([rank.to_json() for rank in ranks], range(2)).text)
    The ranks of this job don't agree:
      n_obs: 100 on rank 0; 99 on rank 1
    Every process must make its sampler with the same arguments, and be in the same epoch.
    """
    descriptions = read_all(texts, numbers, Description.of_content)
    if isinstance(descriptions, Verdict):
        return descriptions
    return find_disagreement(descriptions, numbers) or Verdict("fine", "")


def message(call: str, content: Mapping[str, Any]) -> str:
    """Return what a process says in a call as a text; another version of this package may say other things."""
    return messages.written({"call": f"{call} of {_LIBRARIES[0]} {_version(_LIBRARIES[0])}", "said": content})


def _call_and_content(text: str) -> dict[str, Any]:
    """Return the fields of such a text, of which any version knows the call and may not know the content."""
    return messages.record(messages.parsed(text), {"call": _TEXT, "said": lambda content: content})


def read_all[T](texts: Sequence[str], numbers: Sequence[int], read: messages.Reader[T]) -> list[T] | Verdict:
    """Return what all processes say in a call, or the verdict that calls differ, or that something is no message."""
    calls, problems = _each(texts, numbers, _call_and_content)
    if not problems and len(processes := _grouped((call["call"] for call in calls), numbers)) > 1:
        different = [f"{shown(call)[1:-1]} ({listed('process', who)})" for call, who in processes.items()]
        advice = "All of them must make the same calls in the same order."
        return disagreement("The processes of this job make different calls:", different, advice)
    if not problems:
        found, problems = _each([call["said"] for call in calls], numbers, read)
    if problems:
        advice = "The store of the job, or gather, must hand on what each process says as it is, and nothing else."
        return disagreement("What processes of this job say can't be read:", problems, advice)
    return found


def _each[S, T](said: Sequence[S], numbers: Sequence[int], read: Callable[[S], T]) -> tuple[list[T], list[str]]:
    """Return what is read of what each process has said, and what is wrong with it, each as a text."""
    found, problems = [], []
    for one, number in zip(said, numbers, strict=True):
        try:
            found.append(read(one))
        except ValueError as error:
            problems.append(f"process {number}: {error}")
    return found, problems


def find_disagreement(processes: Sequence[Description], numbers: Sequence[int]) -> Verdict | None:
    """Return the verdict that something differs that must not, or is wrong anywhere; None if all is well."""
    # a process is called by its rank where each has its own, and else by its number
    by_rank = [process.rank for process in processes] == [*range(len(processes))]
    kind: Kind = "rank" if by_rank else "process"
    names = range(len(processes)) if by_rank else numbers
    failed = _grouped((process.problem for process in processes), names)
    if failed.keys() != {""}:
        problems = [f"{problem} ({listed(kind, who)})" for problem, who in failed.items() if problem]
        return disagreement("The ranks of this job can't be compared:", problems)
    problems = [*_differences(processes, kind, names)] or [*_misplaced(processes, numbers)]
    if not problems:
        cause = "plan, which must depend on something else in a sampler or a sharding of your own"
        plans = [process.plan for process in processes]
        problems = [*_unequal(cause, plans, kind, names), *_unlike_peers(processes, numbers)]
    if not problems:
        return None
    advice = "Every process must make its sampler with the same arguments, and be in the same epoch."
    return disagreement("The ranks of this job don't agree:", problems, advice)


def disagreement(title: str, problems: Sequence[str], advice: str = "") -> Verdict:
    """Return the verdict that something is wrong."""
    more = ["..."] if len(problems) > _MOST else []
    lines = [f"  {cut(problem, _LONGEST)}" for problem in [*problems[:_MOST], *more]]
    return Verdict("disagreement", "\n".join([title, *lines, advice]).rstrip())


def _differences(processes: Sequence[Description], kind: Kind, names: Sequence[int]) -> Iterator[str]:
    """Yield what differs between any processes, each as a text."""
    yield from _unequal("world size", [process.world_size for process in processes], kind, names)
    yield from _unequal("processes for each rank", [process.n_peers for process in processes], kind, names)
    yield from _unequal_fields([process.same for process in processes], kind, names)


def _misplaced(processes: Sequence[Description], numbers: Sequence[int]) -> Iterator[str]:
    """Yield which ranks are not those of as many processes as they should be."""
    world_size = processes[0].world_size
    n_peers = processes[0].n_peers or max(1, len(processes) // world_size)
    if len(processes) != world_size * n_peers:
        several = f" with {n_peers} processes for each rank" if n_peers > 1 else ""
        there_are = "there is 1 process" if len(processes) == 1 else f"there are {len(processes)} processes"
        yield f"{there_are}, and the world size is {world_size}{several}"
        return
    who = _grouped((process.rank for process in processes), numbers)
    for rank in range(world_size):
        if len(who.get(rank, ())) != n_peers:
            yield f"rank {rank} is that of {listed('process', who[rank]) if rank in who else 'no process'}"


def _unlike_peers(processes: Sequence[Description], numbers: Sequence[int]) -> Iterator[str]:
    """Yield what differs between processes that have the same share, or makes others have the same one."""
    if processes[0].world_size < len(processes):
        yield from _unequal("dist_info", [process.source for process in processes], "process", numbers)
    for rank, peers in _grouped((process.rank for process in processes), range(len(processes))).items():
        tables = [processes[peer].same_for_peers for peer in peers]
        yield from _unequal_fields(tables, "process", [numbers[peer] for peer in peers], f", of rank {rank}")


def _unequal_fields(tables: Sequence[Values], kind: Kind, names: Sequence[int], whose: str = "") -> Iterator[str]:
    for field in dict.fromkeys(field for table in tables for field in table):
        yield from _unequal(f"{field}{whose}", [table.get(field, _UNSAID) for table in tables], kind, names)


def _unequal(field: str, values: Iterable[object], kind: Kind, names: Sequence[int]) -> Iterator[str]:
    """Yield a text unless all have the same value."""
    groups = _grouped(values, names)
    if len(groups) > 1:
        texts = [f"{value} on {listed(kind, who)}" for value, who in groups.items()]
        yield f"{field}: {'; '.join(texts[:_MOST])}" + ("; ..." if len(texts) > _MOST else "")


def _grouped[T](values: Iterable[T], names: Iterable[int]) -> dict[T, list[int]]:
    """Return for each value the names of those who have it."""
    groups = defaultdict(list)
    for value, name in zip(values, names, strict=True):
        groups[value].append(name)
    return dict(groups)
