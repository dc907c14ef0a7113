"""Cells: the collection that a command names, its rows, and those that have some values in ``obs``."""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from annbatch_distributed.sharding import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pandas as pd
    from annbatch import DatasetCollection

__all__ = ["Cells", "InputError", "masked"]


class InputError(Exception):
    """What was asked for can't be; the message is one line that says why, and what to do."""


class Cells:
    """A collection on disk, opened for reading.

    Raises
    ------
    InputError
        If there is none at the path, or none that can be read.
    """

    def __init__(self, path: str) -> None:
        import zarr
        from annbatch import DatasetCollection

        from annbatch_distributed.loader.layout import n_rows_of

        if "://" not in path and not Path(path).exists():
            raise InputError(f"{path}: no such path")
        self.path = path
        with self._readable():
            self.collection: DatasetCollection = DatasetCollection(zarr.open_group(path, mode="r"))
            is_empty = self.collection.is_empty
            self._n_rows = (
                () if is_empty else tuple(n_rows_of(group["X"], group["X"].path) for group in self.collection)
            )
        if is_empty:
            raise InputError(f"{path}: a zarr group, but no collection, which DatasetCollection(...).add_adatas writes")
        if not self.n_obs:
            raise InputError(f"{path}: a collection without rows")

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Turn what is raised about a collection that can't be read into an InputError."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:
            raise InputError(f"{self.path}: no zarr group, and so no annbatch collection") from error
        except Exception as error:
            # whatever zarr and its stores raise about what is damaged
            what = f"{type(error).__name__}: {error}"
            raise InputError(f"{self.path}: not a collection that can be read: {what}") from error

    @property
    def n_obs(self) -> int:
        """How many rows it has."""
        return sum(self._n_rows)

    def lost(self) -> list[str]:
        """Return a line for each array that has lost chunks."""
        from annbatch_distributed.cli import chunks

        with self._readable():
            return chunks.lost(self.collection)

    def labels(self, column: str) -> pd.Categorical:
        """Return a column of ``obs``.

        Raises
        ------
        InputError
            If there is no such column.
        """
        import pandas as pd

        with self._readable():
            attributes: list[Any] = [group["obs"].attrs.asdict() for group in self.collection]
            columns: list[list[str]] = [list(one.get("column-order", [])) for one in attributes]
        known = [name for name in columns[0] if all(name in names for names in columns)]
        if column not in known:
            raise InputError(f"{self.path}: no column {column!r} in obs, which has {_listed(known)}")
        with self._readable():
            labels = pd.Categorical(self.collection.obs([column])[column])
        if len(labels) != self.n_obs:
            raise InputError(f"{self.path}: obs has {len(labels)} rows in column {column!r}, and X has {self.n_obs}")
        return labels

    def where(self, conditions: Iterable[str]) -> Rows:
        """Return the rows that have one of the values that are named for each column, as in ``["split=train"]``."""
        wanted: dict[str, list[str]] = {}
        for condition in conditions:
            column, equals, value = condition.partition("=")
            if not (column and equals):
                raise InputError(f"--where takes COLUMN=VALUE, such as split=train, got {condition!r}")
            wanted.setdefault(column, []).append(value)
        flags = np.ones(self.n_obs, dtype=np.bool_)
        for column, values in wanted.items():
            labels = self.labels(column)
            known = list(map(str, labels.categories))
            if unknown := [value for value in values if value not in known]:
                raise InputError(f"{self.path}: no {unknown[0]!r} in column {column!r}, which has {_listed(known)}")
            # the last one is for cells without a value, whose code is -1
            flags &= np.array([*(name in values for name in known), False])[labels.codes]
        if not flags.any():
            raise InputError(f"{self.path}: no row has all of {' '.join(conditions)}")
        return Rows.where(flags)

    def stored(self, rows: Sequence[int]) -> Iterator[tuple[int, np.ndarray[Any, Any], pd.Series[Any]]]:
        """Read single rows from the store, past annbatch: each row's number, values and annotations, in no order."""
        import anndata as ad

        start = 0
        for group, n_rows in zip(self.collection, self._n_rows, strict=True):
            its = [row for row in rows if start <= row < start + n_rows]
            if its:
                obs: Any = ad.io.read_elem(group["obs"])
                values = _values(group["X"])
                for row in its:
                    yield row, values(row - start), obs.iloc[row - start]
            start += n_rows


def _values(cells: Any) -> Callable[[int], np.ndarray[Any, Any]]:  # noqa: ANN401 an array or a group of zarr's
    """Return what reads the values of a row, all columns."""
    if hasattr(cells, "shape"):
        return lambda row: np.asarray(cells[row])
    pointers, indices, data = (cells[name] for name in ("indptr", "indices", "data"))
    width = cells.attrs["shape"][1]

    def read(row: int) -> np.ndarray[Any, Any]:
        start, stop = map(int, pointers[row : row + 2])
        values = np.zeros(width, dtype=data.dtype)
        np.add.at(values, indices[start:stop], data[start:stop])
        return values

    return read


def masked(stretches: Sequence[str], n_obs: int, among: Rows | None) -> Rows | None:
    """Return the rows of stretches such as ``"0:16000"`` or ``":16000"``, among some rows or all; None if it is all."""
    if not stretches:
        return among
    found = Rows()
    for text in stretches:
        bounds = re.fullmatch(r"(\d*):(\d*)", text)
        if bounds is None:
            raise InputError(f"--mask takes START:STOP, such as 0:{n_obs}, got {text!r}")
        start, stop = int(bounds[1] or 0), int(bounds[2] or n_obs)
        if not start < stop <= n_obs:
            raise InputError(f"--mask {text}: START must be below STOP, and STOP at most {n_obs}, the number of rows")
        found += Rows((range(start, stop),)) if among is None else among.within(start, stop)
    if not len(found):
        raise InputError(f"--mask {' '.join(stretches)}: none of the rows that --where selects is in it")
    return found


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*names[:20], "..."] if len(names) > 20 else names) or "none"
