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
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from numbers import Integral
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
    version, worker = state.get("version"), state.get("worker")
    if isinstance(version, Integral) and int(version) > VERSION:
        raise ValueError(
            f"The state has format {version}, and this version of annbatch-distributed reads formats up to {VERSION}. "
            "Load it with the version that saved it, or a newer one."
        )
    try:
        _integer("version", version, least=VERSION, most=VERSION)
        segments = tuple(
            Segment(
                _integer("world size", world_size, least=1, most=MOST_RANKS),
                _integer("number of workers", n_workers, least=1, most=MOST_RANKS),
                _integer("batches done", done),
            )
            for world_size, n_workers, done in state["segments"]
        )
        _integer("number of segments", len(segments), least=1, most=MOST_SEGMENTS)
        if worker is not None:
            number, n_workers = worker
            n_workers = _integer("number of workers", n_workers, least=1, most=MOST_RANKS)
            worker = Worker(_integer("worker", number, most=n_workers - 1), n_workers)
        position = Position(_integer("epoch", state["epoch"]), _integer("pass", state["pass"]), segments, worker)
        identity: Identity = {
            name: held if held is None or isinstance(held, str) else _integer(name, held)
            for name, held in dict(state["identity"]).items()
        }
    except (KeyError, TypeError, ValueError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"The state is damaged: {what}, in {shown(state)}. Load another checkpoint.") from error
    return position, identity


def _integer(name: str, value: object, *, least: int = 0, most: int = BOUND - 1) -> int:
    """Return an integer of any library, numpy's and torch's too, as Python's."""
    try:
        number = int(index(value))  # type: ignore[arg-type]  # a TypeError says so
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= most:
        raise ValueError(f"{name} must be an integer from {least} to {most}, got {shown(value)}")
    return number


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


#: What a value looks like, in a few words however large or nested it is.
shown = Repr(maxlevel=3, maxdict=6, maxstring=80, maxother=80).repr
