"""Columns of obs of several files: their dtypes, and their labels."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
import pytest

from annbatch_distributed.collect import Problems
from annbatch_distributed.collect.labels import replace_labels, unite

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
        ([np.array([True, False]), pd.array([True], dtype="boolean")], "bool"),
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
    ],
)
def test_numbers_that_would_lose_digits_are_refused(columns: list[Any], message: str) -> None:
    with pytest.raises(Problems, match=f"x: .*{message}"):
        united(*columns)


@pytest.mark.parametrize(
    ("columns", "labels"),
    [
        ([["1", "1.0"]], ["1", "1.0"]),
        ([[1.0, 2.0], ["1", "b"]], ["1", "2", "1", "b"]),
        ([[True, False], pd.Categorical([0.5, 1.0])], ["True", "False", "0.5", "1"]),
        ([pd.Categorical([1, 2]), [True, False]], ["1", "2", "True", "False"]),
        ([np.array([True, 1, "1"], dtype=object)], ["True", "1", "1"]),
        ([np.array([True, False]), None], ["True", "False", None, None]),
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


def test_categories_keep_the_order_of_the_files() -> None:
    """Categories that agree stay as they are; others are in the order in which the files have them."""

    def ordered(values: str, categories: str, *, is_ordered: bool = True) -> Any:
        return pd.Categorical([*values], [*categories], ordered=is_ordered)

    for parts, categories, is_ordered in (
        ([ordered("ba", "zba"), ordered("b", "zba"), None], "zba", True),
        ([ordered("ba", "zba"), ordered("b", "abz")], "bab"[:2], False),
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
        "WARNING: labels that may stand for missing ones: x0 nan; x1 nan; x2 nan. If they do, pass --na-values nan"
    )
    assert re.search(
        r"may be the same: x0 'B cell' and 'b-cell'; x1 .*; x2 [^;]*\. If they are, pass --labels FILE", alike
    )
