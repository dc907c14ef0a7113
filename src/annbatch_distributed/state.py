"""States: how far an epoch is, as a position, and as a dict that JSON can hold.

A state is the same on every rank, and small however large the collection is:

``version``
    Format of the state.
``epoch``, ``pass``
    The epoch, and the number of passes that were begun before this one since the epoch was set.
``segments``
    Parts of the epoch that were run, each by one number of lanes (ranks, or virtual ones) and of ``DataLoader``
    workers: ``[n_lanes, n_workers, done]``, with the number of batches that every lane has done. The epoch has as many
    streams as its first segment has lanes.
``finished``
    True if all batches of the epoch are done.
``unverified``
    True if batches that are done may be others than those of this plan, because a state was loaded without comparing.
``identity``
    The settings that the rows and their order follow from. A state fits samplers of the same identity only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from numbers import Integral
from operator import index
from reprlib import repr as shortened
from typing import Any

from annbatch_distributed.lanes import Segment
from annbatch_distributed.ranks.rank import MOST_RANKS
from annbatch_distributed.rows import BOUND

#: Format of states; a state of a newer one can't be read.
VERSION = 1

#: Largest number of segments, so that a state stays small.
MOST_SEGMENTS = 100

#: Longest string of an identity; a longer one is cut, and ends in a digest.
_LONGEST = 240

#: Names that a state or a sampler may lack; they are compared if both have them.
_OPTIONAL = "n_obs", "data sets", "align"

#: What the rows and their order follow from, by name.
type Identity = dict[str, int | str | None]


@dataclass(frozen=True)
class Position:
    """The place in an epoch where a pass begins."""

    epoch: int = 0
    """Epoch of the pass."""
    passes: int = 0
    """Number of passes begun before this one, since the epoch was set."""
    segments: tuple[Segment, ...] = ()
    """Parts of the epoch that were run, each by one number of lanes and of workers."""
    finished: bool = False
    """True if all batches of the epoch are done."""
    unverified: bool = False
    """True if batches that are done may be others than those of this epoch's plan."""

    @property
    def done(self) -> int:
        """Number of batches of the epoch that each lane has done."""
        return sum(segment.done for segment in self.segments)

    @property
    def done_before(self) -> int:
        """Number of batches that each lane has done in the segments before the last one."""
        return self.done - self.segments[-1].done

    def with_lanes(self, n_lanes: int, n_workers: int = 1) -> Position:
        """Return the same position, with a last segment of this number of lanes and workers."""
        segments = tuple(segment for segment in self.segments if segment.done)
        if not segments or segments[-1][:2] != (n_lanes, n_workers):
            segments = (*segments, Segment(n_lanes, n_workers, 0))
        return replace(self, segments=segments)

    def at(self, done: int, n_batches: int) -> Position:
        """Return the position after ``done`` of the ``n_batches`` batches that each lane has in this epoch."""
        *segments, last = self.segments
        last = last._replace(done=done - self.done_before)
        return replace(self, segments=(*segments, last), finished=0 < done == n_batches)

    def after(self) -> Position:
        """Return the beginning of the pass after this one."""
        return Position(self.epoch, self.passes + 1)


def to_state(position: Position, identity: Identity) -> dict[str, Any]:
    """Return a position and the identity of its sampler as a state.

    Examples
    --------
    >>> state = to_state(
    ...     Position(epoch=3, segments=(Segment(8, 1, 120),)), {"n_obs": 10_000}
    ... )
    >>> state["segments"], state["finished"]
    ([[8, 1, 120]], False)
    >>> from_state(state)[0].segments
    (Segment(n_lanes=8, n_workers=1, done=120),)
    """
    return {
        "version": VERSION,
        "epoch": position.epoch,
        "pass": position.passes,
        "segments": [list(segment) for segment in position.segments],
        "finished": position.finished,
        **({"unverified": True} if position.unverified else {}),
        "identity": {name: bounded(value) for name, value in identity.items()},
    }


def from_state(state: object) -> tuple[Position, Identity]:
    """Return the position and the identity of a state.

    A TypeError if it is no mapping; a ValueError if it is of a newer format, or damaged.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"A state must be a dict that state_dict has returned, got {shortened(state)}.")
    version = state.get("version")
    if isinstance(version, Integral) and int(version) > VERSION:
        raise ValueError(
            f"The state has format {version}, and this version of annbatch-distributed reads formats up to {VERSION}. "
            "Load it with the version that saved it, or a newer one."
        )
    try:
        _integer("version", version, least=VERSION, most=VERSION)
        position = Position(
            _integer("epoch", state["epoch"]),
            _integer("pass", state["pass"]),
            _segments(state["segments"]),
            *(bool(_integer(name, state.get(name, 0), most=1)) for name in ("finished", "unverified")),
        )
        identity: Identity = {
            name: value if value is None or isinstance(value, str) else _integer(name, value)
            for name, value in dict(state["identity"]).items()
        }
    except (KeyError, TypeError, ValueError) as error:
        problem = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"The state is damaged: {problem}, in {shortened(state)}. Load another checkpoint.") from error
    return position, identity


def _segments(parts: Any) -> tuple[Segment, ...]:  # noqa: ANN401 a state may have anything
    """Return the segments of a state: 1 to ``MOST_SEGMENTS``."""
    segments = tuple(
        Segment(
            _integer("number of lanes", n_lanes, least=1, most=MOST_RANKS),
            _integer("number of workers", n_workers, least=1, most=MOST_RANKS),
            _integer("batches done", done),
        )
        for n_lanes, n_workers, done in parts
    )
    _integer("number of segments", len(segments), least=1, most=MOST_SEGMENTS)
    return segments


def _integer(name: str, value: object, *, least: int = 0, most: int = BOUND - 1) -> int:
    """Return an integer of any library, numpy's and torch's too, as Python's."""
    try:
        number = int(index(value))  # type: ignore[arg-type]  # a TypeError says so
    except TypeError:
        number = least - 1
    if not least <= number <= most or (isinstance(value, bool) and most > 1):
        raise ValueError(f"{name} must be an integer from {least} to {most}, got {shortened(value)}")
    return number


def differences(saved: Identity, here: Identity) -> list[str]:
    """Return the differences between the identities of a state and of a sampler, each as a string."""
    differing = []
    for name in sorted(here.keys() | saved.keys()):
        theirs, ours = bounded(saved.get(name)), bounded(here.get(name))
        is_unknown = name in _OPTIONAL and None in (theirs, ours)
        if theirs != ours and not is_unknown:
            differing.append(f"{name} is {theirs!r} in the state and {ours!r} here")
    return differing


def check_identity(saved: Identity, here: Identity) -> None:
    """Raise a ValueError that names each difference between the identities of a state and of a sampler."""
    if differing := differences(saved, here):
        root = " The root is the seed, or drawn by the wrapped sampler's generator: pass a seed."
        raise ValueError(
            f"The state is of a sampler with other settings: {'; '.join(differing)}. Use those that it had then, with "
            "data sets in the same order, or begin with another checkpoint. strict=False resumes all the same, and may "
            f"read rows twice or never.{root if any(text.startswith('root ') for text in differing) else ''}"
        )


def bounded[Value: int | str | None](value: Value) -> Value | str:
    """Return a value of an identity, cut to a bounded length."""
    if not isinstance(value, str) or len(value) <= _LONGEST:
        return value
    digest = blake2b(value.encode(), digest_size=16).hexdigest()
    return f"{value[: _LONGEST - 40]}... {digest}"
