"""A private copy of any sampler: what happens to the one never reaches the other.

1. Large arrays that the sampler holds (labels of 10^8 rows, say) are found and shared instead of copied.
2. Everything else is deep-copied.
3. If the sampler refuses that (it holds an open file or a lock, or forbids it), its attributes are deep-copied one by
   one, and those that can't be copied are shared.
"""

from __future__ import annotations

import copy
import types
from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    from collections.abc import Iterable

    from annbatch.abc import Sampler

#: Arrays of this many bytes and more are shared, not copied.
SHARED_BYTES = 1 << 20

# What deepcopy takes as it is; the attributes of a class or a module are not the sampler's.
_ATOMS = (int, float, str, bytes, type(None), type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


def private_copy[S: Sampler](sampler: S) -> S:
    """Return a copy of a sampler that shares none of its state but arrays of at least ``SHARED_BYTES``.

    Parameters
    ----------
    sampler
        Any sampler, also one that can't be deep-copied. It is left as it is.
    """
    memo: dict[int, Any] = {id(array): array for array in _large_arrays(sampler)}
    # deepcopy writes into the memo it is given, half-filled objects too where it fails
    try:
        return copy.deepcopy(sampler, dict(memo))
    except Exception:  # noqa: BLE001 whatever forbids the copy: its own __deepcopy__ may raise anything
        return _copy_by_attribute(sampler, memo)


def _copy_by_attribute[S: Sampler](sampler: S, memo: dict[int, Any]) -> S:
    """Copy what can be copied, and share the rest."""
    duplicate = object.__new__(type(sampler))
    memo[id(sampler)] = duplicate
    for name, value in _attributes(sampler).items():
        attempt = dict(memo)
        try:
            copied = copy.deepcopy(value, attempt)
        except Exception:  # noqa: BLE001 an object that can't be copied may say so with anything
            copied = value
        else:
            memo = attempt
        object.__setattr__(duplicate, name, copied)
    return duplicate


def _large_arrays(sampler: Sampler) -> list[Any]:
    """Find the large arrays that a sampler holds in its attributes, and in theirs, and in containers, however deep."""
    found: list[Any] = []
    seen: set[int] = set()
    pending: list[Any] = [sampler]
    while pending:
        thing = pending.pop()
        if id(thing) in seen or isinstance(thing, _ATOMS):
            continue
        seen.add(id(thing))
        n_bytes = _n_bytes(thing)
        if n_bytes is None:
            pending.extend(_parts(thing))
        elif n_bytes >= SHARED_BYTES:
            found.append(thing)
    return found


def _n_bytes(thing: object) -> int | None:
    """The size of an array, whoever's: numpy's, pandas', torch's and zarr's have ``nbytes``. None if it is none."""
    if isinstance(thing, pd.DataFrame):
        return int(thing.size) * 8  # about, and at once
    n_bytes = getattr(thing, "nbytes", None)
    return n_bytes if isinstance(n_bytes, int) else None


def _parts(thing: object) -> Iterable[Any]:
    match thing:
        case dict():
            return [*thing.keys(), *thing.values()]
        case list() | tuple() | set() | frozenset():
            return thing
        case _:
            return _attributes(thing).values()


def _attributes(thing: object) -> dict[str, Any]:
    """Return what an object holds under names of its own, slots included."""
    slots = [name for cls in type(thing).__mro__ for name in _slots(cls) if name not in ("__dict__", "__weakref__")]
    in_slots = {name: getattr(thing, name) for name in slots if hasattr(thing, name)}
    return in_slots | getattr(thing, "__dict__", {})


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
