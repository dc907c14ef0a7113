"""The fingerprint of a sampler: a text that is the same for samplers of the same settings, in any process.

1. What a sampler holds is described, however deep: plain values by themselves, arrays by a digest of what is in them.
2. Random generators are left out, since a wrapper gives others to its copies; so is the mask, which the wrapper has.
3. What has no description of its own, such as an open file, counts by its type.
4. The text goes into states and to other ranks. It shows the numbers that annbatch's samplers and this package's
   wrappers are set to. What others hold, which can be a token or a password, is in it as a digest only.
"""

from __future__ import annotations

import datetime as dt
import functools
import os
import sys
import types
from collections import deque
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import singledispatch
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from annbatch.abc import Sampler
from annbatch.samplers import ClassSampler

from annbatch_distributed.passes.annbatch_samplers import SETTINGS, labels_and_weights
from annbatch_distributed.passes.private_copy import attributes
from annbatch_distributed.plan import POLICIES
from annbatch_distributed.sharding import Contiguous, Independent, Shuffled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    type PartsOf = Callable[[Any], dict[str, Any]]

__all__ = ["SHOWN", "fingerprint", "settings"]

#: Whose settings are shown: of these types exactly, not of what others make of them.
SHOWN: set[type] = {*SETTINGS, Contiguous, Independent, Shuffled}


def fingerprint(thing: object) -> str:
    """Return a text that tells samplers, or shardings, of other settings apart.

    >>> from annbatch.samplers import SequentialSampler
    >>> fingerprint(SequentialSampler(64, 32, 256)) == fingerprint(
    ...     SequentialSampler(64, 32, 256, mask=slice(0, 9))
    ... )
    True
    >>> fingerprint(SequentialSampler(64, 32, 256)) == fingerprint(
    ...     SequentialSampler(64, 32, 512)
    ... )
    False
    >>> fingerprint(Shuffled(block_size=64))
    'Shuffled(block_size=64)'
    """
    if type(thing) not in SHOWN:
        return f"{type(thing).__name__}({_digest_of(thing)})"
    texts = (f"{name}={_shown(value)}" for name, value in _parts(thing, _settings_of(thing)))
    return f"{type(thing).__name__}({', '.join(texts)})"


def _settings_of(thing: object) -> dict[str, Any]:
    return settings(thing) if isinstance(thing, Sampler) else attributes(thing)


def _shown(value: object) -> str:
    """A setting of something whose settings are shown: as it is if it is a number, and else by a digest."""
    match value:
        case np.number() | np.bool_():
            return repr(value.item())
        case None | bool() | int() | float() if type(value) in (type(None), bool, int, float):
            return repr(value)
        case str() if value in POLICIES:
            return value
        case _ if isinstance(value, Sampler) or type(value) in SHOWN:
            return fingerprint(value)
    return _digest_of(value)


def _digest_of(thing: object) -> str:
    """A digest of all that something holds."""
    text = _deep(lambda: _description(thing, (), _settings_of), thing)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _deep(describe: Callable[[], str], thing: object) -> str:
    try:
        return describe()
    except RecursionError:
        raise ValueError(
            f"{type(thing).__name__} holds what is nested too deep to be described, so that states and other ranks "
            "can't be compared with it. Register a function for its type with "
            "annbatch_distributed.passes.settings, which returns what its batches follow from."
        ) from None


@singledispatch
def settings(sampler: Sampler) -> dict[str, Any]:
    """Return what a sampler's batches follow from, by name: all that it holds, unless registered for its type.

    Register a function for the type of a sampler that holds more, such as a counter that runs with its passes. Of
    annbatch's own samplers, their settings count; of a subclass of one of them, all that it holds.

    Parameters
    ----------
    sampler
        Any sampler.
    """
    return _held(sampler)


def _held(sampler: Sampler) -> dict[str, Any]:
    if type(sampler) in SETTINGS:
        return {name: getattr(sampler, name) for name in SETTINGS[type(sampler)]}
    return attributes(sampler)


@settings.register(ClassSampler)
def _settings_of_class_sampler(sampler: ClassSampler) -> dict[str, Any]:
    # of a subclass, without what follows from labels, weights and mask, and what counts passes
    held = {name: part for name, part in _held(sampler).items() if name not in ("_rle_manager", "_num_open_passes")}
    return held | labels_and_weights(sampler)


#: Modules whose objects count by their type: what they hold is theirs, and changes with the process.
_OPAQUE = frozenset(sys.stdlib_module_names) - {"collections", "datetime", "decimal", "fractions", "functools", "enum"}


def _description(thing: object, within: tuple[int, ...], parts_of: PartsOf) -> str:  # noqa: PLR0912 a branch for each kind of thing
    """Describe anything that a sampler holds; ``within`` are the objects that it is held by.

    What objects without a description of their own hold, ``parts_of`` says.
    """
    describe = functools.partial(_description, within=(*within, id(thing)), parts_of=parts_of)
    kind = type(thing)
    match thing:
        case None | bool() | int() | float() | complex() | str() | bytes() | slice() | range() | type() | np.dtype():
            text = repr(thing)
        case np.generic():
            text = repr(thing.item())
        case np.ndarray() if thing.dtype.kind in "biufcmMSUV" and not thing.dtype.hasobject:
            text = f"array({thing.dtype}, {thing.shape}, {_digest(thing)})"
        case pd.Categorical():
            text = f"Categorical({describe(thing.codes)}, {describe(list(thing.categories))})"
        case pd.DataFrame():
            columns = [(name, thing[name].to_numpy()) for name in thing.columns]
            text = f"DataFrame({describe(columns)}, {describe(thing.index.to_numpy())})"
        case pd.Series() | pd.Index():
            text = f"{kind.__name__}({describe(thing.to_numpy())})"
        case os.PathLike():
            text = f"path({os.fspath(thing)!r})"
        case _ if id(thing) in within:
            text = "..."
        case list() | tuple() | deque():
            text = f"[{', '.join(describe(part) for part in thing)}]"
        case np.ndarray():
            text = f"array({thing.shape}, {describe(thing.reshape(-1).tolist())})"
        case set() | frozenset():
            text = f"{{{', '.join(sorted(describe(part) for part in thing))}}}"
        case dict():
            text = _described(thing, thing, within, parts_of)
        case functools.partial():
            text = f"partial({describe([thing.func, thing.args, thing.keywords])})"
        case types.FunctionType() | types.BuiltinFunctionType():
            text = f"{thing.__module__}.{thing.__qualname__}"
        case types.MethodType():
            text = f"{describe(thing.__self__)}.{thing.__name__}"
        case dt.date() | dt.time() | dt.timedelta() | Decimal() | Fraction() | Enum():
            text = repr(thing)
        case _ if hasattr(thing, "__array__"):  # torch's and jax's
            text = describe(np.asarray(thing))
        case _ if kind.__module__.partition(".")[0] in _OPAQUE or isinstance(thing, types.ModuleType):
            text = kind.__qualname__
        case _:
            text = _described(thing, parts_of(thing), within, parts_of)
    return text


def _described(thing: object, parts: dict[Any, Any], within: tuple[int, ...], parts_of: PartsOf) -> str:
    texts = (f"{name}={_description(value, (*within, id(thing)), parts_of)}" for name, value in _parts(thing, parts))
    return f"{type(thing).__name__}({', '.join(texts)})"


def _parts(thing: object, parts: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """What is described of something, by name, in the order of the names."""
    for name, value in sorted(parts.items(), key=lambda part: str(part[0])):
        is_wrappers = isinstance(thing, Sampler) and name in ("_mask", "_rng")
        if not is_wrappers and not isinstance(value, np.random.Generator):
            yield str(name).lstrip("_"), value


def _digest(array: np.ndarray) -> str:
    return blake2b(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, digest_size=16).hexdigest()
