"""Values: whether the cells of some steps have values that cells of the epoch don't usually have.

1. Other cells of the epoch, at even distances, say what is usual: a value is out of range if it is ten times as large
   as any that they have in its column; or in any column, where they have none.
2. The cells of the steps are read from the store, and looked at one by one.
"""

from __future__ import annotations

import json
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata.io import read_elem

from annbatch_distributed import StatefulLoader
from annbatch_distributed.cli.replay import cells_of, loader_of
from annbatch_distributed.rows import Int64Array
from annbatch_distributed.stream import bounds_of

if TYPE_CHECKING:
    from annbatch_distributed.cli.cells import Cells


#: How many cells of the epoch are looked at, and how many times as large a value is that they don't have.
_N_USUAL, _TIMES = 4096, 10
#: The text names so many cells, and so many columns of each.
_MOST_CELLS, _MOST_COLUMNS = 20, 3
_PROBLEMS = ["not_finite", "all_zero", "out_of_range"]


def run(options: Namespace, cells: Cells) -> int:
    """Print how many cells of each step and rank have unusual values, and which; return whether any has."""
    loader = loader_of(options, cells)
    frame = cells_of(loader, options, [])
    window = loader.plan().window
    some = window.to_global(np.unique(np.linspace(0, len(window), _N_USUAL, endpoint=False, dtype=np.int64)))
    others = np.setdiff1d(some, frame["row"])
    usual = _read(loader, others if len(others) else some)
    limits = _limits(usual)
    var: Any = read_elem(next(iter(cells.collection))["var"])
    names: pd.Index[Any] = var.index
    steps = (part for _, part in frame.groupby("step")["row"])
    found = [_problems(_read(loader, rows.to_numpy()), limits, names).set_index(rows.index) for rows in steps]
    frame = frame.join(pd.concat(found))
    flags = frame[_PROBLEMS] > 0
    table = frame[["step", "rank"]].assign(cells=1, **flags).groupby(["step", "rank"], as_index=False).sum()
    unusual = frame[flags.any(axis="columns")]
    epoch = {"cells": usual.shape[0], **(_problems(usual, limits, names)[_PROBLEMS] > 0).sum().to_dict()}
    if options.json:
        said = {"steps": table.to_dict("records"), "epoch": epoch, "problems": unusual.to_dict("records")}
        print(json.dumps({"ok": unusual.empty, **said}))
    else:
        print(table.to_string(index=False))
        print(f"of {epoch['cells']} cells of the epoch: " + ", ".join(f"{epoch[name]} {name}" for name in _PROBLEMS))
        for cell in unusual.head(_MOST_CELLS).to_dict("records"):
            print(_line(cell))
        if len(unusual) > _MOST_CELLS:
            print(f"... and {len(unusual) - _MOST_CELLS} more cells, which --json lists")
    return int(not unusual.empty)


def _line(cell: dict[str, Any]) -> str:
    """Return what is unusual of a cell."""
    columns: list[str] = [*cell["columns"][:_MOST_COLUMNS], *(["..."] if len(cell["columns"]) > _MOST_COLUMNS else [])]
    kinds = {"not_finite": "not finite", "out_of_range": "out of range"}
    what = [f"{cell[name]} {text}" for name, text in kinds.items() if cell[name]]
    problem = f"values {' and '.join(what)}, in {', '.join(columns)}" if what else "all values are zero"
    return f"step {cell['step']}, rank {cell['rank']}: row {cell['row']}, cell {cell['cell']}: {problem}"


def _read(loader: StatefulLoader, rows: Int64Array) -> sp.csr_array:
    """Return some rows of the collection, in order."""
    ordered, places = np.unique(rows, return_inverse=True)
    request: Any = {"requests": list(map(slice, *map(np.ndarray.tolist, bounds_of(ordered)))), "splits": [places]}
    (batch,) = loader.read(request)
    return sp.csr_array(batch["X"])


def _limits(usual: sp.csr_array) -> Any:  # noqa: ANN401 an array
    """Return for each column how large a value may be."""
    sizes = abs(usual)
    sizes.data = np.where(np.isfinite(sizes.data), sizes.data, 0)
    largest = sizes.max(axis=0).toarray().ravel()
    return _TIMES * np.where(largest > 0, largest, largest.max())


def _problems(cells: sp.csr_array, limits: Any, names: pd.Index[Any]) -> pd.DataFrame:  # noqa: ANN401 an array
    """Return for each cell how many values are unusual, and in which columns."""
    n_rows = cells.shape[0]
    row = np.repeat(np.arange(n_rows), np.diff(cells.indptr))
    is_finite = np.isfinite(cells.data)
    is_beyond = is_finite & (abs(np.where(is_finite, cells.data, 0)) > limits[cells.indices])
    flags = {"not_finite": ~is_finite, "out_of_range": is_beyond}
    found = pd.DataFrame({name: np.bincount(row[are], minlength=n_rows) for name, are in flags.items()})
    found["all_zero"] = (np.bincount(row[cells.data != 0], minlength=n_rows) == 0).astype(np.int64)
    is_unusual = ~is_finite | is_beyond
    columns = pd.Series(names[cells.indices[is_unusual]], dtype=object).groupby(row[is_unusual]).agg(list)
    found["columns"] = [columns.get(number, []) for number in range(n_rows)]
    return found
