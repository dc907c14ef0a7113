"""Places: the position of a mixture in its epoch, and its state as a dict that can be written as JSON.

A state is the same on every rank:

``version``
    Format of the state.
``epoch``
    Epoch of the mixture.
``step``
    Number of done steps of the order of sources, earlier epochs included.
``done``
    Number of done steps of this epoch. A mixture with a different order has done the first ``before`` of them.
``finished``
    True if all steps of the epoch are done.
``identity``
    Settings that determine the order of sources.
``sources``
    For each source, by name: its state when the epoch of the mixture began, and ``since``, its batches since then as
    ``[n_lanes, n_workers, n_batches]`` for each number of lanes and workers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from reprlib import repr as shortened
from typing import Any

from annbatch_distributed.lanes import Segment
from annbatch_distributed.state import VERSION, Identity, Position, as_integer, as_json, as_segments, check_format


@dataclass(frozen=True)
class Track:
    """Path of a source through an epoch of the mixture."""

    start: Position = field(default_factory=Position)
    """Position of the source at the beginning of the mixture's epoch."""
    since: tuple[Segment, ...] = ()
    """Batches of the source since then, as a segment for each number of lanes and workers."""

    @property
    def n_batches(self) -> int:
        """Number of batches of the source since then."""
        return sum(segment.done for segment in self.since)

    def before(self, n_batches: int) -> Track:
        """Return the track without its last batches."""
        *others, last = self.since or (Segment(1, 1, 0),)
        if n_batches <= last.done:
            since = (*others, last._replace(done=last.done - n_batches))
            return replace(self, since=tuple(part for part in since if part.done))
        return replace(self, since=tuple(others)).before(n_batches - last.done)

    def after(self, segment: Segment) -> Track:
        """Return the track after more batches."""
        *others, last = self.since or (segment._replace(done=0),)
        if last[:2] == segment[:2]:
            segment = segment._replace(done=last.done + segment.done)
        else:
            others.append(last)
        return replace(self, since=tuple(part for part in (*others, segment) if part.done))


@dataclass(frozen=True)
class Place:
    """Position of a mixture in its epoch, with a track for each source."""

    tracks: Mapping[str, Track]
    """Track of each source, by name."""
    epoch: int = 0
    """Epoch of the mixture."""
    first: int = 0
    """Step of the order of sources at which the epoch begins."""
    before: int = 0
    """Number of steps that a mixture with a different order has done; the tracks begin after them."""
    done: int = 0
    """Number of done steps of the epoch."""
    finished: bool = False
    """True if all steps of the epoch are done."""

    @property
    def step(self) -> int:
        """Number of done steps of the order, earlier epochs included."""
        return self.first + self.done

    def beginning(self) -> Place:
        """Return the beginning of the same epoch."""
        tracks = {name: Track(track.start) for name, track in self.tracks.items()}
        return replace(self, tracks=tracks, done=self.before, finished=False)


def to_state(place: Place, identity: Identity, sources: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return a place as a state, with the states of the sources at the beginning of its epoch.

    Examples
    --------
    >>> track = Track().after(Segment(2, 1, 3))
    >>> place = Place({"tahoe": track}, epoch=1, first=60, done=3)
    >>> state = to_state(place, {"seed": 0}, {"tahoe": {"epoch": 5}})
    >>> state["step"], state["done"], state["sources"]
    (63, 3, {'tahoe': {'epoch': 5, 'since': [[2, 1, 3]]}})
    """
    since = {name: [list(segment) for segment in track.since] for name, track in place.tracks.items()}
    return {
        "version": VERSION,
        "epoch": place.epoch,
        "step": place.step,
        "done": place.done,
        "before": place.before,
        "finished": place.finished,
        "identity": copy.deepcopy(identity),  # the mixture keeps the original
        "sources": {name: {**source, "since": since[name]} for name, source in sources.items()},
    }


def from_state(state: Mapping[str, Any]) -> tuple[Place, Identity, dict[str, Mapping[str, Any]]]:
    """Return the place, the identity and the states of the sources in a state.

    The tracks of the place have no start yet. A TypeError if the state is not a mapping; a ValueError if it is of a
    newer format, damaged, or the state of a single loader.
    """
    check_format(state)
    if "sources" not in state:
        raise ValueError(
            "The state must be of a mixture, got one without 'sources'. Load it with the loader that saved it."
        )
    try:
        as_integer("version", state["version"], least=VERSION, most=VERSION)
        epoch, step, done = (as_integer(name, state[name]) for name in ("epoch", "step", "done"))
        before = as_integer("before", state["before"], most=done)
        first = as_integer("the step where the epoch began", step - done)
        sources = dict(state["sources"])
        tracks = {str(name): Track(since=_since(source["since"])) for name, source in sources.items()}
        finished = bool(as_integer("finished", state["finished"], most=1))
        place = Place(tracks, epoch, first, before, done, finished)
        identity = as_json("identity", dict(state["identity"]))
    except (KeyError, TypeError, ValueError) as error:
        problem = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"The state is damaged: {problem}, in {shortened(state)}. Load another checkpoint.") from error
    return place, identity, sources


def _since(parts: Any) -> tuple[Segment, ...]:  # noqa: ANN401 a state may have anything
    return as_segments(parts) if parts else ()
