"""Labels: the columns of ``obs`` of all files, in common dtypes and with the same categories.

A column has numbers, booleans, or labels, which are strings. Nothing is rounded, and two values are the same label only
if they are of the same text: the number 1.0 and the string "1" are, the strings "1" and "1.0" aren't. Booleans never
become labels, even if some are missing, since the string "False" is true.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pandas as pd

from annbatch_distributed.collect.options import Spellings
from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.core.values import Int64Array, few, plural

#: Largest number of labels of a column in its summary.
_MOST_VALUES = 20
#: Largest number of examples in a warning.
_MOST_EXAMPLES = 3
#: Strings that often stand for missing labels, in lower case.
_LIKE_MISSING = {"", "n/a", "na", "nan", "none", "null", "unassigned", "unknown"}
#: Largest integer up to which floats hold each one.
_MOST_EXACT = 2**53
#: Labels of values that are booleans if they are in a column of booleans.
_BOOLEANS = {"True": True, "False": False, "1": True, "0": False}


def replace_labels(obs: pd.DataFrame, spellings: Spellings, na_values: Sequence[str]) -> set[tuple[str, str]]:
    """Replace labels in place, first by other spellings, then by missing values; return those that ``obs`` had."""
    replaced = set[tuple[str, str]]()
    for name in obs:
        is_text = not (_has_numbers(obs[name]) or _has_booleans(obs[name]))
        if not is_text and name not in spellings:
            continue
        own = _as_labels(obs[name])
        new_labels = spellings.get(name, {})
        spelled = [new_labels.get(label, label) for label in own.categories]
        new = [None if label in na_values else label for label in spelled]
        if new == own.categories.tolist():
            continue
        replaced |= {(name, label) for label in own.categories if label in new_labels}
        replaced |= {("", label) for label in spelled if label in na_values}
        kept = [*dict.fromkeys(label for label in new if label is not None)]
        obs[name] = _recoded(own, [kept.index(label) if label is not None else -1 for label in new], kept, own.ordered)
    return replaced


def unite(
    tables: Sequence[pd.DataFrame], files: Sequence[str], *, is_fixed: bool = False
) -> tuple[list[pd.DataFrame], list[str]]:
    """Return ``obs`` of each file with the columns of all files in common dtypes, and lines about the columns.

    A column that a file lacks has missing values in its cells. Raises Problems with each column that has no common
    dtype; ``is_fixed`` means that none of them can be left out.
    """
    united = [pd.DataFrame(index=table.index) for table in tables]
    lines, problems, labels = list[str](), dict[str, str](), dict[str, list[str]]()
    names = [*dict.fromkeys(chain(*tables))]
    for name in names:
        parts = [table.get(name) for table in tables]
        try:
            columns, kind = _united(parts, [len(table) for table in tables])
        except ValueError as error:
            dtypes = (f"{file} has {part.dtype}" for file, part in zip(files, parts, strict=True) if part is not None)
            problems[name] = f"{name}: {error}, got {few([*dtypes], 5)}"
            continue
        for table, column in zip(united, columns, strict=True):
            table[name] = column
        first: Any = columns[0]
        if isinstance(first, pd.Categorical):
            labels[name] = first.categories.tolist()
        n_missing = sum(int(pd.isna(column).sum()) for column in columns)
        n_files = sum(part is not None for part in parts)
        where = "" if n_files == len(parts) else f", in only {n_files:,} of {plural(len(parts), 'file')}"
        n_cells = f"missing in {plural(n_missing, 'cell')}" if n_missing else "none missing"
        kind = kind if n_missing < sum(map(len, columns)) else "no values"
        lines.append(f"{name}: {kind}{where}, {n_cells}")
    if problems:
        others = [name for name in names if name not in problems]
        hint = "Write them in one dtype"
        if not is_fixed:
            hint += ", or leave the column out" + (f", as in obs={others}" if others else "")
        raise Problems(*(f"{problem}. {hint}" for problem in problems.values()))
    return united, [*lines, *_warnings(labels)]


def check_groups(columns: Sequence[str] | None, obs: pd.DataFrame) -> None:
    """Raise if cells can't be sorted by some columns."""
    for name in columns or ():
        if name not in obs:
            raise Problems(f"group_by: obs has no column {name}. It has {', '.join(obs)}")
        if not isinstance(obs[name].dtype, pd.CategoricalDtype):
            raise Problems(f"group_by: {name} must be a column of labels, got numbers or booleans")


def _united(parts: Sequence[pd.Series[Any] | None], lengths: Sequence[int]) -> tuple[list[Any], str]:
    """Return a column of each file in a common dtype, and what it has; ``lengths`` are the numbers of cells.

    A ValueError if it has no common dtype.
    """
    declared = [part for part in parts if part is not None]
    # a file without values says nothing about the dtype, unless no file has any
    columns = [part for part in declared if part.notna().any()]
    is_whole = all(
        part.notna().all() if part is not None else not length for part, length in zip(parts, lengths, strict=True)
    )
    if all(map(_has_numbers, columns or declared)):
        dtype: Any = _dtype_of_numbers(columns, is_whole=is_whole)
        return [
            pd.Series(np.nan, range(length)).astype(dtype).array
            if part is None or part.isna().all()
            else part.astype(dtype).array
            for part, length in zip(parts, lengths, strict=True)
        ], "numbers"
    if any(map(_has_booleans, columns or declared)):
        booleans = [_as_booleans(part, length) for part, length in zip(parts, lengths, strict=True)]
        return [one.to_numpy(bool) if is_whole else one for one in booleans], "booleans"
    own = [None if part is None else _as_labels(part) for part in parts]
    known = [part for part in own if part is not None and len(part.categories)]
    categories, is_ordered = _categories(known)
    kind = plural(len(categories), "value")
    if 0 < len(categories) <= _MOST_VALUES:
        kind += f" ({(' < ' if is_ordered else ', ').join(categories)})"
    if not is_ordered and any(part.ordered for part in known):
        kind += ", without the order that only some files have or that differs"
    return [
        pd.Categorical.from_codes(np.full(length, -1), categories, ordered=is_ordered)
        if part is None
        else part.set_categories(categories, ordered=is_ordered)
        for part, length in zip(own, lengths, strict=True)
    ], kind


def _categories(parts: Sequence[pd.Categorical]) -> tuple[list[str], bool]:
    """Return the categories of a column of all files, and whether they are in an order."""
    lists = list(dict.fromkeys(tuple(part.categories) for part in parts))
    are_ordered = bool(parts) and all(part.ordered for part in parts)
    if len(lists) <= 1:
        return [*chain(*lists)], are_ordered
    if are_ordered and (order := _joined(lists)):
        return order, True
    used = (part.remove_unused_categories().categories for part in parts)
    return [*dict.fromkeys(chain.from_iterable(used))], False


def _joined(orders: Sequence[Sequence[str]]) -> list[str]:
    """Return the only order of all labels that agrees with each order; an empty list if there is none, or several.

    >>> _joined(["lh", "lmh"]), _joined(["lh", "lm"]), _joined(["lh", "hl"])
    (['l', 'm', 'h'], [], [])
    """
    after = TopologicalSorter[str]()
    for first, second in chain.from_iterable(map(pairwise, orders)):
        after.add(second, first)
    for order in orders:
        after.add(order[0])
    try:
        joined = [*after.static_order()]
    except CycleError:
        return []
    # labels next to each other must be next to each other in some file, or their order isn't known
    known = {*chain.from_iterable(map(pairwise, orders))}
    return joined if known >= {*pairwise(joined)} else []


def _dtype_of_numbers(columns: Sequence[pd.Series[Any]], *, is_whole: bool) -> Any:  # noqa: ANN401 a dtype
    """Return a dtype that holds the numbers of all files exactly; a ValueError if there is none."""
    dtypes = [getattr(column.dtype, "numpy_dtype", column.dtype) for column in columns]
    common = np.result_type(*dtypes) if dtypes else np.dtype(np.float64)
    integers = [column for column, dtype in zip(columns, dtypes, strict=True) if dtype.kind in "iu"]
    if not integers or (is_whole and common.kind in "iu"):
        return common
    least, most = min(int(column.min()) for column in integers), max(int(column.max()) for column in integers)
    has_floats = len(integers) < len(columns)
    is_nullable = any(hasattr(column.dtype, "numpy_dtype") for column in integers)
    if (has_floats or not (is_whole or is_nullable)) and least >= -_MOST_EXACT and most <= _MOST_EXACT:
        return np.dtype(np.float64)  # with NaN, as pandas does
    floats = [column.dropna() for column, dtype in zip(columns, dtypes, strict=True) if dtype.kind == "f"]
    if not all((column % 1 == 0).all() and (abs(column) <= _MOST_EXACT).all() for column in floats):
        raise ValueError(
            f"whole numbers above {_MOST_EXACT:,} and fractions have no common dtype that holds all digits"
        )
    least = min(least, *(int(column.min()) for column in floats), 0)
    for dtype, nullable in ((np.int64, "Int64"), (np.uint64, "UInt64")):
        if np.iinfo(dtype).min <= least and most <= np.iinfo(dtype).max:
            return np.dtype(dtype) if is_whole else pd.api.types.pandas_dtype(nullable)
    raise ValueError("negative numbers and whole numbers above 2**63 have no common dtype that holds all digits")


def _as_booleans(column: pd.Series[Any] | None, length: int) -> Any:  # noqa: ANN401 a nullable array of pandas
    """Return a column as booleans; a ValueError if it has other values than those, 0 and 1, or their texts."""
    if column is None:
        return pd.array([pd.NA] * length, dtype="boolean")
    own = _as_labels(column).remove_unused_categories()
    if others := [label for label in own.categories if label not in _BOOLEANS]:
        raise ValueError(f"booleans and values such as {few(others, _MOST_EXAMPLES, ' and ')} have no common dtype")
    # the code -1 of missing values takes the last place, which the mask hides
    values = np.array([*(_BOOLEANS[label] for label in own.categories), False])[own.codes]
    return pd.arrays.BooleanArray(values, own.isna())


def _as_labels(column: pd.Series[Any]) -> pd.Categorical:
    """Return a column as labels, with the categories that it has, or else in ascending order."""
    own = pd.Categorical(column) if not pd.api.types.is_object_dtype(column.dtype) else _of_objects(column)
    return own.rename_categories([_label(value) for value in own.categories.to_numpy()])


def _of_objects(column: pd.Series[Any]) -> pd.Categorical:
    # by their texts, since True is equal to 1 in Python
    return pd.Categorical(column.map(_label, na_action="ignore"))


def _label(value: object) -> str:
    """Return a value as a label; equal numbers have the same label.

    >>> [_label(value) for value in (3, 3.0, np.float32(0.1), "3.0", True, "B")]
    ['3', '3', '0.1', '3.0', 'True', 'B']
    """
    is_whole = isinstance(value, float | np.floating) and float(value).is_integer()
    return str(int(value)) if is_whole else str(value)  # type: ignore[call-overload]  # a number


def _recoded(column: pd.Categorical, places: Sequence[int], categories: Sequence[str], is_ordered: bool) -> Any:  # noqa: ANN401 pandas' own
    """Return a column with other categories; ``places`` has the code of each category there, or -1."""
    # the code -1 of missing values takes the last place
    codes: Int64Array = np.append(np.array(places, dtype=np.int64), -1)[column.codes]
    return pd.Categorical.from_codes(codes, list(categories), ordered=is_ordered)


def _has_booleans(column: pd.Series[Any]) -> bool:
    return bool(pd.api.types.is_bool_dtype(column.dtype))


def _has_numbers(column: pd.Series[Any]) -> bool:
    return pd.api.types.is_numeric_dtype(column) and not _has_booleans(column)


def _warnings(labels: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield warnings about labels that may be missing values, or the same label."""
    like_missing = {name: [one for one in own if one.casefold() in _LIKE_MISSING] for name, own in labels.items()}
    if any(like_missing.values()):
        of_columns = [f"{name} {', '.join(map(repr, own))}" for name, own in like_missing.items() if own]
        every = sorted({*chain.from_iterable(like_missing.values())})
        yield (
            f"WARNING: labels that may stand for missing ones: {few(of_columns, _MOST_VALUES, '; ')}. If they do, pass "
            f"na_values={every}"
        )
    alike = list[str]()
    for name, own in labels.items():
        by_text: dict[str | float, list[str]] = {}
        for label in own:
            by_text.setdefault(_plain(label), []).append(label)
        spellings = [" and ".join(map(repr, same)) for same in by_text.values() if len(same) > 1]
        alike += [f"{name} {few(spellings, _MOST_EXAMPLES, '; ')}"] if spellings else []
    if alike:
        yield f"WARNING: labels that may be the same: {few(alike, _MOST_VALUES, '; ')}. If they are, pass labels='FILE'"


def _plain(label: str) -> str | float:
    """Return what is left of a label without case, spaces and hyphens between words; a number as a number.

    >>> [_plain(label) for label in ("B cell", "b-cell ", "CD4+ T", "CD4- T", "1.0")]
    ['bcell', 'bcell', 'cd4+ t', 'cd4t', 1.0]
    """
    try:
        return float(label)
    except ValueError:
        return re.sub(r"(?<=\w)[\s_-]+(?=\w)", "", label.strip().casefold())
