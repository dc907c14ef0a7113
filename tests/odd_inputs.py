"""Odd inputs: what somebody may pass by mistake, what it must come to, and whether it does.

A row of a table is one call. It is refused, with an error of this package that says what was expected and what
arrived; or it is taken, and gives what is right; or the error is that of other people's code, and comes out as it is.
None hangs, and none changes the object that it was tried on.
"""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import annbatch_distributed
from annbatch_distributed import DistributedSampler

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGE = Path(annbatch_distributed.__file__).parent

#: How Python, numpy and torch begin to say that an argument is wrong, without saying which one, or what it should be.
BARE = re.compile(
    r"""
      '?[\w.]+'?\ (object|indices|argument)\b
    | [\w.]+\(\)\ (missing|takes|got|arg|argument|requires)\b
    | (un)?supported\ operand|bad\ operand|cannot\ unpack|can't\ multiply|can\ only\ concatenate
    | '[<>=]+'\ not\ supported
    | [Tt]he\ truth\ value|invalid\ literal|slice\ indices|only\ (integer|length|0-dim)
    | (could\ not|cannot|can't)\ (convert|broadcast|cast|interpret)
    | (integer|float)?\ ?(division|modulo)
    | (list|tuple|string|range)?\ ?(object\ )?index\ out
    | .{0,30}\bis\ not\ in\ (list|tuple)
    | (Python\ int(eger)?|int)\ too\ large|not\ enough\ values|too\ many\ values
    | (setting\ an\ array|operands\ could|expected\ (non-negative|a)|must\ be\ real|unhashable|inhomogeneous)
    | (Input|All|Cannot|Invalid|arrays?|maximum)\ [a-z]+\b(?!.*\bgot\b)
    """,
    re.VERBOSE | re.DOTALL,
)
#: An error that says what was expected and what arrived is no shorter.
SHORTEST = 30


@dataclass(frozen=True)
class Odd:
    """One call, and what it must come to."""

    name: str
    do: Callable[..., Any]
    """The call. It is given the object that it is tried on, if there is one."""
    on: Callable[[], Any] | None
    """Makes the object that it is tried on."""
    error: type[Exception] | None = None
    """What it raises; None if it is taken."""
    says: tuple[str, ...] = ()
    """What is in the message: what was expected, and what arrived. It is all of it if the error is other people's."""
    right: Any = None
    """What a call that is taken gives."""
    is_theirs: bool = False
    """Whether the error is that of other people's code."""


def refused(
    name: str, do: Callable[..., Any], error: type[Exception], *says: str, on: Callable[[], Any] | None = None
) -> Odd:
    """A call that is an error, which says what was expected and what arrived."""
    assert len(says) >= 2, f"{name}: what was expected, and what arrived"
    return Odd(name, do, on, error, says)


def taken(name: str, do: Callable[..., Any], right: Any, *, on: Callable[[], Any] | None = None) -> Odd:
    """A call that is odd, and right."""
    return Odd(name, do, on, right=right)


def theirs(
    name: str, do: Callable[..., Any], error: type[Exception], message: str, *, on: Callable[[], Any] | None = None
) -> Odd:
    """A call that runs into an error of other people's code, the user's own or annbatch's."""
    return Odd(name, do, on, error, (message,), is_theirs=True)


def check(odd: Odd) -> None:
    """Make the call, and look at what comes of it."""
    thing = None if odd.on is None else odd.on()
    before = told(thing)
    arguments = () if odd.on is None else (thing,)
    if odd.error is None:
        found, right = told(odd.do(*arguments)), told(odd.right)
        assert found == right, f"it gives {found}, not {right}"
        return
    with pytest.raises(odd.error) as raised:
        odd.do(*arguments)
    # a subclass would be another error, such as zarr's or torch's own
    assert raised.type is odd.error, f"it is a {raised.type.__name__}"
    message = str(raised.value.args[0]) if raised.value.args else ""
    deepest = Path(traceback.extract_tb(raised.value.__traceback__)[-1].filename)
    assert told(thing) == before, "a call that fails leaves the object as it was"
    assert (PACKAGE in deepest.parents) != odd.is_theirs, f"{deepest} says it: {message}"
    if odd.is_theirs:
        assert (message,) == odd.says, f"it says {message}"
        return
    assert len(message) >= SHORTEST, f"it says only: {message}"
    assert not BARE.match(message), f"it says no more than: {message}"
    for text in odd.says:
        assert text in message, f"{text!r} is not in: {message}"


def told(thing: Any) -> Any:
    """What can be told of an object, to compare it with another or with what it was."""
    if isinstance(thing, np.ndarray):
        return thing.dtype.str, thing.tolist()
    if isinstance(thing, DistributedSampler):
        return (
            repr(thing),
            thing.state_dict(batches_done=0),
            thing.rng.bit_generator.state,
            repr(thing._cursor.last(None)),
        )
    if hasattr(thing, "state_dict"):
        return thing.n_obs, thing.state_dict(), told(thing.sampler)
    return repr(thing)
