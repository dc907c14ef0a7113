"""Messages: what processes say to each other, as texts that are read without trust.

A text comes out of a store, or out of a function of the user's, and may hold anything. It is read in two steps, and
whatever is wrong is a ``ValueError`` that says what:

1. It must be JSON in ASCII, of at most :data:`LONGEST` characters and a few levels, made of records, integers, texts,
   booleans and null. A name that comes twice in a record, a fraction, ``NaN``, and a number of very many digits are
   refused.
2. What it holds is read by name: each field by a reader, which knows its type and range. None may be missing, and none
   may be there that isn't known.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    type Reader[T] = Callable[[object], T]

#: How many characters a message has at most: 1 MiB, where its own need a few thousand.
LONGEST = 1 << 20
#: How deep records may be nested.
_DEEPEST = 8
#: How many characters a number has at most.
_DIGITS = 40
#: How many fields a record without fixed fields has at most.
_FIELDS = 200

# also one without an end, so that a text is gone through once
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+\\?"?', re.DOTALL)
_BRACKET = re.compile(r"[][{}]")


def written(content: Mapping[str, Any]) -> str:
    """Return a message."""
    return json.dumps(content, allow_nan=False)


def parsed(text: object) -> object:
    """Return what a message holds.

    Raises
    ------
    ValueError
        If it is none.
    """
    if not isinstance(text, str) or not text.isascii():
        msg = f"it is not a text in ASCII: {shown(text)}"
        raise ValueError(msg)
    if len(text) > LONGEST:
        msg = f"it has {len(text)} characters, more than {LONGEST}: {shown(text)}"
        raise ValueError(msg)
    depth = 0  # else the depth at which Python's reader gives up would depend on who calls it
    for bracket in _BRACKET.findall(_STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > _DEEPEST:
            msg = f"it is nested more than {_DEEPEST} levels deep: {shown(text)}"
            raise ValueError(msg)
    try:
        found: object = json.loads(
            text, object_pairs_hook=_each_once, parse_int=_integer, parse_float=_no_number, parse_constant=_no_number
        )
    except json.JSONDecodeError as error:
        msg = f"it is not JSON ({error}): {shown(text)}"
        raise ValueError(msg) from None
    return found


def record(content: object, fields: Mapping[str, Reader[Any]]) -> dict[str, Any]:
    """Return the fields of a record.

    Parameters
    ----------
    content
        What a message holds, or a part of it.
    fields
        What reads each field, by name.

    Raises
    ------
    ValueError
        If it is no record, lacks a field or has others, or if what a field holds isn't what it should be.
    """
    if not isinstance(content, dict):
        msg = f"it must be a record, and is {shown(content)}"
        raise ValueError(msg)
    if content.keys() != fields.keys():
        there_are, expected = sorted(content.keys() - fields.keys()), sorted(fields.keys() - content.keys())
        msg = f"it must have the fields {', '.join(fields)}; it lacks {shown(expected)} and has {shown(there_are)}"
        raise ValueError(msg)
    return {name: _field(name, content[name], read) for name, read in fields.items()}


def table[T](read: Reader[T]) -> Reader[dict[str, T]]:
    """Return what reads a record of any names."""

    def read_all(content: object) -> dict[str, T]:
        if not isinstance(content, dict) or len(content) > _FIELDS:
            msg = f"must be a record of at most {_FIELDS} fields, and is {shown(content)}"
            raise ValueError(msg)
        return {name: _field(text(200)(name), held, read) for name, held in content.items()}

    return read_all


def count(least: int = 0, below: int | None = None) -> Reader[int]:
    """Return what reads an integer of at least ``least``, and less than ``below``."""

    def read(content: object) -> int:
        if not isinstance(content, int) or isinstance(content, bool):
            msg = f"must be an integer, and is {shown(content)}"
            raise ValueError(msg)
        if content < least or (below is not None and content >= below):
            msg = f"must be at least {least}{'' if below is None else f' and below {below}'}, and is {content}"
            raise ValueError(msg)
        return content

    return read


def text(longest: int) -> Reader[str]:
    """Return what reads a text of so many characters at most."""

    def read(content: object) -> str:
        if not isinstance(content, str) or len(content) > longest:
            msg = f"must be a text of at most {longest} characters, and is {shown(content)}"
            raise ValueError(msg)
        return content

    return read


def one_of(*texts: str) -> Reader[str]:
    """Return what reads one of some texts."""

    def read(content: object) -> str:
        if not isinstance(content, str) or content not in texts:
            msg = f"must be one of {', '.join(texts)}, and is {shown(content)}"
            raise ValueError(msg)
        return content

    return read


def flag(content: object) -> bool:
    """Read true or false."""
    if not isinstance(content, bool):
        msg = f"must be true or false, and is {shown(content)}"
        raise ValueError(msg)
    return content


def any_of[T](*readers: Reader[T]) -> Reader[T]:
    """Return what reads whatever one of some readers reads."""

    def read(content: object) -> T:
        for reader in readers[:-1]:
            try:
                return reader(content)
            except ValueError:
                continue
        return readers[-1](content)

    return read


def anything(content: object) -> object:
    """Read what is still to be read."""
    return content


def none(content: object) -> None:
    """Read null."""
    if content is not None:
        msg = f"must be null, and is {shown(content)}"
        raise ValueError(msg)


def shown(thing: object) -> str:
    """Return anything as a short text for a message, whatever it is."""
    begin = thing[:200] if isinstance(thing, str | list | tuple) else thing
    try:
        described = repr(begin)
    except Exception:  # noqa: BLE001 such as ValueError for an integer of very many digits
        return f"of type {type(thing).__name__}"
    return cut(described, 80)


def cut(long: str, longest: int) -> str:
    """Return a text, cut to so many characters."""
    return long if len(long) <= longest else f"{long[: longest - 3]}..."


def _field[T](name: str, content: object, read: Reader[T]) -> T:
    try:
        return read(content)
    except ValueError as error:
        msg = f"{shown(name)[1:-1]}: {error}"
        raise ValueError(msg) from None


def _each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        msg = f"a record has a field twice, of {shown([name for name, _ in pairs])}"
        raise ValueError(msg)
    return found


def _integer(digits: str) -> int:
    return int(digits) if len(digits) <= _DIGITS else _no_number(digits)


def _no_number(digits: str) -> NoReturn:
    msg = f"it holds {shown(digits)[1:-1]}, and numbers must be integers of at most {_DIGITS} digits"
    raise ValueError(msg)
