"""Progress: how far an epoch is, as a state that can be saved and loaded.

A state is a dict of a few integers and strings that JSON can hold, the same on every rank and small however large the
collection is:

``version``
    The format of the state.
``epoch``, ``pass``
    Which epoch, and which of the passes that were begun since the epoch was set.
``segments``
    The stretches of the epoch that were run so far: world size, number of ``DataLoader`` workers where it makes a
    difference, and batches that every rank has done.
``worker``
    Which worker's state it is, if it is only that of one.
``identity``
    What the rows and their order follow from. A state fits a sampler of the same identity only. What isn't known, in
    the state or of the sampler, makes no difference.

What is read from a state has bounds, so that a damaged one is an error at once, whatever is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from operator import index
from reprlib import Repr
from typing import Any, NamedTuple

from annbatch_distributed.ranks.rank import MOST_RANKS
from annbatch_distributed.sharding.integers import BOUND

#: The format of states; a state of a newer one can't be read.
VERSION = 1

#: How often an epoch can go on with other numbers of ranks or workers than before, its beginning included.
MOST_SEGMENTS = 100

#: Texts of an identity that are longer are cut, and told apart by a digest.
_LONGEST = 160

#: How many names an identity can have.
_MOST_NAMES = 100

#: What a state or a sampler need not know of the collection, and what is told apart only if both know it.
_NEED_NOT_KNOW = "n_obs", "data sets"

type Identity = dict[str, int | str | None]


class Segment(NamedTuple):
    """A stretch of an epoch that was run by so many processes."""

    world_size: int
    """How many ranks there were."""
    n_workers: int
    """How many ``DataLoader`` workers each rank's batches were dealt to: 1 if there are none, or it doesn't matter."""
    done: int
    """How many batches every rank has done."""


class Share(NamedTuple):
    """The part of a pass that one ``DataLoader`` worker has."""

    worker: int
    """Its batches are collected as those with the numbers ``worker``, ``worker + n_workers``, ... of the segment."""
    n_workers: int
    """How many workers there are."""


@dataclass(frozen=True)
class Position:
    """Where a pass begins."""

    epoch: int
    """Which epoch it belongs to."""
    passes: int = 0
    """How many passes were begun before it, since the epoch was set."""
    segments: tuple[Segment, ...] = ()
    """What was run of the epoch."""
    share: Share | None = None
    """Whose part it is, if it isn't the whole rank's."""

    @property
    def resumes(self) -> bool:
        """Whether it is the rest of an epoch."""
        return any(segment.done for segment in self.segments)

    def without_idle_segments(self) -> Position:
        """Return the same position, without segments in which nothing was done."""
        return replace(self, segments=tuple(segment for segment in self.segments if segment.done))

    def of(self, world_size: int) -> tuple[Segment, ...]:
        """Return the last segments, as far as they were run by so many ranks."""
        others = len(self.segments)
        while others and self.segments[others - 1].world_size == world_size:
            others -= 1
        return self.segments[others:]

    def before(self, world_size: int) -> tuple[Segment, ...]:
        """Return the segments before those."""
        return self.segments[: len(self.segments) - len(self.of(world_size))]

    def done(self, world_size: int) -> int:
        """Return how many batches were done in the last segments by so many ranks."""
        return sum(segment.done for segment in self.of(world_size))

    def going_on(self, world_size: int, n_workers: int) -> Position:
        """Return the same position, with a last segment of so many ranks and workers."""
        if self.segments and self.segments[-1][:2] == (world_size, n_workers):
            return self
        return replace(self, segments=(*self.segments, Segment(world_size, n_workers, 0)))

    def moved_to(self, done: int) -> Position:
        """Return the same position, with so many batches done in the last segment."""
        *others, last = self.segments
        return replace(self, segments=(*others, last._replace(done=done)))

    def after(self) -> Position:
        """Return where the next pass begins, once this one has come to its end."""
        return Position(self.epoch, self.passes + 1)


@dataclass(frozen=True, eq=False)
class Begun:
    """A pass that was begun; two of them are never equal, whatever they hold."""

    position: Position
    """Where it began; the last segment is the one that it goes on with."""
    n_obs: int | None
    """Rows of the collection, if that is known."""
    n_batches: int | None
    """How many batches the epoch has on the rank that has the most, if that is known."""
    n_due: int
    """How many batches it yields here."""
    share: Share | None = None
    """Which part of the rank's pass it is, in a ``DataLoader`` worker."""
    ends: bool = True
    """Whether the last batch of the rank's pass is in that part."""
    is_here: bool = True
    """Whether it isn't that of the workers of this process."""
    was_loaded: bool = False
    """Whether workers have loaded the position, so that their process doesn't know it."""

    def moved_by(self, n_yielded: int) -> Position:
        """Return the position after so many batches were yielded here, with those that others have yielded by then."""
        done = self.position.segments[-1].done
        if not n_yielded or self.share is None:
            return self.position.moved_to(done + n_yielded)
        worker, n_workers = self.share
        own = len(range(worker, done, n_workers)) + n_yielded
        return self.position.moved_to((own - 1) * n_workers + worker + 1)


@dataclass(frozen=True)
class Progress:
    """How far an epoch is.

    Examples
    --------
    >>> progress = Progress(Position(epoch=3, segments=(Segment(8, 1, 120),)), identity={"n_obs": 10_000})
    >>> Progress.of_state(progress.to_state()) == progress
    True
    """

    position: Position
    """Where to go on, with at least one segment."""
    identity: Identity
    """What the rows and their order follow from, by name."""

    def to_state(self) -> dict[str, Any]:
        """Return it as a state."""
        at = self.position
        return {
            "version": VERSION,
            "epoch": at.epoch,
            "pass": at.passes,
            "segments": [list(segment) for segment in at.segments],
            **({} if at.share is None else {"worker": list(at.share)}),
            "identity": {name: brief(value) for name, value in self.identity.items()},
        }

    @classmethod
    def of_state(cls, state: object) -> Progress:
        """Read a state.

        Raises
        ------
        TypeError
            If it is not a mapping.
        ValueError
            If it is of a newer format, or damaged.
        """
        if not isinstance(state, Mapping):
            msg = f"A state must be a dict that state_dict has returned, got {shown(state)}."
            raise TypeError(msg)
        version = _integer(state.get("version"))
        if version is not None and version > VERSION:
            msg = (
                f"The state has format {shown(version)}, and this version of annbatch-distributed reads formats up to "
                f"{VERSION}. Load it with the version that saved it, or a newer one."
            )
            raise ValueError(msg)
        if version != VERSION:
            raise _damaged("version", f"must be {VERSION}", state.get("version"))
        position = Position(
            epoch=_counted("epoch", state.get("epoch")),
            passes=_counted("pass", state.get("pass")),
            segments=_segments(state.get("segments")),
            share=_share(state.get("worker")),
        )
        return cls(position, _identity(state.get("identity")))

    def differences(self, identity: Identity) -> list[str]:
        """Return what differs from the identity of a sampler, each as a text."""
        own = {name: brief(value) for name, value in identity.items()}
        found = []
        for name in own.keys() | self.identity.keys():
            saved, here = brief(self.identity.get(name)), own.get(name)
            unknown = name in _NEED_NOT_KNOW and None in (saved, here)
            if saved != here and not unknown:
                found.append(f"{name} is {saved!r} in the state and {here!r} here")
        return sorted(found)


def brief[Value: int | str | None](value: Value) -> Value | str:
    """Return a value of an identity, cut to a bounded length."""
    if not isinstance(value, str) or len(value) <= _LONGEST:
        return value
    digest = blake2b(value.encode(), digest_size=16).hexdigest()
    return f"{value[: _LONGEST - 40]}... {digest}"


def shown(value: object) -> str:
    """Return what a value looks like, in a few words however large or nested it is."""
    return _SHORT.repr(value)


class _Short(Repr):
    """What values look like, in short."""

    def __init__(self) -> None:
        super().__init__(maxlevel=3, maxdict=6, maxlist=6, maxstring=80, maxother=80)

    def repr_int(self, value: int, level: int) -> str:
        """An integer of thousands of digits has no text in Python."""
        del level
        return repr(value) if abs(value) < 2**128 else f"an integer of {value.bit_length()} bits"


_SHORT = _Short()


def _segments(value: object) -> tuple[Segment, ...]:
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MOST_SEGMENTS:
        raise _damaged("segments", _SEGMENTS, value)
    return tuple(map(_segment, value))


_SEGMENTS = (
    f"must be a list of 1 to {MOST_SEGMENTS} [world size, number of workers, batches done], with world sizes and "
    f"numbers of workers from 1 to {MOST_RANKS}, and batches that count from 0 and are below 2**63"
)


def _segment(value: object) -> Segment:
    numbers = _integers(value, 3)
    if numbers is None:
        raise _damaged("segments", _SEGMENTS, value)
    world_size, n_workers, done = numbers
    if not (1 <= world_size <= MOST_RANKS and 1 <= n_workers <= MOST_RANKS and 0 <= done < BOUND):
        raise _damaged("segments", _SEGMENTS, value)
    return Segment(world_size, n_workers, done)


def _share(value: object) -> Share | None:
    if value is None:
        return None
    numbers = _integers(value, 2)
    if numbers is None or not 0 <= numbers[0] < numbers[1] <= MOST_RANKS:
        expected = f"must be [worker, number of workers], with a worker from 0 below a number of at most {MOST_RANKS}"
        raise _damaged("worker", expected, value)
    return Share(*numbers)


def _identity(value: object) -> Identity:
    if not isinstance(value, Mapping) or len(value) > _MOST_NAMES:
        raise _damaged("identity", f"must be a dict of at most {_MOST_NAMES} names", value)
    identity: Identity = {}
    for name, held in value.items():
        if not isinstance(name, str) or len(name) > _LONGEST:
            raise _damaged("identity", f"must have names of at most {_LONGEST} characters", name)
        if held is None or (isinstance(held, str) and len(held) <= _LONGEST):
            identity[name] = held
            continue
        number = _integer(held)
        if number is None or not 0 <= number < BOUND:
            expected = (
                f"must hold texts of at most {_LONGEST} characters, integers from 0 and below 2**63, or None, and not "
                f"as {shown(name)}"
            )
            raise _damaged("identity", expected, held)
        identity[name] = number
    return identity


def _integers(value: object, length: int) -> list[int] | None:
    """So many integers; None if it is something else."""
    if not isinstance(value, list | tuple) or len(value) != length:
        return None
    numbers = [number for number in map(_integer, value) if number is not None]
    return numbers if len(numbers) == length else None


def _integer(value: object) -> int | None:
    """An integer of any library, numpy's and torch's too; None if it is something else."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return int(index(value))
    except TypeError:  # arrays have the method, whatever they hold
        return None


def _counted(name: str, value: object) -> int:
    number = _integer(value)
    if number is None or not 0 <= number < BOUND:
        raise _damaged(name, "must count from 0 and be below 2**63", value)
    return number


def _damaged(name: str, expected: str, value: object) -> ValueError:
    return ValueError(f"The state is damaged: its {name!r} {expected}, got {shown(value)}. Load another checkpoint.")
