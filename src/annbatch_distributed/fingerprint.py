"""The fingerprint of a sampler: a text that is the same for samplers of the same settings, in any process.

1. What a sampler holds is described, however deep: plain values by themselves, arrays by a digest of what is in them.
2. Random generators are left out, since a wrapper gives others to its copies; so is the mask, which the wrapper has.
3. What has no description of its own, such as an open file, counts by its type.
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
from typing import Any

import numpy as np
import pandas as pd
from annbatch.abc import Sampler
from annbatch.samplers import ClassSampler

from annbatch_distributed.private_copy import attributes


def fingerprint(sampler: Sampler) -> str:
    """Return a text that tells samplers of other settings apart: readable at its beginning, and any length.

    Parameters
    ----------
    sampler
        Any sampler.

    Examples
    --------
    >>> from annbatch.samplers import SequentialSampler
    >>> fingerprint(SequentialSampler(64, 32, 256)) == fingerprint(SequentialSampler(64, 32, 256, mask=slice(0, 9)))
    True
    >>> fingerprint(SequentialSampler(64, 32, 256)) == fingerprint(SequentialSampler(64, 32, 512))
    False
    """
    return _described(sampler, settings(sampler), ())


def described(thing: object) -> str:
    """Return such a text of anything.

    Parameters
    ----------
    thing
        A sharding, for one.
    """
    return _description(thing, ())


@singledispatch
def settings(sampler: Sampler) -> dict[str, Any]:
    """Return what a sampler's batches follow from, by name: all that it holds, unless registered for its type.

    Register a function for the type of a sampler that holds more, such as a counter that runs with its passes.

    Parameters
    ----------
    sampler
        Any sampler.
    """
    return attributes(sampler)


@settings.register(ClassSampler)
def _settings_of_class_sampler(sampler: ClassSampler) -> dict[str, Any]:
    # the table of runs follows from these, and from the mask; private names, see tests/test_fingerprint.py
    runs = sampler._rle_manager
    held = {
        name: value for name, value in attributes(sampler).items() if name not in ("_rle_manager", "_num_open_passes")
    }
    return held | {"classes": runs._classes, "weights": runs._weights}


#: Modules whose objects count by their type: what they hold is theirs, and changes with the process.
_OPAQUE = frozenset(sys.stdlib_module_names) - {"collections", "datetime", "decimal", "fractions", "functools", "enum"}


def _description(thing: object, within: tuple[int, ...]) -> str:  # noqa: PLR0912 a branch for each kind of thing
    """Describe anything that a sampler holds; ``within`` are the objects that it is held by."""
    held = (*within, id(thing))
    kind = type(thing)
    match thing:
        case None | bool() | int() | float() | complex() | str() | bytes() | slice() | range() | type() | np.dtype():
            text = repr(thing)
        case np.generic():
            text = repr(thing.item())
        case np.ndarray() if thing.dtype.kind in "biufcmMSUV" and not thing.dtype.hasobject:
            text = f"array({thing.dtype}, {thing.shape}, {_digest(thing)})"
        case pd.Categorical():
            text = f"Categorical({_description(thing.codes, held)}, {_description(list(thing.categories), held)})"
        case pd.DataFrame():
            columns = [(name, thing[name].to_numpy()) for name in thing.columns]
            text = f"DataFrame({_description(columns, held)}, {_description(thing.index.to_numpy(), held)})"
        case pd.Series() | pd.Index():
            text = f"{kind.__name__}({_description(thing.to_numpy(), held)})"
        case os.PathLike():
            text = f"path({os.fspath(thing)!r})"
        case _ if id(thing) in within:
            text = "..."
        case list() | tuple() | deque():
            text = f"[{', '.join(_description(part, held) for part in thing)}]"
        case np.ndarray():
            text = f"array({thing.shape}, {_description(thing.reshape(-1).tolist(), held)})"
        case set() | frozenset():
            text = f"{{{', '.join(sorted(_description(part, held) for part in thing))}}}"
        case dict():
            text = _described(thing, thing, within)
        case functools.partial():
            text = f"partial({_description([thing.func, thing.args, thing.keywords], held)})"
        case types.FunctionType() | types.BuiltinFunctionType():
            text = f"{thing.__module__}.{thing.__qualname__}"
        case types.MethodType():
            text = f"{_description(thing.__self__, held)}.{thing.__name__}"
        case dt.date() | dt.time() | dt.timedelta() | Decimal() | Fraction() | Enum():
            text = repr(thing)
        case _ if hasattr(thing, "__array__"):  # torch's and jax's
            text = _description(np.asarray(thing), held)
        case _ if kind.__module__.partition(".")[0] in _OPAQUE or isinstance(thing, types.ModuleType):
            text = kind.__qualname__
        case _:
            text = _described(thing, attributes(thing), within)
    return text


def _described(thing: object, parts: dict[Any, Any], within: tuple[int, ...]) -> str:
    texts = (
        f"{str(name).lstrip('_')}={_description(value, (*within, id(thing)))}"
        for name, value in sorted(parts.items(), key=lambda part: str(part[0]))
        if not (isinstance(thing, Sampler) and name in ("_mask", "_rng")) and not isinstance(value, np.random.Generator)
    )
    return f"{type(thing).__name__}({', '.join(texts)})"


def _digest(array: np.ndarray) -> str:
    return blake2b(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, digest_size=16).hexdigest()
