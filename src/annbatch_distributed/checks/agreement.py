"""Checks of whether all ranks have the same configuration, and have read what was planned.

1. Each process describes itself in strings and numbers, or says why it can't: its configuration, and, at the end of an
   epoch, what it read, what was planned for it, its part of the plan, and the rows of a part of the window.
2. All processes receive the descriptions of all.
3. Comparing them is arithmetic, so all raise the same error, in the same words, or none. What each process read must be
   what was planned for it, and the plans of all must add up to the window, without dropped rows and with repeats.

Rows are compared by a :class:`Tally`: they are mixed and added up (:func:`rows.mixed_sum`). The sum doesn't depend on
their order, sums of ranks add up to the job's, and different rows have the same sum with a chance of 2**-64, unless
they were chosen to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from importlib import metadata
from reprlib import repr as shortened
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from annbatch_distributed.checks.exchange import Gather, Kind, Timeout, gather_texts, initialized, listed, seconds_of
from annbatch_distributed.lanes import Lane
from annbatch_distributed.plan import EpochPlan
from annbatch_distributed.ranks import Placement, Rank
from annbatch_distributed.rows import Int64Array, Rows, integer, integers, mixed_sum, plural
from annbatch_distributed.state import Identity, Position, bounded, flat
from annbatch_distributed.stream import Pass

#: Rows of each batch that was read.
type Read = Tally | Iterable[npt.ArrayLike]

type Values = Mapping[str, int | str | None]


#: How many rows are mixed together, since numpy takes as long for a few as for thousands.
_AT_ONCE = 1 << 14


class Tally:
    """Counts rows, so that they can be compared with those that were planned.

    Parameters
    ----------
    n_batches
        How many batches were counted; tallies of the same rows are equal whatever the batches were.
    n_rows
        How many rows, each as often as it was counted.
    value
        What tells other rows apart: the sum of all rows, each mixed.

    Raises
    ------
    TypeError
        If one of them is not an integer.
    ValueError
        If one is negative, or the value is 2**64 or more.

    Examples
    --------
    >>> import numpy as np
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
        """Return the tally of the rows of batches; a TypeError if they are no arrays of rows."""
        if batches is None:
            raise TypeError("the batches say no rows: make the loader with return_index=True, or pass read")
        if isinstance(batches, cls):
            return batches
        if not isinstance(batches, Iterable) or isinstance(batches, Mapping | str):
            raise TypeError(f"read must be the rows of each batch, in arrays, got {shortened(batches)}.")
        tally = cls()
        for rows in batches:
            tally.add(rows)
        return tally

    @property
    def value(self) -> int:
        """What tells other rows apart."""
        # batches wait until there are some thousands of rows: numpy takes as long for a few
        if self._pending:
            self._value = (self._value + mixed_sum(np.concatenate(self._pending))) % 2**64
            self._pending, self._n_pending = [], 0
        return self._value

    def add(self, rows: npt.ArrayLike) -> None:
        """Count the rows of a batch.

        Parameters
        ----------
        rows
            Global rows, in any order and each as often as it was read: ``batch["index"]`` of a loader with
            ``return_index=True``.

        Raises
        ------
        TypeError
            If they are not integers.
        ValueError
            If one is negative, or if they have more than one dimension. The tally is then as it was.
        """
        if rows is None:
            raise TypeError("Rows must be integers, got None: make the loader with return_index=True.")
        batch = integers("Rows", rows)
        if batch.ndim != 1:
            raise ValueError(f"Rows must have one dimension, got shape {batch.shape}: pass batch['index'] as it is.")
        if batch.size and batch.min() < 0:
            raise ValueError(f"Rows are counted from 0, got {batch.min()}.")
        self._pending.append(batch.copy())  # whoever has the batch may change it
        self._n_pending += batch.size
        self.n_batches += 1
        self.n_rows += batch.size
        if self._n_pending >= _AT_ONCE:
            self._value = self.value

    def to_dict(self) -> dict[str, int]:
        """Return the arguments of a Tally that is equal, as numbers that JSON can hold."""
        return {"n_batches": self.n_batches, "n_rows": self.n_rows, "value": self.value}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tally):
            return NotImplemented
        return (self.n_rows, self.value) == (other.n_rows, other.value)

    __hash__ = None  # type: ignore[assignment]  # it goes on counting

    def __add__(self, other: Tally) -> Tally:
        if not isinstance(other, Tally):
            return NotImplemented
        value = (self.value + other.value) % 2**64
        return Tally(self.n_batches + other.n_batches, self.n_rows + other.n_rows, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tally, tuple(self.to_dict().values())

    def __repr__(self) -> str:
        return f"Tally({', '.join(f'{name}={number}' for name, number in self.to_dict().items())})"


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
    done: tuple[int, int] = (0, 0)
    """Its epoch, and the number of batches, or steps of a mixture, that are done of it."""
    read: dict[str, Any] = field(default_factory=dict)
    """What it has read and what was planned for it, if that is asked."""
    problem: str = ""
    """Why it couldn't be described; empty if it could."""

    @property
    def in_all(self) -> dict[str, Any]:
        """What must be the same in all processes, with how many there are."""
        return {"world size": self.world_size, "processes for each rank": self.n_peers, **self.same}

    @classmethod
    def of(cls, job: Placement, identity: Identity, position: Position, plan: EpochPlan, more: Values) -> Self:
        """Return what a process says of the configuration with which a pass begins at a position.

        ``identity`` is what the rows and their order follow from, of which the ``"root"`` must be the same for peers
        only, and ``more`` what else must be the same in all processes.
        """
        # versions of these and other libraries follow
        same = flat({name: value for name, value in identity.items() if name not in ("root", "versions")})
        # "5 on 3 ranks, 7 on 4 ranks of 2 workers", the same on every rank of a job
        done = [
            f"{done} on {n_lanes} ranks" + f" of {n_workers} workers" * (n_workers > 1)
            for n_lanes, n_workers, done in position.segments
            if done
        ]
        same |= {"epoch": position.epoch, "batches done": bounded(", ".join(done) or "none")}
        same |= {f"version of {name}": _version(name) for name in _LIBRARIES}
        peers = {"dist_info": bounded(job.source), _ROOT: identity["root"]}
        return cls(
            job.rank.rank,
            job.rank.world_size,
            job.n_peers,
            same | flat(dict(more)),
            _digest(plan),
            peers,
            (position.epoch, position.done),
        )

    @classmethod
    def joined(cls, parts: Mapping[str, Description], more: Values, done: tuple[int, int]) -> Self:
        """Return what a process says of several samplers, by their names, and of what mixes them."""

        def named(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
            # a process has the same versions for all of them
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
    place: Callable[[], Placement],
    describe: Callable[[Placement], Description],
    *,
    timeout: Timeout,
    gather: Gather | None,
    call: str = "check_ranks_agree",
) -> dict[int, Description]:
    """Return what all processes say of themselves, by number; or raise the same in all unless they agree.

    ``place`` returns which process this is, and ``describe`` what it says. All processes hear of it if one of them
    raises, or if ``timeout`` or ``gather``, which are as the user passed them, are wrong. ``call`` is the user's.
    """
    # whatever is wrong here, the other processes wait for this one: it says what is wrong in place of a description
    seconds, job, problem = 300.0, Placement(Rank(0, 1), source=""), None
    try:
        try:
            job = place()
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
    # a rank whose own error nobody heard raises that, not the timeout that it led to
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
    parts: list[object] = [[int(number) for number in plan.sampler_batches], int(plan.n_dropped)]
    for rank in range(plan.n_streams):
        rows = plan.shard(rank).rows
        # 16 local rows at even distances, and their global rows
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
        epochs, numbers = zip(*(process.done for process in named.values()), strict=True)
        if len(set(epochs)) == 1 and len(set(numbers)) > 1:
            ahead = [name for name, process in named.items() if process.done[1] > min(numbers)]
            advice += (
                f" {listed(kind, ahead).capitalize()} can go back to the last step that all have done: "
                f"loader.reshard(batches_done={min(numbers)})."
            )
        raise disagreement("The ranks of this job don't agree:", problems, advice)


def disagreement(title: str, problems: Sequence[str], advice: str = "") -> ValueError:
    """Return the error that something is wrong."""
    shown = [*problems[:_MOST], *(["..."] if len(problems) > _MOST else [])]
    return ValueError("\n  ".join([title, *shown]) + f"\n{advice}" * bool(advice))


def _misplaced(described: Mapping[int, Description]) -> list[str]:
    """Return which ranks are not those of as many processes as they should be."""
    n_processes, any_of_them = len(described), next(iter(described.values()))
    world_size = any_of_them.world_size
    # processes for each rank: those of a mesh know it; others follow from how many processes there are
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
    # {0: "a", 1: "b", 2: "a"} -> {"a": [0, 2], "b": [1]}
    groups: dict[T, list[int]] = {}
    for name, value in values.items():
        groups.setdefault(value, []).append(name)
    return groups


@dataclass(frozen=True)
class Reading:
    """What a process says of the pass that it began last."""

    description: Description
    """Its configuration, and its tallies, which all are sent."""
    plan: EpochPlan
    """The plan of all ranks."""
    position: Position
    """Where the pass began."""

    @classmethod
    def of(cls, description: Description, last: Pass, read: Read | None, own: range) -> Self:
        """Return what a rank says of a pass.

        ``own`` are the lanes of this rank, several if they are virtual ranks. A ValueError or a TypeError if it isn't
        known what was planned or read.
        """
        # imported here, since comparing strings needs no annbatch
        from annbatch_distributed.wrapped import is_annbatchs_own, n_draws

        plan, sampler = last.plan, last.sampler
        # the batches that were due: the sampler is run again, and nothing is read
        planned = Tally.of(last.rows())
        # the shards of this rank: a resumed epoch may have more or fewer streams than lanes
        n_lanes = last.position.segments[-1].n_lanes
        streams = [stream for stream in range(plan.n_streams) if stream % n_lanes in own]
        share = sum((_tally(plan.shard(stream).rows) for stream in streams), Tally())
        # all batches of these shards, those before a resume included
        numbers = tuple(range(plan.first_number(stream), plan.first_number(stream + 1)) for stream in streams)
        of_shares = replace(last, lanes=[Lane(numbers)]) if last.position.done else last
        # of sets, their numbers are counted: a cell can be a control of several
        whole = planned if of_shares is last and plan.sets is None else Tally.of(of_shares.batches())
        has_draws = n_draws(sampler, share.n_rows) is not None
        if share != whole and not has_draws and plan.remainder != "drop" and not is_annbatchs_own(sampler):
            raise ValueError(
                f"{type(sampler).__name__} doesn't read each row of its shard once, as remainder={plan.remainder!r} "
                "promises. Fix it; or pass remainder='drop', which promises full batches only; or, if it draws rows "
                "with replacement, give it a method n_draws(n_rows) that returns the number of samples"
            )
        tallies = {"read": Tally.of(read), "planned": planned, "share": share}
        of_rank = {name: tally.to_dict() for name, tally in tallies.items()}
        return cls(replace(description, read=of_rank | {"reads_share": share == whole}), plan, last.position)


def _tally(rows: Rows) -> Tally:
    return Tally(0, len(rows), rows.mixed_sum())


def epoch_read(
    place: Callable[[], Placement],
    read: Callable[[Placement], Reading],
    *,
    timeout: Timeout,
    gather: Gather | None,
) -> str:
    """Return what all processes together have read, or raise in all: see :func:`agreement.ranks_agree`."""
    own: list[Reading] = []

    def describe(job: Placement) -> Description:
        own.append(read(job))
        return own[0].description

    said = ranks_agree(place, describe, timeout=timeout, gather=gather, call="check_epoch_read")
    return compare_readings(said, own[0].plan, own[0].position)


def epochs_read(
    place: Callable[[], Placement],
    read: Callable[[Placement], tuple[Description, Mapping[str, Reading]]],
    *,
    timeout: Timeout,
    gather: Gather | None,
) -> list[str]:
    """Return what all processes together have read in several passes, by names, a line for each; or raise in all.

    All of them are compared in one exchange, since ranks may have ended different passes after a failed read.
    """
    own: dict[str, Reading] = {}

    def describe(job: Placement) -> Description:
        description, readings = read(job)
        own.update(readings)
        return replace(description, read={name: asdict(reading.description) for name, reading in readings.items()})

    said = ranks_agree(place, describe, timeout=timeout, gather=gather, call="check_epoch_read")
    lines = []
    for name in dict.fromkeys(name for process in said.values() for name in process.read):
        of_pass = {
            number: Description(**process.read[name]) for number, process in said.items() if name in process.read
        }
        begins = {process.same["batches done"] for process in of_pass.values()}
        if len(of_pass) < len(said) or len(begins) > 1:
            lines.append(f"{name}: not checked, since the ranks have read it in different parts")
            continue
        compare(of_pass)
        source, *_ = name.rpartition(", ")
        lines.append(f"{source}, {compare_readings(of_pass, own[name].plan, own[name].position)}")
    return lines


def compare_readings(said: Mapping[int, Description], plan: EpochPlan, position: Position) -> str:
    """Return what processes, by number, have read by a plan; a ValueError if it isn't what was planned."""
    problems = []
    for number, process in said.items():
        own, planned = Tally(**process.read["read"]), Tally(**process.read["planned"])
        if _in_words(own) != _in_words(planned):
            problem = f", not {_in_words(planned)}"
        elif own != planned:
            problem = " as planned, but other rows"
        else:
            continue
        peer = f" (process {number})" if process.n_peers != 1 else ""
        problems.append(f"rank {process.rank}{peer} has read {_in_words(own)}{problem}")
    # ranks of several processes count once
    ranks = {process.rank: process.read for process in said.values()}.values()
    # sums of all ranks: a tally of all rows is the sum of the tallies of its parts
    read, shares = (sum((Tally(**rank[name]) for rank in ranks), Tally()) for name in ("read", "share"))
    if not problems and plan.n_draws is None:
        repeated = (_tally(plan.shard(rank).repeated) for rank in range(plan.n_streams) if plan.n_repeated)
        if shares + _tally(plan.dropped) != sum(repeated, _tally(plan.window)):
            problems = [f"the shares of all ranks, {plural(shares.n_rows, plan.unit)}, differ from the plan"]
    if problems:
        masked = f" ({_masked(plan)})" if _masked(plan) else ""
        raise disagreement(f"What the ranks have read in epoch {plan.epoch} is not what was planned{masked}:", problems)
    reads_each_row = plan.n_draws is None and all(rank["reads_share"] for rank in ranks)
    return _summary(plan, position, read, len(ranks), reads_each_row=reads_each_row)


def _in_words(tally: Tally) -> str:
    return f"{plural(tally.n_rows, 'row')} in {plural(tally.n_batches, 'batch')}"


def _summary(plan: EpochPlan, position: Position, total: Tally, n_ranks: int, *, reads_each_row: bool) -> str:
    """Return what the ranks have read as planned, in a line, and no more than is known."""
    is_rest = position.done > 0
    epoch = "rest of " * is_rest + f"epoch {plan.epoch}"
    ranks = f"{plural(n_ranks, 'rank')} {'has' if n_ranks == 1 else 'have'}"
    text = f"{epoch}: {ranks} read {_in_words(total)}, as planned"
    if is_rest and position.unverified:
        return text + ". The batches before were not checked"
    # when the number of ranks changes, drop may lose whole batches
    if not reads_each_row or (is_rest and plan.remainder == "drop"):
        return text
    text += ". " + ("With the batches before, each" if is_rest else "Each")
    text += f" of the {plural(len(plan.window) - plan.n_dropped, plan.unit)} was read once"
    text += f", {plan.n_repeated:,} were repeated" if plan.n_repeated else ""
    text += f", {plan.n_dropped:,} of the {len(plan.window):,} are dropped in this epoch" if plan.n_dropped else ""
    return text + (f"; {_masked(plan)}" if _masked(plan) else "")


def _masked(plan: EpochPlan) -> str:
    """Return which rows the mask selects, which tells loaders of one collection apart; empty if it selects all."""
    return f"the mask selects {plan.window.format(3)}" if len(plan.window) < plan.n_obs else ""
