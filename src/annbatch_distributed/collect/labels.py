"""Labels: the columns of ``obs`` of all files, in common dtypes and with the same categories."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.core.values import plural

#: Largest number of labels of a column in its summary.
_MOST_VALUES = 20
#: Strings that often stand for missing labels, in lower case.
_LIKE_MISSING = {"", "n/a", "na", "nan", "none", "null", "unassigned", "unknown"}


def replace_missing(obs: pd.DataFrame, na_values: Sequence[str]) -> set[str]:
    """Replace some strings by missing values, in place, and return the strings that ``obs`` had."""
    strings = set[str]()
    for name in obs:
        # a new categorical, without the categories that were replaced
        labels = obs[name].astype(object)
        if (are_missing := labels.isin(na_values)).any():
            strings |= {*labels[are_missing]}
            obs[name] = pd.Categorical(labels.where(labels.isna(), labels.astype(str)).mask(are_missing))
    return strings


def unite(tables: Sequence[pd.DataFrame]) -> tuple[list[pd.DataFrame], list[str]]:
    """Return ``obs`` of each file with the columns of all files in common dtypes, and lines about the columns.

    Labels are strings with the same categories in all files. A column that a file lacks has missing values in its
    cells.
    """
    united = [pd.DataFrame(index=table.index) for table in tables]
    lines = list[str]()
    for name in dict.fromkeys(chain(*tables)):
        parts = [table.get(name) for table in tables]
        columns = [part for part in parts if part is not None]
        n_missing = sum(
            len(table) if part is None else int(part.isna().sum()) for table, part in zip(tables, parts, strict=True)
        )
        dtype: Any = bool
        absent: Any = np.nan
        values: pd.Index[Any] | None = None
        if all(_has_numbers(column) for column in columns):
            kind = "numbers"
            dtype = np.result_type(*(getattr(column.dtype, "numpy_dtype", column.dtype) for column in columns))
            dtype = np.dtype(np.float64) if n_missing and dtype.kind != "f" else dtype  # for NaN
        elif not n_missing and all(pd.api.types.is_bool_dtype(column.dtype) for column in columns):
            kind = "booleans"
            absent = False  # for the dtype: only a file without cells lacks the column
        else:
            labels = {value: _label(value) for column in columns for value in column.dropna().unique()}
            values = pd.Index(sorted({*labels.values()}), dtype=object)
            kind = plural(len(values), "value")
            if 0 < len(values) <= _MOST_VALUES:
                kind += f" ({', '.join(values)})"
        for table, part in zip(united, parts, strict=True):
            if values is not None:
                strings = [None] * len(table) if part is None else part.astype(object).map(labels)
                table[name] = pd.Categorical(strings, categories=values)
            else:
                table[name] = absent if part is None else part.astype(dtype).to_numpy()
        where = "" if len(columns) == len(tables) else f", in only {len(columns):,} of {plural(len(tables), 'file')}"
        n_cells = f"missing in {plural(n_missing, 'cell')}" if n_missing else "none missing"
        lines.append(f"{name}: {kind}{where}, {n_cells}")
        lines += _warnings(name, [] if values is None else values.tolist())
    return united, lines


def check_groups(columns: Sequence[str] | None, obs: pd.DataFrame) -> None:
    """Raise if cells can't be sorted by some columns."""
    for name in columns or ():
        if name not in obs:
            raise Problems(f"--group-by {name}: obs has no such column. It has {', '.join(obs)}")
        if not isinstance(obs[name].dtype, pd.CategoricalDtype):
            raise Problems(f"--group-by {name}: must be a column of labels, got numbers or booleans")


def _has_numbers(column: pd.Series[Any]) -> bool:
    return pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column.dtype)


def _label(value: object) -> str:
    """Return a value as a label; equal numbers have the same label.

    >>> [_label(value) for value in (3, 3.0, "3.0", "3.10", True, "B")]
    ['3', '3', '3', '3.10', 'True', 'B']
    """
    return re.sub(r"^(-?(?:0|[1-9]\d*))\.0+$", r"\1", str(value))


def _warnings(name: str, labels: list[str]) -> Iterator[str]:
    """Yield warnings about labels that may be missing values, or the same label."""
    if like_missing := [label for label in labels if label.casefold() in _LIKE_MISSING]:
        quoted = " ".join(f'"{label}"' for label in like_missing)
        yield f"WARNING: {name} has the labels {quoted}. If they stand for missing labels, pass --na-values {quoted}"
    by_case: dict[str, list[str]] = {}
    for label in labels:
        by_case.setdefault(label.casefold(), []).append(label)
    if alike := [spellings for spellings in by_case.values() if len(spellings) > 1]:
        shown = "; ".join(" and ".join(spellings) for spellings in alike[:3]) + "; ..." * (len(alike) > 3)
        yield f"WARNING: values of {name} differ only in case: {shown}"
