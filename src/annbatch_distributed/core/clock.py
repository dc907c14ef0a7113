"""The clock of a loader: where its next iteration begins.

There is one rule: **the epoch moves when its last batch has been taken, and by** ``set_epoch``. Nothing else moves it,
so an iteration that stops earlier, because the loop has peeked, left or failed, is begun again at the same place, with
the same batches.

What the calls do, by what has happened to the place last. e is the epoch of the place:

=====================  =================  ==================  =======================  ================
has happened           begin              ``set_epoch(e)``    ``set_epoch(other)``     state
=====================  =================  ==================  =======================  ================
nothing                start of epoch 0   nothing             start of other           the place
loaded within e        the place          nothing             start of other; raises   the place
                                                              if it is earlier
loaded at the end of   start of e + 1     no batch is left    start of other; raises   the place
e                                                             if it is earlier
begun or stopped       the place          nothing             start of other           after the done
                                                                                       batches
ended                  start of e + 1     start of e          start of other           the end of e
=====================  =================  ==================  =======================  ================

Iterations that are open when another epoch is set or a state is loaded continue, but no longer move the clock.
"""

from __future__ import annotations

from typing import Any, Protocol

from annbatch_distributed.core.warning import warn

#: An iteration that begins for this time at the same place is reported.
_MANY = 3


class Place(Protocol):
    """Place in an epoch, from which all others of the job follow."""

    @property
    def epoch(self) -> int:
        """Number of the epoch."""

    @property
    def done(self) -> int:
        """Number of done batches of the epoch."""

    @property
    def finished(self) -> bool:
        """True at the end of the epoch."""

    def start_of(self, epoch: int) -> Any:  # noqa: ANN401 a place of the same clock
        """Return the start of an epoch."""

    def after(self) -> Any:  # noqa: ANN401 a place of the same clock
        """Return the start of the next epoch."""


class Clock[P: Place]:
    """Where the next iteration of a loader begins."""

    def __init__(self, place: P) -> None:
        #: Place at which the next iteration begins; at the end of an epoch, see :attr:`next`.
        self.place = place
        #: Iteration that has begun last; None if an epoch was set or a state was loaded since.
        self.last: Any = None
        # the iteration that a change of ranks has cut, as long as its remaining batches come next
        self._interrupted: Any = None
        # True from loading a state until an iteration begins, or another epoch is set
        self._is_loaded = False
        # True if the loaded place is the end of an epoch that was set again
        self._is_set_again = False
        # number of iterations that have begun at the place
        self._n_begun = 0

    @property
    def next(self) -> P:
        """Place at which the next iteration begins."""
        return self.place.after() if self.place.finished and not self._is_set_again else self.place

    @property
    def next_epoch(self) -> int:
        """Epoch to resume or to begin."""
        return self.place.epoch + self.place.finished

    def go_to(self, place: P, *, is_loaded: bool = False) -> None:
        """Make the next iteration begin at a place."""
        self.place, self.last, self._interrupted = place, None, None
        self._is_loaded, self._is_set_again, self._n_begun = is_loaded, False, 0

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration begin at the start of an epoch, unless the place is in this epoch."""
        here = self.place.epoch
        if self._is_loaded and epoch < here:
            raise ValueError(
                f"set_epoch({epoch}) would discard the loaded state of epoch {here}. Start at loader.next_epoch. (The "
                "loader that Fabric.setup_dataloaders returns counts epochs from 0: iterate over the original loader "
                "instead.)"
            )
        self._n_begun = 0
        # frameworks set the epoch of a state that they have just loaded
        if epoch == here and (self._is_loaded or not self.place.finished):
            self._is_set_again = self.place.finished
            return
        is_next = self.place.finished and epoch == here + 1
        self.go_to(self.place.after() if is_next else self.place.start_of(epoch))

    def begin(self, iteration: object, place: P) -> None:
        """Record that an iteration begins at the next place, which may be known better now."""
        self.place, self.last, self._interrupted = place, iteration, None
        self._is_loaded = self._is_set_again = False
        self._n_begun += 1
        if self._n_begun == _MANY:
            warn(
                f"This is iteration {_MANY} in a row that begins after {place.done} batches of epoch {place.epoch}, "
                "because the iterations before it were left early. It yields the same batches as these. To begin "
                "another epoch, call set_epoch(epoch); to continue where an iteration was left, call "
                "load_state_dict(state_dict())."
            )

    def end(self, iteration: object, place: P) -> None:
        """Record that the last batch of an iteration was taken, which has reached a place."""
        if iteration is self.last:
            self.place, self._n_begun = place, 0

    # Changes of the ranks

    def continue_at(self, place: P) -> None:
        """Make the open iteration continue at a place of other ranks."""
        interrupted = self.last or self._interrupted
        self.go_to(place, is_loaded=True)
        self._interrupted = interrupted

    def was_interrupted(self, iteration: object) -> bool:
        """Return True if the ranks have changed within an iteration, and no other epoch was set since."""
        return iteration is self._interrupted

    def has_rest(self, iteration: object) -> bool:
        """Return True if the ranks have changed within an iteration, and its remaining batches come next."""
        return self.was_interrupted(iteration) and not self.place.finished
