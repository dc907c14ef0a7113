"""The command ``cells``: the cells of some steps of an epoch, from a saved state, as a table or counted by label.

The state describes the job, from which the command makes a loader.
"""

from __future__ import annotations

import inspect
import json
import math
import shlex
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
from annbatch.samplers import RandomSampler, SequentialSampler

from annbatch_distributed import CellSets, DistributedSampler, Rank, Shuffled, StatefulLoader
from annbatch_distributed.cli import CommandError, noted
from annbatch_distributed.cli.collection import Cells, in_options
from annbatch_distributed.core.sharding import Contiguous, Independent
from annbatch_distributed.core.state import Identity, Position, from_state, states_in
from annbatch_distributed.core.values import MOST_LISTED, few, plural
from annbatch_distributed.loader.epoch_loader import column_of

#: Classes of samplers and shardings by their names in a state.
_CLASSES: dict[str, Any] = {f"annbatch.samplers.{kind.__name__}": kind for kind in (RandomSampler, SequentialSampler)}
_CLASSES |= {"Contiguous": Contiguous, "Independent": Independent, "Shuffled": Shuffled}


def loader_of(options: Namespace, state: Any, cells: Cells) -> StatefulLoader:  # noqa: ANN401 the contents of a file
    """Return rank 0's loader with a state loaded; the rows of the options must not contradict it."""
    with _reported(f"--state {options.state}"):
        if isinstance(state, dict) and "sources" in state:
            raise ValueError(
                f"the state is of a mixture of {', '.join(sorted(map(str, state['sources'])))}, which this command "
                "can't make. Call mixture.cells_of in the script that makes the mixture."
            )
        position, identity = from_state(state)
        n_ranks = _n_ranks(options, position)
        sampler = _sampler(options, cells, position, identity)
        loader = StatefulLoader(batch_sampler=sampler, return_index=True, preload_to_gpu=False)
        loader.use_collection(cells.collection, names=False)
        loader.load_state_dict(_with_seed(_of_store(state, loader)))
        # after loading, as another epoch may run on ranks that can't resume the epoch of the state
        with loader._cursor.resharded(Rank(0, n_ranks)):
            return loader


def _is_other_epoch(options: Namespace, position: Position) -> bool:
    """Return True if the cells are of an epoch that the state isn't of."""
    return options.epoch not in (None, position.epoch)


def _n_ranks(options: Namespace, position: Position) -> int:
    """Return the number of ranks of the epoch to list; notes on stderr say what is assumed."""
    n_saved = position.segments[-1].n_lanes
    if not _is_other_epoch(options, position):
        if options.ranks and n_saved % options.ranks:
            raise ValueError(
                f"--ranks must divide the {n_saved} ranks that the state has in epoch {position.epoch}, which are then "
                f"virtual ranks, got {options.ranks}. Omit it"
            )
        return options.ranks or n_saved
    if options.ranks is None:
        numbers = dict.fromkeys(str(segment.n_lanes) for segment in position.segments)
        if len(numbers) > 1:
            raise ValueError(
                f"the state doesn't know on how many ranks epoch {options.epoch} ran, since the number changed in "
                f"epoch {position.epoch} ({', '.join(numbers)}). Pass it as --ranks"
            )
        noted(
            f"epoch {options.epoch} is listed for {plural(n_saved, 'rank')}, which the state has in epoch "
            f"{position.epoch}. If it ran on a different number, pass that as --ranks."
        )
    elif options.ranks != n_saved:
        noted(
            f"epoch {options.epoch} is listed for {plural(options.ranks, 'rank')}, where the state has {n_saved} in "
            f"epoch {position.epoch}. If these are virtual ranks, omit --ranks."
        )
    return options.ranks or n_saved


def _of_store(state: Mapping[str, Any], loader: StatefulLoader) -> Mapping[str, Any]:
    """Return the state of an AlignedLoader as the state of one of its stores; other states unchanged."""
    stores, here = state["identity"].get("datasets"), loader.state_dict()["identity"]["datasets"]
    # {"rna": [[rows, columns], ...], ...} of stores, or [[rows, columns], ...], or a digest of that
    if not isinstance(stores, dict) or "digest" in stores or here not in stores.values():
        return state
    return {**state, "identity": state["identity"] | {"datasets": here}}


def _with_seed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with its root as the seed; the root may come from a generator."""
    identity = state["identity"]
    return {**state, "identity": {**identity, "seed": _seed(identity)}}


@contextmanager
def _reported(where: str) -> Iterator[None]:
    """Convert errors about a state to a CommandError with the name of its file or source."""
    try:
        yield
    except (OSError, ValueError) as error:
        # notes name a source, or strict=False, which is no option of the command
        notes = [note for note in getattr(error, "__notes__", ()) if "strict=False" not in note]
        raise CommandError(in_options(" ".join([f"{where}: {error}", *notes]))) from error
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CommandError(f"{where}: the state is damaged ({what}). Pass a different one") from error


def _state(file: Path, key: str | None) -> Any:  # noqa: ANN401 whatever the file has
    """Return the only state in a JSON file or a PyTorch checkpoint, or the one with a key such as ``loaders.0``."""
    with file.open("rb") as opened:
        is_zip = opened.read(2) == b"PK"  # as torch.save writes
    try:
        content = _checkpoint(file) if is_zip else json.loads(file.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the file must be JSON or a PyTorch checkpoint, but {error}. Pass a state.") from error
    states = [(".".join(map(str, path)), state) for path, state in states_in(content)]
    named = [state for path, state in states if key in (None, path)]
    # a Lightning checkpoint may have the state of a loader twice: by Lightning, and by the data module
    if not named or any(state != named[0] for state in named):
        listed = [f"{path} ({_kind(state)})" for path, state in states]
        wanted = "one state of a loader" if key is None else f"one state of a loader at {key}"
        raise ValueError(
            f"the file must have {wanted}, got {few(listed, MOST_LISTED) or 'none'}. "
            + ("Pass one of them as --state-key." if states else "Write json.dump(loader.state_dict(), file).")
        )
    return named[0]


def _kind(state: Mapping[str, Any]) -> str:
    """Return what tells the states of a file apart: the number of cells, or the sources of a mixture."""
    sources, n_obs = state.get("sources"), state["identity"].get("n_obs")
    return f"mixture of {', '.join(sources)}" if sources else plural(n_obs, "cell") if n_obs else "no cells"


class _Unknown:
    """Object of any class in a checkpoint, of which nothing is kept."""

    def __new__(cls, *_: object) -> Self:
        return super().__new__(cls)

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


def _checkpoint(file: Path) -> object:
    """Return what is in a PyTorch checkpoint, without running code from it or importing its classes."""
    import torch
    from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

    classes: list[str] = []
    try:
        classes = get_unsafe_globals_in_checkpoint(file)
        # hyperparameters, for example, may be of classes that can't be imported here, and whose code nobody has checked
        with safe_globals([(_Unknown, name) for name in classes]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # PyTorch raises many types for unsafe or damaged files
        problem = str(error).partition("\n")[0]
        if not classes:
            raise ValueError(f"PyTorch can't read it: {problem} Pass a different one.") from error
        code = (
            f'import json, torch; json.dump(torch.load({json.dumps(str(file))}, map_location="cpu", '
            'weights_only=False), open("state.json", "w"), default=str, skipkeys=True)'
        )
        raise ValueError(
            f"PyTorch can't load its objects of {', '.join(classes)} safely. Where these can be imported, write "
            f"everything but such objects with python -c {shlex.quote(code)}, and pass --state state.json. This runs "
            "code from the file, so it must be of somebody you trust."
        ) from error


def _sampler(options: Namespace, cells: Cells, position: Position, identity: Identity) -> DistributedSampler:
    sets, mask = None, None
    if "weights" in identity:
        raise ValueError(
            "the weights can't be restored from the state, which has only a digest of them. Call loader.cells_of in "
            "the script that makes the loader"
        )
    if "sets" in identity:
        sets = _sets(options, cells, identity["sets"])
    else:
        mask = _mask(options, cells, identity["rows"])
    n_lanes = position.segments[-1].n_lanes
    # one rank per lane, unless --ranks is smaller, as the lanes were virtual ranks then
    ranks = n_lanes if _is_other_epoch(options, position) else options.ranks or n_lanes
    return DistributedSampler(
        _build(identity["sampler"]),
        dist_info=Rank(0, ranks),
        remainder=identity["remainder"],
        sharding=_build(identity["sharding"]),
        seed=_seed(identity),
        virtual_ranks=None if ranks == n_lanes else n_lanes,
        mask=mask,
        sets=sets,
    )


def _mask(options: Namespace, cells: Cells, rows: Mapping[str, Any]) -> Any:  # noqa: ANN401 any mask
    """Return the mask of the options, or else of a state."""
    if (mask := cells.mask(options.rows, options.where)) is not None:
        return mask
    if "ranges" not in rows:
        raise ValueError(
            "the mask can't be restored from the state, which has only a digest of its rows. Pass them as --rows or "
            "--where"
        )
    return [slice(start, stop) for start, stop in rows["ranges"]]


def _sets(options: Namespace, cells: Cells, described: Mapping[str, Any]) -> CellSets:
    """Return the sets of a state."""
    controls = described["controls"]
    if controls is not None and "digest" in controls:
        raise ValueError(
            "the controls can't be restored from the state, which has only a digest of them. Call loader.cells_of in "
            "the script that makes the sets"
        )
    settings = {name: described[name] for name in ("by", "set_size", "chunk_size", "remainder", "seed")}
    columns = dict.fromkeys([*described["by"], *described["match"], *(controls or ())])
    return CellSets.from_obs(
        pd.DataFrame({name: cells.labels(name) for name in columns}),
        controls=controls,
        match=described["match"] or None,
        mask=_mask(options, cells, described["mask"]),
        **settings,
    )


def _seed(identity: Identity) -> int:
    """Return the seed of a job: the seed or root in the state."""
    return next((seed for seed in (identity["seed"], identity["root"]) if isinstance(seed, int)), 0)


def _build(described: dict[str, Any]) -> Any:  # noqa: ANN401 of any class
    """Return the sampler or sharding that a state describes."""
    kind = _CLASSES.get(described["type"])
    if kind is None:
        raise ValueError(
            f"{described['type']} can't be restored from the state. Call cells_of of the loader, or "
            "rows_of of the sampler, in the script that makes it"
        )
    # a state has more settings than arguments
    return kind(**{name: value for name, value in described.items() if name in inspect.signature(kind).parameters})


def run(options: Namespace) -> int:
    """Print the cells of some steps, or their counts by label."""
    with _reported(f"--state {options.state}"):
        state = _state(Path(options.state), options.state_key)
    cells = Cells(options)
    loader = loader_of(options, state, cells)
    epoch = int(state["epoch"]) if options.epoch is None else options.epoch
    columns = dict.fromkeys(options.obs or ())
    if options.by is not None:
        if "sets" in state["identity"]:
            raise CommandError("--by can't count cells of sets. Pass --obs to list them")
        columns[options.by] = None
    try:
        frame = loader.cells_of(options.steps, list(columns), epoch=options.epoch)
    except (IndexError, KeyError, ValueError) as error:
        raise CommandError(in_options(str(error.args[0]))) from error
    if frame.empty:
        raise CommandError(f"--steps must have a step of epoch {epoch}, got none. Pass earlier steps")
    if options.by is not None:
        _print_counts(options, epoch, frame, cells.labels(options.by), loader)
    elif options.json:
        # pandas rounds numbers in JSON
        lines = frame.astype(object).itertuples(index=False, name=None)
        records = [dict(zip(map(str, frame), map(_as_json, line), strict=True)) for line in lines]
        print(json.dumps({"epoch": epoch, "cells": records}, allow_nan=False))
    else:
        print(frame.to_string(index=False))
    return 0


def _as_json(value: Any) -> bool | float | str | None:  # noqa: ANN401 of any column
    """Return a value of a table for JSON, which has no numbers that aren't finite; None if it is missing.

    >>> [_as_json(value) for value in (1e-11, float("inf"), pd.NA, True)]
    [1e-11, None, None, True]
    """
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or value is pd.NA or value is pd.NaT:
        return None
    return value if isinstance(value, bool | int | str) else str(value)


def _print_counts(
    options: Namespace, epoch: int, frame: pd.DataFrame, labels: pd.Categorical, loader: StatefulLoader
) -> None:
    """Print the number of cells of each label in each step, and the label's share of the epoch."""
    n_labels = len(labels.categories)
    # missing labels have the code -1; for 3 labels they are counted as -1 % 4 = 3, the last of 4
    selected = loader.plan().selected.take(labels.codes).astype(np.int64) % (n_labels + 1)
    in_epoch = np.bincount(selected, minlength=n_labels + 1)
    shares = in_epoch / in_epoch.sum()
    # (labels, steps): numbers of cells; missing labels are the last line, if the epoch has any
    codes = pd.Categorical(frame[column_of(options.by)], categories=labels.categories).codes
    counts = pd.crosstab(codes, frame["step"].to_numpy()).reindex([*range(n_labels), -1], fill_value=0)
    counts.index = pd.Index([*labels.categories, np.nan], dtype=object)
    if not shares[-1]:
        counts, shares = counts.iloc[:-1], shares[:-1]
    # (steps,): total variation distance between the labels of each step and of the epoch, from 0 to 1
    distances = (counts / counts.sum()).sub(shares, axis="index").abs().sum() / 2
    if options.json:
        names = [None if pd.isna(label) else str(label) for label in counts.index]
        summary = {"epoch": epoch, "labels": names, "share": shares.tolist(), "distance": distances.tolist()}
        print(json.dumps(summary | {"steps": counts.columns.tolist(), "counts": counts.T.to_numpy().tolist()}))
        return
    print(f"cells of each {options.by} in steps of epoch {epoch}, its share of the epoch, and distances (0 to 1)")
    shown = counts.astype(object)
    shown["epoch"] = [f"{100 * share:.1f}%" for share in shares]
    shown.loc["distance"] = [*(f"{distance:.3f}" for distance in distances), ""]
    text = shown.rename_axis(columns="step", index=None).to_string()
    print("\n".join(map(str.rstrip, text.splitlines())))
