"""States: how far an epoch is, as a position, and as a dict that can be saved and loaded.

A state is a dict of a few integers and strings that JSON can hold, the same on every rank and small however large the
collection is:

``version``
    The format of the state.
``epoch``, ``pass``
    Which epoch, and which of the passes that were begun since the epoch was set.
``segments``
    The parts of the epoch that were run so far: number of lanes (ranks, or virtual ones), number of ``DataLoader``
    workers where it makes a difference, and batches that every lane has done. The epoch has as many streams as its
    first segment has lanes.
``ended``
    The segments of the pass before, in a state that was saved when that had come to its end: nothing is left of the
    epoch for who sets that once more.
``left_out``
    Ranges of rows that are left out of the epoch, each with the step from which on; if there are any.
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
from reprlib import repr as shortened
from typing import Any, NamedTuple

from annbatch_distributed.lanes import Segment, Worker
from annbatch_distributed.ranks.rank import MOST_RANKS
from annbatch_distributed.rows import BOUND

#: The format of states; a state of a newer one can't be read.
VERSION = 1

#: How often an epoch can be resumed with other numbers of ranks or workers, its beginning included.
MOST_SEGMENTS = 100

#: How many ranges of rows can be left out of an epoch.
MOST_LEFT_OUT = 1000

#: Texts of an identity that are longer are cut, and told apart by a digest; those of annbatch's samplers are shorter.
_LONGEST = 240

#: What a state or a sampler need not know, and what is told apart only if both know it.
_NEED_NOT_KNOW = "n_obs", "data sets", "align"

#: What the rows and their order follow from, by name.
type Identity = dict[str, int | str | None]


class LeftOut(NamedTuple):
    """A range of rows that are left out of an epoch."""

    since: int
    """From which step of the epoch on."""
    start: int
    """The first row."""
    stop: int
    """The row after the last one."""


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
    ended: tuple[Segment, ...] = ()
    """What was run in the pass before, if that has just come to its end."""
    left_out: tuple[LeftOut, ...] = ()
    """Which rows are left out, by their first ones; of the pass before, if that has just come to its end."""

    @property
    def resumes(self) -> bool:
        """Whether it is the rest of an epoch."""
        return any(segment.done for segment in self.segments)

    def without_idle_segments(self) -> Position:
        """Return the same position, without segments in which nothing was done."""
        return replace(self, segments=tuple(segment for segment in self.segments if segment.done))

    def n_streams(self, n_lanes: int) -> int:
        """Return how many streams the epoch has that so many lanes resume or begin."""
        return self.segments[0].n_lanes if self.resumes else n_lanes

    @property
    def done(self) -> int:
        """How many batches of the epoch every lane has done, over all segments."""
        return sum(segment.done for segment in self.segments)

    @property
    def leaves_out(self) -> tuple[LeftOut, ...]:
        """Which rows are left out of what is left."""
        return () if self.ended else self.left_out

    @property
    def before_end(self) -> Position:
        """The pass that has just come to its end, or else this one."""
        return replace(self, passes=self.passes - 1, segments=self.ended, ended=()) if self.ended else self

    def run_by(self, n_lanes: int, n_workers: int) -> Position:
        """Return the same position, with a last segment of this number of lanes and workers."""
        if self.segments and self.segments[-1][:2] == (n_lanes, n_workers):
            return self
        segments = self.without_idle_segments().segments
        if not segments or segments[-1][:2] != (n_lanes, n_workers):
            segments = (*segments, Segment(n_lanes, n_workers, 0))
        return replace(self, segments=segments)

    def at(self, done: int) -> Position:
        """Return the same position, with ``done`` batches in the last segment."""
        *others, last = self.segments
        moved = replace(self, segments=(*others, last._replace(done=done)))
        return replace(moved, ended=(), left_out=self.leaves_out) if done else moved

    def after(self) -> Position:
        """Return where the next pass begins, once this one has come to its end."""
        return Position(self.epoch, self.passes + 1)


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
    (Segment(n_lanes=8, n_workers=1, done=120),)
    """
    return {
        "version": VERSION,
        "epoch": position.epoch,
        "pass": position.passes,
        "segments": [list(segment) for segment in position.segments],
        **({"ended": [list(segment) for segment in position.ended]} if position.ended else {}),
        **({"left_out": [list(rows) for rows in position.left_out]} if position.left_out else {}),
        **({} if position.worker is None else {"worker": list(position.worker)}),
        "identity": {name: bounded(value) for name, value in identity.items()},
    }


def from_state(state: object) -> tuple[Position, Identity]:
    """Return the position and the identity of a state.

    What is no mapping is a TypeError; what is of a newer format, or damaged, a ValueError.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"A state must be a dict that state_dict has returned, got {shortened(state)}.")
    version, worker = state.get("version"), state.get("worker")
    if isinstance(version, Integral) and int(version) > VERSION:
        raise ValueError(
            f"The state has format {version}, and this version of annbatch-distributed reads formats up to {VERSION}. "
            "Load it with the version that saved it, or a newer one."
        )
    try:
        _integer("version", version, least=VERSION, most=VERSION)
        segments, ended = _segments(state["segments"], least=1), _segments(state.get("ended", ()), least=0)
        if worker is not None:
            number, n_workers = worker
            n_workers = _integer("number of workers", n_workers, least=1, most=MOST_RANKS)
            worker = Worker(_integer("worker", number, most=n_workers - 1), n_workers)
        epoch, passes = _integer("epoch", state["epoch"]), _integer("pass", state["pass"], least=1 if ended else 0)
        position = Position(epoch, passes, segments, worker, ended, _left_out(state.get("left_out", ())))
        identity: Identity = {
            name: held if held is None or isinstance(held, str) else _integer(name, held)
            for name, held in dict(state["identity"]).items()
        }
    except (KeyError, TypeError, ValueError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"The state is damaged: {what}, in {shortened(state)}. Load another checkpoint.") from error
    return position, identity


def _segments(given: Any, *, least: int) -> tuple[Segment, ...]:  # noqa: ANN401 a state may have anything
    """Return the segments that a state has, a number of them at least, and at most as many as one can have."""
    segments = tuple(
        Segment(
            _integer("number of lanes", n_lanes, least=1, most=MOST_RANKS),
            _integer("number of workers", n_workers, least=1, most=MOST_RANKS),
            _integer("batches done", done),
        )
        for n_lanes, n_workers, done in given
    )
    _integer("number of segments", len(segments), least=least, most=MOST_SEGMENTS)
    return segments


def _left_out(given: Any) -> tuple[LeftOut, ...]:  # noqa: ANN401 a state may have anything
    """Return the rows that a state leaves out."""
    left_out = tuple(LeftOut(*(_integer("left_out", number) for number in rows)) for rows in given)
    _integer("number of ranges that are left out", len(left_out), most=MOST_LEFT_OUT)
    return left_out


def _integer(name: str, value: object, *, least: int = 0, most: int = BOUND - 1) -> int:
    """Return an integer of any library, numpy's and torch's too, as Python's."""
    try:
        number = int(index(value))  # type: ignore[arg-type]  # a TypeError says so
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or not least <= number <= most:
        raise ValueError(f"{name} must be an integer from {least} to {most}, got {shortened(value)}")
    return number


def differences(saved: Identity, own: Identity) -> list[str]:
    """Return what differs between the identity of a state and that of a sampler, each as a text."""
    differing = []
    for name in sorted(own.keys() | saved.keys()):
        theirs, ours = bounded(saved.get(name)), bounded(own.get(name))
        is_unknown = name in _NEED_NOT_KNOW and None in (theirs, ours)
        if theirs != ours and not is_unknown:
            differing.append(f"{name} is {theirs!r} in the state and {ours!r} here")
    return differing


def check_identity(saved: Identity, own: Identity) -> None:
    """Raise if a state is of a sampler with another identity; the message names each difference."""
    if differing := differences(saved, own):
        root = " The root is the seed, or drawn by the wrapped sampler's generator: pass a seed."
        raise ValueError(
            f"The state is of a sampler with other settings: {'; '.join(differing)}. Use those that it had then, with "
            "data sets in the same order, or begin with another checkpoint. strict=False resumes all the same, and may "
            f"read rows twice or never.{root if any(text.startswith('root ') for text in differing) else ''}"
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


def bounded[Value: int | str | None](value: Value) -> Value | str:
    """Return a value of an identity, cut to a bounded length."""
    if not isinstance(value, str) or len(value) <= _LONGEST:
        return value
    digest = blake2b(value.encode(), digest_size=16).hexdigest()
    return f"{value[: _LONGEST - 40]}... {digest}"
