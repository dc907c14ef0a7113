"""Runs of jobs: what happens in each, and the fewest events after which one still fails."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.simulated.jobs import Job, one_of
from tests.simulated.simulation import ALL, Died, Simulation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

#: The name of a method of a Simulation, and its arguments.
type Event = tuple[str, dict[str, Any]]
#: By name: how often an event happens, and how its arguments are drawn.
type Events = dict[str, tuple[int, Callable[[random.Random], dict[str, Any]]]]

#: What ranks do before the loop in which they resume.
_THEN = "", "", "look", "set the epoch", "look and set the epoch", "set an earlier epoch"
#: What happens to all jobs.
_EVENTS: Events = {
    "take": (10, lambda rng: {"n_steps": rng.choice([1, 2, 3, ALL]), "stays_within": rng.random() < 0.4}),
    "save": (3, lambda rng: {"fate": one_of(rng, {"whole": 8, "torn": 1, "lost": 1})}),
    "die": (
        4,
        lambda rng: {
            "which": rng.randrange(3),
            "n_ahead": rng.choice([0, 0, 1, 2]),
            "is_older": rng.random() < 0.2,
            "then": rng.choice(_THEN),
        },
    ),
    "reshard": (
        4,
        lambda rng: {
            "which": rng.randrange(3),
            "first": rng.randrange(4),
            "times": rng.choice([1, 1, 2]),
            "stays_open": rng.random() < 0.6,
            "then": rng.choice(_THEN),
        },
    ),
    "fail": (2, lambda rng: {"rank": rng.randrange(64), "times": one_of(rng, {1: 3, 2: 1, 99: 1})}),
    "set_epoch": (3, lambda rng: {"by": rng.choice([-2, -1, 0, 0, 1, 2]), "drains": rng.random() < 0.5}),
    "leave": (1, lambda _: {}),
    "peek": (2, lambda rng: {"n_ranks": rng.choice([1, ALL]), "times": rng.choice([1, 2])}),
    "ask": (2, lambda rng: {"by": rng.choice([0, 0, -1, 1])}),
    "misuse": (
        1,
        lambda rng: {"how": rng.choice(["seed", "remainder", "sharding", "mask", "epoch"]), "rank": rng.randrange(64)},
    ),
    "refuse": (1, lambda rng: {"how": rng.choice(["job", "collection"])}),
}
#: What happens to files, too.
_DAMAGE: Events = {
    "damage": (
        8,
        lambda rng: {"how": rng.choice(["flipped", "flipped", "shortened", "missing"]), "which": rng.randrange(10**6)},
    ),
}
#: What happens to mixtures, too.
_OF_MIXTURES: Events = {
    "read_again": (4, lambda rng: {"by": rng.choice([-1, 0]), "then": rng.choice([0, 1])}),
}


@dataclass(frozen=True)
class Failure:
    """A job that failed, and the fewest events after which it does."""

    seed: int
    job: str
    events: list[Event]
    error: str

    def __str__(self) -> str:
        events = [f"  {name}({', '.join(f'{key}={value}' for key, value in own.items())})" for name, own in self.events]
        return "\n".join([self.job, "fails after:", *events, self.error, f"python -m tests.simulated {self.seed}"])


def drawn(seed: int) -> tuple[Job, list[Event]]:
    """Draw the job of a seed, and what happens in it."""
    rng = random.Random(seed)
    with warnings.catch_warnings(action="ignore"):
        job = Job.of(rng, seed)
    kind = job.sources[0].disk.kind
    events = _EVENTS | (_DAMAGE if kind == "files" else {}) | (_OF_MIXTURES if job.is_mixture else {})
    n_events = rng.randint(2, 4) if kind == "fast" else rng.randint(2, 9)
    names = [one_of(rng, {name: weight for name, (weight, _) in events.items()}) for _ in range(n_events)]
    return job, [(name, events[name][1](rng)) for name in names]


def run(job: Job, events: Sequence[Event], tell: Callable[[str], object] = lambda _: None) -> str:
    """Run a job to the end of its epoch; return how it ended. An error that is raised breaks a law."""
    simulation = Simulation(job, tell)
    with warnings.catch_warnings(action="ignore"), simulation.faults.installed():
        for name, arguments in [("start", {"which": 0}), *events, ("take", {"n_steps": ALL})]:
            try:
                getattr(simulation, name)(**arguments)
            except Died as death:
                tell(str(death))
                if not simulation.has_read:
                    return "can't run"
                simulation.start(0)
    return "ran"


def failure(seed: int, *, shrinks: bool = True) -> Failure | None:
    """Return how the job of a seed fails; None if it keeps all laws."""
    job, events = drawn(seed)
    error = _error(job, events)
    if error is None:
        return None
    for number in reversed(range(len(events) if shrinks else 0)):  # the last events first
        fewer = [*events[:number], *events[number + 1 :]]
        if (less := _error(drawn(seed)[0], fewer)) is not None:
            events, error = fewer, less
    return Failure(seed, str(job), events, error)


def _error(job: Job, events: Sequence[Event]) -> str | None:
    try:
        run(job, events)
    except Exception as error:  # noqa: BLE001 any error is a failure, and is shown
        return f"{type(error).__name__}: {error}"
    return None


def outcomes(seeds: Iterable[int]) -> Counter[str]:
    """Run the jobs of some seeds; an AssertionError about the first one that fails."""
    counted = Counter[str]()
    for seed in seeds:
        try:
            counted[run(*drawn(seed))] += 1
        except Exception as error:
            raise AssertionError(failure(seed)) from error
    return counted
