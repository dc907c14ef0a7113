"""The mixture: lengths, positions and cells of its epochs, as functions of a place.

The order of sources gives the number of batches of each source between two steps, and the epochs of a source lead from
one position to another. So the batch of any step is known, without a walk through the steps before.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import pandas as pd

from annbatch_distributed.core.epochs import StepSelection, step_numbers
from annbatch_distributed.core.state import Identity, Position, check_identity, damaged, differences
from annbatch_distributed.core.values import few
from annbatch_distributed.mixtures.order import SourceOrder, StoppingStrategy
from annbatch_distributed.mixtures.place import Place, Start, from_state, to_state
from annbatch_distributed.mixtures.source import Source

_NOTE = (
    "load_state_dict(state, strict=False) resumes the sources that are in both mixtures, with the settings of this one."
)


class Mixture:
    """Every epoch of a mixture, as functions of a place."""

    def __init__(
        self,
        sources: dict[str, Source],
        order: SourceOrder,
        n_steps: int | None,
        stopping_strategy: StoppingStrategy | None,
    ) -> None:
        #: Sources by name.
        self.sources = sources
        #: Order of the sources.
        self.order = order
        self._n_steps, self._stopping_strategy = n_steps, stopping_strategy

    @property
    def identity(self) -> Identity:
        """Settings that determine the batches of a step, as JSON."""
        return self.order.identity | {"n_steps": self._n_steps, "stopping_strategy": self._stopping_strategy}

    @property
    def first_place(self) -> Place:
        """Beginning of the first epoch."""
        return Place.beginning(dict.fromkeys(self.sources, Position()))

    def positions(self, place: Place, step: int | None = None) -> dict[str, Position]:
        """Return the position of each source at a step of the order; by default, after the done steps of a place."""
        start, stop = place.first + place.start, place.step if step is None else step
        return {
            name: source.after(source.here(place.positions[name]), self.order.count(name, start, stop))
            for name, source in self.sources.items()
        }

    def resolved(self, place: Place | Start) -> Place:
        """Return a place with the positions of the sources, of a start too."""
        if isinstance(place, Place):
            return place
        origin = self.resolved(place.origin)
        if place.before is not None:
            return replace(self.following(place.before), origin=origin)
        start = self.start_of(place.epoch, origin)
        # the sources begin within their epochs, and whether the batches before were read is unknown
        positions = {
            name: replace(position, unverified=position.done > 0) for name, position in start.positions.items()
        }
        return replace(start, positions=positions, origin=None if place.epoch <= origin.epoch else origin)

    def length(self, place: Place) -> int:
        """Return the number of steps of the whole epoch of a place."""
        if place.finished:
            return place.done
        if self._n_steps is not None:
            return max(self._n_steps, place.done)
        assert self._stopping_strategy is not None
        positions = self.positions(place)
        # no batches are left if the source has ended its epoch since the mixture's epoch began
        n_left = {
            name: self.sources[name].n_left(positions[name]) if positions[name].epoch == place.began[name] else 0
            for name in self.order.lasting
        }
        return self.order.end(place.step, n_left, self._stopping_strategy) - place.first

    def following(self, place: Place) -> Place:
        """Return the beginning of the epoch after a place."""
        stop = place.first + self.length(place)
        positions = self.positions(place, stop)
        if self._stopping_strategy is not None:  # with new epochs of the sources
            positions = {
                name: Position(position.epoch + 1) if position.done else position
                for name, position in positions.items()
            }
        return Place.beginning(positions, place.epoch + 1, stop)

    def start_of(self, epoch: int, anchor: Place) -> Place:
        """Return the beginning of an epoch; of a loaded one, the first step that this job can run again.

        Epochs from the epoch of ``anchor`` on follow from it, and earlier ones from the first place.
        """
        place = anchor if epoch >= anchor.epoch else self.first_place
        if epoch == place.epoch:
            return replace(place, done=place.start, finished=False)
        if self._n_steps is None:
            while place.epoch < epoch:
                place = self.following(place)
            return place
        first = place.first + self.length(place) + (epoch - place.epoch - 1) * self._n_steps
        return Place.beginning(self.positions(place, first), epoch, first)

    # States

    def to_state(self, place: Place) -> dict[str, Any]:
        """Return a place as a state."""
        states = {name: source.to_state(place.positions[name]) for name, source in self.sources.items()}
        since = {name: self.order.count(name, place.first + place.start, place.step) for name in self.sources}
        return to_state(place, self.identity, states, since)

    def from_state(self, state: Mapping[str, Any], *, strict: bool) -> tuple[Place, list[str]]:
        """Return the place in a state, and differences of the settings, which raise if ``strict``."""
        place, since, saved, states = from_state(state)
        if strict:
            check_identity(saved, self.identity, whose="a mixture", note=_NOTE)
            if states.keys() != self.sources.keys():
                names = few([*states], 5) or "none"
                problem = f"it must have the sources {', '.join(self.sources)}, got {names}"
                raise damaged(state, ValueError(problem))
        starts, here, notes = dict[str, Position](), dict[str, Position](), list[str]()
        has_other_order = bool(differences(saved, saved | self.order.identity))
        is_continued = not has_other_order
        for name, source in self.sources.items():
            if name not in states:
                starts[name] = here[name] = Position()
                continue
            try:
                starts[name], here[name], problems = source.from_state(states[name], since[name], strict=strict)
            except (TypeError, ValueError) as error:
                error.add_note(
                    f"This is the state of the source {name!r}. To skip the rest of epoch {place.epoch}, call "
                    f"set_epoch({place.epoch + 1}) of the mixture instead."
                )
                raise
            is_continued &= source.is_here(starts[name]) and not problems
            notes += [f"The state of {name} {problem}." for problem in problems]
        changed = differences(saved, self.identity)
        if changed:
            notes.append(
                f"The state is of a different mixture: {'; '.join(changed)}. Sources of the state resume; other "
                "sources begin their first epoch."
            )
        began = {name: place.began.get(name, position.epoch) for name, position in here.items()}
        if has_other_order:
            began = {name: position.epoch for name, position in here.items()}
        if changed and place.finished:  # sources resume, even if each epoch of this mixture begins new epochs of them
            return Place.beginning(here, place.epoch + 1, place.step), notes
        if is_continued:
            return replace(place, positions=starts, began=began), notes
        # the steps before are of other ranks, of other settings or of a different order
        return replace(place, positions=here, began=began, start=place.done), notes

    # Cells

    def cells(
        self,
        place: Place,
        steps: StepSelection,
        columns: str | Sequence[str] | None,
        ranks: int | Sequence[int] | None,
    ) -> pd.DataFrame:
        """Return the cells of each rank in some steps of the epoch of a place: see :meth:`.MixedLoader.cells_of`."""
        wanted = step_numbers(steps, self.length(place))
        if len(wanted) and wanted[0] < place.start:
            raise ValueError(
                f"The steps up to {place.start - 1} of epoch {place.epoch} were done by a different number of ranks or "
                "workers, or with different settings or versions, so their cells are unknown here. Ask for steps from "
                f"{place.start} on."
            )
        parts = []
        # (sources, steps): the number of batches of each source before each wanted step, and in it
        n_before = self.order.counts(place.first + wanted)
        n_here = self.order.counts(place.first + wanted + 1) - n_before
        n_at_start = self.order.counts(np.array([place.first + place.start]))[:, 0]
        for number, (name, source) in enumerate(self.sources.items()):
            start = source.here(place.positions[name])
            # for each epoch of the source: the position of its first wanted batch, and the step of each wanted batch
            epochs: dict[int, tuple[Position, dict[int, int]]] = {}
            for which in np.flatnonzero(n_here[number]).tolist():
                position = source.next_batch(source.after(start, int(n_before[number, which] - n_at_start[number])))
                _, step_of = epochs.setdefault(position.epoch, (position, {}))
                step_of[position.done] = int(wanted[which])
            for position, step_of in epochs.values():
                try:
                    cells = source.loader._cells_at(position, list(step_of), columns, ranks)
                except KeyError as error:
                    raise KeyError(f"The source {name}: {error.args[0]}") from error
                cells["step"] = cells["step"].map(step_of)
                cells.insert(1, "source", name)
                parts.append(cells)
        if not parts:
            return pd.DataFrame(columns=["step", "source", "rank", "row", "dataset", "cell"])
        table = pd.concat(parts, ignore_index=True)
        if "set" in table:  # sources without sets have missing values there
            table = table.astype({"set": "Int64", "is_control": "boolean"})
        # stable, so that rows of a batch keep their order
        return table.sort_values(["step", "source", "rank"], kind="stable", ignore_index=True)

    def plan(self, place: Place, n_steps: int) -> pd.DataFrame:
        """Return how often each source is read in the first steps of an epoch: see :meth:`.MixedLoader.plan`."""
        lines = []
        for name, source in self.sources.items():
            first = source.here(Position(place.positions[name].epoch))
            plan = source.epochs.plan(source.loader.n_obs, first)
            n_taken = self.order.count(name, place.first, place.first + n_steps)
            lines.append(
                {
                    "source": name,
                    "share": n_taken / n_steps,
                    "steps": n_taken,
                    "batches": plan.most_batches,
                    "epochs": n_taken / plan.most_batches,
                    "rows": sum(plan.sizes),
                }
            )
        return pd.DataFrame(lines).set_index("source")

    def __copy__(self) -> Self:
        duplicate = object.__new__(type(self))
        vars(duplicate).update(vars(self), sources={name: copy.copy(source) for name, source in self.sources.items()})
        return duplicate
