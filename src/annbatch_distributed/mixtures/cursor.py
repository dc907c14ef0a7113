"""The cursor of a mixture: where its next pass begins, and the pass that began last.

It is the only part of a mixture that changes; all that follows from a place is computed by :class:`.Mixture`. A mixture
has one difference from a sampler: its next epoch can follow from the end of the one before. So it also holds

1. ``anchor``, the place that later epochs follow from, and
2. the pass that the open passes of the sources belong to, which may continue after another epoch is set.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, Self

from annbatch_distributed.core.rank import Placement
from annbatch_distributed.mixtures.mixture import Mixture
from annbatch_distributed.mixtures.place import Place


@dataclass(eq=False)
class MixturePass:
    """Pass over a mixture."""

    place: Place
    """Place at its beginning."""
    anchor: Place
    """Place that later epochs follow from."""
    placement: Placement
    """Rank that reads it."""
    n_steps: int
    """Number of steps of the whole epoch."""
    has_ended: bool = False
    """True once its last batch was yielded."""
    is_open: bool = True
    """True while its iterator is in use, its last step included."""


class MixtureCursor:
    """Place of the next pass over a mixture, and the last pass."""

    def __init__(self, mixture: Mixture) -> None:
        #: Every epoch of the mixture, as functions of a place.
        self.mixture = mixture
        #: Last pass; None if no pass has begun since an epoch was set or a state loaded.
        self.last: MixturePass | None = None
        # the place that later epochs follow from
        self._anchor = mixture.first_place
        # a place to resume at, or the number of the epoch to begin
        self._upcoming: Place | int = 0
        # True until the epoch of a loaded state has ended; True once set_epoch was called since
        self._is_loaded = self._is_set = False
        # the pass that reshard() has cut, as long as the rest of it comes next
        self._cut: MixturePass | None = None
        # the pass that the open passes of the sources belong to
        self._running: MixturePass | None = None

    # The next pass

    @property
    def next_epoch(self) -> int:
        """Epoch to resume or to begin."""
        if self.last is not None:
            return self.last.place.epoch + self.last.has_ended
        return self._upcoming if isinstance(self._upcoming, int) else self._upcoming.epoch + self._upcoming.finished

    def next(self) -> Place:
        """Return the place of the next pass."""
        upcoming = self._upcoming
        if isinstance(upcoming, Place):
            # a finished epoch that is set again has no batches left
            if not upcoming.finished or (self._is_loaded and self._is_set):
                return upcoming
            upcoming = upcoming.epoch + 1
        # the sources continue where the epoch before has ended
        ended = [self._anchor] if self._anchor.finished else []
        if self._running is not None and self._running.has_ended and self._running.anchor is self._anchor:
            ended = [self._running.place]
        if ended and ended[0].epoch + 1 == upcoming:
            return self.mixture.following(ended[0])
        start = self.mixture.start_of(upcoming, self._anchor)
        # the sources begin within their epochs, and whether the batches before were read is unknown
        positions = {
            name: replace(position, unverified=position.done > 0) for name, position in start.positions.items()
        }
        return replace(start, positions=positions)

    def of_epoch(self, epoch: int | None) -> Place:
        """Return the place in an epoch; by default, in the epoch that was set, loaded or read last."""
        place = self._upcoming if self.last is None else self.last.place
        if epoch is not None and epoch != getattr(place, "epoch", place):
            # the epoch of a state has steps of earlier numbers of ranks
            place = self._anchor if epoch == self._anchor.epoch else epoch
        return self.mixture.start_of(place, self._anchor) if isinstance(place, int) else place

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass begin an epoch, or resume this epoch if its state was loaded."""
        loaded = self._upcoming if self._is_loaded and isinstance(self._upcoming, Place) else None
        if loaded is not None and self.last is None and epoch < loaded.epoch:
            raise ValueError(
                f"A state of epoch {loaded.epoch} was loaded, and set_epoch({epoch}) would discard it. Start at "
                "loader.next_epoch."
            )
        self._is_set = True
        # frameworks set the epoch of a state that they have just loaded
        if loaded is None or epoch != loaded.epoch:
            if epoch <= self._anchor.epoch:  # begin it again; later epochs then follow from its beginning
                self._anchor = self.mixture.start_of(epoch, self._anchor)
            self._go_to(epoch)

    def load(self, place: Place, *, continues: bool) -> None:
        """Make the next pass resume at a loaded place; the iterator of the last pass begins it if it ``continues``."""
        cut = (self.last or self._cut) if continues else None
        self._anchor, self._is_set = place, False
        self._go_to(place, is_loaded=True)
        self._cut = cut

    def _go_to(self, upcoming: Place | int, *, is_loaded: bool = False) -> None:
        self._upcoming, self._is_loaded, self.last, self._cut = upcoming, is_loaded, None, None

    # The pass

    def begin(self, placement: Placement) -> MixturePass:
        """Begin the next pass."""
        place = self.next()
        new = MixturePass(place, self._anchor, placement, self.mixture.length(place))
        self.last, self._running, self._cut = new, new, None
        # a resumed epoch comes next until it has ended, so that peeking at a batch doesn't lose it
        is_resumed = place.done > (0 if self._is_loaded else place.start)
        self._upcoming, self._is_loaded = (place, self._is_loaded) if is_resumed else (place.epoch + 1, False)
        return new

    def end(self, ended: MixturePass) -> None:
        """Record the end of a pass, unless an epoch was set since."""
        ended.has_ended = True
        if self.last is ended:
            self._upcoming, self._is_loaded = ended.place.epoch + 1, False

    def break_off(self, broken: MixturePass, n_done: int | None) -> None:
        """Record that a pass won't continue; after ``n_done`` of its steps, the next pass begins with the others.

        None if the consumer has left its loop, so that the next pass begins the next epoch.
        """
        self._running = None
        if self.last is broken and n_done is not None:
            self._go_to(self.after(None, n_done), is_loaded=self._is_loaded)

    @property
    def has_ended(self) -> bool:
        """True if the last pass has yielded its last batch."""
        return self.last is not None and self.last.has_ended

    def is_running(self, current: MixturePass) -> bool:
        """Return True if the open passes of the sources belong to a pass."""
        return self._running is current

    def has_cut(self, interrupted: MixturePass) -> bool:
        """Return True if the ranks have changed within a pass, and no other epoch was set since."""
        return self._cut is interrupted

    # States

    def after(self, batches_done: int | None, n_done: int) -> Place:
        """Return the place after ``batches_done`` steps of the epoch; by default, after ``n_done`` of the last pass."""
        if self.last is None and batches_done is None:
            return self._upcoming if isinstance(self._upcoming, Place) else self.next()
        if self.last is None:
            # before a pass begins, batches_done may lie before the resume
            place, has_ended = self.next(), False
            least, n_steps = place.start, self.mixture.length(place)
        else:
            place, has_ended = self.last.place, self.last.has_ended
            least, n_steps = place.done, self.last.n_steps
        if batches_done is None:
            batches_done = place.done + n_done
        if not least <= batches_done <= n_steps:
            raise ValueError(
                f"batches_done must be from {least}, as earlier steps were done before this iteration, by a different "
                f"number of ranks or with different settings, to {n_steps}, the steps of the epoch, got {batches_done}."
            )
        if batches_done == place.done and not has_ended:
            return place
        return place.at(batches_done, n_steps)

    def __copy__(self) -> Self:
        duplicate = object.__new__(type(self))
        vars(duplicate).update(self.__getstate__(), mixture=copy.copy(self.mixture))
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        # a copy has no open passes: its sources begin at the place of its next pass
        last = None if self.last is None else replace(self.last, is_open=False)
        return vars(self) | {"last": last, "_cut": None, "_running": None}
