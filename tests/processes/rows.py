"""Logs of `logging_rows`: the rows that each rank of a job read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.samplers import flat

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

BATCH_SIZE = 32  # of the examples


def read_batches(folder: Path, name: str, ranks: int = 2) -> list[list[list[int]]]:
    """Return the rows of each batch of each rank."""
    paths = [folder / f"{name}-rank{rank}.txt" for rank in range(ranks)]
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def read(folder: Path, name: str, ranks: int = 2) -> list[list[int]]:
    """Return the rows that each rank read."""
    return [flat(batches) for batches in read_batches(folder, name, ranks)]


def check_reads_everything(
    folder: Path, *, epochs: int, among: Sequence[int], ranks: int = 2, drops: bool = False
) -> None:
    """Check that each epoch has each row once, the same number of batches per rank, and a new order.

    A job that ``drops`` leaves out the rows that don't fill a step.
    """
    orders = []
    for epoch in range(epochs):
        batches = read_batches(folder, f"train-{epoch}", ranks)
        rows = flat(flat(batches))
        assert len({len(of_rank) for of_rank in batches}) == 1
        assert len({*rows}) == len(rows)
        assert {*rows} <= {*among}
        assert len(rows) == (len(among) // (ranks * BATCH_SIZE) * ranks * BATCH_SIZE if drops else len(among))
        orders.append(batches)
    assert all(order != orders[0] for order in orders[1:])


def check_continues(whole: Path, rest: Path, *, epoch: int, n_batches: int) -> None:
    """Check that a resumed run read the last batches of an epoch, as the first run did."""
    batches = (read_batches(folder, f"train-{epoch}") for folder in (whole, rest))
    for first, second in zip(*batches, strict=True):
        assert second == first[-n_batches:]
        assert len(second) == n_batches
