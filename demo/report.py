"""Report of the demo: the rows that the ranks read, checked against the plan, as tables."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from rich.table import Table

from demo.job import KILLED_ON, RESUMED_ON

if TYPE_CHECKING:
    from rich.console import Console

    from demo.job import Job


@dataclass(frozen=True)
class Read:
    """Rows and batch sizes that the ranks read of one split, by epoch and rank."""

    rows: list[list[np.ndarray]]
    batches: list[list[np.ndarray]]

    @classmethod
    def of(cls, split: str, ranks: list[dict[str, np.ndarray]], epochs: int) -> Self:
        """Return one split of the results of all ranks."""
        return cls(
            rows=[[rank[f"{split} rows {epoch}"] for rank in ranks] for epoch in range(epochs)],
            batches=[[rank[f"{split} batches {epoch}"] for rank in ranks] for epoch in range(epochs)],
        )

    @property
    def disjoint(self) -> bool:
        """True if no row was read twice in an epoch."""
        return all(len(np.unique(rows := np.concatenate(epoch))) == len(rows) for epoch in self.rows)

    @property
    def equal_batches(self) -> bool:
        """True if all ranks had the same number of batches."""
        return all(len({len(sizes) for sizes in epoch}) == 1 for epoch in self.batches)

    def covers(self, rows: range) -> bool:
        """Return True if exactly these rows were read in each epoch, each row once."""
        return all(np.array_equal(np.sort(np.concatenate(epoch)), rows) for epoch in self.rows)


def report(job: Job, n_ranks: int, console: Console) -> bool:
    """Show the results of the ranks, and check them.

    Parameters
    ----------
    job
        Job that was run.
    n_ranks
        Number of ranks.
    console
        Console to print to.

    Returns
    -------
    bool
        True if every check holds.
    """
    results = Path(job.results)
    ranks = [dict(np.load(results / f"rank{rank}.npz")) for rank in range(n_ranks)]
    history = json.loads((results / "history.json").read_text())
    training = Read.of("training", ranks, job.epochs)
    validation = Read.of("validation", ranks, job.epochs)

    console.print(_shares(training, validation))
    console.print(_accuracy(history))
    if job.virtual_ranks is not None:
        console.print(_losses(history))
    trained = np.unique(np.concatenate([rows for epoch in training.rows for rows in epoch]))
    left_out = job.n_train % ((job.virtual_ranks or n_ranks) * job.batch_size)
    checks = {
        "no row was read by two ranks": training.disjoint and validation.disjoint,
        "every rank had the same number of batches": training.equal_batches and validation.equal_batches,
        "no held-out row was trained on": bool(trained[0] >= 0 and trained[-1] < job.n_train),
        f"{left_out} rows were dropped in each epoch": all(
            sum(map(len, epoch)) == job.n_train - left_out for epoch in training.rows
        ),
        f"each of the {job.n_validation:,} held-out cells was counted once": validation.covers(
            range(job.n_train, job.n_obs)
        )
        and all(epoch["counted"] == job.n_validation for epoch in history),
    }
    for check, holds in checks.items():
        console.print("[green]✓[/]" if holds else "[red]✗[/]", check)
    console.print(f"  {len(trained):,} of {job.n_train:,} training rows were read in {job.epochs} epochs")
    speed = sum(sum(map(len, epoch)) for epoch in training.rows) / sum(epoch["seconds"] for epoch in history)
    console.print(f"  {speed:,.0f} cells/s in training, over all ranks")
    return all(checks.values())


def report_resume(job: Job, console: Console) -> bool:
    """Show the steps before and after a kill, and return True if each row was read once."""
    resumed = _steps(job, RESUMED_ON)
    first = min(resumed)
    # steps after the last checkpoint were run again
    killed = {step: rows for step, rows in _steps(job, KILLED_ON).items() if step < first}
    rows = np.concatenate([*killed.values(), *resumed.values()])
    console.print(f"  steps 0 to {first - 1} on {KILLED_ON} ranks, {first} to {max(resumed)} on {RESUMED_ON} ranks")
    holds = np.array_equal(np.sort(rows), np.arange(job.n_train))
    check = f"each of the {job.n_train:,} training cells of that epoch was read once"
    console.print("[green]✓[/]" if holds else "[red]✗[/]", check)
    return holds


def _steps(job: Job, n_ranks: int) -> dict[int, np.ndarray]:
    """Return the rows of all ranks in each step."""
    rows: dict[int, list[int]] = {}
    for rank in range(n_ranks):
        for line in (Path(job.results) / f"{n_ranks}ranks-{rank}.jsonl").read_text().splitlines():
            step = json.loads(line)
            rows.setdefault(step["step"], []).extend(step["rows"])
    return {step: np.array(own) for step, own in rows.items()}


def _shares(training: Read, validation: Read) -> Table:
    table = Table(title="What each rank read in an epoch", title_justify="left")
    for column in ("rank", "training rows", "batches", "validation rows", "batches"):
        table.add_column(column, justify="right")
    for rank, rows in enumerate(training.rows[0]):
        table.add_row(
            str(rank),
            f"{len(rows):,}",
            f"{len(training.batches[0][rank]):,}",
            f"{len(validation.rows[0][rank]):,}",
            f"{len(validation.batches[0][rank]):,}",
        )
    return table


def _losses(history: list[dict[str, Any]]) -> Table:
    table = Table(title="Training loss of the first steps", title_justify="left")
    for column in ("step", *(f"epoch {number}" for number in range(len(history)))):
        table.add_column(column, justify="right")
    for step, losses in enumerate(islice(zip(*(epoch["losses"] for epoch in history), strict=True), 20)):
        table.add_row(str(step), *(f"{loss:.4f}" for loss in losses))
    return table


def _accuracy(history: list[dict[str, Any]]) -> Table:
    table = Table(title="Validation", title_justify="left")
    for column in ("epoch", "held-out cells", "accuracy"):
        table.add_column(column, justify="right")
    for number, epoch in enumerate(history):
        table.add_row(str(number), f"{epoch['counted']:,}", f"{epoch['right'] / epoch['counted']:.1%}")
    return table
