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
    True if batches that are done may be others than those of this plan: a state was loaded with ``strict=False``, or
    saved by other versions.
``identity``
    The settings that the rows and their order follow from, as JSON: ``sampler``, ``sharding``, ``remainder``, ``seed``,
    ``root`` (seed of all randomness), ``align``, ``n_obs``, ``rows`` (of the mask), ``versions`` of what draws rows;
    and from a loader ``datasets`` (their shapes) and ``cells`` (a digest of some of their names). A state fits samplers
    of the same identity only.
"""

from __future__ import annotations

import copy
import json
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

#: Longest string that is compared as it is; a longer one is cut, and ends in a digest.
_LONGEST = 240

#: Lists of at most this length are in an identity as they are, longer ones as a digest.
_LISTED = 16

#: Names that a state or a sampler may lack; they are compared if both have them.
_OPTIONAL = "n_obs", "datasets", "cells"

#: What the rows and their order follow from, as JSON.
type Identity = dict[str, Any]


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
        """Return the position after ``done`` of the ``n_batches`` batches that each lane has in this epoch.

        It may be in an earlier segment.

        >>> position = Position(segments=(Segment(4, 1, 6), Segment(3, 1, 2)))
        >>> position.at(9, 20).segments
        (Segment(n_lanes=4, n_workers=1, done=6), Segment(n_lanes=3, n_workers=1, done=3))
        >>> position.at(5, 20).segments
        (Segment(n_lanes=4, n_workers=1, done=5),)
        """
        *segments, last = self.segments
        while segments and done < sum(segment.done for segment in segments):
            last = segments.pop()
        last = last._replace(done=done - sum(segment.done for segment in segments))
        return replace(self, segments=(*segments, last), finished=done == n_batches)

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
        "identity": copy.deepcopy(identity),  # a sampler keeps its own
    }


def from_state(state: Mapping[str, Any]) -> tuple[Position, Identity]:
    """Return the position and the identity of a state.

    A TypeError if it is no mapping; a ValueError if it is of a newer format, or damaged.
    """
    check_format(state)
    try:
        as_integer("version", state.get("version"), least=VERSION, most=VERSION)
        position = Position(
            as_integer("epoch", state["epoch"]),
            as_integer("pass", state["pass"]),
            as_segments(state["segments"]),
            *(bool(as_integer(name, state.get(name, 0), most=1)) for name in ("finished", "unverified")),
        )
        identity = as_json("identity", dict(state["identity"]))
    except (KeyError, TypeError, ValueError) as error:
        problem = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"The state is damaged: {problem}, in {shortened(state)}. Load another checkpoint.") from error
    return position, identity


def check_format(state: object) -> None:
    """Raise a TypeError if a state is no mapping, or a ValueError if it is of a newer format."""
    if not isinstance(state, Mapping):
        raise TypeError(f"A state must be a dict that state_dict has returned, got {shortened(state)}.")
    version = state.get("version")
    if isinstance(version, Integral) and int(version) > VERSION:
        raise ValueError(
            f"The state has format {version}, and this version of annbatch-distributed reads formats up to {VERSION}. "
            "Load it with the version that saved it, or a newer one."
        )


def as_segments(parts: Any) -> tuple[Segment, ...]:  # noqa: ANN401 a state may have anything
    """Return the segments of a state: 1 to ``MOST_SEGMENTS``."""
    segments = tuple(
        Segment(
            as_integer("number of lanes", n_lanes, least=1, most=MOST_RANKS),
            as_integer("number of workers", n_workers, least=1, most=MOST_RANKS),
            as_integer("batches done", done),
        )
        for n_lanes, n_workers, done in parts
    )
    as_integer("number of segments", len(segments), least=1, most=MOST_SEGMENTS)
    return segments


def as_integer(name: str, value: object, *, least: int = 0, most: int = BOUND - 1) -> int:
    """Return an integer of any library, numpy's and torch's too, as Python's."""
    try:
        number = int(index(value))  # type: ignore[arg-type]  # a TypeError says so
    except TypeError:
        number = least - 1
    if not least <= number <= most or (isinstance(value, bool) and most > 1):
        raise ValueError(f"{name} must be an integer from {least} to {most}, got {shortened(value)}")
    return number


def as_json(name: str, value: Any) -> Any:  # noqa: ANN401 a state may have anything
    """Return JSON with Python's own types, whatever library has loaded it; a ValueError if it is none."""
    if isinstance(value, Mapping):
        return {str(key): as_json(f"{name}.{key}", part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(name, part) for part in value]
    if value is None or isinstance(value, bool | float):
        return value
    return str(value) if isinstance(value, str) else as_integer(name, value, least=-BOUND)


def listed(parts: list[Any]) -> list[Any] | dict[str, Any]:
    """Return a list as it is if it is short, or else its length and a digest.

    >>> listed([[0, 100]])
    [[0, 100]]
    >>> listed([[100, 2]] * 17)
    {'length': 17, 'digest': 'a9c414d5bd0f4c5b31026fa57433225d'}
    """
    return parts if len(parts) <= _LISTED else {"length": len(parts), "digest": digest_of(json.dumps(parts))}


def digest_of(text: str) -> str:
    """Return a digest of a string, which tells it from others."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def flat(identity: Identity, path: str = "") -> dict[str, Any]:
    """Return the values of an identity by their paths, lists as strings.

    >>> flat({"seed": 0, "sampler": {"chunk_size": 64}, "rows": {"ranges": [[0, 9]]}})
    {'seed': 0, 'sampler.chunk_size': 64, 'rows.ranges': '[[0, 9]]'}
    """
    values: dict[str, Any] = {}
    for name, value in identity.items():
        if isinstance(value, dict):
            values |= flat(value, f"{path}{name}.")
        else:
            values[f"{path}{name}"] = bounded(json.dumps(value) if isinstance(value, list) else value)
    return values


def differences(saved: Identity, here: Identity) -> list[str]:
    """Return the differences between the identities of a state and of a sampler, each with its path and values."""
    unknown = [name for name in _OPTIONAL if None in (saved.get(name), here.get(name))]
    # what either side lacks, where it may, is left out of both
    theirs, ours = (flat({name: part for name, part in one.items() if name not in unknown}) for one in (saved, here))
    return [
        f"{path} is {theirs.get(path)!r} in the state and {ours.get(path)!r} here"
        for path in sorted(theirs.keys() | ours.keys())
        if theirs.get(path) != ours.get(path)
    ]


#: Explanations of a difference whose value says little, by its path.
_HINTS = {
    "root": "The root is the seed, or drawn by the wrapped sampler's generator: pass a seed.",
    "cells": "The names of the cells differ: datasets in another order, or another collection of the same cells.",
}


#: What to do if the settings were changed on purpose.
_NOTE = "load_state_dict(state, strict=False) resumes all the same, and may read rows twice or never."


def check_identity(saved: Identity, here: Identity, *, whose: str = "a sampler", note: str = _NOTE) -> None:
    """Raise a ValueError that names each difference between the identities of a state and of a sampler."""
    if differing := differences(saved, here):
        hints = [
            hint
            for path, hint in _HINTS.items()
            if any(text.startswith((f"{path} ", f"{path}.")) for text in differing)
        ]
        advice = (
            f"The state is of {whose} with other settings: {'; '.join(differing)}. Use the settings and datasets of "
            "then, or begin with another checkpoint."
        )
        error = ValueError(" ".join([advice, *hints]))
        # a note, since commands and frameworks have no such option
        error.add_note(note)
        raise error


def bounded[Value](value: Value) -> Value | str:
    """Return a value, or of a long string its beginning and a digest."""
    if not isinstance(value, str) or len(value) <= _LONGEST:
        return value
    return f"{value[: _LONGEST - 40]}... {digest_of(value)}"
