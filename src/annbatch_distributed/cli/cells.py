"""The collection that a command names, its rows, and the samplers that the options make for them.

A chunk of cells, names or categories that isn't in the store counts as lost: zarr would read fill values for it, and
raise nothing. Writers leave out chunks that hold the fill value only, as columns of ``obs`` may, but that would have to
be cells without a single count.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import pandas as pd
import zarr
from annbatch import DatasetCollection
from annbatch.samplers import RandomSampler, SequentialSampler

from annbatch_distributed import DistributedSampler, EpochPlan, Rank
from annbatch_distributed.cli import CommandError
from annbatch_distributed.loader._annbatch import n_rows_of


def lost_chunks(collection: DatasetCollection) -> list[str]:
    """Return a line for each array that has lost chunks."""
    groups = list(collection)
    # where keys can't be listed, every chunk would look lost
    if not _lists_keys(groups[0]):
        return []
    return [
        f"{group.basename} lacks chunks of {array.path.removeprefix(f'{group.path}/')}"
        for group in groups
        for array in _arrays(group)
        if array.nchunks_initialized < array.nchunks
    ]


def _lists_keys(group: zarr.Group) -> bool:
    """Whether a store says which keys it has: some web servers and buckets don't."""
    try:
        return any(zarr.open_group(group.store, path=group.path, mode="r", use_consolidated=False).keys())
    except Exception:  # noqa: BLE001 each store has its own error where listing isn't allowed
        return False


def _arrays(group: Any) -> Iterator[zarr.Array[Any]]:  # noqa: ANN401 a group of zarr's
    """Yield the arrays of a data set of which writers leave no chunk out."""
    cells, obs, var = group["X"], group["obs"], group["var"]
    # of sparse cells without a single value, writers leave out everything
    if isinstance(cells, zarr.Array):
        yield cells
    elif cells["data"].size:
        yield from (cells["indptr"], cells["data"])
        if cells["indices"].nchunks_initialized:  # none are written if all values are of the first gene
            yield cells["indices"]
    names = [table[table.attrs.get("_index", "_index")] for table in (obs, var)]
    # of a categorical column, the categories: codes may be the fill value, 0, in all cells of a chunk
    columns = [obs[name] for name in obs.attrs["column-order"]]
    names += [column["categories"] for column in columns if isinstance(column, zarr.Group) and "categories" in column]
    # strings of which some are missing are a group of values and flags
    arrays = (array if isinstance(array, zarr.Array) else array["values"] for array in names)
    yield from (array for array in arrays if array.size > 1)  # a name may be empty


class Cells:
    """A collection, opened for reading by its path or URL; a CommandError if it can't be read."""

    def __init__(self, path: str) -> None:
        self.path = path
        with self._readable():
            self.collection = DatasetCollection(zarr.open_group(_stored(path), mode="r"))
            if self.collection.is_empty:
                raise ValueError("no annbatch collection, which DatasetCollection(...).add_adatas writes")
            # from metadata; it is an error where annbatch would read rows wrongly
            self.n_obs = sum(n_rows_of(group["X"], group["X"].path) for group in self.collection)
            if not self.n_obs:
                raise ValueError("no rows")

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # zarr and its stores raise all kinds for what is missing or damaged
            what = f"{type(error).__name__}: {error}"
            if "BadScheme" in what:  # of obstore, whose error doesn't say it
                what = "its server has an address http://..., which needs AWS_ALLOW_HTTP=true in the environment"
            raise CommandError(f"{self.path}: not a collection that can be read: {what}") from error

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
            raise CommandError(f"{self.path}: no column {column!r} in obs, which has {_listed(columns)}")
        return pd.Categorical(obs[column])

    def mask(self, stretches: Sequence[slice] | None, conditions: Sequence[str] | None) -> Any:  # noqa: ANN401 any mask
        """Return what selects the rows of some stretches for which all conditions hold.

        Of several values of a column, a row has one; of several that it must not have, none.
        """
        if not conditions:
            return stretches
        # a flag for each row: the stretches, then without the rows that a condition rules out
        flags = np.zeros(self.n_obs, dtype=np.bool_)
        for stretch in stretches or [slice(None)]:
            flags[stretch] = True
        labels_of = cache(lambda column: self.labels(column).rename_categories(str))
        any_of: dict[str, Any] = {}
        for condition in conditions:
            # "donor=d1" selects a value, "donor!=d1" all others and missing ones, "donor" all values
            name, equals, value = condition.partition("=")
            column = name.removesuffix("!") if equals else name
            if not column:
                raise CommandError(f"--where takes COLUMN=VALUE, COLUMN!=VALUE or COLUMN, got {condition!r}")
            labels = labels_of(column)
            if equals and value not in labels.categories:
                there = _listed(labels.categories)
                raise CommandError(f"{self.path}: no {value!r} in column {column!r}, which has {there}")
            if not equals:
                flags &= labels.notna()
            elif name != column:
                flags &= labels != value
            else:  # values of one column are alternatives
                any_of[column] = any_of.get(column, False) | (labels == value)
        return np.logical_and.reduce([flags, *any_of.values()])


def _stored(path: str) -> Any:  # noqa: ANN401 whatever zarr opens
    """Return the store of a URL, by obstore if that is there; or what was given, for zarr to open."""
    if "://" not in path or find_spec("obstore") is None:
        return path
    from obstore.store import from_url
    from zarr.storage import ObjectStore

    return ObjectStore(from_url(path), read_only=True)


def sampler_of(options: Namespace, mask: Any, rank: int) -> DistributedSampler:  # noqa: ANN401 any mask
    """Return the sampler that the options make for a rank."""
    kind = {"random": RandomSampler, "sequential": SequentialSampler}[options.sampler]
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
    """Return the plan of each epoch; a CommandError if there can't be one."""
    plans = []
    try:
        sampler = sampler_of(options, mask, 0)
        for epoch in range(options.epoch, options.epoch + options.epochs):
            sampler.set_epoch(epoch)
            plans.append(sampler.plan(n_obs))
    except (TypeError, ValueError) as error:
        raise CommandError(str(error)) from error
    return plans


def settings_of(options: Namespace, n_obs: int) -> dict[str, Any]:
    """Return what JSON says of all epochs."""
    sizes = ["ranks", "virtual_ranks", "chunk_size", "preload_nchunks", "batch_size"]
    names = [*sizes, "sampler", "remainder", "sharding", "seed"]
    return {"n_obs": n_obs} | {name: getattr(options, name) for name in names}


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*names[:20], *(["..."] if len(names) > 20 else [])]) or "none"
