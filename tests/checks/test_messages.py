"""Messages that anybody may have written: they are read as what they say, or it is said what is wrong with them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed.checks import messages
from annbatch_distributed.checks.exchange import Verdict
from tests.alterations import noise, values

FIELDS = {
    "count": messages.count(1, below=10),
    "text": messages.text(5),
    "flag": messages.flag,
    "kind": messages.one_of("a", "b"),
    "either": messages.optional(messages.count()),
    "table": messages.table(messages.count()),
}
GOOD = {"count": 3, "text": "abc", "flag": True, "kind": "a", "either": None, "table": {"x": 0}}


def read(text: object) -> dict[str, Any]:
    return messages.record(messages.parsed(text), FIELDS)


def test_what_was_written_is_read() -> None:
    assert read(messages.written(GOOD)) == GOOD


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it is not JSON"),
        ("garbage", "it is not JSON (Expecting value: line 1 column 1 (char 0)): 'garbage'"),
        ("[1]", "it must be a record, and is [1]"),
        ("null", "it must be a record, and is None"),
        (None, "it is not a text in ASCII: None"),
        (b"{}", "it is not a text in ASCII: b'{}'"),
        ('"\N{GREEK SMALL LETTER ALPHA}"', "it is not a text in ASCII"),
        ("[" * 10**5, "it is nested more than 8 levels deep: '[[["),
        ('{"a":' * 10**5, "it is nested more than 8 levels deep"),
        ("[" * 9 + "]" * 9, "it is nested more than 8 levels deep"),
        (" " * 2**20 + "1", "it has 1048577 characters, more than 1048576"),
        ("9" * 41, "it holds 99999"),
        ("9" * 10_000, "numbers must be integers of at most 40 digits"),
        ("1.5", "it holds 1.5, and numbers must be integers"),
        ("1e3", "it holds 1e3, and numbers must be integers"),
        ("NaN", "it holds NaN, and numbers must be integers"),
        ("-Infinity", "it holds -Infinity, and numbers must be integers"),
        ('{"a": 1, "a": 1}', "a record has a field twice, of ['a', 'a']"),
        ("{}", "it lacks ['count', 'either', 'flag', 'kind', 'table', 'text'] and has []"),
    ],
)
def test_a_text_that_is_no_message_is_said_to_be_none(text: object, problem: str) -> None:
    with pytest.raises(ValueError, match=r"^it |^a record") as caught:
        read(text)
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 400


def test_texts_that_take_long_to_look_through_are_refused_at_once() -> None:
    for text in ('"' + '\\"' * 2**18, '"' * 2**20, "\\" * 2**20, "[]" * 2**19, '{"' * 2**18):
        with pytest.raises(ValueError, match=r"it is not JSON|nested more than"):
            messages.parsed(text)


@pytest.mark.parametrize(
    ("field", "content", "problem"),
    [
        ("count", 0, "count: must be at least 1 and below 10, and is 0"),
        ("count", 10, "count: must be at least 1 and below 10, and is 10"),
        ("count", True, "count: must be an integer, and is True"),
        ("count", "3", "count: must be an integer, and is '3'"),
        ("text", "abcdef", "text: must be a text of at most 5 characters, and is 'abcdef'"),
        ("text", None, "text: must be a text"),
        ("flag", "no", "flag: must be true or false, and is 'no'"),
        ("flag", 1, "flag: must be true or false, and is 1"),
        ("kind", "c", "kind: must be one of a, b, and is 'c'"),
        ("kind", ["a"], "kind: must be one of a, b, and is ['a']"),
        ("either", -1, "either: must be at least 0, and is -1"),
        ("either", "x", "either: must be an integer, and is 'x'"),
        ("table", [], "table: must be a record"),
        ("table", {"x": "y"}, "table: x: must be an integer"),
        ("table", {str(number): 0 for number in range(300)}, "table: must be a record of at most 200 fields"),
    ],
)
def test_a_field_that_holds_something_else_is_named(field: str, content: object, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: ") as caught:
        read(messages.written(GOOD | {field: content}))
    assert str(caught.value).startswith(problem)


@given(noise)
def test_any_text_is_read_as_python_reads_it_or_it_is_an_error_that_says_why(text: str) -> None:
    try:
        found = messages.parsed(text)
    except json.JSONDecodeError:
        pytest.fail("the error of a library")
    except ValueError:
        return
    assert found == json.loads(text)


@given(
    st.fixed_dictionaries(
        {}, optional={name: values | st.just(GOOD[name]) for name in [*GOOD, "other"] if name in GOOD}
    )
)
def test_records_are_read_only_if_every_field_is_what_it_should_be(content: dict[str, Any]) -> None:
    try:
        found = read(json.dumps(content))
    except ValueError:
        return
    assert found == content
    assert isinstance(found["count"], int)
    assert 1 <= found["count"] < 10
    assert isinstance(found["text"], str)
    assert len(found["text"]) <= 5
    assert isinstance(found["flag"], bool)
    assert found["kind"] in ("a", "b")


@pytest.mark.parametrize(
    "text", ["", "garbage", "{}", '{"kind": "good", "text": ""}', '{"kind": "fine", "text": 1}', "[" * 10**5]
)
def test_a_verdict_that_is_none_is_an_error_and_never_fine(text: str) -> None:
    verdict = Verdict.from_json(text)
    assert verdict.kind == "disagreement"
    with pytest.raises(ValueError, match="The ranks can't be checked, since their verdict can't be read"):
        verdict.raise_or_return()


@given(st.sampled_from(["fine", "disagreement", "timeout"]), st.text())
def test_a_verdict_is_what_was_written(kind: Any, text: str) -> None:
    verdict = Verdict(kind, text)
    assert Verdict.from_json(verdict.to_json()) == verdict


def test_what_a_verdict_says_is_bounded_and_can_be_printed() -> None:
    assert len(Verdict("fine", "x" * 10**6).text) < 10**5
    assert Verdict.from_json(Verdict("fine", "\x1b" * 10**6).to_json()).kind == "fine"
    assert Verdict("fine", "a\nb\x1b[31m\ud800\N{GREEK SMALL LETTER ALPHA}").raise_or_return() == (
        "a\nb\\x1b[31m\\ud800\N{GREEK SMALL LETTER ALPHA}"
    )
