"""Labels: ``obs`` of all datasets of a collection, read with the rows of a load request.

In memory, ``obs`` of 10^8 cells takes gigabytes on each rank. ``collect`` stores columns so that a run of rows can be
read like values: numbers, codes of categories, and flags of missing values. Only categories are in memory. Labels that
are stored otherwise, as annbatch's collections have them, are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import islice
from typing import Any, NamedTuple, Self

import anndata as ad
import numpy as np
import numpy.typing as npt
import pandas as pd
from zarr import Array

from annbatch_distributed.core.rows import runs
from annbatch_distributed.core.values import Int64Array
from annbatch_distributed.loader import chunk_reader
from annbatch_distributed.loader.columns import MOST_ROWS, Chunking, Column, bounds_of
from annbatch_distributed.loader.files import files_in, together
from annbatch_distributed.loader.shards import DamagedChunkError, Shards

#: By ``encoding-type``: classes of values and flags of missing ones.
_NULLABLE: dict[str, Callable[..., Any]] = {
    "nullable-integer": pd.arrays.IntegerArray,
    "nullable-boolean": pd.arrays.BooleanArray,
}


class Strings:
    """Stored strings, read when they are asked for, and verified as far as they have checksums."""

    def __init__(self, stored: Any) -> None:  # noqa: ANN401 an array or a group of zarr's
        self._stored = stored
        # flags of missing strings are in a group with them
        array = stored if isinstance(stored, Array) else stored["values"]
        self._n_strings = int(array.shape[0])
        shards = Shards.of(stored.async_array) if isinstance(stored, Array) else None
        self._shards = shards if shards is not None and shards.dtype == object else None

    @property
    def is_read_in_chunks(self) -> bool:
        """True if some strings are read without all others."""
        return self._shards is not None and self._shards.chunk_size <= MOST_ROWS

    def __len__(self) -> int:
        return self._n_strings

    def __getitem__(self, rows: slice | Int64Array) -> pd.Index[Any]:
        """Return the strings of some rows; a DamagedChunkError if they aren't as they were written."""
        if self._shards is None:
            return pd.Index(ad.io.read_elem(self._stored))[rows]
        wanted = np.arange(*rows.indices(self._n_strings)) if isinstance(rows, slice) else rows
        strings = np.empty(len(wanted), dtype=object)
        chunk_reader.read(self._shards, *runs(wanted), strings)
        # pandas takes no strings at all for objects
        return pd.Index(strings, dtype=_text_dtype() if self._n_strings else object)


class Names(Strings):
    """Names of the cells of a dataset."""

    def __init__(self, number: int, table: Any) -> None:  # noqa: ANN401 a group of zarr's
        super().__init__(table[table.attrs["_index"]])
        self._number = number

    def __getitem__(self, rows: slice | Int64Array) -> pd.Index[Any]:
        """Return the names of some cells; an OSError if they aren't as they were written."""
        try:
            return super().__getitem__(rows)
        except DamagedChunkError as error:
            raise error.of_cells(self._number, np.arange(error.start, error.stop)) from error


@cache
def _text_dtype() -> Any:  # noqa: ANN401 a dtype of pandas
    """Return the dtype of strings in an index: of objects before pandas 3."""
    return pd.Index([""]).dtype


class _Form(NamedTuple):
    """Kind of a column, and its arrays in a dataset."""

    kind: str
    """Its ``encoding-type``."""
    dtype: Any
    """Of the values: a NumPy dtype, or a dtype of categories."""
    arrays: tuple[Array[Any], ...]
    make: Callable[..., Any]
    """Function that makes values of pandas from the values of the arrays."""

    def is_like(self, other: _Form) -> bool:
        """Return True if columns have one dtype, so that their values can be put together."""
        if self.kind != other.kind:
            return False
        if not isinstance(self.dtype, pd.CategoricalDtype):
            return bool(self.dtype == other.dtype)
        return _longest([self.dtype, other.dtype]) is not None


def _longest(dtypes: Sequence[pd.CategoricalDtype]) -> pd.CategoricalDtype | None:
    """Return the dtype with the most categories, of which all others have the first ones; None if there is none.

    Codes are the same in all of them. Datasets that were added later may have more categories.
    """
    longest = max(dtypes, key=lambda dtype: len(dtype.categories))
    are_first = all(longest.categories[: len(one.categories)].equals(one.categories) for one in dtypes)
    return longest if are_first and len({bool(one.ordered) for one in dtypes}) == 1 else None


#: Values of a column of all datasets: a function that makes them of the values of some arrays, and these arrays.
type _Values = tuple[Callable[..., Any], list[Column]]


class Labels:
    """Labels of all datasets of a collection, of which only categories are in memory."""

    def __init__(
        self,
        lengths: Sequence[int],
        columns: Mapping[str, _Values],
        names: Sequence[Names] | None,
        index_name: str | None,
    ) -> None:
        self._columns = columns
        self._names = names
        self._index_name = index_name
        self._firsts = [first for first, _ in bounds_of(lengths)]
        self._lengths = lengths
        _, parts = next(iter(columns.values()))
        self._chunking = Chunking(parts[0].chunk_size, lengths)

    @classmethod
    def of(cls, tables: Sequence[Any], *, names: bool) -> Self | None:
        """Return the labels of the groups ``obs`` of all datasets; None if they can't be read with the rows."""
        # before anything is read from a remote store
        if files_in(tables[0].store) is None or (columns := _columns_of(tables)) is None:
            return None
        stored = [Names(number, table) for number, table in enumerate(tables)]
        if names and not all(own.is_read_in_chunks for own in stored):
            return None
        key = tables[0].attrs["_index"]
        return cls([len(own) for own in stored], columns, stored if names else None, None if key == "_index" else key)

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(self._columns)

    def read(
        self,
        rows_of: Mapping[int, Int64Array],
        at: npt.NDArray[np.intp] | None = None,
        *,
        columns: Sequence[str] | None = None,
    ) -> pd.DataFrame:
        """Return labels of rows of each dataset, or of those at some places among them.

        The index has the names of the cells, or without names their rows in the collection. Raises an OSError if they
        are damaged.
        """
        index, places = self._index(rows_of), self._chunking.places(rows_of)
        if at is not None:
            index, places = index[at], places._replace(at=places.at[at])
        wanted = {name: self._columns[name] for name in (self._columns if columns is None else columns)}
        read = iter(together(column.reading(places) for _, parts in wanted.values() for column in parts))
        values = {name: make(*islice(read, len(parts))) for name, (make, parts) in wanted.items()}
        return pd.DataFrame(values, index=index, copy=False)

    def tables(self) -> list[pd.DataFrame]:
        """Return the labels of each dataset, all of its rows."""
        return [self.read({number: np.arange(length)}) for number, length in enumerate(self._lengths)]

    def _index(self, rows_of: Mapping[int, Int64Array]) -> pd.Index[Any]:
        if self._names is None:
            return pd.Index(np.concatenate([rows + self._firsts[number] for number, rows in rows_of.items()]))
        parts = [self._names[number][rows] for number, rows in rows_of.items()]
        return parts[0].append(parts[1:]).rename(self._index_name)


def in_memory(tables: Sequence[Any], first: int, *, names: bool) -> list[pd.DataFrame | None]:
    """Return the stored ``obs`` of each dataset; None for those without columns.

    Without names, the index has the rows from ``first`` on. Categories that begin with the same ones become equal.
    """
    loaded: list[Any] = []
    for table in tables:
        if not table.attrs["column-order"]:
            loaded.append(None)
            continue
        if names:
            loaded.append(ad.io.read_elem(table))
            continue
        columns: dict[str, Any] = {name: ad.io.read_elem(table[name]) for name in table.attrs["column-order"]}
        n_obs = len(next(iter(columns.values())))
        loaded.append(pd.DataFrame(columns, index=pd.RangeIndex(first, first + n_obs), copy=False))
        first += n_obs
    obs = [one for one in loaded if one is not None]
    for name in obs[0] if obs else ():
        dtypes = [one[name].dtype for one in obs if name in one]
        are_labels = all(isinstance(dtype, pd.CategoricalDtype) for dtype in dtypes)
        longest = _longest(dtypes) if are_labels else None
        for one in obs:
            if longest is not None and name in one:
                one[name] = one[name].astype(longest)
    return loaded


def _columns_of(tables: Sequence[Any]) -> dict[str, _Values] | None:
    """Return the columns of the groups ``obs`` of all datasets; None if they can't be read with the rows."""
    orders = [list(table.attrs["column-order"]) for table in tables]
    if not orders[0] or any(order != orders[0] for order in orders):
        return None
    columns: dict[str, _Values] = {}
    for name in orders[0]:
        if (values := _values_of([table[name] for table in tables])) is None:
            return None
        columns[name] = values
    same_chunks = len({part.chunk_size for _, parts in columns.values() for part in parts}) == 1
    return columns if same_chunks else None


def _values_of(elements: Sequence[Any]) -> _Values | None:
    """Return a column of all datasets; None if it can't be read with the rows."""
    forms = [form for element in elements if (form := _form_of(element)) is not None]
    # the form with the most categories makes the values of all
    most = max(forms, key=lambda form: len(getattr(form.dtype, "categories", ())), default=None)
    if most is None or len(forms) < len(elements) or not all(form.is_like(most) for form in forms):
        return None
    # the codes of all datasets; or the values of all, and the flags of all
    by_part = zip(*([Shards.of(array.async_array) for array in form.arrays] for form in forms), strict=True)
    parts = [column for shards in by_part if (column := Column.of(shards)) is not None]
    return (most.make, parts) if len(parts) == len(most.arrays) else None


def _form_of(element: Any) -> _Form | None:  # noqa: ANN401 an array or a group of zarr's
    """Return the form of a stored column; None if it can't be read with the rows."""
    kind = element.attrs.get("encoding-type")
    if kind == "array" and isinstance(element, Array):
        return _Form(kind, element.dtype, (element,), _unchanged)
    if kind == "categorical":
        categories: Any = Strings(element["categories"])[:]
        dtype = pd.CategoricalDtype(categories, ordered=bool(element.attrs["ordered"]))
        return _Form(kind, dtype, (element["codes"],), partial(pd.Categorical.from_codes, dtype=dtype))
    if kind in _NULLABLE:
        return _Form(kind, element["values"].dtype, (element["values"], element["mask"]), _NULLABLE[kind])
    return None


def _unchanged(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values
