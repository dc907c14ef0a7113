"""The fingerprint of a sampler: a text that is the same for samplers of the same settings, in any process.

1. What a sampler holds is described, however deep: plain values by themselves, arrays by a digest of what is in them.
2. Random generators are left out, since a wrapper gives others to its copies; so is the mask, which the wrapper has.
3. What has no description of its own, such as an open file, counts by its type.
4. The text goes into states and to other ranks. It shows the numbers that annbatch's samplers and this package's
   shardings are set to. What others hold, which can be a token or a password, is in it as a digest only.
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
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from annbatch.abc import Sampler

from annbatch_distributed.copies import attributes
from annbatch_distributed.known import SETTINGS, settings
from annbatch_distributed.sharding import Contiguous, Independent, Shuffled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["fingerprint"]

#: Whose settings are shown: of these types exactly, not of what others make of them.
_SHOWN: set[type] = {*SETTINGS, Contiguous, Independent, Shuffled}

#: Modules whose objects count by their type: what they hold is theirs, and changes with the process.
_OPAQUE = frozenset(sys.stdlib_module_names) - {"collections", "datetime", "decimal", "fractions", "functools", "enum"}


def fingerprint(thing: object) -> str:
    """Return a text that tells samplers, or shardings, of other settings apart.

    >>> from annbatch.samplers import SequentialSampler
    >>> masked = SequentialSampler(64, 32, 256, mask=slice(0, 9))
    >>> fingerprint(SequentialSampler(64, 32, 256)) == fingerprint(masked)
    True
    >>> fingerprint(SequentialSampler(64, 32, 256)) == fingerprint(
    ...     SequentialSampler(64, 32, 512)
    ... )
    False
    >>> fingerprint(Shuffled(block_size=64))
    'Shuffled(block_size=64)'
    """
    if type(thing) not in _SHOWN:
        return f"{type(thing).__name__}({_digest(_description(thing).encode('utf-8', 'surrogatepass'))})"
    texts = (f"{name}={_shown(value)}" for name, value in _parts(thing))
    return f"{type(thing).__name__}({', '.join(texts)})"


def _shown(value: object) -> str:
    """A setting that is shown: as it is if it is a number, and else by a digest."""
    plain = value.item() if isinstance(value, np.generic) else value
    if type(plain) in (type(None), bool, int, float):
        return repr(plain)
    return _digest(_description(value).encode("utf-8", "surrogatepass"))


def _digest(data: bytes | memoryview) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _description(thing: object, within: tuple[int, ...] = ()) -> str:  # noqa: PLR0912 a branch for each kind of thing
    """Describe anything that a sampler holds; ``within`` are the objects that it is held by."""
    describe = functools.partial(_description, within=(*within, id(thing)))
    kind = type(thing)
    match thing:
        case None | bool() | int() | float() | complex() | str() | bytes() | slice() | range() | type() | np.dtype():
            text = repr(thing)
        case dt.date() | dt.time() | dt.timedelta() | Decimal() | Fraction() | Enum():
            text = repr(thing)
        case np.generic():
            text = repr(thing.item())
        case np.ndarray() if thing.dtype.kind in "biufcmMSUV" and not thing.dtype.hasobject:
            values = np.ascontiguousarray(thing).reshape(-1).view(np.uint8).data
            text = f"array({thing.dtype}, {thing.shape}, {_digest(values)})"
        case os.PathLike():
            text = f"path({os.fspath(thing)!r})"
        case _ if id(thing) in within:
            text = "..."
        case list() | tuple() | deque():
            text = f"[{', '.join(map(describe, thing))}]"
        case set() | frozenset():
            text = f"{{{', '.join(sorted(map(describe, thing)))}}}"
        case dict():
            pairs = sorted(((str(key), value) for key, value in thing.items()), key=lambda pair: pair[0])
            text = kind.__name__ + _of_pairs(pairs, describe)
        case np.ndarray():
            text = f"array({thing.shape}, {describe(thing.reshape(-1).tolist())})"
        case pd.Categorical():
            text = f"Categorical({describe(thing.codes)}, {describe(list(thing.categories))})"
        case pd.DataFrame():
            text = f"DataFrame({describe(list(thing.items()))}, {describe(thing.index)})"
        case pd.Series() | pd.Index():
            text = f"{kind.__name__}({describe(thing.to_numpy())})"
        case functools.partial():
            text = f"partial({describe([thing.func, thing.args, thing.keywords])})"
        case types.FunctionType() | types.BuiltinFunctionType():
            text = f"{thing.__module__}.{thing.__qualname__}"
        case types.MethodType():
            text = f"{describe(thing.__self__)}.{thing.__name__}"
        case _ if hasattr(thing, "__array__"):  # torch's and jax's
            text = describe(np.asarray(thing))
        case _ if kind.__module__.partition(".")[0] in _OPAQUE or isinstance(thing, types.ModuleType):
            text = kind.__qualname__
        case _:
            text = kind.__name__ + _of_pairs(_parts(thing), describe)
    return text


def _of_pairs(pairs: Iterable[tuple[str, Any]], describe: Callable[[Any], str]) -> str:
    return f"({', '.join(f'{name}={describe(value)}' for name, value in pairs)})"


def _parts(thing: object) -> Iterator[tuple[str, Any]]:
    """What counts of a sampler or another object, by name, in the order of the names."""
    held = settings(thing) if isinstance(thing, Sampler) else attributes(thing)
    for name, value in sorted(held.items()):
        is_wrappers = isinstance(thing, Sampler) and name in ("_mask", "_rng")
        if not is_wrappers and not isinstance(value, np.random.Generator):
            yield name.lstrip("_"), value
