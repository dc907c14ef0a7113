"""Agreement: whether all processes of a job have the same configuration, and which differ in what.

Each process describes itself by texts and numbers. Comparing the descriptions is arithmetic, and whoever does it comes
to the same verdict, in the same words.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from hashlib import blake2b
from importlib import metadata
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from annbatch_distributed.checks import messages
from annbatch_distributed.checks.exchange import Verdict, listed
from annbatch_distributed.checks.messages import cut, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from annbatch_distributed.checks.exchange import Judge
    from annbatch_distributed.ranks.membership import Membership
    from annbatch_distributed.sharding import EpochPlan

#: What the rows, their order and what is read of them follow from, besides settings.
_LIBRARIES = "annbatch-distributed", "annbatch", "anndata", "numpy", "zarr"

#: How many rows of each rank stand for all of them.
_SOME = 16

#: How many problems, and values of one thing, are listed at most.
_MOST = 10

#: How many characters a problem has at most, and any other text.
_LONGEST, _LONG = 4000, 400


@dataclass(frozen=True)
class Description:
    """What a process says of itself."""

    rank: int
    """Which rank it is; ranks within ranks are numbered through."""
    world_size: int
    """Of how many."""
    n_peers: int | None
    """How many processes have the same share, this one included; None if as many as there are for each rank."""
    source: str
    """Where that is known from; the same in all processes where several have the same share."""
    same: dict[str, Any]
    """What must be the same in all processes, by name."""
    plan: str
    """What tells plans apart; they follow from those, unless a sampler or sharding of a user's own does otherwise."""
    same_for_peers: dict[str, Any]
    """What must be the same in all processes that have the same share."""
    problem: str = ""
    """Why it couldn't be described; empty if it could."""

    @classmethod
    def failed(cls, job: Membership, error: Exception) -> Self:
        """Return what a process says that can't say more, since something is wrong."""
        problem = cut(f"{type(error).__name__}: {error}", _LONGEST)
        return cls(job.rank.rank, job.rank.world_size, job.n_peers, cut(job.source, _LONG), {}, "", {}, problem)

    def to_text(self) -> str:
        """Return it as a text."""
        return told("check_ranks_agree", asdict(self))

    @property
    def judge(self) -> Judge:
        """What makes a verdict of what all processes say, this one included."""
        return compare

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Read such a text.

        Raises
        ------
        ValueError
            If it is none.
        """
        return cls.of_said(said_in(text))

    @classmethod
    def of_said(cls, said: object) -> Self:
        """Read what such a text says."""
        texts = messages.text(_LONG)
        values = messages.table(messages.any_of(messages.none, messages.count(least=-(2**63)), texts))
        fields = {
            "rank": messages.count(),
            "world_size": messages.count(1),
            "n_peers": messages.any_of(messages.none, messages.count(1)),
            "source": texts,
            "same": values,
            "plan": texts,
            "same_for_peers": values,
            "problem": messages.text(_LONGEST),
        }
        found = cls(**messages.record(said, fields))
        if found.rank >= found.world_size:
            msg = f"rank: must be below {found.world_size}, the world size, and is {found.rank}"
            raise ValueError(msg)
        return found


def versions() -> dict[str, str]:
    """Return the versions of the libraries that must be the same, by name."""
    return {f"version of {name}": _version(name) for name in _LIBRARIES}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # it runs from a folder that was put on the path
        return "not installed"


def digest(plan: EpochPlan) -> str:
    """Return a few letters that are others for another plan: of its batches, and of some rows of each rank."""
    said: list[object] = [[int(number) for number in plan.sampler_batches], int(plan.n_lost)]
    for rank in range(plan.world_size):
        rows = plan.shard(rank).rows
        some = np.linspace(0, len(rows), _SOME, endpoint=False, dtype=np.int64)[: len(rows)]
        said.append((len(rows), rows.to_global(some).tolist()))
    return blake2b(repr(said).encode(), digest_size=8).hexdigest()


def compare(texts: Sequence[str], numbers: Sequence[int]) -> Verdict:
    """Compare the descriptions of all processes.

    Parameters
    ----------
    texts
        For each process, what it says.
    numbers
        For each process, its number.

    Examples
    --------
    >>> ranks = [Description(rank, 2, 1, "", {"n_obs": 100 - rank}, "plan", {}) for rank in range(2)]
    >>> print(compare([rank.to_text() for rank in ranks], range(2)).text)
    The ranks of this job don't agree:
      n_obs: 100 on rank 0; 99 on rank 1
    Every process must make its sampler with the same arguments, and be in the same epoch.
    """
    descriptions = read_all(texts, numbers, Description.of_text)
    if isinstance(descriptions, Verdict):
        return descriptions
    return find_disagreement(descriptions, numbers) or Verdict("fine", "")


def told(call: str, said: Mapping[str, Any]) -> str:
    """Return what a process says in a call as a text; another version of this package may say other things."""
    return messages.written({"call": f"{call} of {_LIBRARIES[0]} {_version(_LIBRARIES[0])}", "said": said})


def said_in(text: str) -> object:
    """Return what such a text says, as far as any version knows what that may be."""
    return _told_in(text)["said"]


def _told_in(text: str) -> dict[str, Any]:
    return messages.record(messages.parsed(text), {"call": messages.text(_LONG), "said": messages.anything})


def read_all[T](texts: Sequence[str], numbers: Sequence[int], read: Callable[[str], T]) -> list[T] | Verdict:
    """Return what all processes say, or the verdict that they make different calls, or that something is no message.

    Parameters
    ----------
    texts, numbers
        For each process, what it says, and its number.
    read
        Reads what is said in the call that this process makes.
    """
    calls, unlike = _each(texts, numbers, lambda text: _told_in(text)["call"])
    if not unlike and len(whose := _grouped(zip(calls, numbers, strict=True))) > 1:
        problems = [f"{shown(call)[1:-1]} ({listed('process', who)})" for call, who in whose.items()]
        advice = "All of them must make the same calls in the same order."
        return disagreement("The processes of this job make different calls:", problems, advice)
    found, unread = _each(texts, numbers, read)
    if problems := unlike or unread:
        advice = "The store of the job, or gather, must hand on what each process says as it is, and nothing else."
        return disagreement("What processes of this job say can't be read:", problems, advice)
    return found


def _each[T](texts: Sequence[str], numbers: Sequence[int], read: Callable[[str], T]) -> tuple[list[T], list[str]]:
    """Return what each text says, or what is wrong, each as a text."""
    found, problems = [], []
    for text, number in zip(texts, numbers, strict=True):
        try:
            found.append(read(text))
        except ValueError as error:
            problems.append(f"process {number}: {error}")
    return found, problems


def find_disagreement(processes: Sequence[Description], numbers: Sequence[int]) -> Verdict | None:
    """Return the verdict that something differs that must not, or is wrong anywhere; None if all is well."""
    # a process is called by its rank where each has its own, and else by its number
    if [process.rank for process in processes] == [*range(len(processes))]:
        kind, names = "rank", [*range(len(processes))]
    else:
        kind, names = "process", [*numbers]
    failed = _grouped((process.problem, name) for process, name in zip(processes, names, strict=True))
    if failed.keys() != {""}:
        problems = [f"{problem} ({listed(kind, who)})" for problem, who in failed.items() if problem]
        return disagreement("The ranks of this job can't be compared:", problems)
    found = list(_differences(processes, kind, names)) or list(_misplaced(processes, numbers))
    problems = found or [*_other_plans(processes, kind, names), *_unlike_peers(processes, numbers)]
    if not problems:
        return None
    advice = "Every process must make its sampler with the same arguments, and be in the same epoch."
    return disagreement("The ranks of this job don't agree:", problems, advice)


def disagreement(title: str, problems: Sequence[str], advice: str = "") -> Verdict:
    """Return the verdict that something is wrong."""
    more = ["..."] if len(problems) > _MOST else []
    lines = [f"  {cut(problem, _LONGEST)}" for problem in [*problems[:_MOST], *more]]
    return Verdict("disagreement", "\n".join([title, *lines, advice]).rstrip())


def _differences(processes: Sequence[Description], kind: str, names: Sequence[int]) -> Iterator[str]:
    """Return what differs between any processes, each as a text."""
    yield from _told("world size", kind, zip((process.world_size for process in processes), names, strict=True))
    n_peers = (process.n_peers for process in processes)
    yield from _told("processes for each rank", kind, zip(n_peers, names, strict=True))
    for field in dict.fromkeys(field for process in processes for field in process.same):
        values = (process.same.get(field, _UNSAID) for process in processes)
        yield from _told(field, kind, zip(values, names, strict=True))


def _misplaced(processes: Sequence[Description], numbers: Sequence[int]) -> Iterator[str]:
    """Return which ranks are not those of as many processes as they should be."""
    world_size = processes[0].world_size
    n_peers = processes[0].n_peers or max(1, len(processes) // world_size)
    if len(processes) != world_size * n_peers:
        several = f" with {n_peers} processes for each rank" if n_peers > 1 else ""
        there_are = "there is 1 process" if len(processes) == 1 else f"there are {len(processes)} processes"
        yield f"{there_are}, and the world size is {world_size}{several}"
        return
    who = _grouped(zip((process.rank for process in processes), numbers, strict=True))
    for rank in range(world_size):
        if len(who.get(rank, ())) != n_peers:
            yield f"rank {rank} is that of {listed('process', who[rank]) if rank in who else 'no process'}"


def _other_plans(processes: Sequence[Description], kind: str, names: Sequence[int]) -> Iterator[str]:
    """Return which processes have another plan, although all that is known of them is the same."""
    cause = "plan, which must depend on something else in a sampler or a sharding of your own"
    return _told(cause, kind, zip((process.plan for process in processes), names, strict=True))


def _unlike_peers(processes: Sequence[Description], numbers: Sequence[int]) -> Iterator[str]:
    """Return what differs between processes that have the same share, or makes others have the same one."""
    if processes[0].world_size < len(processes):
        sources = (process.source for process in processes)
        yield from _told("dist_info", "process", zip(sources, numbers, strict=True))
    for rank, who in _grouped((process.rank, which) for which, process in enumerate(processes)).items():
        for field in dict.fromkeys(field for which in who for field in processes[which].same_for_peers):
            values = ((processes[which].same_for_peers.get(field, _UNSAID), numbers[which]) for which in who)
            yield from _told(f"{field}, of rank {rank}", "process", values)


#: Stands for what a process hasn't said.
_UNSAID = "(not said)"


def _grouped[T](pairs: Iterable[tuple[T, int]]) -> dict[T, list[int]]:
    """Return for each value who has it."""
    groups = defaultdict(list)
    for value, who in pairs:
        groups[value].append(who)
    return dict(groups)


def _told(field: str, kind: str, pairs: Iterable[tuple[Any, int]]) -> Iterator[str]:
    """Return a text if not all have the same value."""
    values = _grouped(pairs)
    if len(values) > 1:
        texts = [f"{value} on {listed(kind, who)}" for value, who in values.items()]
        yield f"{field}: {'; '.join(texts[:_MOST])}" + ("; ..." if len(texts) > _MOST else "")
