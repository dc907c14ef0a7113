"""Progress: how far an epoch is, as a state that can be saved and loaded.

A state is a dict of a few integers and strings that JSON can hold, the same on every rank and small however large the
collection is:

``version``
    The format of the state.
``epoch``, ``pass``
    Which epoch, and which of the passes that were begun since the epoch was set.
``segments``
    The stretches of the epoch that were run so far: world size, and batches that every rank has done.
``identity``
    What the rows and their order follow from. A state fits a sampler of the same identity only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

#: The format of states; a state of a newer one can't be read.
VERSION = 1

#: Texts of an identity that are longer are cut, and told apart by a digest.
_LONGEST = 160

type Identity = dict[str, int | str | None]


@dataclass(frozen=True)
class Position:
    """Where a pass begins."""

    epoch: int
    """Which epoch it belongs to."""
    passes: int = 0
    """How many passes were begun before it, since the epoch was set."""
    segments: tuple[tuple[int, int], ...] = ()
    """World size and batches done, for each stretch of the epoch that was run with another world size."""
    done: int = 0
    """How many batches were done by ranks of this world size."""

    @property
    def resumes(self) -> bool:
        """Whether it is the rest of an epoch."""
        return bool(self.segments or self.done)

    def after(self) -> Position:
        """Return where the next pass begins, once this one has come to its end."""
        return Position(self.epoch, self.passes + 1)


@dataclass(frozen=True, eq=False)
class Begun:
    """A pass that was begun; two of them are never equal, whatever they hold."""

    position: Position
    """Where it began."""
    n_obs: int
    """Rows of the collection."""
    n_batches: int
    """How many batches it has on the rank that has the most, those that were done before included."""


@dataclass(frozen=True)
class Progress:
    """How far an epoch is.

    Examples
    --------
    >>> progress = Progress(epoch=3, passes=0, segments=((8, 120),), identity={"n_obs": 10_000})
    >>> Progress.of_state(progress.to_state()) == progress
    True
    """

    epoch: int
    """Which epoch."""
    passes: int
    """How many passes were begun before this one, since the epoch was set."""
    segments: tuple[tuple[int, int], ...]
    """World size and batches done on every rank, for each stretch of the epoch that was run with one world size."""
    identity: Identity
    """What the rows and their order follow from, by name."""

    def to_state(self) -> dict[str, Any]:
        """Return it as a state."""
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "pass": self.passes,
            "segments": [list(segment) for segment in self.segments],
            "identity": {name: _brief(value) for name, value in self.identity.items()},
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
            raise _damaged("segments", "must be a list of [world size, batches done]", segments)
        for segment in segments:
            if not (isinstance(segment, list | tuple) and len(segment) == 2 and _counts(segment[0], 1)):
                raise _damaged("segments", "must be a list of [world size, batches done]", segments)
            _counted("segments", segment[1])
        if not isinstance(identity, Mapping):
            raise _damaged("identity", "must be a dict", identity)
        return cls(
            epoch=_counted("epoch", state.get("epoch")),
            passes=_counted("pass", state.get("pass")),
            segments=tuple((int(world_size), int(done)) for world_size, done in segments),
            identity=dict(identity),
        )

    @property
    def segments_run(self) -> tuple[tuple[int, int], ...]:
        """The segments in which something was done, or the last one."""
        return tuple(segment for segment in self.segments if segment[1]) or self.segments[-1:]

    def differences(self, identity: Identity) -> list[str]:
        """Return what differs from the identity of a sampler, each as a text; None in either stands for unknown."""
        own = {name: _brief(value) for name, value in identity.items()}
        found = []
        for name in own.keys() | self.identity.keys():
            saved, here = _brief(self.identity.get(name)), own.get(name)
            unknown = name == "n_obs" and None in (saved, here)
            if saved != here and not unknown:
                found.append(f"{name} is {saved!r} in the state and {here!r} here")
        return sorted(found)


def _brief(value: int | str | None) -> int | str | None:
    """A value of an identity, cut to a bounded length."""
    if not isinstance(value, str) or len(value) <= _LONGEST:
        return value
    digest = blake2b(value.encode(), digest_size=16).hexdigest()
    return f"{value[: _LONGEST - 40]}... {digest}"


def _counts(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _counted(name: str, value: Any) -> int:  # noqa: ANN401 whatever is in a damaged state
    if not _counts(value):
        raise _damaged(name, "must count from 0", value)
    return int(value)


def _damaged(name: str, expected: str, value: object) -> ValueError:
    return ValueError(f"The state is damaged: its {name!r} {expected}, got {value!r}. Load another checkpoint.")
