"""Facts about a wrapped sampler that sharding needs and annbatch's interface doesn't expose.

A sampler of a user's own states them in attributes of these names, as far as it has them:

===========================  ==========================================================================================
``chunk_size``               number of consecutive rows that it reads at a time
``n_draws(n_rows)``          number of samples that it draws with replacement from ``n_rows`` rows; None without
``set_draws(n_draws)``       makes it draw ``n_draws`` samples: a rank's part of the samples of the job
``localize(rows, n_obs)``    narrows values that it holds for each of the ``n_obs`` rows to the rows of a shard
``settings()``               dict of the settings that its batches follow from, if it holds more than those
===========================  ==========================================================================================

annbatch's own samplers are known here by private names: tests/test_wrapped.py fails if annbatch changes one.

A private copy
    Pickle asks each object what it consists of, and the copy is made of copies of these parts, but for four things:

    1. Arrays of at least ``SHARED_BYTES`` (labels of 10^8 rows, say) are shared, and numpy's are read-only in the copy.
    2. If a new generator is given, it replaces those of the sampler, so that no pass repeats the order of another.
    3. A sampler consists of its attributes, also if it forbids copies.
    4. Objects that can't be pickled, such as locks and open files, are shared.

A description
    JSON that is equal for samplers with equal settings, in any process. Generators and the mask are left out: the
    wrapper has those. It goes into states and to other ranks, so it shows the numbers that annbatch's samplers and this
    package's shardings are set to; all other values, which can be a password or a token, are in it as a digest only.
"""

from __future__ import annotations

import datetime as dt
import functools
import os
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from hashlib import blake2b
from io import BytesIO
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import pandas as pd
from annbatch.abc import Sampler
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler, WeightedClassSampler

from annbatch_distributed.rows import Rows
from annbatch_distributed.sharding import Contiguous, Independent, Shuffled

#: Arrays of this many bytes and more are shared, not copied.
SHARED_BYTES = 1 << 20

# Types whose objects pickle writes without asking them; all others are looked at first.
_PLAIN = frozenset(
    {bool, bytearray, bytes, dict, float, frozenset, int, list, pickle.PickleBuffer, set, str, tuple, type(None)}
)
_PANDAS = (pd.DataFrame, pd.Series, pd.Index, pd.api.extensions.ExtensionArray)


def private_copy[S: Sampler](sampler: S, rng: np.random.Generator | None = None) -> S:
    """Return a copy of a sampler, for one pass or to be kept. The sampler stays as it is.

    ``rng`` takes the place of the sampler's own generator in the copy, under every name; each other generator is
    replaced by one spawned from ``rng``. None copies all generators.
    """
    duplicate: S = _copied(sampler, rng).duplicate
    return duplicate


def first_generator(sampler: Sampler) -> np.random.Generator | None:
    """Return the generator that a sampler's randomness comes from: its ``rng``, or else the first in an attribute."""
    if sampler.rng is not None:
        return sampler.rng
    return next((thing for thing in _copied(sampler).visited.values() if isinstance(thing, np.random.Generator)), None)


def samplers_in(sampler: Sampler) -> list[Sampler]:
    """Return a sampler and all samplers in its attributes, however deep."""
    return [thing for thing in _copied(sampler).visited.values() if isinstance(thing, Sampler)]


def make_numbers_ints(sampler: Sampler) -> None:
    """Replace numpy's integers in a private copy by Python's: JSON has no others, and sums of numpy's can overflow."""
    for part in samplers_in(sampler):
        for name, value in getattr(part, "__dict__", {}).items():
            if isinstance(value, np.integer):
                vars(part)[name] = int(value)


def attributes(thing: object) -> dict[str, Any]:
    """Return the attributes of an object itself, not of its class, slots included."""
    state: Any = object.__getstate__(thing)
    # the instance's dict, or a pair of it and the slots; either can be None
    in_dict, in_slots = state if isinstance(state, tuple) else (state, None)
    return (in_dict or {}) | (in_slots or {})


def _copied(sampler: Sampler, rng: np.random.Generator | None = None) -> _Copier:
    """Return what has copied a sampler, and knows what it has visited."""
    try:
        return _Copier(sampler, rng)
    except Exception:  # noqa: BLE001 an object that says wrongly how to make it anew may raise anything
        return _Copier(sampler, rng, is_careful=True)


class _Copier(pickle.Pickler):
    """Copies a sampler by a pickle of it, which visits every object in it once.

    If ``is_careful``, it copies samplers, containers and numpy's objects only, and shares all others.
    """

    def __init__(self, sampler: Sampler, rng: np.random.Generator | None, *, is_careful: bool = False) -> None:
        file = BytesIO()
        super().__init__(file, protocol=5)
        self._own_rng, self._rng, self._is_careful = sampler.rng, rng, is_careful
        #: Objects by their ids; as long as they are here, no other object gets the id.
        self.visited: dict[int, Any] = {}
        #: Objects that the copy has instead of others, by the ids of the others.
        self.substitutes: dict[int, Any] = {}
        #: What objects consist of, as they say to pickle, by their ids.
        self._parts: dict[int, Any] = {}
        self.dump(sampler)
        file.seek(0)
        unpickler = _Unpickler(file)
        unpickler.substitutes = self.substitutes
        self.duplicate: Any = unpickler.load()

    def persistent_id(self, thing: object) -> int | None:
        """Return the id of an object that the copy has a substitute for; None for one to be copied."""
        if type(thing) in _PLAIN:
            return None
        key = id(thing)
        if key not in self.visited:
            self.visited[key] = thing
            self._visit(key, thing)
        return key if key in self.substitutes else None

    def reducer_override(self, thing: object) -> Any:  # noqa: ANN401 pickle's form, of many lengths
        """Return what an object consists of: of a sampler its attributes, whatever it says about copies."""
        if isinstance(thing, Sampler):
            return object.__new__, (type(thing),), attributes(thing), None, None, _set_attributes
        return self._parts.pop(id(thing), NotImplemented)

    def _visit(self, key: int, thing: object) -> None:
        """Note the substitute of an object, or what it consists of."""
        if isinstance(thing, Sampler):
            return
        if isinstance(thing, np.random.Generator) and self._rng is not None:
            self.substitutes[key] = self._rng if thing is self._own_rng else self._rng.spawn(1)[0]
            return
        is_numpys = type(thing).__module__.partition(".")[0] == "numpy"
        if isinstance(thing, type) or _n_bytes(thing) >= SHARED_BYTES or (self._is_careful and not is_numpys):
            self.substitutes[key] = _shared(thing)
            return
        if isinstance(thing, _PANDAS):
            self.substitutes[key] = thing.copy()  # several times as fast as a pickle of it
            return
        try:
            parts = thing.__reduce_ex__(5)
        except Exception:  # noqa: BLE001 a lock, a file, a function, a module: whatever is there once only
            parts = ""
        if isinstance(parts, str):  # pickle would look it up by this name
            self.substitutes[key] = thing
        else:
            self._parts[key] = parts


class _Unpickler(pickle.Unpickler):
    """Reads what a copier has written."""

    substitutes: dict[int, Any]

    def persistent_load(self, pid: int) -> Any:  # noqa: ANN401 any object
        """Return the substitute of an object."""
        return self.substitutes[pid]


def _set_attributes(thing: object, named: dict[str, Any]) -> None:
    """Set attributes, also where the class forbids it."""
    for name, value in named.items():
        object.__setattr__(thing, name, value)


def _shared(thing: object) -> object:
    """Return an object for the copy to share, so that the copy can't write into it where that is possible."""
    match thing:
        case np.ndarray():
            view = thing.view()
            view.flags.writeable = False
            return view
        case pd.DataFrame() | pd.Series():
            return thing.copy(deep=False)
        case _:
            return thing


def _n_bytes(thing: object) -> int:
    """Return the size of an array of any library: numpy's, pandas', torch's and zarr's have ``nbytes``. Else 0."""
    if isinstance(thing, pd.DataFrame):
        return int(thing.size) * 8  # about, and at once
    try:
        n_bytes = getattr(thing, "nbytes", 0)
    except Exception:  # noqa: BLE001 an array of a file that is closed can't tell, whatever its library raises
        return 0
    return n_bytes if isinstance(n_bytes, int) else 0


_SIZES = ("_batch_size", "_chunk_size", "_preload_nchunks", "_drop_last")

#: For each of annbatch's types, the attributes that hold arguments of its constructor, but for mask, rng, classes and
#: class_weights. They are listed so that saved states stay valid if a later annbatch adds an attribute.
SETTINGS: dict[type[Sampler], tuple[str, ...]] = {
    RandomSampler: (*_SIZES, "_num_samples", "_replacement"),
    SequentialSampler: _SIZES,
    ClassSampler: (*_SIZES, "_num_samples"),
    WeightedClassSampler: (*_SIZES, "_num_samples"),
}
_ANNBATCHS = (RandomSampler, SequentialSampler, ClassSampler)


def _method(sampler: Sampler, name: str) -> Callable[..., Any] | None:
    """Return a method that a sampler has for this package; None if it has none."""
    method = getattr(sampler, name, None)
    return method if callable(method) else None


def is_annbatchs_own(sampler: Sampler) -> bool:
    """True for annbatch's own samplers, whose load requests are right; those of subclasses may not be."""
    return type(sampler) in SETTINGS


def chunk_size(sampler: Sampler) -> int | None:
    """Return the number of consecutive rows that a sampler reads at a time; None if unknown.

    >>> chunk_size(RandomSampler(chunk_size=64, preload_nchunks=32, batch_size=256))
    64
    """
    size: int | None = getattr(sampler, "chunk_size", None)
    return sampler._chunk_size if size is None and isinstance(sampler, _ANNBATCHS) else size


def rows_per_request(sampler: Sampler) -> int | None:
    """Return the largest number of rows in a load request of a sampler; None if unknown."""
    return sampler._chunk_size * sampler._preload_nchunks if isinstance(sampler, _ANNBATCHS) else None


def n_draws(sampler: Sampler, n_rows: int) -> int | None:
    """Return the number of samples that a sampler draws with replacement from some rows; None if it doesn't draw.

    >>> n_draws(RandomSampler(64, 32, 256, replacement=True), 20_000)
    20000
    >>> n_draws(RandomSampler(64, 32, 256), 20_000) is None
    True
    """
    if method := _method(sampler, "n_draws"):
        drawn: int | None = method(n_rows)
        return drawn
    if isinstance(sampler, ClassSampler):
        drawn = sampler._num_samples
    elif isinstance(sampler, RandomSampler) and sampler._replacement:
        drawn = sampler._num_samples or n_rows
    else:
        return None
    return drawn // sampler.batch_size * sampler.batch_size if sampler._drop_last else drawn


def can_set_draws(sampler: Sampler) -> bool:
    """True if the number of samples that a sampler draws can be set."""
    return isinstance(sampler, ClassSampler | RandomSampler) or _method(sampler, "set_draws") is not None


def set_draws(sampler: Sampler, n_draws: int) -> None:
    """Set the number of samples that a private copy of a sampler draws in a pass."""
    if method := _method(sampler, "set_draws"):
        method(n_draws)
    else:
        assert isinstance(sampler, ClassSampler | RandomSampler)
        sampler._num_samples = n_draws


def reads_every_row(sampler: Sampler) -> bool:
    """True if a sampler reads each of its rows once, rather than drawing some of them."""
    has_fixed_number = isinstance(sampler, RandomSampler) and sampler._num_samples is not None
    return not has_fixed_number and n_draws(sampler, 1) is None


def is_random(sampler: Sampler) -> bool:
    """True if a sampler's order may follow from a generator: it holds one, or leaves shuffling to others."""
    if isinstance(sampler, SequentialSampler):  # it holds a generator all the same
        return sampler.shuffle
    return first_generator(sampler) is not None or bool(sampler.shuffle)


def drawable_classes(sampler: Sampler) -> frozenset[str] | None:
    """Return the classes that a class sampler can draw from its rows; None for other samplers."""
    if not isinstance(sampler, ClassSampler):
        return None
    runs = sampler._rle_manager
    return frozenset(map(str, runs._classes.categories[runs.codes]))


def needs_global_rows(sampler: Sampler) -> bool:
    """True if a sampler holds a value for each row, so that it matters which rows a shard has, not only how many."""
    return isinstance(sampler, ClassSampler) or _method(sampler, "localize") is not None


def localize(sampler: Sampler, rows: Rows, n_obs: int) -> None:
    """Make a private copy of a sampler run on the local rows of a shard, and take ``len(rows)`` for ``n_obs``.

    A ValueError if it can't run on these rows; a TypeError if its mask can't be assigned.
    """
    if method := _method(sampler, "localize"):
        method(rows, n_obs)
    elif isinstance(sampler, ClassSampler):
        sampler.validate(n_obs)  # one label per row of the collection
        sampler._num_open_passes = 0  # the original may have been copied with one open
        labels: pd.Categorical = sampler._rle_manager._classes
        # a ClassSampler of the shard's labels, in the categories of all: a class that the shard lacks keeps its number
        codes = rows.take(labels.codes)
        sampler._n_obs = len(codes)
        sampler._rle_manager._classes = pd.Categorical.from_codes(codes, dtype=labels.dtype)
        sampler.mask = slice(0, len(codes))  # looks for the runs of each class again
    else:
        mask: object = sampler.mask  # which a user's sampler may have of any type
        if mask is None or (isinstance(mask, slice) and mask == slice(0, None)):
            return
        try:
            sampler.mask = slice(0, None)
        except AttributeError as error:
            raise TypeError(
                f"{type(sampler).__name__} has the mask {sampler.mask}, which can't be assigned. To run on a rank's "
                "rows it must take another one; give it a setter for mask."
            ) from error


def settings(sampler: Sampler) -> dict[str, Any]:
    """Return what a sampler's batches follow from, by name.

    Of annbatch's own samplers these are the arguments of the constructor, of others all attributes, unless they have a
    method ``settings``.
    """
    if method := _method(sampler, "settings"):
        named: dict[str, Any] = method()
        return named
    names = SETTINGS.get(type(sampler))
    named = attributes(sampler) if names is None else {name: getattr(sampler, name) for name in names}
    if not isinstance(sampler, ClassSampler):
        return named
    # without what follows from labels, weights and mask, and what counts passes
    named = {name: value for name, value in named.items() if name not in ("_rle_manager", "_num_open_passes")}
    return named | {"classes": sampler._rle_manager._classes, "class_weights": sampler._rle_manager._weights}


#: Types whose settings a description shows, with their names there. Subclasses of them may hold anything.
_SHOWN: dict[type, str] = {
    **{kind: f"annbatch.samplers.{kind.__name__}" for kind in SETTINGS},
    **{kind: kind.__name__ for kind in (Contiguous, Independent, Shuffled)},
}
# Types of values that repr() writes out in full, the same in every process.
_NUMBERS = (bool, complex, float, int, Decimal, Fraction)
_VALUES = (*_NUMBERS, bytearray, bytes, range, slice, str, type(None), np.dtype, dt.date, dt.time, dt.timedelta)

# Modules whose objects, such as locks and loggers, hold what differs from process to process.
_OPAQUE = frozenset(sys.stdlib_module_names) - {"collections", "functools"}


def description(thing: object) -> dict[str, Any]:
    """Return a sampler or a sharding as JSON: equal for equal settings, in any process.

    >>> description(Shuffled(block_size=64))
    {'type': 'Shuffled', 'block_size': 64}
    >>> from annbatch.samplers import SequentialSampler
    >>> sampler = description(SequentialSampler(64, 32, 256, mask=slice(0, 9)))
    >>> (
    ...     sampler["type"],
    ...     sampler["chunk_size"],
    ...     sampler == description(SequentialSampler(64, 32, 256)),
    ... )
    ('annbatch.samplers.SequentialSampler', 64, True)
    """
    kind = type(thing)
    if kind not in _SHOWN:
        named = thing if isinstance(thing, FunctionType) else kind
        return {"type": _full_name(named), "digest": _digest(_text(thing))}
    described: dict[str, Any] = {"type": _SHOWN[kind]}
    for name, value in _named_parts(thing):
        number = value.item() if isinstance(value, np.generic) else value
        is_shown = type(number) in {bool, float, int, type(None)}
        described[name] = number if is_shown else _digest(_text(value))
    return described


def _full_name(thing: Any) -> str:  # noqa: ANN401 a function or a class
    """Return the module and the name of a function or a class."""
    # a spawned process imports the script again, under another name
    module = "__main__" if thing.__module__ == "__mp_main__" else thing.__module__
    return f"{module}.{thing.__qualname__}"


def _digest(data: str | memoryview) -> str:
    """Return 32 hexadecimal digits that differ for different data."""
    # the name of a file can hold surrogates
    encoded = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    return blake2b(encoded, digest_size=16).hexdigest()


def _text(thing: Any, within: tuple[int, ...] = ()) -> str:  # noqa: ANN401 anything
    """Return a string that differs for different things; ``within`` are the ids of what the thing is in."""
    if id(thing) in within:  # a list that is in itself, say
        return "..."
    match thing:
        case np.generic():
            return repr(thing.item())
        case np.ndarray() if not thing.dtype.hasobject:
            values = np.ascontiguousarray(thing).reshape(-1).view(np.uint8)  # any shape and dtype -> bytes
            return f"array({thing.dtype}, {thing.shape}, {_digest(values.data)})"
        case type() | FunctionType() | BuiltinFunctionType():
            return _full_name(thing)
        case _ if isinstance(thing, _VALUES):
            return repr(thing)
    texts = [_text(part, (*within, id(thing))) for part in _parts(thing)]
    if isinstance(thing, dict | set | frozenset):
        texts.sort()
    return f"{type(thing).__qualname__}({', '.join(texts)})"


def _parts(thing: Any) -> Iterable[Any]:  # noqa: ANN401, PLR0911 anything, and a return for each kind of it
    """Return what an object consists of, as far as that counts."""
    match thing:
        case list() | tuple() | set() | frozenset() | deque():
            return thing
        case dict():
            return thing.items()
        case Enum():
            return [thing.name]
        case os.PathLike():
            return [os.fspath(thing)]
        case functools.partial():
            return [thing.func, thing.args, thing.keywords]
        case MethodType():
            return [thing.__self__, thing.__name__]
        case ModuleType():
            return [thing.__name__]
        case np.ndarray():
            return [thing.shape, thing.reshape(-1).tolist()]
        case pd.DataFrame():
            return [*thing.items(), thing.index]
        case pd.Categorical():
            return [thing.codes, *thing.categories]
        case _ if hasattr(thing, "__array__"):  # pandas', torch's and jax's
            return [np.asarray(thing)]
        case _ if type(thing).__module__.partition(".")[0] in _OPAQUE:
            return []
    return _named_parts(thing)


def _named_parts(thing: object) -> Iterator[tuple[str, Any]]:
    """Yield what counts of a sampler or another object, by name, in the order of the names."""
    parts = settings(thing) if isinstance(thing, Sampler) else attributes(thing)
    for name, value in sorted(parts.items()):
        # the wrapper has a mask and a generator instead
        is_replaced = isinstance(thing, Sampler) and name in ("_mask", "_rng")
        if not is_replaced and not isinstance(value, np.random.Generator):
            yield name.lstrip("_"), value
