"""Values from users and of the machine: integers, the names of a Series, nouns of messages, digests, and cores.

Python and NumPy accept a bool as an integer, truncate floats, and wrap large unsigned integers to negative ones. As row
indices, these would silently be different rows.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Buffer, Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from hashlib import blake2b
from itertools import chain
from operator import index
from pathlib import Path
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pandas as pd

type IntArray = npt.NDArray[np.integer[Any]]
type Int64Array = npt.NDArray[np.int64]

#: First integer that doesn't fit into 64 bits with a sign.
BOUND = 2**63

#: Attribute of the stored values of a collection: the dtype of the files' values, if it differs from the stored dtype.
FILE_DTYPE = "file_dtype"
#: Attribute of a stored array: a digest of each of its shards, all of which are stored.
SHARD_DIGESTS = "shard_digests"

#: Largest length of a list that is part of an identity; of a longer list, there is a digest.
MOST_LISTED = 16


def plural(number: int, noun: str) -> str:
    """Format a number with a noun: ``1 row``, ``10,906 rows``, ``2 batches``."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def few(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    """Join the first texts; ``...`` stands for the others.

    >>> few(["B", "NK", "T"], 2)
    'B, NK, ...'
    """
    return separator.join([*texts[:most], *(["..."] if len(texts) > most else [])])


#: What to pass here for an argument that users know from PyTorch.
_OF_TORCH = {
    "drop_last": "remainder='drop'",
    "num_replicas": "dist_info=Rank(rank, world_size)",
    "num_workers": "num_workers to to_dataloader() of the loader",
    "rank": "dist_info=Rank(rank, world_size)",
    "world_size": "dist_info=Rank(rank, world_size)",
}


def check_arguments(door: str, given: Iterable[str], *known: Iterable[str]) -> None:
    """Raise a TypeError for an argument that ``door`` doesn't have, and name one with a similar name."""
    names = {*chain(*known)}
    for name in given:
        if name not in names:
            similar = get_close_matches(name, names, 1)
            hint = f" Did you mean {similar[0]!r}?" if similar else ""
            if name in _OF_TORCH:
                hint = f" Pass {_OF_TORCH[name]}."
            raise TypeError(f"{door}() got an unexpected keyword argument {name!r}.{hint}")


def integer(name: str, value: object, *, least: int | None = None, below: int | None = None) -> int:
    """Return an integer of any library, such as NumPy or PyTorch, as Python's.

    ``name`` is its name in messages. A TypeError if it isn't an integer, or is a bool; a ValueError if it isn't within
    ``[least, below)``.
    """
    try:
        number = None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]  # raises a TypeError
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be an integer, got {shortened(value)} of type {type(value).__name__}.")
    if (least is not None and number < least) or (below is not None and number >= below):
        # Python refuses to format an integer of thousands of digits
        got = number if abs(number) < 2**128 else f"an integer of {number.bit_length()} bits"
        raise ValueError(f"{name} must be at least {least}{'' if below is None else f' and below {below}'}, got {got}.")
    return number


def as_bytes(memory: int | str, name: str = "memory") -> int:
    """Return a number of bytes, from a number or a string such as ``"4GB"``; 1 kB has 1,000 bytes, 1 KiB has 1,024.

    ``name`` is the beginning of messages.

    >>> as_bytes("4GB"), as_bytes("1 MiB"), as_bytes(300)
    (4000000000, 1048576, 300)
    """
    if isinstance(memory, str):
        from dask.utils import parse_bytes

        if not re.fullmatch(r"\d+(\.\d+)? ?([KMGT]i?)?B?", memory, re.IGNORECASE):
            raise ValueError(f"{name} must be a number of bytes or a string such as '4GB', got {memory!r}.")
        memory = parse_bytes(memory)
    return integer(name, memory, least=1)


def integers(name: str, values: object, *, below: int | None = None) -> Int64Array:
    """Return integers in an array, a list, a range or a pandas Series as an int64 array of the same shape.

    ``name`` is the beginning of messages. A TypeError if they aren't integers (an empty array may have any dtype), a
    ValueError if int64 can't hold them, an IndexError if they aren't all within ``[0, below)``.
    """
    if not (isinstance(values, list | tuple | range) or hasattr(values, "__array__")):
        raise TypeError(_no_array(name, values))
    try:
        array = as_array(values)
    except ValueError:  # lists of different lengths
        raise TypeError(_no_array(name, values)) from None
    if not array.size:
        return array.astype(np.int64)
    if array.dtype.kind == "b":
        raise TypeError(f"{name} must be integers, got bool. For the rows of a boolean mask, use Rows.from_mask(mask).")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}. Convert whole numbers with astype(int).")
    if below is not None and not 0 <= int(array.min()) <= int(array.max()) < below:
        raise IndexError(f"{name} must be in [0, {below}), got {array.min()} to {array.max()}.")
    if array.dtype == np.uint64 and int(array.max()) >= BOUND:
        raise ValueError(f"{name} must be below 2**63, got {array.max()}.")
    return array.astype(np.int64, copy=False)


def _no_array(name: str, values: object) -> str:
    return f"{name} must be integers in a list or an array, got {shortened(values)} of type {type(values).__name__}."


def as_array(values: object) -> npt.NDArray[Any]:
    """Return an array, a list or a pandas Series as an array."""
    # np.asarray asks a Series for attributes that it lacks, and to look for them, pandas hashes its whole index: about
    # 110 bytes for each name, as long as the index is in use
    series: Any = values
    return series.to_numpy() if _is_series(values) else np.asarray(values)


def _is_series(values: object) -> bool:
    return all(hasattr(values, name) for name in ("index", "dtype", "to_numpy"))


def names_of(what: str, values: object) -> pd.Index[Any] | None:
    """Return the index of a Series with a value for each cell; None for values by position, such as arrays.

    A Series with the index 0, 1, 2, ... (in total or in each dataset) is by position. ``what`` is the name in messages.
    A ValueError if an index of integers has a different order.
    """
    if not _is_series(values):
        return None
    names: pd.Index[Any] = values.index  # type: ignore[attr-defined]  # a Series
    if names.dtype.kind not in "iuf":
        return names
    # each number must continue the one before, or be the 0 of the next dataset: of 0 1 2 0 1 3, place 5 is wrong
    numbers = np.asarray(names)
    wrong = np.flatnonzero((numbers != np.append(-1, numbers[:-1]) + 1) & (numbers != 0))
    if len(wrong):
        place = int(wrong[0])
        raise ValueError(
            f"The index of a Series passed as {what} must be 0, 1, 2, ... (in each dataset), got {numbers[place]} at "
            f"position {place}. Don't filter, sort or shuffle it. If its index has a different meaning, pass the "
            "values with to_numpy()."
        )
    return None


def digest(*parts: str | Buffer, size: int = 16) -> str:
    """Return ``2 * size`` hexadecimal digits that differ for different data, the parts of which are joined.

    Arrays must be C-contiguous; their bytes aren't copied.
    """
    hashed = blake2b(digest_size=size)
    for part in parts:
        # file names can contain surrogates
        hashed.update(part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part)
    return hashed.hexdigest()


def file_digest(path: Path) -> str:
    """Return 16 hexadecimal digits that differ for files of different bytes.

    A CRC would not do: it is the same for all files of chunks of one size that each end with their own CRC.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(blake2b, digest_size=8)).hexdigest()


def n_cores() -> int:
    """Return the number of cores that this process may use, where the system tells; else the number of all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
