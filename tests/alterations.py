"""What may come of a message on its way: other content, content of another shape, or no message at all."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

#: Anything that JSON can say, and some that it can't.
values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 60)
    | st.integers()
    | st.sampled_from([10**50, 2**61, 2**64, -(2**63), float("nan"), float("inf"), 1e300])
    | st.floats()
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)

noise: st.SearchStrategy[str] = (
    st.text()
    | st.binary().map(lambda raw: raw.decode("latin-1"))
    | values.map(json.dumps)
    | st.integers(1, 10**5).map(lambda depth: "[" * depth)
    | st.integers(1, 10**4).map(lambda depth: '{"said":' * depth + "1" + "}" * depth)
    | st.integers(4000, 6000).map(lambda digits: "1" * digits)
)


@st.composite
def altered(draw: st.DrawFn, text: str) -> str:
    """A message, or what may have come of it."""
    content = json.loads(text)
    record = draw(st.sampled_from(_records(content)))
    name = draw(st.sampled_from(sorted(record)))
    how = draw(st.sampled_from(["noise", "part", "letter", "spaces", "content", "content", "less", "more", "twice"]))
    match how:
        case "noise":
            return draw(noise)
        case "part":
            start, stop = sorted(draw(st.integers(0, len(text))) for _ in range(2))
            return text[start:stop]
        case "letter":
            place = draw(st.integers(0, len(text) - 1))
            return text[:place] + draw(st.characters()) + text[place + 1 :]
        case "content" | "twice":
            record[name] = draw(values)
        case "less":
            record.pop(name)
        case "more":
            record[draw(st.text(max_size=4))] = draw(values)
    if how == "twice":
        return "{" + json.dumps(content)[1:-1] + ", " + text[1:]
    return json.dumps(content, indent=draw(st.none() | st.integers(0, 3)))


def _records(content: Any) -> list[dict[str, Any]]:
    """All records that a message has, which aren't empty."""
    if not isinstance(content, dict) or not content:
        return []
    return [content, *(record for part in content.values() for record in _records(part))]


def says_the_same(one: str, other: str) -> bool:
    """Whether two texts are messages that say the same."""
    try:
        first, second = (
            json.loads(
                text,
                object_pairs_hook=lambda pairs: ["record", *sorted(pairs, key=lambda pair: pair[0])],
                parse_int=lambda digits: f"number {digits}",  # which isn't equal to a boolean
            )
            for text in (one, other)
        )
        return bool(first == second)
    except (ValueError, RecursionError):
        return False
