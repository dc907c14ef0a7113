"""Columns of obs of several files: their dtypes, and their labels."""

from __future__ import annotations

import re
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed.collect import Problems, collect
from annbatch_distributed.collect.harmonize.labels import replace_labels, unite

if TYPE_CHECKING:
    from pathlib import Path

LARGE = 2**53 + 1


def united(*columns: Any) -> tuple[list[Any], list[str]]:
    """The values of a column of all files, and the lines about it; None is a file without it, of two cells."""
    tables = [
        pd.DataFrame({} if column is None else {"x": column}, index=range(2 if column is None else len(column)))
        for column in columns
    ]
    done, lines = unite(tables, [f"{number}.h5ad" for number in range(len(tables))])
    assert len({str(table["x"].dtype) for table in done}) == 1
    return pd.concat(done)["x"].tolist(), lines


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [
        ([np.array([1, 2]), np.array([3], dtype="int8")], "int64"),
        ([np.array([1, 2]), None], "float64"),
        ([np.array([1, 2]), np.array([0.5])], "float64"),
        ([np.array([0.5], dtype="float32"), None], "float32"),
        ([np.array([LARGE, LARGE - 1]), None], "Int64"),
        ([pd.array([LARGE, None], dtype="Int64"), np.array([LARGE - 1])], "Int64"),
        ([np.array([LARGE]), np.array([1], dtype="uint64")], "int64"),
        ([np.array([2**64 - 1], dtype="uint64"), np.array([1])], "uint64"),
        ([np.array([2**64 - 1], dtype="uint64"), None], "UInt64"),
        ([np.array([LARGE]), np.array([np.nan, 3.0])], "Int64"),
        ([np.array([LARGE]), np.array([np.nan, np.nan])], "Int64"),
        ([pd.array([1, None], dtype="Int8"), np.array([300])], "Int64"),
        ([pd.array([1, 2], dtype="Int8"), None], "Int64"),
        ([pd.array([1, 2], dtype="Int64"), np.array([300])], "int64"),
        ([pd.array([1, None], dtype="Int64"), np.array([0.5])], "float64"),
        ([np.array([np.nan, np.nan])], "float64"),
    ],
)
def test_numbers_keep_their_digits(columns: list[Any], dtype: str) -> None:
    """Numbers of all files are what they were, in one dtype that holds them."""
    tables = [
        pd.DataFrame({} if one is None else {"x": one}, index=range(2 if one is None else len(one))) for one in columns
    ]
    done, _ = unite(tables, [f"{number}.h5ad" for number in range(len(tables))])
    for table, column in zip(done, columns, strict=True):
        assert str(table["x"].dtype) == dtype
        given = [pd.NA] * 2 if column is None else list(column)
        for value, expected in zip(table["x"], given, strict=True):
            assert pd.isna(value) == pd.isna(expected)
            assert pd.isna(expected) or value == expected.item()  # Python compares integers and floats exactly


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            [np.array([LARGE]), np.array([0.5])],
            "and fractions have no common dtype .*, got 0.h5ad has int64, 1.h5ad has",
        ),
        ([np.array([2**64 - 1], dtype="uint64"), np.array([-1])], "negative numbers and whole numbers above 2"),
        ([[True, False], [0.5, 1.0]], "booleans and values such as 0.5 have no common dtype, got 0.h5ad has bool"),
        ([pd.Categorical([1, 2]), [True, False]], "booleans and values such as 2 have no common dtype"),
        ([pd.Categorical([True, None]), ["yes", "no"]], "booleans and values such as no and yes have no common dtype"),
    ],
)
def test_values_without_common_dtype_are_refused(columns: list[Any], message: str) -> None:
    with pytest.raises(Problems, match=f"x: .*{message}"):
        united(*columns)


@pytest.mark.parametrize(
    ("columns", "labels"),
    [
        ([["1", "1.0"]], ["1", "1.0"]),
        ([[1.0, 2.0], ["1", "b"]], ["1", "2", "1", "b"]),
        ([np.array([True, 1, "1"], dtype=object)], ["True", "1", "1"]),
        ([pd.Categorical([0.5, 1.0]), ["1", "b"]], ["0.5", "1", "1", "b"]),
        ([[np.nan, np.nan], ["a", "b"]], [None, None, "a", "b"]),
    ],
)
def test_labels_are_compared_by_their_texts(columns: list[Any], labels: list[str | None]) -> None:
    """Values are the same label if their texts are, in any order of the files."""
    for order in (slice(None), slice(None, None, -1)):
        expected = labels if order.step is None else [*np.concatenate(_split(labels, columns)[::-1])]
        values, _ = united(*columns[order])
        assert [None if pd.isna(value) else value for value in values] == expected


def _split(labels: list[Any], columns: list[Any]) -> list[Any]:
    lengths = [2 if column is None else len(column) for column in columns]
    return np.split(np.array(labels, dtype=object), np.cumsum(lengths)[:-1])


#: For each kind of column: its values, its dtype, and the dtype that it may have in a file if no cell lacks a value.
KINDS: dict[str, tuple[list[Any], str, str]] = {
    "boolean": ([True, False], "boolean", "bool"),
    "0 or 1": ([0, 1], "Int64", "int64"),
    "0.0 or 1.0": ([0.0, 1.0], "float64", "float64"),
    "word": (["True", "False"], "category", "object"),
    "small integer": ([0, 1, -7], "Int8", "int8"),
    "integer": ([5, 2**40], "Int64", "int64"),
    "float": ([0.5, -3.0], "float64", "float64"),
    "string": (["a", "b", "True"], "string", "object"),
    "category": (["a", "c"], "category", "category"),
    "category of integers": ([1, 2], "category", "category"),
}


@st.composite
def columns_of_files(draw: st.DrawFn) -> Any:
    """Columns of any kind, with or without cells, of which some or all lack a value; None is a file without it."""
    values, nullable, plain = KINDS[draw(st.sampled_from([*KINDS]))]
    cells = draw(st.lists(st.none() | st.sampled_from(values), max_size=4))
    dtype = nullable if None in cells or draw(st.booleans()) else plain
    return draw(st.sampled_from([None, pd.Series(np.array(cells, dtype=object)).astype(dtype)]))


def expected_of(columns: Any) -> list[Any] | None:
    """The values of a column of all files, None for a cell without one; None if they have no common dtype."""
    cells = [None if pd.isna(value) else value for one in columns for value in ([None] * 2 if one is None else one)]
    texts = [str(int(cell) if isinstance(cell, float) and cell % 1 == 0 else cell) for cell in cells]
    # a file without values says nothing, unless no file has any
    with_values = [one for one in columns if one is not None and one.notna().any()]
    if any(pd.api.types.is_bool_dtype(one) for one in with_values):
        if not {*texts} <= {"True", "False", "1", "0", "None"}:
            return None
        return [None if cell is None else text in {"True", "1"} for cell, text in zip(cells, texts, strict=True)]
    if all(pd.api.types.is_numeric_dtype(one) for one in with_values):
        return cells
    return [None if cell is None else text for cell, text in zip(cells, texts, strict=True)]


def assert_same(stored: Any, expected: list[Any]) -> None:
    # also by their types, since True is equal to 1 in Python
    assert [None if pd.isna(value) else value for value in stored] == expected
    assert [isinstance(value, bool | np.bool) for value in stored] == [isinstance(value, bool) for value in expected]


@given(st.lists(columns_of_files(), min_size=1, max_size=4).filter(lambda own: any(one is not None for one in own)))
def test_any_file_may_lack_any_values(columns: list[Any]) -> None:
    """Whatever files and cells lack, each value is stored as what it is, and each cell without one has none."""
    expected = expected_of(columns)
    if expected is None:
        with pytest.raises(Problems, match=r"x: booleans and values such as .* have no common dtype"):
            united(*columns)
        return
    stored, (line, *_) = united(*columns)
    assert_same(stored, expected)
    assert ("no values" in line) == (not any(value is not None for value in expected))


def test_files_may_lack_values_of_any_kind(tmp_path: Path) -> None:
    """Columns of each kind come through files and the collection as they are, whichever file lacks values."""
    tables: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
    expected: dict[str, Any] = {}
    for kind in ("boolean", "small integer", "float", "string", "category"):
        values, nullable, plain = KINDS[kind]
        forms = {
            "has all": pd.Series(np.array(values[:2], dtype=object)).astype(plain),
            "has some": pd.Series(np.array([values[0], None], dtype=object)).astype(nullable),
            "has none": pd.Series(np.array([None, None], dtype=object)).astype(nullable),
            "has no column": None,
        }
        for (first, one), (second, two) in [*combinations_with_replacement(forms.items(), 2)][:-1]:
            name = f"{kind}: a {first}, b {second}"
            expected[name] = expected_of([one, two])
            tables["a"] |= {} if one is None else {name: one.array}
            tables["b"] |= {} if two is None else {name: two.array}
    for file, table in tables.items():
        cells = ad.AnnData(np.ones((2, 1), "float32"), obs=pd.DataFrame(table, index=[f"{file}0", f"{file}1"]))
        with ad.settings.override(allow_write_nullable_strings=True):
            cells.write_h5ad(tmp_path / f"{file}.h5ad")
    cells[:0].write_h5ad(tmp_path / "empty.h5ad")
    files = [tmp_path / f"{name}.h5ad" for name in ("a", "b", "empty")]
    obs = collect(files, tmp_path / "cells.zarr", tell=lambda line: None).obs().loc[["a0", "a1", "b0", "b1"]]
    for name, own in expected.items():
        assert_same(obs[name], own)


def test_categories_keep_the_order_of_the_files() -> None:
    """Orders that agree are joined; other categories are in the order in which the files have them."""

    def ordered(values: str, categories: str, *, is_ordered: bool = True) -> Any:
        return pd.Categorical([*values], [*categories], ordered=is_ordered)

    for parts, categories, is_ordered in (
        ([ordered("ba", "zba"), ordered("b", "zba"), None], "zba", True),
        ([ordered("ba", "zba"), ordered("b", "abz")], "bab"[:2], False),
        ([ordered("lh", "lh"), ordered("lm", "lmh"), ordered("mm", "mhx")], "lmhx", True),
        ([ordered("hl", "lh"), ordered("lm", "lm")], "lhm", False),  # h and m have no order
        ([ordered("hl", "lh"), ordered("lh", "hl")], "lh", False),
        ([ordered("hl", "lh"), ordered("mm", "m")], "lhm", False),
        ([ordered("ba", "ba"), [*"ca"]], "bac", False),
        ([ordered("ba", "ba"), ordered("a", "ba", is_ordered=False)], "ba", False),
        ([[*"ca"], [*"bd"]], "acbd", False),
    ):
        tables = [
            pd.DataFrame({} if part is None else {"x": part}, index=range(2 if part is None else len(part)))
            for part in parts
        ]
        done, (line, *_) = unite(tables, ["f.h5ad"] * len(tables))
        for table in done:
            assert table["x"].cat.categories.tolist() == [*categories]
            assert table["x"].cat.ordered == is_ordered
        was_ordered = any(isinstance(part, pd.Categorical) and part.ordered for part in parts)
        assert ("without the order" in line) == (was_ordered and not is_ordered)


def test_labels_are_replaced() -> None:
    """Other spellings and missing values are replaced, also in numbers; the rest stays, and so does the order."""
    obs = pd.DataFrame(
        {
            "type": ["Tcell", "T cell", "Unknown", "B"],
            "stage": pd.Categorical([*"ablc"], [*"labc"], ordered=True),
            "cluster": [0, 1, 2, 0],
            "n": [0, 1, 2, 3],
        }
    )
    spellings: dict[str, dict[str, str | None]] = {
        "type": {"Tcell": "T cell", "X": "Y"},
        "cluster": {"0": "B"},
        "stage": {"l": "a"},
    }
    found = replace_labels(obs, spellings, ["Unknown", "B"])
    assert found == {("type", "Tcell"), ("cluster", "0"), ("stage", "l"), ("", "Unknown"), ("", "B")}
    assert obs["type"].astype(object).where(obs["type"].notna(), None).tolist() == ["T cell", "T cell", None, None]
    assert obs["cluster"].astype(object).where(obs["cluster"].notna(), None).tolist() == [None, "1", "2", None]
    assert obs["stage"].tolist() == [*"abac"]
    assert obs["stage"].cat.categories.tolist() == [*"abc"]
    assert obs["stage"].cat.ordered
    assert obs["n"].tolist() == [0, 1, 2, 3]


def test_suspicious_labels_are_one_warning_of_all_columns() -> None:
    tables = [pd.DataFrame({f"x{n}": ["nan", "B cell", "b-cell", "CD4+", "CD4-", "it's NA"] for n in range(3)})]
    _, lines = unite(tables, ["a.h5ad"])
    missing, alike = (line for line in lines if line.startswith("WARNING"))
    assert missing == (
        "WARNING: labels that may stand for missing ones: x0 'nan'; x1 'nan'; x2 'nan'. If they do, pass "
        "na_values=['nan']"
    )
    assert re.search(
        r"may be the same: x0 'B cell' and 'b-cell'; x1 .*; x2 [^;]*\. If they are, pass labels='FILE'", alike
    )
