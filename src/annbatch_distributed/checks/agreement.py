"""Consistency checks: that all ranks have the same configuration, and have read the planned rows.

1. Each process describes itself in strings and numbers, or gives the reason why it can't. The description holds its
   configuration and, at the end of an epoch, checksums of the rows that it read, of its planned rows, and of its shard.
2. Every process receives the descriptions of all processes.
3. Each process compares them, which is arithmetic, so all raise the same error or none. The rows that a process read
   must be its planned rows, and the shards of all ranks must add up to the selected rows, without dropped rows and with
   repeated rows. Each rank sums a part of the selected rows, so that no rank sums more rows than it reads.

Rows are compared by a :class:`Tally`, a sum of hashes of row indices (:func:`rows.hash_sum`). The sum doesn't depend on
the order of the rows, and the sums of ranks add up to the sum of the job. Different rows have the same sum with a
probability of 2**-64, unless they were chosen for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import metadata
from reprlib import repr as shortened
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from annbatch_distributed.checks.exchange import (
    Gather,
    Kind,
    Timeout,
    enumerated,
    gather_texts,
    initialized,
    seconds_of,
)
from annbatch_distributed.core.lanes import Lane
from annbatch_distributed.core.plan import Plan
from annbatch_distributed.core.rows import Rows, hash_sum
from annbatch_distributed.core.state import Position, bounded, flat
from annbatch_distributed.core.stream import Pass
from annbatch_distributed.core.units import EachRow
from annbatch_distributed.core.values import BOUND, Int64Array, digest, few, integer, integers, plural
from annbatch_distributed.core.wrapped import is_annbatchs_own, n_draws
from annbatch_distributed.cursor import Cursor
from annbatch_distributed.ranks import Placement
from annbatch_distributed.reports.words import words_of

#: Rows of each batch that was read.
type Read = Tally | Iterable[npt.ArrayLike]

type Values = Mapping[str, int | str | None]


#: Number of rows that are hashed together, since NumPy takes the same time for a few as for thousands.
_AT_ONCE = 1 << 14


class Tally:
    """Checksum of rows that doesn't depend on their order.

    Use it to compare the rows that were read with the planned rows. Two tallies are equal if their rows are equal,
    whatever the batches were.

    Parameters
    ----------
    n_batches
        Number of batches that were added (default 0).
    n_rows
        Number of rows that were added; a row counts each time that it was added (default 0).
    value
        Checksum of the rows, below 2**64 (default 0).

    Raises
    ------
    TypeError
        If an argument is not an integer.
    ValueError
        If an argument is negative, or ``value`` is 2**64 or more.

    Examples
    --------
    >>> from annbatch_distributed.checks import Tally
    >>> read, planned = Tally(), Tally()
    >>> for rows in (np.array([3, 0, 1]), np.array([2, 4])):
    ...     read.add(rows)
    >>> planned.add(np.arange(5))
    >>> read == planned
    True
    >>> planned.add(np.array([4]))
    >>> read == planned
    False
    """

    def __init__(self, n_batches: int = 0, n_rows: int = 0, value: int = 0) -> None:
        self.n_batches = integer("n_batches of a Tally", n_batches, least=0)
        self.n_rows = integer("n_rows of a Tally", n_rows, least=0)
        self._value = integer("value of a Tally", value, least=0, below=2**64)
        self._pending: list[Int64Array] = []
        self._n_pending = 0

    @classmethod
    def of(cls, batches: Read | None) -> Self:
        """Return the tally of the rows of batches; a TypeError if they aren't arrays of rows."""
        if batches is None:
            raise TypeError("The batches have no row indices. Create the loader with return_index=True, or pass read.")
        if isinstance(batches, cls):
            return batches
        if not isinstance(batches, Iterable) or isinstance(batches, Mapping | str):
            raise TypeError(
                f"read must be an iterable of integer arrays, one per batch, got {shortened(batches)}. Pass a list of "
                "batch['index']."
            )
        tally = cls()
        for rows in batches:
            tally.add(rows)
        return tally

    @property
    def value(self) -> int:
        """Checksum of the rows."""
        # batches are collected until they have some thousands of rows, which take NumPy the same time as a few
        if self._pending:
            self._value = (self._value + hash_sum(np.concatenate(self._pending))) % 2**64
            self._pending, self._n_pending = [], 0
        return self._value

    def add(self, rows: npt.ArrayLike) -> None:
        """Add the rows of a batch.

        Parameters
        ----------
        rows
            Row indices of the batch, an integer array of shape ``(batch_size,)`` in any order: ``batch["index"]`` of a
            loader with ``return_index=True``.

        Raises
        ------
        TypeError
            If the rows are not integers.
        ValueError
            If a row is negative, or the array has more than one dimension. The tally is left unchanged.

        Examples
        --------
        >>> from annbatch_distributed.checks import Tally
        >>> tally = Tally()
        >>> tally.add(np.array([3, 0, 1]))
        >>> tally.n_batches, tally.n_rows
        (1, 3)
        """
        if rows is None:
            raise TypeError("Rows must be integers, got None. Create the loader with return_index=True.")
        batch = integers("Rows", rows)
        if batch.ndim != 1:
            raise ValueError(f"Rows must have one dimension, got shape {batch.shape}. Pass batch['index'] unchanged.")
        if batch.size and batch.min() < 0:
            raise ValueError(f"Rows must be at least 0, got {batch.min()}. Pass batch['index'] unchanged.")
        self._pending.append(batch.copy())  # the caller may change the batch later
        self._n_pending += batch.size
        self.n_batches += 1
        self.n_rows += batch.size
        if self._n_pending >= _AT_ONCE:
            self._value = self.value

    def to_dict(self) -> dict[str, int]:
        """Return the arguments of an equal Tally, as JSON."""
        return {"n_batches": self.n_batches, "n_rows": self.n_rows, "value": self.value}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tally):
            return NotImplemented
        return (self.n_rows, self.value) == (other.n_rows, other.value)

    __hash__ = None  # type: ignore[assignment]  # it is mutable

    def __add__(self, other: Tally) -> Tally:
        if not isinstance(other, Tally):
            return NotImplemented
        value = (self.value + other.value) % 2**64
        return Tally(self.n_batches + other.n_batches, self.n_rows + other.n_rows, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tally, tuple(self.to_dict().values())

    def __repr__(self) -> str:
        return f"Tally({', '.join(f'{name}={number}' for name, number in self.to_dict().items())})"


#: Libraries whose versions determine the rows, their order and their values, in addition to the settings.
_LIBRARIES = "annbatch-distributed", "annbatch", "anndata", "numpy", "zarr"
#: Number of rows of each rank that represent all of its rows.
_SOME = 16
#: Largest number of problems, and of values of one setting, that a message lists.
_MOST_PROBLEMS = 10
#: Number of ranges of a mask that a message names.
_MOST_RANGES = 3

_DONE = "batches done"
_ROOT = "randomness (a seed makes it the same)"
_PLAN = "plan, which must depend on another setting of a custom sampler or sharding"


@dataclass(frozen=True)
class Description:
    """A process's description of its configuration."""

    rank: int
    """Rank of the process."""
    world_size: int
    """Number of ranks."""
    n_peers: int | None
    """Number of processes with the same shard, this one included; None if all processes are divided evenly."""
    same: dict[str, Any] = field(default_factory=dict)
    """Settings that must be the same in all processes, by name."""
    plan: str = ""
    """Digest of the plan, which follows from ``same`` unless a custom sampler or sharding depends on other values."""
    same_for_peers: dict[str, Any] = field(default_factory=dict)
    """Settings that must be the same in all processes with the same shard."""
    done: tuple[int, int] = (0, 0)
    """Epoch, and the number of its batches (or steps of a mixture) that are done."""
    read: dict[str, Any] = field(default_factory=dict)
    """Tallies of the rows that it has read, of its planned rows, of its shard and of a part of the selected rows.

    Empty unless requested.
    """
    problem: str = ""
    """Error message if the process couldn't be described, else empty."""

    @property
    def in_all(self) -> dict[str, Any]:
        """Settings that must be the same in all processes, the numbers of ranks and peers included."""
        return {"world size": self.world_size, "processes for each rank": self.n_peers, **self.same}

    @classmethod
    def of(cls, job: Placement, cursor: Cursor, n_obs: int, position: Position, more: Values) -> Self:
        """Return a process's description of the configuration of a pass that begins at a position.

        ``more`` must be the same in all processes, like the settings that determine the rows and their order.
        """
        n_obs = integer("n_obs", n_obs, least=0, below=BOUND)
        plan, epochs = cursor.planned(n_obs, position), cursor.epochs
        if epochs.virtual_ranks is not None:
            more = {"virtual ranks": epochs.virtual_ranks, **more}
        identity = epochs.config.identity(n_obs)
        # versions of more libraries are added below
        same = flat({name: value for name, value in identity.items() if name not in ("root", "versions")})
        # "5 on 3 ranks, 7 on 4 ranks of 2 workers", the same on every rank of a job
        done = [
            f"{done} on {plural(n_lanes, 'rank')}" + f" of {n_workers} workers" * (n_workers > 1)
            for n_lanes, n_workers, done in position.segments
            if done
        ]
        same |= {"epoch": position.epoch, _DONE: bounded(", ".join(done) or "none")}
        same |= {f"version of {name}": _version(name) for name in _LIBRARIES}
        peers = {"dist_info": bounded(job.source), _ROOT: identity["root"]}
        return cls(
            job.rank,
            job.world_size,
            job.n_peers,
            same | flat(dict(more)),
            _digest(plan),
            peers,
            (position.epoch, position.done),
        )

    @classmethod
    def of_next(cls, job: Placement, cursor: Cursor, n_obs: int, more: Values) -> Self:
        """Return a process's description of its next pass."""
        return cls.of(job, cursor, n_obs, cursor.next(), more)

    @classmethod
    def joined(cls, parts: Mapping[str, Description], more: Values, done: tuple[int, int]) -> Self:
        """Return the description of several samplers, by their names, and of the loader that mixes them."""

        def named(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
            # a process has the same versions for all samplers
            return {
                what if what.startswith("version") else f"{name}: {what}": value
                for name, own in values.items()
                for what, value in own.items()
            }

        any_of_them = next(iter(parts.values()))
        return cls(
            any_of_them.rank,
            any_of_them.world_size,
            any_of_them.n_peers,
            flat(dict(more)) | named({name: part.same for name, part in parts.items()}),
            " ".join(part.plan for part in parts.values()),
            named({name: part.same_for_peers for name, part in parts.items()}),
            done,
        )


def ranks_agree(
    cursor: Cursor,
    describe: Callable[[Placement], Description],
    *,
    timeout: Timeout,
    gather: Gather | None,
    call: str = "check_ranks_agree",
) -> dict[int, Description]:
    """Return the descriptions of all processes, by number; if they don't agree, raise the same error in all.

    ``cursor`` knows the placement of this process, and ``describe`` returns its description. If one of them raises, or
    the user's ``timeout`` or ``gather`` is invalid, all processes raise that error. ``call`` is the user's call.
    """
    # the other processes wait for this one, so it sends an error in place of a description
    seconds, job, problem = 300.0, Placement(0, 1, source=""), None
    try:
        try:
            job = cursor.epochs.placement
            if job.framework is None:  # processes may learn their ranks from different sources
                job = job.with_source("")
        finally:
            seconds = seconds_of(timeout)
        if gather is not None and not callable(gather):
            raise TypeError(
                "gather must be a function that takes a string and returns the strings of all processes, got "
                f"{shortened(gather)}. Pass comm.allgather of mpi4py, for example."
            )
        description = describe(job)
    except Exception as error:
        if not callable(gather) and initialized() is None:  # there is no other process to send it to
            raise
        problem = error
        text = f"{type(error).__name__}: {error}"
        description = Description(job.rank, job.world_size, job.n_peers, problem=text)
    # another version of this package may send descriptions of another form
    message = {"call": f"{call} of {_LIBRARIES[0]} {_version(_LIBRARIES[0])}", "said": asdict(description)}
    try:
        texts = gather_texts(json.dumps(message), job, seconds=seconds, gather=gather if callable(gather) else None)
    # a rank whose error reached no other process raises this error, not the timeout that it led to
    except TimeoutError:
        if problem is not None:
            raise problem from None
        raise
    processes = _read(texts)
    compare(processes)
    return processes


def _read(texts: Mapping[int, str]) -> dict[int, Description]:
    """Return the descriptions of processes, by number; a ValueError unless all make the same call."""
    try:
        messages = {number: json.loads(text) for number, text in texts.items()}
        calls = _grouped({number: message["call"] for number, message in messages.items()})
        if len(calls) == 1:
            return {number: Description(**message["said"]) for number, message in messages.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "The messages of other processes can't be read. Their store, or gather, must return the strings unchanged, "
            f"got {shortened(texts)}."
        ) from error
    different = [f"{name} ({enumerated('process', who)})" for name, who in calls.items()]
    advice = "All of them must make the same calls in the same order."
    raise disagreement("The processes of this job make different calls:", different, advice)


@cache
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # it was imported from a folder on the path
        return "not installed"


def _digest(plan: Plan) -> str:
    """Return a digest of a plan: of its numbers of batches, and of some rows of each rank."""
    parts: list[object] = [[int(number) for number in plan.sampler_batches], int(plan.n_dropped)]
    for rank in range(plan.n_streams):
        # 16 evenly spaced rows of a shard: of 32 rows, positions 0 2 4 ... 30
        positions = plan.positions(rank)
        some = np.linspace(0, len(positions), _SOME, endpoint=False, dtype=np.int64)[: len(positions)]
        rows = plan.order.to_global((positions.start + some) % len(plan.order))
        parts.append((len(positions), rows.tolist()))
    return digest(repr(parts), size=8)


def compare(described: Mapping[int, Description]) -> None:
    """Raise a ValueError unless processes, by number, have the same configuration and the right ranks.

    >>> ranks = {
    ...     rank: Description(rank, 2, 1, {"n_obs": 100 - rank}) for rank in range(2)
    ... }
    >>> compare(ranks)
    Traceback (most recent call last):
    ...
    ValueError: The ranks of this job don't agree:
      n_obs: 100 on rank 0; 99 on rank 1
    Every process must create its sampler with the same arguments, and be in the same epoch.
    """
    # a process is named by its rank if each has its own rank, else by its number
    by_rank = [process.rank for process in described.values()] == [*range(len(described))]
    kind: Kind = "rank" if by_rank else "process"
    named = dict(enumerate(described.values())) if by_rank else described
    failed = _grouped({name: process.problem for name, process in named.items()})
    if failed.keys() != {""}:
        problems = [f"{problem} ({enumerated(kind, who)})" for problem, who in failed.items() if problem]
        raise disagreement("The ranks of this job can't be compared:", problems)
    problems = _unequal({name: process.in_all for name, process in named.items()}, kind) or _misplaced(described)
    if not problems:
        problems = _unequal({name: {_PLAN: process.plan} for name, process in named.items()}, kind)
        for rank, peers in _grouped({number: process.rank for number, process in described.items()}).items():
            own = {number: described[number].same_for_peers for number in peers}
            problems += _unequal(own, "process", f", of rank {rank}")
    if problems:
        advice = "Every process must create its sampler with the same arguments, and be in the same epoch."
        epochs, numbers = zip(*(process.done for process in named.values()), strict=True)
        if len(set(epochs)) == 1 and len(set(numbers)) > 1:
            ahead = [name for name, process in named.items() if process.done[1] > min(numbers)]
            if min(numbers):
                advice += (
                    f" To go back to the last step that all of them have done, call "
                    f"loader.reshard(batches_done={min(numbers)}) on {enumerated(kind, ahead)}."
                )
            else:  # after a restart, going back would repeat batches that the loaded model was trained on
                advice += f" If only {enumerated(kind, ahead)} resumed, load the same state in every process."
        raise disagreement("The ranks of this job don't agree:", problems, advice)


def disagreement(title: str, problems: Sequence[str], advice: str = "") -> ValueError:
    """Return an error that lists problems."""
    shown = few(problems, _MOST_PROBLEMS, "\n  ")
    return ValueError(f"{title}\n  {shown}" + f"\n{advice}" * bool(advice))


def _misplaced(described: Mapping[int, Description]) -> list[str]:
    """Return the problems of ranks that don't belong to the right number of processes."""
    n_processes, any_of_them = len(described), next(iter(described.values()))
    world_size = any_of_them.world_size
    # processes for each rank: a mesh knows this number; else the processes are divided evenly
    n_peers = any_of_them.n_peers or max(1, n_processes // world_size)
    if n_processes != world_size * n_peers:
        several = f" with {n_peers} processes for each rank" if n_peers > 1 else ""
        there_are = "there is 1 process" if n_processes == 1 else f"there are {n_processes} processes"
        return [f"{there_are}, but the world size is {world_size}{several}"]
    peers = _grouped({number: process.rank for number, process in described.items()})
    return [
        f"rank {rank} belongs to {enumerated('process', peers[rank]) if rank in peers else 'no process'}"
        for rank in range(world_size)
        if len(peers.get(rank, ())) != n_peers
    ]


def _unequal(tables: Mapping[int, Values], kind: Kind, whose: str = "") -> list[str]:
    """Return a string for each setting that differs, with its values and the ranks or processes that have them."""
    problems = []
    for what in dict.fromkeys(what for table in tables.values() for what in table):
        groups = _grouped({name: table.get(what, "(missing)") for name, table in tables.items()})
        if len(groups) > 1:
            texts = [f"{value} on {enumerated(kind, who)}" for value, who in groups.items()]
            problems.append(f"{what}{whose}: {few(texts, _MOST_PROBLEMS, '; ')}")
    return problems


def _grouped[T](values: Mapping[int, T]) -> dict[T, list[int]]:
    """Return, for each value, the names that have it."""
    # {0: "a", 1: "b", 2: "a"} -> {"a": [0, 2], "b": [1]}
    groups: dict[T, list[int]] = {}
    for name, value in values.items():
        groups.setdefault(value, []).append(name)
    return groups


@dataclass(frozen=True)
class Reading:
    """A process's report of a pass."""

    description: Description
    """Configuration and tallies, which every process receives."""
    plan: Plan
    """Plan of all ranks."""
    position: Position
    """Position at which the pass began."""

    @classmethod
    def of(cls, job: Placement, cursor: Cursor, n_obs: int, read: Read | None, last: Pass | None = None) -> Self:
        """Return a process's report of the rows that it has read in a pass (default: the last one).

        A ValueError or a TypeError if the planned rows or the rows read are unknown.
        """
        n_obs, last = integer("n_obs", n_obs, least=0, below=BOUND), last or cursor.last
        if last is None:
            cursor.check_workers_have_not_read()
            raise ValueError(
                "No iteration has started since set_epoch or load_state_dict. Read the epoch first, and call "
                "check_epoch_read before the next set_epoch."
            )
        if last.plan.n_obs != n_obs:
            raise ValueError(
                f"n_obs must be the number of rows of the last iteration, {last.plan.n_obs}, got {n_obs}. Pass "
                "loader.n_obs."
            )
        # several lanes with virtual ranks
        description, own = Description.of(job, cursor, n_obs, last.position, {}), cursor.epochs.own_lanes
        plan, sampler, remainder = last.plan, last.plan.config.sampler, last.plan.config.remainder
        # the planned batches, and their units: the sampler runs again, but no data is read
        planned, whole, are_rows = Tally(), Tally(), isinstance(plan.config.units, EachRow)
        for numbers in last.batches():
            planned.add(plan.units.rows_of(numbers).rows)
            if not are_rows:
                whole.add(numbers)
        whole = planned if are_rows else whole
        # the shards of this rank; a resumed epoch may have more or fewer streams than lanes: lane 1 of 2 checks streams
        # 1 and 3 of 4
        n_lanes = last.position.segments[-1].n_lanes
        streams = [stream for stream in range(plan.n_streams) if stream % n_lanes in own]
        shards = [plan.shard(stream) for stream in streams]
        share = sum((_tally(shard.rows) for shard in shards), Tally())
        # all batches of these shards, including the batches before a resume
        of_shares = tuple(range(plan.first_number(stream), plan.first_number(stream + 1)) for stream in streams)
        if last.position.done:
            whole = Tally.of(replace(last, lanes=[Lane(of_shares)]).batches())
        has_draws = n_draws(sampler, share.n_rows) is not None
        if share != whole and not has_draws and remainder != "drop" and not is_annbatchs_own(sampler):
            raise ValueError(
                f"{type(sampler).__name__} doesn't read each row of its shard once, as remainder={remainder!r} "
                "requires. Fix it, or pass remainder='drop', which requires only full batches. If it samples with "
                "replacement, give it a method n_draws(n_rows) that returns the number of samples."
            )
        # the shards of all ranks add up to these parts: of 7 selected rows, ranks 0 and 1 of 2 sum 0:3 and 3:7
        bounds = (len(plan.selected) * rank // job.world_size for rank in (job.rank, job.rank + 1))
        due = sum((_tally(shard.repeated) for shard in shards), _tally(plan.selected.cut(*bounds)))
        tallies = {"read": Tally.of(read), "planned": planned, "share": share, "due": due}
        of_rank = {name: tally.to_dict() for name, tally in tallies.items()}
        begins = {"begins": description.same.pop(_DONE), "reads_share": share == whole}
        return cls(replace(description, read=of_rank | begins), plan, last.position)


def _tally(rows: Rows) -> Tally:
    return Tally(0, len(rows), rows.hash_sum())


def epoch_read(
    cursor: Cursor,
    read: Callable[[Placement], Reading],
    *,
    timeout: Timeout,
    gather: Gather | None,
) -> str:
    """Return a summary of the rows that all processes have read, or raise in all: see :func:`ranks_agree`."""
    own: list[Reading] = []

    def describe(job: Placement) -> Description:
        own.append(read(job))
        return own[0].description

    described = ranks_agree(cursor, describe, timeout=timeout, gather=gather, call="check_epoch_read")
    return compare_readings(described, own[0].plan, own[0].position)


def epochs_read(
    cursor: Cursor,
    read: Callable[[Placement], tuple[Description, Mapping[str, Reading]]],
    *,
    timeout: Timeout,
    gather: Gather | None,
) -> list[str]:
    """Return a summary of the rows that all processes have read in each of several passes, or raise in all.

    One exchange compares all passes, since ranks may have ended different passes after a failed read.
    """
    own: dict[str, Reading] = {}

    def describe(job: Placement) -> Description:
        description, readings = read(job)
        own.update(readings)
        return replace(description, read={name: asdict(reading.description) for name, reading in readings.items()})

    described = ranks_agree(cursor, describe, timeout=timeout, gather=gather, call="check_epoch_read")
    lines = []
    for name in dict.fromkeys(name for process in described.values() for name in process.read):
        of_pass = {
            number: Description(**process.read[name]) for number, process in described.items() if name in process.read
        }
        if len(of_pass) < len(described):
            lines.append(f"{name}: not checked, since the ranks have read it in different parts")
            continue
        compare(of_pass)
        source, *_ = name.rpartition(", ")
        lines.append(f"{source}, {compare_readings(of_pass, own[name].plan, own[name].position)}")
    return lines


def compare_readings(described: Mapping[int, Description], plan: Plan, position: Position) -> str:
    """Return a summary of the rows that processes, by number, have read; a ValueError if they differ from the plan."""
    problems = []
    for number, process in described.items():
        own, planned = Tally(**process.read["read"]), Tally(**process.read["planned"])
        if _in_words(own) != _in_words(planned):
            problem = f", not {_in_words(planned)}"
        elif own != planned:
            problem = " as planned, but different rows"
        else:
            continue
        peer = f" (process {number})" if process.n_peers != 1 else ""
        problems.append(f"rank {process.rank}{peer} has read {_in_words(own)}{problem}")
    # a rank of several processes counts once
    ranks = {process.rank: process.read for process in described.values()}.values()
    # sums over all ranks: the tally of all rows is the sum of the tallies of its parts
    read, shares, due = (sum((Tally(**rank[name]) for rank in ranks), Tally()) for name in ("read", "share", "due"))
    if not problems and plan.n_samples is None and shares + _tally(plan.dropped) != due:
        problems = [f"the shards of all ranks, {plural(shares.n_rows, plan.units.noun)}, differ from the plan"]
    if problems:
        masked = f" ({mask})" if (mask := _masked(plan)) else ""
        raise disagreement(f"The ranks have not read the planned rows in epoch {plan.epoch}{masked}:", problems)
    reads_each_row = plan.n_samples is None and all(rank["reads_share"] for rank in ranks)
    # a rank that has resumed alone, after a failed read, has begun its last pass later than the others
    have_begun_together = len({rank["begins"] for rank in ranks}) == 1
    is_verified = have_begun_together and not position.unverified
    is_rest = position.done > 0 or not have_begun_together
    return _summary(plan, read, len(ranks), is_rest=is_rest, is_verified=is_verified, reads_each_row=reads_each_row)


def _in_words(tally: Tally) -> str:
    return f"{plural(tally.n_rows, 'row')} in {plural(tally.n_batches, 'batch')}"


def _summary(plan: Plan, total: Tally, n_ranks: int, *, is_rest: bool, is_verified: bool, reads_each_row: bool) -> str:
    """Return a line about the rows that the ranks have read as planned; it claims only what was checked."""
    epoch = "rest of " * is_rest + f"epoch {plan.epoch}"
    ranks = f"{plural(n_ranks, 'rank')} {'has' if n_ranks == 1 else 'have'}"
    text = f"{epoch}: {ranks} read {_in_words(total)}, as planned"
    if is_rest and not is_verified:
        return text + ". Earlier batches were not checked"
    # when the number of ranks changes, whole batches may be dropped
    if not reads_each_row or (is_rest and plan.config.remainder == "drop"):
        return text
    text += ". " + ("Including earlier batches, each" if is_rest else "Each")
    text += f" of the {plural(len(plan.selected) - plan.n_dropped, plan.units.noun)} was read once"
    text += "" if plan.n_repeated or plan.n_dropped else words_of(plan.units).claim
    text += f", {plan.n_repeated:,} were repeated" if plan.n_repeated else ""
    text += f"; {plan.n_dropped:,} of the {len(plan.selected):,} are dropped in this epoch" if plan.n_dropped else ""
    return text + (f"; {mask}" if (mask := _masked(plan)) else "")


def _masked(plan: Plan) -> str:
    """Return the rows that the mask selects, which identify a loader of a collection; empty if it selects all."""
    if len(plan.selected) == len(plan.units):
        return ""
    if len(plan.selected.starts) <= _MOST_RANGES:
        return f"the mask selects {plan.selected}"
    return f"the mask selects {len(plan.selected):,} of {len(plan.units):,} {plan.units.noun}s"
