"""Messages: what processes say to each other, as texts that are read without trust.

A text comes out of a store, or out of a function of the user's, and may hold anything. It is read in two steps, and
whatever is wrong is a ``ValueError`` that says what:

1. It must be JSON in ASCII, of at most 1 MiB and a few levels, made of records, integers, texts,
   booleans and null. A name that comes twice in a record, a fraction, ``NaN``, and a number of very many digits are
   refused.
2. Each field of a record is read by a reader, which knows the field's type and range and returns what it holds. No
   field may be missing, and none may be there that isn't known.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn

from annbatch_distributed.resume.state import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Reader", "count", "cut", "flag", "one_of", "optional", "parsed", "record", "table", "text", "written"]

#: Returns what a field holds, or raises a ValueError that says what it must be.
type Reader[T] = Callable[[object], T]

#: How many characters a message has at most; this package's need a few thousand.
_LONGEST = 1 << 20
#: How deep records may be nested.
_DEEPEST = 8
#: How many characters a number has at most.
_DIGITS = 40
#: How many fields a record without fixed fields has at most, and how many characters their names have.
_FIELDS, _LONGEST_NAME = 200, 200

# also one without an end, so that a text is gone through once
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+\\?"?', re.DOTALL)
_BRACKET = re.compile(r"[][{}]")


def written(content: Mapping[str, Any]) -> str:
    """Return a message."""
    return json.dumps(content, allow_nan=False)


def parsed(text: object) -> object:
    """Return what a message holds."""
    if not isinstance(text, str) or not text.isascii():
        raise ValueError(f"it is not a text in ASCII: {shown(text)}")
    if len(text) > _LONGEST:
        raise ValueError(f"it has {len(text)} characters, more than {_LONGEST}: {shown(text)}")
    # else the depth at which Python's reader gives up would depend on who calls it
    steps = (1 if bracket in "[{" else -1 for bracket in _BRACKET.findall(_STRING.sub("", text)))
    if any(depth > _DEEPEST for depth in accumulate(steps)):
        raise ValueError(f"it is nested more than {_DEEPEST} levels deep: {shown(text)}")
    try:
        found: object = json.loads(
            text, object_pairs_hook=_each_once, parse_int=_integer, parse_float=_no_number, parse_constant=_no_number
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error}): {shown(text)}") from None
    return found


def record(content: object, fields: Mapping[str, Reader[Any]]) -> dict[str, Any]:
    """Return the fields of a record, each as its reader returns it."""
    if not isinstance(content, dict):
        raise ValueError(f"it must be a record, and is {shown(content)}")
    if content.keys() != fields.keys():
        there_are, expected = sorted(content.keys() - fields.keys()), sorted(fields.keys() - content.keys())
        raise ValueError(
            f"it must have the fields {', '.join(fields)}; it lacks {shown(expected)} and has {shown(there_are)}"
        )
    return {name: _field(name, content[name], read) for name, read in fields.items()}


def table[T](read: Reader[T]) -> Reader[dict[str, T]]:
    """Return what reads a record of any names, and each of its fields by the same reader."""
    name_of = text(_LONGEST_NAME)

    def read_all(content: object) -> dict[str, T]:
        if not isinstance(content, dict) or len(content) > _FIELDS:
            raise ValueError(f"must be a record of at most {_FIELDS} fields, and is {shown(content)}")
        return {name: _field(name_of(name), held, read) for name, held in content.items()}

    return read_all


def count(least: int = 0, below: int | None = None) -> Reader[int]:
    """Return what reads an integer of at least ``least``, and less than ``below``."""
    bounds = f"at least {least}{'' if below is None else f' and below {below}'}"
    integer = _reader("an integer", lambda content: isinstance(content, int) and not isinstance(content, bool))
    within = _reader(bounds, lambda content: content >= least and (below is None or content < below))
    return lambda content: within(integer(content))


def text(longest: int) -> Reader[str]:
    """Return what reads a text of ``longest`` characters at most."""
    expected = f"a text of at most {longest} characters"
    return _reader(expected, lambda content: isinstance(content, str) and len(content) <= longest)


def one_of(*texts: str) -> Reader[str]:
    """Return what reads one of some texts."""
    return _reader(f"one of {', '.join(texts)}", lambda content: isinstance(content, str) and content in texts)


def optional[T](read: Reader[T]) -> Reader[T | None]:
    """Return what reads null, or what a reader reads."""
    return lambda content: None if content is None else read(content)


def _reader(expected: str, is_expected: Callable[[Any], bool]) -> Reader[Any]:
    """Return what reads content that a condition holds of."""

    def read(content: object) -> object:
        if not is_expected(content):
            raise ValueError(f"must be {expected}, and is {shown(content)}")
        return content

    return read


#: Reads true or false.
flag: Reader[bool] = _reader("true or false", lambda content: isinstance(content, bool))


def cut(long: str, longest: int) -> str:
    """Return a text, cut to ``longest`` characters."""
    return long if len(long) <= longest else f"{long[: longest - 3]}..."


def _field[T](name: str, content: object, read: Reader[T]) -> T:
    try:
        return read(content)
    except ValueError as error:
        raise ValueError(f"{shown(name)[1:-1]}: {error}") from None


def _each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a record has a field twice, of {shown([name for name, _ in pairs])}")
    return found


def _integer(digits: str) -> int:
    return int(digits) if len(digits) <= _DIGITS else _no_number(digits)


def _no_number(digits: str) -> NoReturn:
    raise ValueError(f"it holds {shown(digits)[1:-1]}, and numbers must be integers of at most {_DIGITS} digits")
