"""Places: an epoch of a mixture, a step, and a position of each source; and its state, as a dict for JSON.

A state is the same on every rank:

``version``
    Format of the state.
``epoch``
    Epoch of the mixture.
``step``
    Number of done steps of the order of sources, earlier epochs included.
``done``
    Number of done steps of this epoch.
``start``
    Number of steps of this epoch that were done by different ranks or workers, or with different settings.
``finished``
    True if all steps of the epoch are done.
``identity``
    Settings that determine the order of sources.
``sources``
    For each source, by name: its state after ``start`` steps of the epoch; ``since``, its number of batches in the
    steps from there to ``done``; and ``began``, its epoch when the epoch of the mixture began.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from annbatch_distributed.core.state import VERSION, Identity, Position, as_flag, as_json, check_format, damaged
from annbatch_distributed.core.values import BOUND, integer


@dataclass(frozen=True)
class Start:
    """Start of an epoch of a mixture, which the order and the sources lead to from another place."""

    epoch: int
    """Epoch of the mixture."""
    origin: Place | Start
    """Place from which an epoch that is set follows: the place of the loaded state, or the first place."""
    before: Place | None = None
    """End of the epoch before, if that was reached."""
    finished: bool = field(default=False, init=False)
    """False, as this job has done no step of the epoch."""

    @property
    def done(self) -> int:
        """Number of done steps of the epoch: of the epoch of a loaded state, those that different ranks have done."""
        origin = self.origin
        if isinstance(origin, Place) and self.before is None and self.epoch == origin.epoch:
            return origin.start
        return 0

    def start_of(self, epoch: int) -> Start:
        """Return the start of an epoch."""
        # an earlier epoch that was set is the new origin
        return Start(epoch, self if self.epoch <= self.origin.epoch else self.origin)

    def after(self) -> Start:
        """Return the start of the next epoch."""
        return self.start_of(self.epoch + 1)


@dataclass(frozen=True)
class Place:
    """Place of a mixture in its epoch."""

    positions: Mapping[str, Position]
    """Position of each source, by name, after ``start`` steps of the epoch."""
    began: Mapping[str, int]
    """Epoch of each source when the epoch of the mixture began."""
    epoch: int = 0
    """Epoch of the mixture."""
    first: int = 0
    """Step of the order of sources at which the epoch begins."""
    start: int = 0
    """Number of steps of the epoch that were done by different ranks or workers, or with different settings."""
    done: int = 0
    """Number of done steps of the epoch."""
    finished: bool = False
    """True if all steps of the epoch are done."""
    origin: Place | None = field(default=None, repr=False)
    """Place that epochs follow from when they are set; None for this one."""

    @classmethod
    def beginning(cls, positions: Mapping[str, Position], epoch: int = 0, first: int = 0) -> Place:
        """Return the place at which an epoch begins."""
        return cls(positions, {name: position.epoch for name, position in positions.items()}, epoch, first)

    @property
    def step(self) -> int:
        """Number of done steps of the order, earlier epochs included."""
        return self.first + self.done

    def at(self, done: int, n_steps: int) -> Place:
        """Return the place after ``done`` of the ``n_steps`` steps of the epoch."""
        return replace(self, done=done, finished=done == n_steps)

    def start_of(self, epoch: int) -> Start:
        """Return the start of an epoch."""
        return Start(epoch, self.origin or self)

    def after(self) -> Start:
        """Return the start of the next epoch."""
        return Start(self.epoch + 1, self.origin or self, before=self)


def to_state(
    place: Place, identity: Identity, sources: Mapping[str, Mapping[str, Any]], since: Mapping[str, int]
) -> dict[str, Any]:
    """Return a place as a state, with the states of the sources at its start, and their batches since then.

    Examples
    --------
    >>> place = Place.beginning({"tahoe": Position(epoch=5)}, epoch=1, first=60)
    >>> state = to_state(
    ...     place.at(3, 60), {"seed": 0}, {"tahoe": {"epoch": 5}}, {"tahoe": 2}
    ... )
    >>> state["step"], state["done"], state["sources"]
    (63, 3, {'tahoe': {'epoch': 5, 'since': 2, 'began': 5}})
    """
    return {
        "version": VERSION,
        "epoch": place.epoch,
        "step": place.step,
        "done": place.done,
        "start": place.start,
        "finished": place.finished,
        "identity": copy.deepcopy(identity),  # the mixture keeps the original
        "sources": {
            name: {**source, "since": since[name], "began": place.began[name]} for name, source in sources.items()
        },
    }


def from_state(state: Mapping[str, Any]) -> tuple[Place, dict[str, int], Identity, dict[str, Mapping[str, Any]]]:
    """Return the place in a state, the batches of each source since its start, the identity, and the sources' states.

    The place has no positions yet. A TypeError if the state is not a mapping; a ValueError if it is of a newer format,
    damaged, or the state of a single loader.
    """
    check_format(state)
    if "sources" not in state:
        raise ValueError(
            "The state must be of a mixture, got one without 'sources'. Load it with the loader that saved it."
        )
    try:
        integer("version", state["version"], least=VERSION, below=VERSION + 1)
        epoch, step, done = (integer(name, state[name], least=0, below=BOUND) for name in ("epoch", "step", "done"))
        start = integer("start", state["start"], least=0, below=done + 1)
        first = integer("the step where the epoch began", step - done, least=0)
        sources = {str(name): source for name, source in dict(state["sources"]).items()}
        since, began = (
            {name: integer(what, source[what], least=0, below=BOUND) for name, source in sources.items()}
            for what in ("since", "began")
        )
        finished = as_flag("finished", state["finished"])
        identity = as_json("identity", dict(state["identity"]))
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(state, error) from error
    return Place({}, began, epoch, first, start, done, finished), since, identity, sources
