"""The fingerprint of a sampler: a text that is the same for samplers of the same settings, in any process.

1. What a sampler holds is described, however deep: plain values by themselves, arrays by a digest of what is in them.
2. Random generators are left out, since a wrapper gives others to its copies; so is the mask, which the wrapper has.
3. What has no description of its own, such as an open file, counts by its type.
"""

from __future__ import annotations

from functools import singledispatch
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from annbatch.samplers import ClassSampler

from annbatch_distributed.private_copy import attributes

if TYPE_CHECKING:
    from annbatch.abc import Sampler


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


def _description(thing: object, within: tuple[int, ...]) -> str:
    """Describe anything that a sampler holds; ``within`` are the objects that it is held by."""
    held = (*within, id(thing))
    match thing:
        case None | bool() | int() | float() | complex() | str() | bytes() | slice() | range() | type() | np.dtype():
            text = repr(thing)
        case np.generic():
            text = repr(thing.item())
        case np.ndarray() if thing.dtype != object:
            text = f"array({thing.dtype}, {thing.shape}, {_digest(np.ascontiguousarray(thing))})"
        case pd.Categorical():
            text = f"Categorical({_description(thing.codes, held)}, {_description(list(thing.categories), held)})"
        case pd.DataFrame() | pd.Series() | pd.Index():
            text = f"{type(thing).__name__}({_digest(pd.util.hash_pandas_object(thing).to_numpy())})"
        case _ if id(thing) in within:
            text = "..."
        case list() | tuple() | np.ndarray():
            text = f"[{', '.join(_description(part, held) for part in thing)}]"
        case set() | frozenset():
            text = f"{{{', '.join(sorted(_description(part, held) for part in thing))}}}"
        case dict():
            text = _described(thing, thing, within)
        case _ if callable(thing):
            text = str(getattr(thing, "__qualname__", type(thing).__qualname__))
        case _:
            text = _described(thing, attributes(thing), within)
    return text


def _described(thing: object, parts: dict[Any, Any], within: tuple[int, ...]) -> str:
    texts = (
        f"{str(name).lstrip('_')}={_description(value, (*within, id(thing)))}"
        for name, value in sorted(parts.items(), key=lambda part: str(part[0]))
        if name not in ("_mask", "_rng") and not isinstance(value, np.random.Generator)
    )
    return f"{type(thing).__name__}({', '.join(texts)})"


def _digest(array: np.ndarray) -> str:
    return blake2b(array.data, digest_size=16).hexdigest()
