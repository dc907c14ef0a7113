"""States: what is in them, and every way in which one can be wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from annbatch_distributed.progress import Position, Progress, Segment, Share

IDENTITY = {"n_obs": 100, "mask": "0:", "seed": None, "sampler": "RandomSampler(batch_size=8)"}
POSITION = Position(2, 1, (Segment(4, 2, 7),), share=Share(1, 2))
STATE = Progress(POSITION, IDENTITY).to_state()


def test_a_state_goes_through_json_and_comes_back_as_it_was() -> None:
    assert Progress.of_state(json.loads(json.dumps(STATE))) == Progress(POSITION, IDENTITY)


def test_a_state_stays_small_whatever_is_in_the_identity() -> None:
    long = dict.fromkeys(IDENTITY, "x" * 10**6)
    state = Progress(Position(10**9, 2**63, (Segment(1024, 64, 10**9),)), long).to_state()
    assert len(json.dumps(state)) < 2_000
    changed = Progress(Position(0, segments=(Segment(1, 1, 0),)), long | {"mask": "x" * 10**6 + "y"})
    assert [text.split()[0] for text in Progress.of_state(state).differences(changed.identity)] == ["mask"]
    assert Progress.of_state(state).differences(long) == []


def test_what_differs_is_named_with_both_values_and_an_unknown_number_of_rows_does_not() -> None:
    progress = Progress.of_state(STATE)
    assert progress.differences(IDENTITY) == []
    assert progress.differences(IDENTITY | {"n_obs": None}) == []
    assert progress.differences(IDENTITY | {"n_obs": 101, "seed": 3}) == [
        "n_obs is 100 in the state and 101 here",
        "seed is None in the state and 3 here",
    ]
    assert progress.differences({"n_obs": 100}) == [
        "mask is '0:' in the state and None here",
        "sampler is 'RandomSampler(batch_size=8)' in the state and None here",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "format 2, and this version of annbatch-distributed reads formats up to 1"),
        ({"version": None}, "its 'version' must be 1, got None"),
        ({"version": "1"}, "its 'version' must be 1, got '1'"),
        ({"epoch": -1}, "its 'epoch' must count from 0, got -1"),
        ({"epoch": None}, "its 'epoch' must count from 0, got None"),
        ({"pass": 0.5}, "its 'pass' must count from 0, got 0.5"),
        ({"pass": True}, "its 'pass' must count from 0, got True"),
        (
            {"segments": []},
            r"its 'segments' must be a list of \[world size, number of workers, batches done\], got \[\]",
        ),
        ({"segments": None}, "its 'segments' must be a list of"),
        ({"segments": [[0, 1, 3]]}, "its 'segments' must be a list of"),
        ({"segments": [[4, 0, 3]]}, "its 'segments' must be a list of"),
        ({"segments": [[4, 3]]}, "its 'segments' must be a list of"),
        ({"segments": [[4, 1, -3]]}, "its 'segments' must count from 0, got -3"),
        ({"worker": [2, 2]}, r"its 'worker' must be \[worker, number of workers\], got \[2, 2\]"),
        ({"worker": 1}, "its 'worker' must be"),
        ({"identity": None}, "its 'identity' must be a dict, got None"),
    ],
)
def test_a_damaged_state_is_an_error_that_says_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Progress.of_state(STATE | changes)


@pytest.mark.parametrize("name", sorted(STATE.keys() - {"worker"}))
def test_a_truncated_state_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=f"The state is damaged: its '{name}'"):
        Progress.of_state({key: value for key, value in STATE.items() if key != name})


@pytest.mark.parametrize("state", [None, 3, "{}", [STATE]])
def test_what_is_no_dict_is_a_type_error(state: Any) -> None:
    with pytest.raises(TypeError, match="A state must be a dict that state_dict has returned, got"):
        Progress.of_state(state)
