"""Facts about a wrapped sampler that sharding needs and annbatch's interface doesn't expose.

A custom sampler provides them as attributes with these names, each of which is optional:

===========================  ==========================================================================================
``chunk_size``               number of consecutive rows that it reads at a time
``n_draws(n_rows)``          number of samples with replacement from ``n_rows`` rows; None without replacement
``set_draws(n_draws)``       set the number of samples, to a rank's part of the samples of the job
``localize(rows, n_obs)``    select the values of a shard's rows, if it holds a value for each of the ``n_obs`` rows
``settings()``               return a dict of the attributes that determine the batches (default: all attributes)
===========================  ==========================================================================================

For annbatch's own samplers, this module uses private names; tests/core/test_wrapped.py fails if annbatch changes one.

A private copy
    A pickler visits each object that a sampler consists of, and the copy is built from copies of these parts, with four
    exceptions:

    1. Arrays of at least ``SHARED_BYTES``, such as the labels of 10^8 rows, are shared. NumPy's arrays are read-only in
       the copy.
    2. A new generator, if there is one, replaces the sampler's generators, so that no two passes have the same order.
    3. A sampler is copied by its attributes, even if it forbids copies.
    4. Objects that can't be pickled, such as locks and open files, are shared.

A description
    JSON that is equal for samplers with equal settings, in any process. It leaves out generators and the mask, which
    the wrapper holds. Since it is part of states and is sent to other ranks, it shows only the numeric settings of
    annbatch's samplers and this package's shardings. Other values, which could be a password or a token, are part of a
    digest.
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
from io import BytesIO
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import pandas as pd
from annbatch.abc import Sampler
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler, WeightedClassSampler

from annbatch_distributed.core.rows import Rows
from annbatch_distributed.core.sharding import Contiguous, Independent, Shuffled
from annbatch_distributed.core.values import digest

#: Smallest size of an array that is shared instead of copied, in bytes.
SHARED_BYTES = 1 << 20

# Types whose objects are pickled without visiting them
_PLAIN = frozenset(
    {bool, bytearray, bytes, dict, float, frozenset, int, list, pickle.PickleBuffer, set, str, tuple, type(None)}
)
_PANDAS = (pd.DataFrame, pd.Series, pd.Index, pd.api.extensions.ExtensionArray)


def private_copy[S: Sampler](sampler: S, rng: np.random.Generator | None = None) -> S:
    """Return a copy of a sampler, which isn't changed.

    In the copy, ``rng`` replaces the sampler's own generator, under every name. Each further generator is replaced by a
    generator spawned from ``rng``. None copies all generators.
    """
    duplicate: S = _copied(sampler, rng).duplicate
    return duplicate


def first_generator(sampler: Sampler) -> np.random.Generator | None:
    """Return a sampler's ``rng``, or else the first generator in its attributes; None if it has none."""
    if sampler.rng is not None:
        return sampler.rng
    return next((thing for thing in _copied(sampler).visited.values() if isinstance(thing, np.random.Generator)), None)


def samplers_in(sampler: Sampler) -> list[Sampler]:
    """Return a sampler and all samplers in its attributes, at any depth."""
    return [thing for thing in _copied(sampler).visited.values() if isinstance(thing, Sampler)]


def make_numbers_ints(sampler: Sampler) -> None:
    """Convert NumPy's integers in a private copy to Python's, which JSON can hold and which don't overflow."""
    for part in samplers_in(sampler):
        for name, value in getattr(part, "__dict__", {}).items():
            if isinstance(value, np.integer):
                vars(part)[name] = int(value)


def attributes(thing: object) -> dict[str, Any]:
    """Return the attributes of an object, including its slots, but without the attributes of its class."""
    state: Any = object.__getstate__(thing)
    # the instance's dict, or a pair of it and the slots; either can be None
    in_dict, in_slots = state if isinstance(state, tuple) else (state, None)
    return (in_dict or {}) | (in_slots or {})


def _copied(sampler: Sampler, rng: np.random.Generator | None = None) -> _Copier:
    """Return a copier that has copied a sampler, with all objects that it visited."""
    try:
        return _Copier(sampler, rng)
    except Exception:  # noqa: BLE001 an object with a wrong __reduce__ may raise anything
        return _Copier(sampler, rng, is_careful=True)


class _Copier(pickle.Pickler):
    """Pickler that copies a sampler, and visits every object in it once.

    If ``is_careful``, it copies only samplers, containers and NumPy's objects, and shares all other objects.
    """

    def __init__(self, sampler: Sampler, rng: np.random.Generator | None, *, is_careful: bool = False) -> None:
        file = BytesIO()
        super().__init__(file, protocol=5)
        self._own_rng, self._rng, self._is_careful = sampler.rng, rng, is_careful
        #: Objects by their ids. They are kept here so that no other object gets the same id.
        self.visited: dict[int, Any] = {}
        #: Objects that replace others in the copy, by the ids of the replaced objects.
        self.substitutes: dict[int, Any] = {}
        #: Results of ``__reduce_ex__`` of objects, by their ids.
        self._parts: dict[int, Any] = {}
        self.dump(sampler)
        file.seek(0)
        unpickler = _Unpickler(file)
        unpickler.substitutes = self.substitutes
        self.duplicate: Any = unpickler.load()

    def persistent_id(self, thing: object) -> int | None:
        """Return the id of an object with a substitute; None if the object is to be copied."""
        if type(thing) in _PLAIN:
            return None
        key = id(thing)
        if key not in self.visited:
            self.visited[key] = thing
            self._visit(key, thing)
        return key if key in self.substitutes else None

    def reducer_override(self, thing: object) -> Any:  # noqa: ANN401 pickle's form, of many lengths
        """Return the parts of an object; of a sampler, its attributes, even if it defines ``__reduce__``."""
        if isinstance(thing, Sampler):
            return object.__new__, (type(thing),), attributes(thing), None, None, _set_attributes
        return self._parts.pop(id(thing), NotImplemented)

    def _visit(self, key: int, thing: object) -> None:
        """Store the substitute of an object, or its parts."""
        if isinstance(thing, Sampler):
            return
        if isinstance(thing, np.random.Generator) and self._rng is not None:
            self.substitutes[key] = self._rng if thing is self._own_rng else self._rng.spawn(1)[0]
            return
        # of functions that are compiled by older versions of Cython, as in NumPy 2.3, it is no string
        is_numpys = str(type(thing).__module__).partition(".")[0] == "numpy"
        if isinstance(thing, type) or _n_bytes(thing) >= SHARED_BYTES or (self._is_careful and not is_numpys):
            self.substitutes[key] = _shared(thing)
            return
        if isinstance(thing, _PANDAS):
            self.substitutes[key] = thing.copy()  # several times faster than pickling
            return
        try:
            parts = thing.__reduce_ex__(5)
        except Exception:  # noqa: BLE001 a lock, a file, a module, or another object that can't be copied
            parts = ""
        if isinstance(parts, str):  # a global name: there is only one such object
            self.substitutes[key] = thing
        else:
            self._parts[key] = parts


class _Unpickler(pickle.Unpickler):
    """Unpickler of the objects that a copier has pickled."""

    substitutes: dict[int, Any]

    def persistent_load(self, pid: int) -> Any:  # noqa: ANN401 any object
        """Return the substitute of an object."""
        return self.substitutes[pid]


def _set_attributes(thing: object, named: dict[str, Any]) -> None:
    """Set attributes, even if the class forbids it."""
    for name, value in named.items():
        object.__setattr__(thing, name, value)


def _shared(thing: object) -> object:
    """Return an object for the copy to share, read-only if possible."""
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
    """Return the size in bytes of an array of any library with ``nbytes`` (NumPy, pandas, PyTorch, zarr); else 0."""
    if isinstance(thing, pd.DataFrame):
        return int(thing.size) * 8  # a quick estimate
    try:
        n_bytes = getattr(thing, "nbytes", 0)
    except Exception:  # noqa: BLE001 an array of a closed file may raise anything
        return 0
    return n_bytes if isinstance(n_bytes, int) else 0


_SIZES = ("_batch_size", "_chunk_size", "_preload_nchunks", "_drop_last")

#: For each of annbatch's types, the attributes that hold arguments of its constructor, except mask, rng, classes and
#: class_weights. They are listed so that saved states stay valid if a later version of annbatch adds an attribute.
SETTINGS: dict[type[Sampler], tuple[str, ...]] = {
    RandomSampler: (*_SIZES, "_num_samples", "_replacement"),
    SequentialSampler: _SIZES,
    ClassSampler: (*_SIZES, "_num_samples"),
    WeightedClassSampler: (*_SIZES, "_num_samples"),
}
_ANNBATCHS = (RandomSampler, SequentialSampler, ClassSampler)


def _method(sampler: Sampler, name: str) -> Callable[..., Any] | None:
    """Return a method of a custom sampler; None if it doesn't have this method."""
    method = getattr(sampler, name, None)
    return method if callable(method) else None


def is_annbatchs_own(sampler: Sampler) -> bool:
    """Return True for annbatch's own samplers, whose load requests are valid; subclasses may have invalid ones."""
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


def batches_per_request(sampler: Sampler) -> int | None:
    """Return the largest number of full batches in a load request of a sampler; None if unknown."""
    n_rows = rows_per_request(sampler)
    return None if n_rows is None or not sampler.batch_size else max(1, n_rows // sampler.batch_size)


def n_draws(sampler: Sampler, n_rows: int) -> int | None:
    """Return the number of samples with replacement that a sampler takes from some rows; None without replacement.

    >>> n_draws(RandomSampler(64, 32, 256, replacement=True), 20_000)
    20000
    >>> n_draws(RandomSampler(64, 32, 256), 20_000) is None
    True
    """
    if method := _method(sampler, "n_draws"):
        number: int | None = method(n_rows)
        return number
    if isinstance(sampler, ClassSampler):
        number = sampler._num_samples
    elif isinstance(sampler, RandomSampler) and sampler._replacement:
        number = sampler._num_samples or n_rows
    else:
        return None
    return number // sampler.batch_size * sampler.batch_size if sampler._drop_last else number


def can_set_draws(sampler: Sampler) -> bool:
    """Return True if a sampler's number of samples can be set."""
    return isinstance(sampler, ClassSampler | RandomSampler) or _method(sampler, "set_draws") is not None


def set_draws(sampler: Sampler, n_draws: int) -> None:
    """Set the number of samples of a private copy of a sampler."""
    if method := _method(sampler, "set_draws"):
        method(n_draws)
    else:
        assert isinstance(sampler, ClassSampler | RandomSampler)
        sampler._num_samples = n_draws


def refuse_short_draws(sampler: Sampler, n_rows: int) -> None:
    """Raise if annbatch's RandomSampler yields fewer batches than its ``n_batches`` returns.

    With ``replacement`` and ``drop_last`` it samples whole chunks only, but counts the remaining samples as well.
    tests/core/test_counts.py fails if annbatch changes this.
    """
    if not (isinstance(sampler, RandomSampler) and sampler._replacement and sampler._drop_last):
        return
    # 100 samples in batches of 8: n_batches is 12. 6 whole chunks of 16 yield 12 batches, but 1 chunk of 64 only 8
    n_samples, chunk_size = sampler._num_samples or n_rows, sampler._chunk_size
    expected, actual = n_samples // sampler.batch_size, n_samples // chunk_size * chunk_size // sampler.batch_size
    if actual < expected:
        raise ValueError(
            f"with replacement=True and drop_last=True, it samples whole chunks of {chunk_size} rows and yields only "
            f"{actual} of the {expected} batches of {n_samples} samples. Pass drop_last=False."
        )


def reads_every_row(sampler: Sampler) -> bool:
    """Return True if a sampler reads each of its rows once, rather than a sample of them."""
    has_fixed_number = isinstance(sampler, RandomSampler) and sampler._num_samples is not None
    return not has_fixed_number and n_draws(sampler, 1) is None


def is_random(sampler: Sampler) -> bool:
    """Return True if a sampler's order may depend on a generator: it holds one, or ``shuffle`` is True."""
    if isinstance(sampler, SequentialSampler):  # it holds a generator that it may not use
        return sampler.shuffle
    return first_generator(sampler) is not None or bool(sampler.shuffle)


def drawable_classes(sampler: Sampler) -> frozenset[str] | None:
    """Return the classes that a class sampler can sample from; None for other samplers."""
    if not isinstance(sampler, ClassSampler):
        return None
    runs = sampler._rle_manager
    return frozenset(map(str, runs._classes.categories[runs.codes]))


def needs_global_rows(sampler: Sampler) -> bool:
    """Return True if a sampler holds a value for each row, so that its batches depend on the rows of a shard."""
    return isinstance(sampler, ClassSampler) or _method(sampler, "localize") is not None


def localize(sampler: Sampler, rows: Rows, n_obs: int) -> None:
    """Prepare a private copy of a sampler to run on the local rows of a shard, with ``len(rows)`` as ``n_obs``.

    A ValueError if it can't run on these rows; a TypeError if its mask can't be assigned.
    """
    if method := _method(sampler, "localize"):
        method(rows, n_obs)
    elif isinstance(sampler, ClassSampler):
        sampler.validate(n_obs)  # one label per row of the collection
        sampler._num_open_passes = 0  # the original may have been copied with one open
        labels: pd.Categorical = sampler._rle_manager._classes
        # a ClassSampler of the shard's labels, with the categories of all labels: a class keeps its code even if the
        # shard lacks others
        codes = rows.take(labels.codes)
        sampler._n_obs = len(codes)
        sampler._rle_manager._classes = pd.Categorical.from_codes(codes, dtype=labels.dtype)
        sampler.mask = slice(0, len(codes))  # updates the runs of each class
    else:
        mask: object = sampler.mask  # may have any type in a custom sampler
        if mask is None or (isinstance(mask, slice) and mask == slice(0, None)):
            return
        try:
            sampler.mask = slice(0, None)
        except AttributeError as error:
            raise TypeError(
                f"{type(sampler).__name__}.mask must be assignable, so that it can run on a rank's rows, but it is "
                f"{sampler.mask} and has no setter. Add a setter for mask."
            ) from error


def settings(sampler: Sampler) -> dict[str, Any]:
    """Return the settings that determine a sampler's batches, by name.

    They are the constructor's arguments for annbatch's own samplers, and the result of ``settings()`` or else all
    attributes for custom samplers.
    """
    if method := _method(sampler, "settings"):
        named: dict[str, Any] = method()
        return named
    names = SETTINGS.get(type(sampler))
    named = attributes(sampler) if names is None else {name: getattr(sampler, name) for name in names}
    if not isinstance(sampler, ClassSampler):
        return named
    # without attributes that are derived from labels, weights and mask, and without the counter of passes
    named = {name: value for name, value in named.items() if name not in ("_rle_manager", "_num_open_passes")}
    return named | {"classes": sampler._rle_manager._classes, "class_weights": sampler._rle_manager._weights}


#: Types whose settings a description shows, with their names in it. Subclasses aren't included: they may hold anything.
_SHOWN: dict[type, str] = {
    **{kind: f"annbatch.samplers.{kind.__name__}" for kind in SETTINGS},
    **{kind: kind.__name__ for kind in (Contiguous, Independent, Shuffled)},
}
# Types of values whose repr() is complete, and the same in every process.
_NUMBERS = (bool, complex, float, int, Decimal, Fraction)
_VALUES = (*_NUMBERS, bytearray, bytes, range, slice, str, type(None), np.dtype, dt.date, dt.time, dt.timedelta)

# Modules whose objects, such as locks and loggers, have attributes that differ between processes.
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
        return {"type": _full_name(named), "digest": digest(_text(thing))}
    described: dict[str, Any] = {"type": _SHOWN[kind]}
    for name, value in _named_parts(thing):
        number = value.item() if isinstance(value, np.generic) else value
        is_shown = type(number) in {bool, float, int, type(None)}
        described[name] = number if is_shown else digest(_text(value))
    return described


def _full_name(thing: Any) -> str:  # noqa: ANN401 a function or a class
    """Return the module and the name of a function or a class."""
    # a spawned process imports the main script under a different name
    module = "__main__" if thing.__module__ == "__mp_main__" else thing.__module__
    return f"{module}.{thing.__qualname__}"


def _text(thing: Any, within: tuple[int, ...] = ()) -> str:  # noqa: ANN401 anything
    """Return a string that differs for different objects; ``within`` holds the ids of the containers around them."""
    if id(thing) in within:  # a list that contains itself, for example
        return "..."
    match thing:
        case np.generic():
            return repr(thing.item())
        case np.ndarray() if not thing.dtype.hasobject:
            values = np.ascontiguousarray(thing).reshape(-1).view(np.uint8)  # any shape and dtype -> bytes
            return f"array({thing.dtype}, {thing.shape}, {digest(values)})"
        case type() | FunctionType() | BuiltinFunctionType():
            return _full_name(thing)
        case _ if isinstance(thing, _VALUES):
            return repr(thing)
    texts = [_text(part, (*within, id(thing))) for part in _parts(thing)]
    if isinstance(thing, dict | set | frozenset):
        texts.sort()
    return f"{type(thing).__qualname__}({', '.join(texts)})"


def _parts(thing: Any) -> Iterable[Any]:  # noqa: ANN401, PLR0911 anything, and a return for each kind of it
    """Return the relevant parts of an object."""
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
        case _ if hasattr(thing, "__array__"):  # of pandas, PyTorch or JAX
            return [np.asarray(thing)]
        case _ if type(thing).__module__.partition(".")[0] in _OPAQUE:
            return []
    return _named_parts(thing)


def _named_parts(thing: object) -> Iterator[tuple[str, Any]]:
    """Yield the relevant attributes of an object, sorted by name."""
    parts = settings(thing) if isinstance(thing, Sampler) else attributes(thing)
    for name, value in sorted(parts.items()):
        # the wrapper holds the mask and the generator
        is_replaced = isinstance(thing, Sampler) and name in ("_mask", "_rng")
        if not is_replaced and not isinstance(value, np.random.Generator):
            yield name.lstrip("_"), value
