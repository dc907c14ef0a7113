"""The command ``replay``: which cells were in some steps of an epoch, from a state, as a table or counted by label.

The job of the state is made again from what the state holds.
"""

from __future__ import annotations

import inspect
import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from annbatch.samplers import RandomSampler, SequentialSampler

from annbatch_distributed import DistributedSampler, Rank, Shuffled, StatefulLoader
from annbatch_distributed.cli import CommandError
from annbatch_distributed.cli.cells import Cells
from annbatch_distributed.sharding import Contiguous, Independent
from annbatch_distributed.state import Identity, Position, from_state

_SAMPLERS = {"random": RandomSampler, "sequential": SequentialSampler}
_SHARDINGS = {"contiguous": Contiguous, "shuffled": Shuffled}
#: Classes that a state can name, by the names that it has for them.
_CLASSES: dict[str, Any] = {f"annbatch.samplers.{kind.__name__}": kind for kind in _SAMPLERS.values()}
_CLASSES |= {"Contiguous": Contiguous, "Independent": Independent, "Shuffled": Shuffled}


def loader_of(options: Namespace, cells: Cells) -> StatefulLoader:
    """Return the loader of rank 0 of the job that a state is of, with that state; options must not contradict it."""
    try:
        state = _state(Path(options.state))
        position, identity = from_state(state)
        sampler = _sampler(options, cells, position, identity)
        loader = StatefulLoader(batch_sampler=sampler, return_index=True, preload_to_gpu=False)
        loader.use_collection(cells.collection)
        # the root is a seed here, whatever it was drawn from
        loader.load_state_dict({**state, "identity": identity | {"seed": _seed(options, identity)}})
    except (OSError, TypeError, ValueError) as error:
        raise CommandError(f"--state {options.state}: {error}") from error
    except (AttributeError, KeyError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CommandError(f"--state {options.state}: the state is damaged ({what}); take another one") from error
    return loader


def _state(file: Path) -> Any:  # noqa: ANN401 whatever the file has
    """Return the state in a file of JSON, or the only one that is in a checkpoint of torch."""
    data = file.read_bytes()
    if not data.startswith(b"PK"):  # of a zip file, as torch.save writes it
        return json.loads(data)
    import torch

    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises all kinds for what it doesn't trust, or is damaged
        raise ValueError(
            f"torch can't load it with weights_only=True: {str(error).splitlines()[0]} Write the state alone, with "
            "json.dump(loader.state_dict(), file)."
        ) from error
    found = dict(_states_in(checkpoint))
    if len(found) != 1:
        raise ValueError(
            f"the checkpoint has {len(found)} states of loaders{': ' if found else ''}{', '.join(found)}. Write one of "
            "them alone, with json.dump(state, file)."
        )
    return next(iter(found.values()))


def _states_in(part: object, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the states of loaders in a part of a checkpoint, each with its path."""
    if isinstance(part, dict) and {"version", "segments", "identity"} <= part.keys():
        yield path, part
    elif isinstance(part, dict | list | tuple):
        for name, value in part.items() if isinstance(part, dict) else enumerate(part):
            yield from _states_in(value, f"{path}[{name!r}]")


def _sampler(options: Namespace, cells: Cells, position: Position, identity: Identity) -> DistributedSampler:
    mask = cells.mask(options.mask, options.where)
    if mask is None:
        rows = identity["rows"]
        if "ranges" not in rows:
            raise CommandError(f"the state has only a digest of its mask, {rows}: name its rows by --mask or --where")
        mask = [slice(start, stop) for start, stop in rows["ranges"]]
    sizes = {name: getattr(options, name) for name in ("chunk_size", "preload_nchunks", "batch_size")}
    # a rank for each lane, unless --ranks says that the lanes were virtual ranks
    n_lanes = position.segments[-1].n_lanes
    ranks = options.ranks or n_lanes
    return DistributedSampler(
        _made(identity["sampler"], _SAMPLERS.get(options.sampler), sizes),
        dist_info=Rank(0, ranks),
        remainder=options.remainder or identity["remainder"],
        sharding=_made(identity["sharding"], _SHARDINGS.get(options.sharding), {}),
        seed=_seed(options, identity),
        virtual_ranks=options.virtual_ranks or (None if ranks == n_lanes else n_lanes),
        align=identity["align"],
        mask=mask,
    )


def _seed(options: Namespace, identity: Identity) -> int:
    """Return the seed of a job: the root stands for it, whatever it was drawn from."""
    return next((seed for seed in (options.seed, identity["seed"], identity["root"]) if isinstance(seed, int)), 0)


def _made(described: dict[str, Any], kind: Any, options: dict[str, Any]) -> Any:  # noqa: ANN401 of any kind
    """Return what a state describes, or the same of another class, with settings that options change."""
    kind = kind or _CLASSES.get(described["type"])
    if kind is None:
        raise CommandError(
            f"the state is of {described['type']}, which can't be made from it: ask sampler.rows_of or "
            "loader.cells_of, in the script that makes that object"
        )
    # a state holds more than the arguments of a class, and --sampler may name a class that takes fewer
    settings = described | {name: value for name, value in options.items() if value is not None}
    return kind(**{name: value for name, value in settings.items() if name in inspect.signature(kind).parameters})


def run(options: Namespace) -> int:
    """Print the cells of some steps, or how many of each label there are in each."""
    cells = Cells(options.path)
    loader = loader_of(options, cells)
    epoch = loader.sampler.epoch if options.epoch is None else options.epoch
    columns = dict.fromkeys(options.obs or ())
    if options.by is not None:
        columns[options.by] = None
    try:
        frame = loader.cells_of(options.steps, list(columns), epoch=options.epoch)
    except (IndexError, KeyError, ValueError) as error:
        raise CommandError(str(error.args[0])) from error
    if frame.empty:
        raise CommandError("--steps: the epoch has none of these steps")
    if options.by is not None:
        _print_counts(options, epoch, frame, cells.labels(options.by), loader)
    elif options.json:
        print(json.dumps({"epoch": epoch, "cells": json.loads(frame.to_json(orient="records"))}))
    else:
        print(frame.to_string(index=False))
    return 0


def _print_counts(
    options: Namespace, epoch: int, frame: pd.DataFrame, labels: pd.Categorical, loader: StatefulLoader
) -> None:
    """Print how many cells of each label are in each step, and the share of the epoch's rows that have it."""
    n_labels = len(labels.categories)
    # missing labels have the code -1; of 3 labels, they are the last of 4: -1 % 4 = 3
    window = loader.plan().window.take(labels.codes).astype(np.int64) % (n_labels + 1)
    in_epoch = np.bincount(window, minlength=n_labels + 1)
    shares = in_epoch / in_epoch.sum()
    # (labels, steps): cells of each label in each step, and of missing labels if the epoch has some
    codes = pd.Categorical(frame[options.by], categories=labels.categories).codes
    counts = pd.crosstab(codes, frame["step"].to_numpy()).reindex([*range(n_labels), -1], fill_value=0)
    counts.index = pd.Index([*labels.categories, np.nan], dtype=object)
    if not shares[-1]:
        counts, shares = counts.iloc[:-1], shares[:-1]
    # (steps,): total variation distance of each step's mix of labels to that of the epoch, from 0 to 1
    distances = (counts / counts.sum()).sub(shares, axis="index").abs().sum() / 2
    if options.json:
        texts = [None if pd.isna(label) else str(label) for label in counts.index]
        said = {"epoch": epoch, "labels": texts, "share": shares.tolist(), "distance": distances.tolist()}
        print(json.dumps(said | {"steps": counts.columns.tolist(), "counts": counts.T.to_numpy().tolist()}))
        return
    print(f"cells of each {options.by} in steps of epoch {epoch}, its share of the epoch, and how far their mixes are")
    shown = counts.astype(object)
    shown["epoch"] = [f"{100 * share:.1f} %" for share in shares]
    shown.loc["distance"] = [*(f"{distance:.3f}" for distance in distances), ""]
    text = shown.rename_axis(columns="step", index=None).to_string()
    print("\n".join(map(str.rstrip, text.splitlines())))
