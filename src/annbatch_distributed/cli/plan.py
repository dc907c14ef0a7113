"""The command ``plan``: the rows of each rank as text, JSON or a picture."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import numpy as np

from annbatch_distributed import EpochPlan
from annbatch_distributed.cli import CommandError
from annbatch_distributed.cli.collection import Cells, choose_sizes, in_options, plans_of, settings_of
from annbatch_distributed.core.rows import Rows

if TYPE_CHECKING:
    import pandas as pd


#: Largest number of labels; a column with more values has measurements, or names of cells.
_MOST_LABELS = 1000
#: Largest number of ranges of a rank's rows in JSON.
_MOST_RANGES_OF_JSON = 1000


def run(options: Namespace) -> int:
    """Print the plan of each epoch."""
    if (options.path is None) == (options.n_obs is None):
        problem = "none" if options.path is None else "both"
        raise CommandError(f"plan needs either the PATH of a collection or --n-obs, got {problem}")
    cells, labels, n_obs, mask = None, None, options.n_obs, options.rows
    if options.path is not None:
        cells = Cells(options)
        n_obs, mask = cells.n_obs, cells.mask(options.rows, options.where)
        if options.by is not None:
            labels = cells.labels(options.by)
            if (n_labels := len(labels.categories)) > _MOST_LABELS:
                raise CommandError(
                    f"--by {options.by}: the column must have at most {_MOST_LABELS} values, got {n_labels}"
                )
    elif options.where or options.by:
        raise CommandError("--where and --by need the PATH of a collection, because they use columns of its obs")
    choose_sizes(options, mask, cells)
    plans = plans_of(options, mask, n_obs)
    if options.plot is not None:
        try:
            plans[0].plot(*plans[1:]).savefig(options.plot)
        except (ImportError, OSError, ValueError) as error:
            raise CommandError(f"--plot {options.plot}: {error}") from error
    # for each plan with --by: a table of shape (ranks, labels)
    mixes = [] if labels is None else [plan.composition(labels) for plan in plans]
    if options.json:
        epochs = [_plan_of(plan) for plan in plans]
        for epoch, mix in zip(epochs, mixes, strict=False):
            epoch["composition"] = _composition_of(mix)
        print(json.dumps(settings_of(options, n_obs) | {"epochs": epochs}))
        return 0
    texts = [in_options(str(plan)) for plan in plans]
    for number, mix in enumerate(mixes):
        title = (
            f"rows of each {options.by}, and the distance of each rank's mix from the mix of all selected rows (0 to 1)"
        )
        texts[number] += f"\n\n{title}\n" + mix.astype(object).T.to_string(float_format="{:.3f}".format)
    print("\n\n".join(texts))
    return 0


def _plan_of(plan: EpochPlan) -> dict[str, Any]:
    """Return a plan for JSON, with a shard for each rank or virtual rank."""
    shards = [plan.shard(rank) for rank in range(plan.n_streams)]
    return {
        "epoch": plan.epoch,
        "selected": len(plan.selected),
        "dropped": {"rows": plan.n_dropped} | _ranges(plan.dropped),
        "repeated": plan.n_repeated,
        "rows_in_memory": plan.rows_in_memory,
        "shards": [
            {"rank": rank, "batches": plan.n_batches(rank), "rows": len(shard), "repeated": len(shard) - shard.n_own}
            | _ranges(shard.rows)
            for rank, shard in enumerate(shards)
        ],
    }


def _ranges(rows: Rows) -> dict[str, Any]:
    # rows 0:5 and 8:9 are [[0, 5], [8, 9]]
    bounds = np.column_stack([rows.starts[:_MOST_RANGES_OF_JSON], rows.stops[:_MOST_RANGES_OF_JSON]])
    return {"ranges": bounds.tolist(), "all_ranges": len(rows.starts) <= _MOST_RANGES_OF_JSON}


def _composition_of(mix: pd.DataFrame) -> dict[str, Any]:
    """Return a composition for JSON; the label of missing values is null."""
    labels = [None if label != label else str(label) for label in mix["rows"].columns]  # noqa: PLR0124 NaN differs from itself
    return {"labels": labels, "rows": mix["rows"].to_numpy().tolist(), "distance": mix["distance"].tolist()}
