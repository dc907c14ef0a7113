"""What the scripts wrote down: which rows each of two ranks trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.processes.configurations import N_OBS

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

BATCH_SIZE = 32  # of the examples


def read(folder: Path, name: str, ranks: int = 2) -> list[list[int]]:
    """The rows that each rank wrote down."""
    return [np.load(folder / f"{name}-rank{rank}.npy").tolist() for rank in range(ranks)]


def check_reads_everything(
    folder: Path, *, epochs: int, n_rows: int = N_OBS, among: Collection[int] | None = None, ranks: int = 2
) -> None:
    """Check that every epoch has each row once, but for those that fill no step, and an order of its own.

    The rows are the first ``n_rows``, or those that they are ``among``.
    """
    among = range(n_rows) if among is None else among
    orders = []
    for epoch in range(epochs):
        trained_on = read(folder, f"train-{epoch}", ranks)
        together = [row for rows in trained_on for row in rows]
        assert set(together) <= set(among)
        assert len(set(together)) == len(together)
        assert len(together) == len(among) // (ranks * BATCH_SIZE) * ranks * BATCH_SIZE
        orders.append(trained_on)
    assert all(order != orders[0] for order in orders[1:])


def check_goes_on(whole: Path, rest: Path, *, epoch: int, n_batches: int) -> None:
    """Check that a second run read the last batches of an epoch, as the first one did."""
    for first, second in zip(read(whole, f"train-{epoch}"), read(rest, f"train-{epoch}"), strict=True):
        assert len(second) == n_batches * BATCH_SIZE
        assert second == first[-len(second) :]
