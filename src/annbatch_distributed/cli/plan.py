"""The command ``plan``: which rank reads which rows, as text, as JSON and as a picture."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from annbatch_distributed.cli import CommandError
from annbatch_distributed.cli.cells import Cells, plans_of, settings_of

if TYPE_CHECKING:
    from argparse import Namespace

    import pandas as pd

    from annbatch_distributed import EpochPlan
    from annbatch_distributed.rows import Rows

__all__ = ["run"]

#: A column of more values is one of measurements, or names each cell.
_MOST_LABELS = 1000
#: Of rows in more stretches, JSON has the first ones.
_STRETCHES = 1000


def run(options: Namespace) -> int:
    """Print the plan of each epoch."""
    if (options.path is None) == (options.n_obs is None):
        raise CommandError("plan takes the PATH of a collection, or --n-obs, the number of its rows: one of them")
    labels, n_obs, mask = None, options.n_obs, options.mask
    if options.path is not None:
        cells = Cells(options.path)
        n_obs, mask = cells.n_obs, cells.mask(options.mask, options.where)
        labels = None if options.by is None else cells.labels(options.by)
    elif options.where or options.by:
        raise CommandError("--where and --by need the PATH of a collection, whose obs has the column")
    if labels is not None and len(labels.categories) > _MOST_LABELS:
        raise CommandError(f"--by {options.by}: {len(labels.categories)} values are too many to count each rank's")
    plans = plans_of(options, mask, n_obs)
    mixes = [None if labels is None else plan.composition(labels) for plan in plans]
    if options.plot is not None:
        try:
            plans[0].plot(*plans[1:]).savefig(options.plot)
        except (ImportError, OSError, ValueError) as error:
            raise CommandError(f"--plot {options.plot}: {error}") from error
    if options.json:
        epochs = [_plan_of(plan) | _composition_of(mix) for plan, mix in zip(plans, mixes, strict=True)]
        print(json.dumps(settings_of(options, n_obs) | {"epochs": epochs}))
        return 0
    texts = []
    for plan, mix in zip(plans, mixes, strict=True):
        texts.append(str(plan))
        if mix is not None:
            texts.append(f"rows of each {options.by}, and how far their mix is from that of all selected rows, 0 to 1")
            texts[-1] += "\n" + mix.astype(object).T.to_string(float_format="{:.3f}".format)
    print("\n\n".join(texts))
    return 0


def _plan_of(plan: EpochPlan) -> dict[str, Any]:
    """Return what JSON has of a plan; ranks are virtual ones, if there are such."""
    shards = [plan.shard(rank) for rank in range(plan.world_size)]
    return {
        "epoch": plan.epoch,
        "selected": len(plan.window),
        "lost": {"rows": plan.n_lost} | _stretches(plan.lost),
        "repeated": plan.n_repeated,
        "rows_in_memory": plan.rows_in_memory,
        "shards": [
            {"rank": rank, "batches": plan.n_batches(rank), "rows": len(shard), "repeated": len(shard) - shard.n_own}
            | _stretches(shard.rows)
            for rank, shard in enumerate(shards)
        ],
    }


def _stretches(rows: Rows) -> dict[str, Any]:
    """Return the first stretches of consecutive rows, half-open, in the order of the rank, and whether they are all."""
    bounds = np.column_stack([rows.starts[:_STRETCHES], rows.stops[:_STRETCHES]])
    return {"stretches": bounds.tolist(), "all_stretches": len(rows.starts) <= _STRETCHES}


def _composition_of(mix: pd.DataFrame | None) -> dict[str, Any]:
    """Return what JSON has of a composition; a cell without a value has the label null."""
    if mix is None:
        return {}
    labels = [None if name != name else str(name) for name in mix["rows"].columns]  # noqa: PLR0124 NaN alone is not itself
    rows, distance = mix["rows"].to_numpy().tolist(), mix["distance"].to_numpy().reshape(-1).tolist()
    return {"composition": {"labels": labels, "rows": rows, "distance": distance}}
