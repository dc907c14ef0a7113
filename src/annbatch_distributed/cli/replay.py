"""The command ``replay``: which cells were in some steps of an epoch, from a state, as a table or counted by label."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from annbatch_distributed.cli import CommandError
from annbatch_distributed.cli.cells import Cells
from annbatch_distributed.cli.past import loader_of

if TYPE_CHECKING:
    from argparse import Namespace

    from annbatch_distributed import StatefulLoader

__all__ = ["cells_of", "run"]


def run(options: Namespace) -> int:
    """Print the cells of some steps, or how many of each label there are in each."""
    cells = Cells(options.path)
    loader = loader_of(options, cells)
    epoch = loader.sampler.epoch if options.epoch is None else options.epoch
    columns = [*dict.fromkeys([*(options.obs or ()), *([options.by] if options.by else ())])]
    frame = cells_of(loader, options, columns)
    if options.by is None:
        if options.json:
            print(json.dumps({"epoch": epoch, "cells": json.loads(frame.to_json(orient="records"))}))
        else:
            print(frame.to_string(index=False))
        return 0
    counts = _counted(frame, options.by, cells.labels(options.by), loader)
    if options.json:
        labels = [None if pd.isna(label) else str(label) for label in counts.index]
        said = {"labels": labels, "share": counts["epoch"].tolist(), "distance": _distances(counts).tolist()}
        said |= {"steps": counts.columns[:-1].tolist(), "counts": counts.iloc[:, :-1].T.to_numpy().tolist()}
        print(json.dumps({"epoch": epoch, **said}))
        return 0
    print(f"cells of each {options.by} in steps of epoch {epoch}, its share of the epoch, and how far their mixes are")
    shown = counts.astype(object)
    shown["epoch"] = [f"{100 * share:.1f} %" for share in counts["epoch"]]
    shown.loc["distance"] = [*(f"{distance:.3f}" for distance in _distances(counts)), ""]
    text = shown.rename_axis(columns="step", index=None).to_string()
    print("\n".join(map(str.rstrip, text.splitlines())))
    return 0


def cells_of(loader: StatefulLoader, options: Namespace, columns: list[str]) -> pd.DataFrame:
    """Return the cells of the steps that the options name, with columns of ``obs``."""
    try:
        cells = loader.cells_of(options.steps, columns, epoch=options.epoch)
    except (IndexError, KeyError, ValueError) as error:
        raise CommandError(str(error.args[0])) from error
    if cells.empty:
        raise CommandError("--steps: the epoch has none of these steps")
    return cells


def _counted(frame: pd.DataFrame, column: str, labels: pd.Categorical, loader: StatefulLoader) -> pd.DataFrame:
    """Return how many cells of each label are in each step, and the share of the epoch's rows that have it."""
    n_labels = len(labels.categories)
    codes = pd.Categorical(frame[column], categories=labels.categories).codes
    counts = pd.crosstab(codes, frame["step"].to_numpy()).reindex([*range(n_labels), -1], fill_value=0)
    counts.index = pd.Index([*labels.categories, np.nan], dtype=object)
    of_epoch = np.bincount(
        loader.plan().window.take(labels.codes).astype(np.int64) % (n_labels + 1), minlength=n_labels + 1
    )
    counts["epoch"] = of_epoch / of_epoch.sum()
    return counts if of_epoch[-1] else counts.iloc[:-1]


def _distances(counts: pd.DataFrame) -> Any:  # noqa: ANN401 an array
    """Return the total variation distance of each step's mix of labels to that of the epoch."""
    steps = counts.drop(columns="epoch")
    return ((steps / steps.sum()).sub(counts["epoch"], axis="index").abs().sum() / 2).to_numpy()
