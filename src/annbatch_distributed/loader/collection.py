"""Collections that a user names: by a path, a URL, a zarr group, or annbatch's own object."""

from __future__ import annotations

from importlib.util import find_spec
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import zarr
from annbatch import DatasetCollection

from annbatch_distributed.loader.cache import Cache

#: Collection, a zarr group with its datasets, or its path or URL.
type AnyCollection = DatasetCollection | zarr.Group | str | PathLike[str]


def as_collection(
    collection: object, *, cache: str | PathLike[str] | None = None, cache_limit: int | str | None = None
) -> DatasetCollection:
    """Return a collection, opened for reading, maybe through a cache; a TypeError or an OSError if it is none.

    A ValueError if annbatch has written no datasets there.
    """
    if cache is None and cache_limit is not None:
        raise TypeError("cache_limit is the limit of a folder, got none. Pass cache='/path/of/a/folder' as well.")
    what = collection
    if isinstance(collection, str | PathLike):
        collection = _group_at(fspath(collection), None if cache is None else Cache(cache, cache_limit))
    elif cache is not None:
        raise TypeError(
            "With cache=..., a collection must be a URL or a path, got one that was opened before, of type "
            f"{type(collection).__name__}. Pass its URL."
        )
    if isinstance(collection, DatasetCollection):
        return collection
    if not isinstance(collection, zarr.Group):
        raise TypeError(
            "A collection must be a path or URL, a zarr group, or an annbatch DatasetCollection, got "
            f"{collection!r} of type {type(collection).__name__}."
        )
    opened = DatasetCollection(collection)
    if opened.is_empty:
        raise ValueError(f"{what} must have datasets of annbatch, got none. {_REMEDY}")
    return opened


_REMEDY = "Write h5ad files to a collection with annbatch-distributed collect."


def _group_at(path: str, cache: Cache | None) -> zarr.Group:
    if "://" not in path and not Path(path).is_dir() and not path.endswith(".zip"):
        found = "must be the folder of a collection, got a file" if Path(path).exists() else "doesn't exist"
        raise FileNotFoundError(f"{path} {found}. {_REMEDY}")
    try:
        return zarr.open_group(store_at(path, cache), mode="r")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} must be a collection, got no zarr group there. {_REMEDY}") from error


def store_at(path: str, cache: Cache | None = None) -> Any:  # noqa: ANN401 whatever zarr opens
    """Return an obstore store for a URL, if obstore is installed; else the path, for zarr to open."""
    if cache is None and ("://" not in path or find_spec("obstore") is None):
        return path
    if cache is not None and path.endswith(".zip"):
        raise ValueError(f"{path} must be a folder of objects to be read through a cache, got a zip file. Unpack it.")
    if find_spec("obstore") is None:
        raise ImportError("cache=... needs obstore, which isn't installed. Install it: pip install obstore.")
    from obstore.exceptions import BaseError
    from obstore.store import LocalStore, from_url
    from zarr.storage import ObjectStore

    try:
        # a URL would lose .. behind a symlink, and # and ?
        place = path if "://" in path else str(Path(path).resolve())
        store = from_url(place) if "://" in path else LocalStore(place)
        if cache is None:
            return ObjectStore(store, read_only=True)
        from annbatch_distributed.loader.cached_store import CachedStore

        return CachedStore(store, place, cache)
    except BaseError as error:
        problem = str(error).partition("\n")[0]
        raise OSError(f"{path} must be the URL of a collection, but obstore can't open it: {problem}.") from error
