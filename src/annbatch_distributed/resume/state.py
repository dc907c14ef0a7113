"""States: how far an epoch is, as a position, and as a dict that can be saved and loaded.

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
from annbatch_distributed.sharding.batches import Collected, Worker
from annbatch_distributed.sharding.integers import BOUND

__all__ = [
    "MOST_SEGMENTS",
    "Identity",
    "Position",
    "Segment",
    "brief",
    "check_identity",
    "check_worker",
    "differences",
    "from_state",
    "shown",
    "to_state",
]

#: The format of states; a state of a newer one can't be read.
VERSION = 1

#: How often an epoch can go on with other numbers of ranks or workers than before, its beginning included.
MOST_SEGMENTS = 100

#: Texts of an identity that are longer are cut, and told apart by a digest.
_LONGEST = 160

#: How many names an identity can have.
_MOST_NAMES = 100

#: What a state or a sampler need not know, and what is told apart only if both know it.
_NEED_NOT_KNOW = "n_obs", "data sets", "align"

#: What the rows and their order follow from, by name.
type Identity = dict[str, int | str | None]


class Segment(NamedTuple):
    """A stretch of an epoch that was run with one world size and one number of workers."""

    world_size: int
    """How many ranks there were."""
    n_workers: int
    """How many ``DataLoader`` workers shared each rank's batches: 1 if there are none, or it doesn't matter."""
    done: int
    """How many batches every rank has done."""


@dataclass(frozen=True)
class Position:
    """Where a pass begins."""

    epoch: int
    """Which epoch it belongs to."""
    passes: int = 0
    """How many passes were begun before it, since the epoch was set."""
    segments: tuple[Segment, ...] = ()
    """What was run of the epoch."""
    worker: Worker | None = None
    """Whose part of the last segment it is, if it isn't the whole rank's."""

    @property
    def resumes(self) -> bool:
        """Whether it is the rest of an epoch."""
        return any(segment.done for segment in self.segments)

    def without_idle_segments(self) -> Position:
        """Return the same position, without segments in which nothing was done."""
        return replace(self, segments=tuple(segment for segment in self.segments if segment.done))

    def before(self, world_size: int) -> tuple[Segment, ...]:
        """Return the segments but for the last ones, as far as they have this world size."""
        n_others = len(self.segments)
        while n_others and self.segments[n_others - 1].world_size == world_size:
            n_others -= 1
        return self.segments[:n_others]

    def collected(self, world_size: int) -> Collected:
        """Return the number of workers and the batches done of each of the last segments with this world size."""
        last = self.segments[len(self.before(world_size)) :]
        return tuple((segment.n_workers, segment.done) for segment in last)

    def done(self, world_size: int) -> int:
        """Return how many batches were done in the last segments with this world size."""
        return sum(done for _, done in self.collected(world_size))

    def going_on(self, world_size: int, n_workers: int) -> Position:
        """Return the same position, with a last segment of this world size and number of workers."""
        if self.segments and self.segments[-1][:2] == (world_size, n_workers):
            return self
        return replace(self, segments=(*self.segments, Segment(world_size, n_workers, 0)))

    def moved_to(self, done: int) -> Position:
        """Return the same position, with ``done`` batches in the last segment."""
        *others, last = self.segments
        return replace(self, segments=(*others, last._replace(done=done)))

    def after(self) -> Position:
        """Return where the next pass begins, once this one has come to its end."""
        return Position(self.epoch, self.passes + 1)

    def to_json(self) -> dict[str, Any]:
        """Return it as a dict that JSON can hold."""
        return {
            "epoch": self.epoch,
            "pass": self.passes,
            "segments": [list(segment) for segment in self.segments],
            **({} if self.worker is None else {"worker": list(self.worker)}),
        }

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Position:
        """Return the position that :meth:`to_json` has written."""
        segments, worker = json["segments"], json.get("worker")
        return cls(
            json["epoch"],
            json["pass"],
            tuple(Segment(*segment) for segment in segments),
            None if worker is None else Worker(*worker),
        )


def to_state(position: Position, identity: Identity) -> dict[str, Any]:
    """Return a position, which has a segment at least, and what its rows and their order follow from, as a state.

    Examples
    --------
    >>> state = to_state(
    ...     Position(epoch=3, segments=(Segment(8, 1, 120),)), {"n_obs": 10_000}
    ... )
    >>> state
    {'version': 1, 'epoch': 3, 'pass': 0, 'segments': [[8, 1, 120]], 'identity': {'n_obs': 10000}}
    >>> from_state(state)[0].segments
    (Segment(world_size=8, n_workers=1, done=120),)
    """
    return {
        "version": VERSION,
        **position.to_json(),
        "identity": {name: brief(value) for name, value in identity.items()},
    }


def from_state(state: object) -> tuple[Position, Identity]:
    """Return the position and the identity of a state.

    What is no mapping is a TypeError; what is of a newer format, or damaged, a ValueError.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"A state must be a dict that state_dict has returned, got {shown(state)}.")
    version = _integer(state.get("version"))
    if version is not None and version > VERSION:
        raise ValueError(
            f"The state has format {shown(version)}, and this version of annbatch-distributed reads formats up to "
            f"{VERSION}. Load it with the version that saved it, or a newer one."
        )
    if version != VERSION:
        raise _damaged("version", f"must be {VERSION}", state.get("version"))
    checks = {"epoch": _checked_count, "pass": _checked_count, "segments": _checked_segments, "worker": _checked_worker}
    position = Position.from_json({name: check(name, state.get(name)) for name, check in checks.items()})
    return position, _checked_identity("identity", state.get("identity"))


def differences(saved: Identity, own: Identity) -> list[str]:
    """Return what differs between the identity of a state and that of a sampler, each as a text."""
    own = {name: brief(value) for name, value in own.items()}
    found = []
    for name in own.keys() | saved.keys():
        values = brief(saved.get(name)), own.get(name)
        unknown = name in _NEED_NOT_KNOW and None in values
        if values[0] != values[1] and not unknown:
            found.append(f"{name} is {values[0]!r} in the state and {values[1]!r} here")
    return sorted(found)


def check_identity(saved: Identity, own: Identity) -> None:
    """Raise if a state is of a sampler with another identity; the message names each difference."""
    if found := differences(saved, own):
        raise ValueError(
            f"The state is of a sampler with other settings: {'; '.join(found)}. Make the sampler as it was "
            "made then, with all data sets added in the same order, or pass strict=False. (The root is what the order "
            "follows from: a seed=..., or else the generator of the wrapped sampler, which must be seeded alike in "
            "every process.)"
        )


def check_worker(position: Position, worker: Worker | None) -> None:
    """Raise if a state is that of one DataLoader worker, and this is none, or one of others."""
    if position.worker is not None and (worker is None or worker.n_workers != position.worker.n_workers):
        number, n_workers = position.worker
        raise ValueError(
            f"The state is that of worker {number} of {n_workers} of a DataLoader. Load the whole state of the "
            "DataLoader into one with as many workers. For another number of workers, save what "
            "state_dict(batches_done=...) of the loader itself returns."
        )


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

_SEGMENTS = (
    f"must be a list of 1 to {MOST_SEGMENTS} [world size, number of workers, batches done], with world sizes and "
    f"numbers of workers from 1 to {MOST_RANKS}, and batches that count from 0 and are below 2**63"
)


def _checked_segments(name: str, value: object) -> list[list[int]]:
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MOST_SEGMENTS:
        raise _damaged(name, _SEGMENTS, value)
    segments = []
    for segment in value:
        world_size, n_workers, done = numbers = _integers(segment, 3) or [0, 0, 0]
        if not (1 <= world_size <= MOST_RANKS and 1 <= n_workers <= MOST_RANKS and 0 <= done < BOUND):
            raise _damaged(name, _SEGMENTS, segment)
        segments.append(numbers)
    return segments


def _checked_worker(name: str, value: object) -> list[int] | None:
    if value is None:
        return None
    numbers = _integers(value, 2)
    if numbers is None or not 0 <= numbers[0] < numbers[1] <= MOST_RANKS:
        expected = f"must be [worker, number of workers], with a worker from 0 below a number of at most {MOST_RANKS}"
        raise _damaged(name, expected, value)
    return numbers


def _checked_identity(name: str, value: object) -> Identity:
    if not isinstance(value, Mapping) or len(value) > _MOST_NAMES:
        raise _damaged(name, f"must be a dict of at most {_MOST_NAMES} names", value)
    identity: Identity = {}
    for key, held in value.items():
        if not isinstance(key, str) or len(key) > _LONGEST:
            raise _damaged(name, f"must have names of at most {_LONGEST} characters", key)
        if held is None or (isinstance(held, str) and len(held) <= _LONGEST):
            identity[key] = held
            continue
        number = _integer(held)
        if number is None or not 0 <= number < BOUND:
            expected = (
                f"must hold texts of at most {_LONGEST} characters, integers from 0 and below 2**63, or None, and not "
                f"as {shown(key)}"
            )
            raise _damaged(name, expected, held)
        identity[key] = number
    return identity


def _checked_count(name: str, value: object) -> int:
    number = _integer(value)
    if number is None or not 0 <= number < BOUND:
        raise _damaged(name, "must count from 0 and be below 2**63", value)
    return number


def _integers(value: object, length: int) -> list[int] | None:
    """A list of ``length`` integers; None if it is something else."""
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


def _damaged(name: str, expected: str, value: object) -> ValueError:
    return ValueError(f"The state is damaged: its {name!r} {expected}, got {shown(value)}. Load another checkpoint.")
