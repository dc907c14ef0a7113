"""Output: plans, and what was read by them, as tables, lines and what JSON can hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from annbatch_distributed import EpochPlan
    from annbatch_distributed.cli.job import Read
    from annbatch_distributed.cli.settings import Settings
    from annbatch_distributed.sharding import Rows

__all__ = ["composition_of", "composition_table", "plan_of", "problems_of", "read_of", "read_table", "settings_of"]

#: Of rows in more stretches, JSON has the first ones.
_STRETCHES = 1000


def settings_of(settings: Settings, n_obs: int) -> dict[str, Any]:
    """Return what all epochs have in common."""
    return {
        "n_obs": n_obs,
        "ranks": settings.world_size,
        "virtual_ranks": settings.virtual_ranks,
        "chunk_size": settings.chunk_size,
        "preload_nchunks": settings.n_chunks,
        "batch_size": settings.batch_size,
        "sampler": "random" if settings.is_random else "sequential",
        "remainder": settings.remainder,
        "sharding": settings.sharding,
        "seed": settings.seed,
    }


def plan_of(plan: EpochPlan) -> dict[str, Any]:
    """Return what a plan says."""
    shards = [(rank, plan.shard(rank)) for rank in range(plan.world_size)]
    return {
        "epoch": plan.epoch,
        "selected": len(plan.window),
        "lost": {"rows": plan.n_lost, **_stretches(plan.lost)},
        "repeated": plan.n_repeated,
        "rows_in_memory": plan.rows_in_memory,
        # of virtual ranks, if there are such
        "shards": [
            {
                "rank": rank,
                "batches": plan.n_batches(rank),
                "rows": len(shard),
                "repeated": len(shard) - shard.n_own,
                **_stretches(shard.rows),
            }
            for rank, shard in shards
        ],
    }


def _stretches(rows: Rows) -> dict[str, Any]:
    """Return the first stretches of consecutive rows, half-open, in the order of the rank, and whether they are all."""
    found: list[list[int]] = []
    step = 1 << 20
    for start in range(0, len(rows), step):
        starts, stops, _ = rows.slices_to_global(np.array([start]), np.array([min(start + step, len(rows))]))
        for first, last in zip(starts.tolist(), stops.tolist(), strict=True):
            if found and found[-1][1] == first:
                found[-1][1] = last
            else:
                found.append([first, last])
        if len(found) > _STRETCHES:
            break
    return {"stretches": found[:_STRETCHES], "all_stretches": len(found) <= _STRETCHES}


def composition_of(mix: pd.DataFrame) -> dict[str, Any]:
    """Return a composition; a cell without a value has the label null."""
    return {
        "labels": [_label(name) for name in mix["rows"].columns],
        "rows": mix["rows"].to_numpy().tolist(),
        "distance": mix["distance"].to_numpy().reshape(-1).tolist(),
    }


def _label(name: object) -> str | None:
    return None if name is None or name != name else str(name)  # noqa: PLR0124 NaN alone is not itself


def composition_table(mix: pd.DataFrame) -> Table:
    """Return a composition with a line for each rank; or for each label, if there are more of these."""
    found, ranks = composition_of(mix), [f"{mix.index.name} {rank}" for rank in mix.index]
    names = ["none" if name is None else name for name in found["labels"]]
    lines = [
        ["", *names, "distance"],
        *(
            [rank, *map(str, counts), f"{distance:.3f}"]
            for rank, counts, distance in zip(ranks, found["rows"], found["distance"], strict=True)
        ),
    ]
    if len(names) > len(ranks):
        lines = [list(column) for column in zip(*lines, strict=True)]
    return _table(lines)


def _table(lines: list[list[str]]) -> Table:
    """Return a table whose first line has the names of the columns; numbers are on the right."""
    table = Table(box=SIMPLE, show_edge=False, pad_edge=False)
    for number, name in enumerate(lines[0]):
        table.add_column(name, justify="right" if number or lines[1][0].isdigit() else "left")
    for line in lines[1:]:
        table.add_row(*line)
    return table


def read_table(read: Sequence[Read]) -> Table:
    """Return what ranks have read in an epoch, with a line for each."""
    names = ["rank", "rows", "batches", "rows/s", "longest wait"]
    return _table(
        [
            names,
            *(
                [
                    str(its.rank),
                    str(its.n_rows),
                    str(its.n_batches),
                    f"{its.rows_per_second:.0f}",
                    f"{its.longest_wait:.3f} s",
                ]
                for its in read
            ),
        ]
    )


def problems_of(read: Sequence[Read]) -> list[str]:
    """Return what is otherwise than planned in an epoch."""
    wrong = [] if read[0].is_planned else read[0].verdict.splitlines()
    return wrong + [problem for its in read for problem in its.problems]


def read_of(read: Sequence[Read]) -> dict[str, Any]:
    """Return what ranks have read in an epoch, as what JSON can hold."""
    problems = problems_of(read)
    return {
        "epoch": read[0].epoch,
        "ok": not problems,
        "problems": problems,
        "ranks": [
            {
                "rank": its.rank,
                "rows": its.n_rows,
                "batches": its.n_batches,
                "rows_per_second": round(its.rows_per_second, 1),
                "longest_wait": round(its.longest_wait, 6),
                "cells_compared": its.n_compared,
                "other_cells": its.other_cells,
            }
            for its in read
        ],
    }
