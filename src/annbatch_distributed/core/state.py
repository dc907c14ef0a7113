"""States: the position in an epoch, as an object and as a dict that can be written as JSON.

A state is the same on every rank, and small for collections of any size:

``version``
    Format of the state.
``epoch``
    Number of the epoch.
``segments``
    Parts of the epoch that were run, each with one number of lanes (ranks, or virtual ranks) and of ``DataLoader``
    workers: ``[n_lanes, n_workers, done]``, where ``done`` is the number of batches that every lane has done. The
    number of streams of the epoch is the number of lanes of its first segment.
``finished``
    True if all batches of the epoch are done.
``unverified``
    True if batches that are done may differ from this plan, because a state was loaded with ``strict=False`` or saved
    by different versions.
``identity``
    The settings that determine the rows and their order, as JSON: ``sampler``, ``sharding``, ``remainder``, ``seed``,
    ``root`` (seed of all randomness), ``n_obs``, ``rows`` (of the mask), and ``versions`` of the packages
    that determine the order. A loader adds ``datasets`` (their shapes) and ``cells`` (a digest of some of their names).
    A state fits only samplers with the same identity.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from reprlib import repr as shortened
from typing import Any

from annbatch_distributed.core.lanes import Segment
from annbatch_distributed.core.rank import MOST_RANKS
from annbatch_distributed.core.values import BOUND, MOST_LISTED, digest, few, integer

#: Format of states; a state of a newer format can't be read.
VERSION = 1

#: Largest number of segments, so that a state stays small.
MOST_SEGMENTS = 100

#: Largest length of a string that is compared unchanged; a longer string is cut, and ends in a digest.
_LONGEST = 240

#: Names that a state or a sampler may lack; they are compared if both have them.
_OPTIONAL = "n_obs", "datasets", "cells"

#: Settings that determine the rows and their order, as JSON.
type Identity = dict[str, Any]


@dataclass(frozen=True)
class Position:
    """Position in an epoch where a pass begins."""

    epoch: int = 0
    """Epoch of the pass."""
    segments: tuple[Segment, ...] = ()
    """Parts of the epoch that were run, each with one number of lanes and of workers."""
    finished: bool = False
    """True if all batches of the epoch are done."""
    unverified: bool = False
    """True if batches that are done may differ from this epoch's plan."""

    @property
    def done(self) -> int:
        """Number of batches of the epoch that each lane has done."""
        return sum(segment.done for segment in self.segments)

    @property
    def done_before(self) -> int:
        """Number of batches that each lane has done in the segments before the last one."""
        return self.done - self.segments[-1].done

    def trimmed(self) -> Position:
        """Return this position without segments in which no batch was done."""
        return replace(self, segments=tuple(segment for segment in self.segments if segment.done))

    def with_lanes(self, n_lanes: int, n_workers: int = 1) -> Position:
        """Return this position with a last segment of the given numbers of lanes and workers.

        A ValueError if these numbers have changed too often in the epoch for a state.
        """
        segments = self.trimmed().segments
        if not segments or segments[-1][:2] != (n_lanes, n_workers):
            segments = (*segments, Segment(n_lanes, n_workers, 0))
        if len(segments) > MOST_SEGMENTS:
            raise ValueError(
                f"The number of ranks or workers may change at most {MOST_SEGMENTS - 1} times within an epoch, got "
                f"more changes in epoch {self.epoch}."
            )
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

    def start_of(self, epoch: int) -> Position:
        """Return the start of an epoch."""
        return Position(epoch)

    def after(self) -> Position:
        """Return the start of the next epoch."""
        return Position(self.epoch + 1)


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
        "segments": [list(segment) for segment in position.segments],
        "finished": position.finished,
        **({"unverified": True} if position.unverified else {}),
        "identity": copy.deepcopy(identity),  # the sampler keeps the original
    }


def from_state(state: Mapping[str, Any]) -> tuple[Position, Identity]:
    """Return the position and the identity of a state.

    A TypeError if it isn't a mapping; a ValueError if it is damaged or has a newer format.
    """
    check_format(state)
    if "sources" in state:
        raise ValueError(
            f"The state is of a mixture of {', '.join(map(str, state['sources']))}. Load it with a MixedLoader of "
            "these sources."
        )
    try:
        integer("version", state.get("version"), least=VERSION, below=VERSION + 1)
        position = Position(
            integer("epoch", state["epoch"], least=0, below=BOUND),
            as_segments(state["segments"]),
            *(as_flag(name, state.get(name, False)) for name in ("finished", "unverified")),
        )
        identity = as_json("identity", dict(state["identity"]))
        _check_shape(identity)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(state, error) from error
    return position, identity


def _check_shape(identity: Identity) -> None:
    """Raise unless the parts of an identity that are read, and not only compared, have their form."""
    if (n_obs := identity.get("n_obs")) is not None:
        integer("identity.n_obs", n_obs, least=0, below=BOUND)
    if not isinstance(versions := identity.get("versions", {}), dict):
        raise TypeError(f"identity.versions must be a dict, got {shortened(versions)}")
    rows = identity.get("rows")
    ranges = rows.get("ranges", []) if isinstance(rows, dict) else []
    if not isinstance(ranges, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in ranges):
        raise TypeError(f"identity.rows.ranges must be a list of pairs, got {shortened(ranges)}")


def damaged(state: object, error: Exception) -> ValueError:
    """Return an error about a damaged state, from the error of reading it."""
    problem = f"it has no {error}" if isinstance(error, KeyError) else str(error).removesuffix(".")
    return ValueError(f"The state is damaged: {problem}, in {shortened(state)}. Load another checkpoint.")


def check_format(state: object) -> None:
    """Raise a TypeError if a state isn't a mapping, or a ValueError if it has a newer format."""
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a dict, got {shortened(state)}. Pass the return value of state_dict().")
    if state.keys().isdisjoint({"identity", "segments", "sources"}):
        path = next((path for path, _ in states_in(state)), None)
        here = "the return value of state_dict()" if path is None else f"state{''.join(f'[{key!r}]' for key in path)}"
        raise ValueError(
            f"state must be the state of a loader, got a dict with {few([*map(repr, state)], 5) or 'no keys'}. Pass "
            f"{here}."
        )
    version = state.get("version")
    if isinstance(version, Integral) and int(version) > VERSION:
        raise ValueError(
            f"The format of a state must be at most {VERSION} for this version of annbatch-distributed, got {version}. "
            "Load it with the version that saved it, or a newer one."
        )


def states_in(part: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    """Yield the path and the state of each loader and mixture in a checkpoint of dicts and lists.

    >>> dict(states_in({"epoch": 2, "loaders": [{"identity": {}, "segments": []}]}))
    {('loaders', 0): {'identity': {}, 'segments': []}}
    """
    if isinstance(part, Mapping) and "identity" in part and not part.keys().isdisjoint({"segments", "sources"}):
        yield path, part  # the state of a mixture is one state, although it contains the states of its sources
    elif isinstance(part, Mapping | list | tuple):
        for key, value in part.items() if isinstance(part, Mapping) else enumerate(part):
            yield from states_in(value, (*path, key))


def as_segments(parts: Any) -> tuple[Segment, ...]:  # noqa: ANN401 a state may have anything
    """Return the segments of a state: 1 to ``MOST_SEGMENTS``."""
    segments = tuple(
        Segment(
            integer("number of lanes", n_lanes, least=1, below=MOST_RANKS + 1),
            integer("number of workers", n_workers, least=1, below=MOST_RANKS + 1),
            integer("batches done", done, least=0, below=BOUND),
        )
        for n_lanes, n_workers, done in parts
    )
    integer("number of segments", len(segments), least=1, below=MOST_SEGMENTS + 1)
    return segments


def as_flag(name: str, value: object) -> bool:
    """Return a flag of a state, which some formats write as 0 or 1."""
    return bool(integer(name, int(value) if isinstance(value, bool) else value, least=0, below=2))


def as_json(name: str, value: Any) -> Any:  # noqa: ANN401 a state may have anything
    """Return JSON in Python's own types, whichever library has loaded it; a ValueError if it isn't JSON."""
    if isinstance(value, Mapping):
        return {str(key): as_json(f"{name}.{key}", part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(name, part) for part in value]
    if value is None or isinstance(value, bool | float):
        return value
    return str(value) if isinstance(value, str) else integer(name, value, least=-BOUND, below=BOUND)


def listed(parts: list[Any]) -> list[Any] | dict[str, Any]:
    """Return a short list unchanged, and the length and a digest of a longer list.

    >>> listed([[0, 100]])
    [[0, 100]]
    >>> listed([[100, 2]] * 17)
    {'length': 17, 'digest': 'a9c414d5bd0f4c5b31026fa57433225d'}
    """
    return parts if len(parts) <= MOST_LISTED else {"length": len(parts), "digest": digest(json.dumps(parts))}


def flat(identity: Identity, path: str = "") -> dict[str, Any]:
    """Return the values of an identity by their paths, lists as strings.

    >>> sampler, rows = {"chunk_size": 64}, {"ranges": [[0, 9]]}
    >>> flat({"seed": 0, "sampler": sampler, "rows": rows})
    {'seed': 0, 'sampler.chunk_size': 64, 'rows.ranges': '[[0, 9]]'}
    """
    values: dict[str, Any] = {}
    for name, value in identity.items():
        if isinstance(value, dict):
            values |= flat(value, f"{path}{name}.")
        else:
            values[f"{path}{name}"] = bounded(json.dumps(value) if isinstance(value, list) else value)
    return values


def _as_argument(path: str) -> str:
    """Return the name of the argument that a value of an identity comes from: ``sampler.batch_size`` is batch_size."""
    name = path.replace("rows.ranges", "mask")
    return name if name == "sampler.type" else name.removeprefix("sampler.")


def differences(saved: Identity, here: Identity) -> list[str]:
    """Return the differences between the identities of a state and of a sampler, each with its path and values."""
    unknown = [name for name in _OPTIONAL if None in (saved.get(name), here.get(name))]
    # optional names that one side lacks are ignored on both sides
    theirs = flat({name: part for name, part in saved.items() if name not in unknown})
    ours = flat({name: part for name, part in here.items() if name not in unknown})
    paths = sorted(theirs.keys() | ours.keys())
    differing = [path for path in paths if theirs.get(path) != ours.get(path)]
    # the root follows from the seed, and the other sizes of from_collection from the batch size
    implied = {"root"} if {"seed", "sampler.type"} & {*differing} else set[str]()
    if "sampler.batch_size" in differing:
        implied |= {"sampler.chunk_size", "sampler.preload_nchunks"}
    # masks of many ranges are digests, which nobody can read
    has_digest = "rows.digest" in differing
    texts = [
        f"{_as_argument(path)} is {theirs.get(path)!r} in the state and {ours.get(path)!r} here"
        for path in differing
        if path not in implied and not (has_digest and path.partition(".")[0] == "rows")
    ]
    return [*texts, "the mask selects different rows"] if has_digest else texts


_OF_MEMORY = "from_collection chooses chunk_size and preload_nchunks by memory, batch_size, prefetch, mask and cells."

#: Explanations of differences in values that aren't readable or that nobody passed, by path.
_HINTS = {
    "root": "The root is the seed, or comes from the wrapped sampler's generator: pass seed=... to make it the same.",
    "cells": "The obs_names differ: the datasets have a different order, or belong to a different collection.",
    "chunk_size": _OF_MEMORY,
    "preload_nchunks": _OF_MEMORY,
}


#: Advice for settings that were changed on purpose.
_NOTE = "load_state_dict(state, strict=False) resumes without comparing settings, but may repeat or skip rows."


def check_identity(saved: Identity, here: Identity, *, whose: str = "a sampler", note: str = _NOTE) -> None:
    """Raise a ValueError that names each difference between the identities of a state and of a sampler."""
    if differing := differences(saved, here):
        hints = [
            hint
            for path, hint in _HINTS.items()
            if any(text.startswith((f"{path} ", f"{path}.")) for text in differing)
        ]
        advice = (
            f"The state was saved by {whose} with different settings: {'; '.join(differing)}. Use the same settings "
            "and datasets as when it was saved, or load a different checkpoint."
        )
        error = ValueError(" ".join([advice, *dict.fromkeys(hints)]))
        # as a note, since commands and frameworks don't have this option
        error.add_note(note)
        raise error


def bounded[Value](value: Value) -> Value | str:
    """Return a value; cut a long string, and append a digest."""
    if not isinstance(value, str) or len(value) <= _LONGEST:
        return value
    return f"{value[: _LONGEST - 40]}... {digest(value)}"
