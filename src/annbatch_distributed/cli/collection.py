"""Collections of the command line, their rows, and the samplers of a command's options.

A chunk of cells, names or categories counts as lost if it isn't in the store. zarr would silently read fill values for
it. Writers omit chunks that have only fill values, as columns of ``obs`` may; for cells, such a chunk would have no
counts at all.
"""

from __future__ import annotations

import ast
import re
import shlex
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import gcd
from typing import Any

import numpy as np
import pandas as pd
import zarr
from annbatch import DatasetCollection
from annbatch.samplers import RandomSampler, SequentialSampler

from annbatch_distributed import DistributedSampler, EpochPlan, Rank, suggest_sizes
from annbatch_distributed.cli import CommandError
from annbatch_distributed.core.values import as_bytes, few
from annbatch_distributed.loader._annbatch import n_rows_of
from annbatch_distributed.loader.collection import as_collection


def lost_chunks(collection: DatasetCollection) -> list[str]:
    """Return a line for each array that has lost chunks."""
    groups = list(collection)
    # if keys can't be listed, every chunk would look lost
    if not _lists_keys(groups[0]):
        return []
    return [
        f"{group.basename} lacks chunks of {array.path.removeprefix(f'{group.path}/')}"
        for group in groups
        for array in _arrays(group)
        if array.nchunks_initialized < array.nchunks
    ]


def _lists_keys(group: zarr.Group) -> bool:
    """Return True if a store can list its keys; some web servers and buckets can't."""
    try:
        return any(zarr.open_group(group.store, path=group.path, mode="r", use_consolidated=False).keys())
    except Exception:  # noqa: BLE001 each store has its own error if listing isn't allowed
        return False


def _arrays(group: Any) -> Iterator[zarr.Array[Any]]:  # noqa: ANN401 a group of zarr's
    """Yield the arrays of a dataset whose chunks writers never omit."""
    cells, obs, var = group["X"], group["obs"], group["var"]
    # writers omit all chunks of sparse cells without values
    if isinstance(cells, zarr.Array):
        yield cells
    elif cells["data"].size:
        yield from (cells["indptr"], cells["data"])
        if cells["indices"].nchunks_initialized:  # none are written if all values are of the first gene
            yield cells["indices"]
    names = [table[table.attrs.get("_index", "_index")] for table in (obs, var)]
    # categories of categorical columns, but not codes, which may be the fill value 0 in all cells of a chunk
    columns = [obs[name] for name in obs.attrs["column-order"]]
    names += [column["categories"] for column in columns if isinstance(column, zarr.Group) and "categories" in column]
    # strings with missing values are a group of values and flags
    arrays = (array if isinstance(array, zarr.Array) else array["values"] for array in names)
    yield from (array for array in arrays if array.size > 1)  # a single name may be empty, which is the fill value


class Cells:
    """Collection at a path or URL, opened for reading; a CommandError if it can't be read."""

    def __init__(self, options: Namespace) -> None:
        self.path = str(options.path)
        # only the commands that read cells have a cache
        cache = {name: getattr(options, name, None) for name in ("cache", "cache_limit")}
        with self._readable():
            self.collection = as_collection(self.path, **cache)
            # from metadata; raises if annbatch would read rows wrongly
            self.n_obs = sum(n_rows_of(group["X"], group["X"].path) for group in self.collection)
            if not self.n_obs:
                raise ValueError("it has no rows")

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # zarr and its stores raise many types for missing or damaged data
            what = f"{type(error).__name__}: {error}"
            if "BadScheme" in what:  # the error of obstore doesn't name the variable
                what = "its server has an http:// address, which needs AWS_ALLOW_HTTP=true in the environment"
            raise CommandError(f"{self.path}: can't be read as a collection: {what}") from error

    def lost(self) -> list[str]:
        """Return a line for each array that has lost chunks."""
        with self._readable():
            return lost_chunks(self.collection)

    def labels(self, column: str) -> pd.Categorical:
        """Return a column of ``obs``."""
        with self._readable():
            obs = self.collection.obs([column])
            columns: Any = next(iter(self.collection))["obs"].attrs["column-order"]
        if column not in obs:
            raise CommandError(f"{self.path}: obs has no column {column!r}. It has {_listed(columns)}")
        return pd.Categorical(obs[column])

    def mask(self, ranges: Sequence[slice] | None, conditions: Sequence[str] | None) -> Any:  # noqa: ANN401 any mask
        """Return a mask of the rows in some ranges that match all conditions.

        Values of the same column are alternatives; excluded values add up.
        """
        for rows in ranges or ():
            if (rows.stop or rows.start + 1) > self.n_obs:
                raise CommandError(
                    f"--rows {rows.start}:{rows.stop or ''} must lie within the {self.n_obs:,} rows of {self.path}"
                )
        if not conditions:
            return ranges
        # (n_obs,): True in the ranges, then False for rows that don't match a condition
        flags = np.zeros(self.n_obs, dtype=np.bool_)
        for rows in ranges or [slice(None)]:
            flags[rows] = True
        labels_of = cache(lambda column: self.labels(column).rename_categories(str))
        any_of: dict[str, Any] = {}
        for condition in conditions:
            # "donor=d1" selects a value, "donor!=d1" other values and missing values, "donor" any value
            name, equals, value = condition.partition("=")
            column = name.removesuffix("!") if equals else name
            if not column:
                raise CommandError(f"--where must be COLUMN=VALUE, COLUMN!=VALUE or COLUMN, got {condition!r}")
            labels = labels_of(column)
            if equals and value not in labels.categories:
                known = _listed([repr(category) for category in labels.categories])
                raise CommandError(f"{self.path}: column {column!r} has no value {value!r}. It has {known}")
            if not equals:
                flags &= labels.notna()
            elif name != column:
                flags &= labels != value
            else:  # values of one column are alternatives
                any_of[column] = any_of.get(column, False) | (labels == value)
        flags = np.logical_and.reduce([flags, *any_of.values()])
        if not flags.any():
            raise CommandError(
                f"--where {' '.join(conditions)}{' and --rows' * bool(ranges)} must select a row, got none"
            )
        return flags


def choose_sizes(options: Namespace, mask: Any, cells: Cells | None) -> None:  # noqa: ANN401 any mask
    """Set the sizes of chunks and load requests that the options leave open, as ``from_collection`` chooses them."""
    if cells is not None and options.chunk_size is None and options.preload_nchunks is None:
        with _reported():
            sizes = suggest_sizes(
                cells.collection,
                mask=mask,
                memory=as_bytes(options.memory) // (options.virtual_ranks or 1),  # a rank may run all virtual ranks
                batch_size=options.batch_size,
                prefetch=options.prefetch,
            )
        options.chunk_size, options.preload_nchunks = sizes.chunk_size, sizes.preload_nchunks
    options.chunk_size = options.chunk_size or 64
    # the smallest number of chunks from 32 on that makes whole batches: 33 for chunks of 64 and batches of 192
    step = options.batch_size // gcd(options.batch_size, options.chunk_size)
    options.preload_nchunks = options.preload_nchunks or -(-32 // step) * step


@contextmanager
def _reported() -> Iterator[None]:
    """Convert errors about options to a CommandError."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise CommandError(in_options(str(error))) from error


#: Arguments that are options of the commands about loaders, too.
_ARGUMENTS = [
    *("remainder", "sharding", "seed", "batch_size", "chunk_size", "preload_nchunks", "virtual_ranks", "prefetch"),
    "memory",
]
_STRING = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
#: A string, a list or dict of strings, True, or a number that doesn't begin a name, such as one of a file.
_LITERAL = rf"(?:{_STRING}|\[(?:{_STRING}|[^\]'\"])*\]|{{(?:{_STRING}|[^}}'\"])*}}|True|\d+(?!\.?\w))"


def in_options(text: str, arguments: Sequence[str] = _ARGUMENTS) -> str:
    """Return a text with options of the command in place of arguments.

    >>> in_options("Pass remainder='exact', or a smaller batch_size.")
    'Pass --remainder exact, or a smaller --batch-size.'
    >>> in_options("rename: pass rename={'type a': 'b'}.", ["rename"])
    "--rename: pass --rename 'type a=b'."
    """
    text = re.sub(rf"(?<![-./\w])({'|'.join(arguments)})=({_LITERAL})", _as_option, text)
    # a name of one word may be any word, except at the beginning of a message
    of_beginning = rf"(?:(?<=^)|(?<=WARNING: ))(?:{'|'.join(arguments)})(?=:| must)"
    bare = [rf"{name}\b(?!\.\w)" for name in arguments if "_" in name]
    return re.sub(rf"(?<![-./\w])(?:--)?({'|'.join([*bare, of_beginning])})", _as_option, text)


def _as_option(match: re.Match[str]) -> str:
    name, *values = match.groups()
    words = list[str]()
    for value in map(ast.literal_eval, values):
        if isinstance(value, dict):
            words += [f"{old}={new}" for old, new in value.items()]
        elif value is not True:
            words += map(str, value) if isinstance(value, list) else [str(value)]
    return " ".join([f"--{name.replace('_', '-')}", *map(shlex.quote, words)])


def sampler_of(options: Namespace, mask: Any, rank: int) -> DistributedSampler:  # noqa: ANN401 any mask
    """Return the sampler of a rank, from the options."""
    kind = SequentialSampler if options.no_shuffle else RandomSampler
    return DistributedSampler(
        kind(options.chunk_size, options.preload_nchunks, options.batch_size),
        dist_info=Rank(rank, options.ranks),
        remainder=options.remainder,
        sharding=options.sharding,
        seed=options.seed,
        virtual_ranks=options.virtual_ranks,
        mask=mask,
    )


def plans_of(options: Namespace, mask: Any, n_obs: int) -> list[EpochPlan]:  # noqa: ANN401 any mask
    """Return the plan of each epoch; a CommandError if the options are invalid."""
    plans = []
    with _reported():
        sampler = sampler_of(options, mask, 0)
        for epoch in range(options.epoch, options.epoch + options.epochs):
            sampler.set_epoch(epoch)
            plans.append(sampler.plan(n_obs))
    return plans


def settings_of(options: Namespace, n_obs: int) -> dict[str, Any]:
    """Return the settings of all epochs, for JSON."""
    sizes = ["ranks", "virtual_ranks", "chunk_size", "preload_nchunks", "batch_size"]
    names = [*sizes, "remainder", "sharding", "seed"]
    settings = {name: getattr(options, name) for name in names}
    return {"n_obs": n_obs, "shuffle": not options.no_shuffle} | settings


def _listed(names: Sequence[str]) -> str:
    return few(names, 20) or "none"
