"""A private copy of any sampler: what happens to the one never reaches the other.

1. What the sampler holds is searched for large arrays and for random generators, however deep.
2. Large arrays (labels of 10^8 rows, say) are shared instead of copied, and numpy's can't be written through the copy.
3. Generators are replaced where new ones are given, so that no pass repeats another's order.
4. Everything else is deep-copied. Of a sampler that refuses that (it holds an open file or a lock, or forbids it), the
   attributes are copied one by one, and what then still can't be copied is shared.
"""

from __future__ import annotations

import copy
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from annbatch.abc import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SHARED_BYTES", "attributes", "first_generator", "make_numbers_ints", "private_copy", "samplers_in"]

#: Arrays of this many bytes and more are shared, not copied.
SHARED_BYTES = 1 << 20

# What deepcopy takes as it is; the attributes of a class or a module are not the sampler's.
_ATOMS = (int, float, str, bytes, type(None), type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


def private_copy[S: Sampler](sampler: S, rng: np.random.Generator | None = None) -> S:
    """Return a copy of a sampler, for one pass or to be kept. The sampler is left as it is.

    ``rng`` takes the place of the sampler's own generator in the copy, wherever that is held; other generators that the
    sampler holds are replaced by generators spawned from it. None keeps them all as they are.
    """
    memo: dict[Any, Any] = {}
    for thing in _held(sampler):
        if not isinstance(thing, np.random.Generator):
            if (_n_bytes(thing) or 0) >= SHARED_BYTES:
                memo[id(thing)] = _shared(thing)
        elif rng is not None:
            memo[id(thing)] = rng if thing is sampler.rng else rng.spawn(1)[0]
    duplicate: S = _copied(sampler, memo)
    return duplicate


def first_generator(sampler: Sampler) -> np.random.Generator | None:
    """Return the generator that a sampler's randomness comes from: its ``rng``, or else the first one that it holds."""
    if sampler.rng is not None:
        return sampler.rng
    return next((thing for thing in _held(sampler) if isinstance(thing, np.random.Generator)), None)


def samplers_in(sampler: Sampler) -> list[Sampler]:
    """Return a sampler and those that it holds, however deep."""
    return [thing for thing in _held(sampler) if isinstance(thing, Sampler)]


def make_numbers_ints(sampler: Sampler) -> None:
    """Make numpy's integers that a private copy holds Python's: JSON can't hold others, and their sums overflow."""
    for held in samplers_in(sampler):
        for name, value in getattr(held, "__dict__", {}).items():
            if isinstance(value, np.integer):
                vars(held)[name] = int(value)


def _copied(thing: object, memo: dict[Any, Any]) -> Any:  # noqa: ANN401 of the same type
    """Deep-copy what can be deep-copied, and of samplers and containers that can't at least the parts."""
    if id(thing) in memo:
        return memo[id(thing)]
    # deepcopy writes into the memo it is given, half-filled objects too where it fails
    duplicate: Any = thing
    attempt = dict(memo)
    try:
        duplicate = copy.deepcopy(thing, attempt)
    except Exception:  # noqa: BLE001 whatever forbids the copy: its own __deepcopy__ may raise anything
        pass
    else:
        if not (isinstance(thing, Sampler) and duplicate is thing):
            # what deepcopy keeps alive is under the id of its memo, which another object has once that memo is gone
            keep_alive = attempt.pop(id(attempt), [])
            memo.update(attempt)
            memo.setdefault("keep alive", []).extend(keep_alive)
            return duplicate
    match thing:
        case Sampler():
            duplicate = memo[id(thing)] = object.__new__(type(thing))
            for name, value in attributes(thing).items():
                object.__setattr__(duplicate, name, _copied(value, memo))
        case list():
            duplicate = memo[id(thing)] = []
            duplicate.extend(_copied(part, memo) for part in thing)
        case dict():
            duplicate = memo[id(thing)] = {}
            duplicate.update((key, _copied(part, memo)) for key, part in thing.items())
        case _:
            # a lock, a file: a copy would not be one, and closing it would close the original
            memo[id(thing)] = thing
    return duplicate


def _shared(array: object) -> object:
    """A large array under another name, which can't write into it where that is possible."""
    match array:
        case np.ndarray():
            view = array.view()
            view.flags.writeable = False
            return view
        case pd.DataFrame() | pd.Series():
            return array.copy(deep=False)
        case _:
            return array


def _held(sampler: Sampler) -> Iterator[Any]:
    """Yield a sampler and what it holds in attributes and containers, but not what arrays and generators hold."""
    seen: set[int] = set()
    pending: list[Any] = [sampler]
    while pending:
        thing = pending.pop()
        if isinstance(thing, _ATOMS) or id(thing) in seen:
            continue
        seen.add(id(thing))
        yield thing
        if isinstance(thing, np.random.Generator) or _n_bytes(thing) is not None:
            continue
        if isinstance(thing, list | tuple | set | frozenset):
            pending.extend(thing)
        else:
            pending.extend((thing if isinstance(thing, dict) else attributes(thing)).values())


def _n_bytes(thing: object) -> int | None:
    """The size of an array, whoever's: numpy's, pandas', torch's and zarr's have ``nbytes``. None if it is none."""
    if isinstance(thing, pd.DataFrame):
        return int(thing.size) * 8  # about, and at once
    try:
        n_bytes = getattr(thing, "nbytes", None)
    except Exception:  # noqa: BLE001 an array of a file that is closed can't tell, whatever its library raises
        return None
    return n_bytes if isinstance(n_bytes, int) else None


def attributes(thing: object) -> dict[str, Any]:
    """Return what an object holds under names of its own, slots included."""
    in_slots = {
        name: getattr(thing, name) for cls in type(thing).__mro__ for name in _slots(cls) if hasattr(thing, name)
    }
    return in_slots | getattr(thing, "__dict__", {})


def _slots(cls: type) -> list[str]:
    """The names of a class's slots, as Python spells them on instances."""
    slots = vars(cls).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    private = f"_{cls.__name__.lstrip('_')}"
    return [
        private + name if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    ]
