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
    What the rows and their order follow from. A state fits a sampler of the same identity only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

#: The format of states; a state of a newer one can't be read.
VERSION = 1

#: Texts of an identity that are longer are cut, and told apart by a digest.
_LONGEST = 160

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
            msg = f"A state must be a dict that state_dict has returned, got {state!r}."
            raise TypeError(msg)
        version = state.get("version")
        if isinstance(version, int) and version > VERSION:
            msg = (
                f"The state has format {version}, and this version of annbatch-distributed reads formats up to "
                f"{VERSION}. Load it with the version that saved it, or a newer one."
            )
            raise ValueError(msg)
        if not version == VERSION:
            raise _damaged("version", f"must be {VERSION}", version)
        segments, identity = state.get("segments"), state.get("identity")
        if not isinstance(segments, list | tuple) or not segments:
            raise _damaged("segments", _SEGMENTS, segments)
        for segment in segments:
            if not (_is_row(segment, 3) and _counts(segment[0], 1) and _counts(segment[1], 1)):
                raise _damaged("segments", _SEGMENTS, segments)
            _counted("segments", segment[2])
        share = state.get("worker")
        if share is not None and not (_is_row(share, 2) and _counts(share[0]) and _counts(share[1], share[0] + 1)):
            raise _damaged("worker", "must be [worker, number of workers]", share)
        if not isinstance(identity, Mapping):
            raise _damaged("identity", "must be a dict", identity)
        position = Position(
            epoch=_counted("epoch", state.get("epoch")),
            passes=_counted("pass", state.get("pass")),
            segments=tuple(Segment(*segment) for segment in segments),
            share=None if share is None else Share(*share),
        )
        return cls(position, dict(identity))

    def differences(self, identity: Identity) -> list[str]:
        """Return what differs from the identity of a sampler, each as a text; None in either stands for unknown."""
        own = {name: brief(value) for name, value in identity.items()}
        found = []
        for name in own.keys() | self.identity.keys():
            saved, here = brief(self.identity.get(name)), own.get(name)
            unknown = name == "n_obs" and None in (saved, here)
            if saved != here and not unknown:
                found.append(f"{name} is {saved!r} in the state and {here!r} here")
        return sorted(found)


def brief(value: int | str | None) -> int | str | None:
    """Return a value of an identity, cut to a bounded length."""
    if not isinstance(value, str) or len(value) <= _LONGEST:
        return value
    digest = blake2b(value.encode(), digest_size=16).hexdigest()
    return f"{value[: _LONGEST - 40]}... {digest}"


_SEGMENTS = "must be a list of [world size, number of workers, batches done]"


def _is_row(value: object, length: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == length


def _counts(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _counted(name: str, value: Any) -> int:  # noqa: ANN401 whatever is in a damaged state
    if not _counts(value):
        raise _damaged(name, "must count from 0", value)
    return int(value)


def _damaged(name: str, expected: str, value: object) -> ValueError:
    return ValueError(f"The state is damaged: its {name!r} {expected}, got {value!r}. Load another checkpoint.")
