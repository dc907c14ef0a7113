"""States: what is in them, and every way in which one can be wrong."""

from __future__ import annotations

import json
from decimal import Decimal
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from annbatch_distributed.resume.state import Position, Segment, differences, from_state, shown, to_state
from annbatch_distributed.sharding.batches import Worker

#: As a file would have it, written by hand.
STATE: dict[str, Any] = {
    "version": 1,
    "epoch": 2,
    "pass": 1,
    "segments": [[3, 1, 5], [4, 2, 7]],
    "worker": [0, 2],
    "identity": {"n_obs": 100, "mask": "0:", "seed": None, "sampler": "RandomSampler(batch_size=8)", "align": 64},
}
IDENTITY: dict[str, int | str | None] = {
    "n_obs": 100,
    "mask": "0:",
    "seed": None,
    "sampler": "RandomSampler(batch_size=8)",
    "align": 64,
}


def test_what_is_read_of_a_state_is_what_is_written_in_it() -> None:
    at, identity = from_state(STATE)
    assert (at.epoch, at.passes) == (2, 1)
    first, second = at.segments
    assert (first.world_size, first.n_workers, first.done) == (3, 1, 5)
    assert (second.world_size, second.n_workers, second.done) == (4, 2, 7)
    assert at.worker is not None
    assert (at.worker.number, at.worker.n_workers) == (0, 2)
    assert identity == IDENTITY
    assert from_state({name: value for name, value in STATE.items() if name != "worker"})[0].worker is None


def test_what_is_written_to_a_state_is_what_was_said() -> None:
    segments = (Segment(world_size=3, n_workers=1, done=5), Segment(world_size=4, n_workers=2, done=7))
    position = Position(epoch=2, passes=1, segments=segments, worker=Worker(number=0, n_workers=2))
    assert json.loads(json.dumps(to_state(position, IDENTITY))) == STATE
    whole = to_state(Position(epoch=2, passes=1, segments=segments), IDENTITY)
    assert whole == {name: value for name, value in STATE.items() if name != "worker"}


def test_a_state_stays_small_whatever_is_in_the_identity() -> None:
    long: dict[str, int | str | None] = {"mask": "x" * 10**6, "sampler": "y" * 10**6}
    state = to_state(Position(10**9, 2**63 - 1, (Segment(1024, 64, 10**9),)), long)
    assert len(json.dumps(state)) < 2_000
    assert differences(from_state(state)[1], long) == []
    changed = long | {"mask": "x" * 10**6 + "y"}
    assert [text.split()[0] for text in differences(from_state(state)[1], changed)] == ["mask"]


def test_what_differs_is_named_with_both_values_and_what_need_not_be_known_does_not_if_it_is_not() -> None:
    _, saved = from_state(STATE)
    assert differences(saved, IDENTITY) == []
    assert differences(saved, IDENTITY | {"n_obs": None}) == []
    assert differences(saved, IDENTITY | {"data sets": "100x3"}) == []
    assert differences(saved, IDENTITY | {"n_obs": 101, "seed": 3}) == [
        "n_obs is 100 in the state and 101 here",
        "seed is None in the state and 3 here",
    ]
    assert differences(saved, {"n_obs": 100}) == [
        "mask is '0:' in the state and None here",
        "sampler is 'RandomSampler(batch_size=8)' in the state and None here",
    ]
    _, knowing = from_state(STATE | {"identity": IDENTITY | {"data sets": "60x3, 40x3"}})
    assert differences(knowing, IDENTITY) == []
    assert differences(knowing, IDENTITY | {"data sets": "40x3, 60x3"}) == [
        "data sets is '60x3, 40x3' in the state and '40x3, 60x3' here"
    ]


class Unspeakable:
    """Can't be shown."""

    def __repr__(self) -> str:
        raise RuntimeError


class Verbose:
    """Takes its time to say what it is."""

    def __repr__(self) -> str:
        return "verbose " * 10**6


class Seven(IntEnum):
    SEVEN = 7


def nested(depth: int) -> list[Any]:
    """A list in a list in a list."""
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


ITSELF: list[Any] = []
ITSELF.append(ITSELF)
ENDLESS: dict[str, Any] = {}
ENDLESS["identity"] = ENDLESS

_COUNTS = r"must count from 0 and be below 2\*\*63, got "
_SEGMENTS = (
    r"its 'segments' must be a list of 1 to 100 \[world size, number of workers, batches done\], with world sizes and "
    r"numbers of workers from 1 to 1048576, and batches that count from 0 and are below 2\*\*63, got "
)
_WORKER = (
    r"its 'worker' must be \[worker, number of workers\], with a worker from 0 below a number of at most 1048576, got "
)
_NAMES = "its 'identity' must be a dict of at most 100 names, got "
_HOLDS = (
    r"its 'identity' must hold texts of at most 160 characters, integers from 0 and below 2\*\*63, or None, and not as "
)

#: What is wrong with a state, and what is said of it.
DAMAGED: list[tuple[dict[str, Any], str]] = [
    ({"version": 2}, "has format 2, and this version of annbatch-distributed reads formats up to 1"),
    ({"version": np.int64(2)}, "has format 2, and this"),
    ({"version": 10**5000}, "has format an integer of 16610 bits, and this"),
    ({"version": 0}, "its 'version' must be 1, got 0"),
    ({"version": -1}, "its 'version' must be 1, got -1"),
    ({"version": None}, "its 'version' must be 1, got None"),
    ({"version": "1"}, "its 'version' must be 1, got '1'"),
    ({"version": 1.0}, r"its 'version' must be 1, got 1\.0"),
    ({"version": True}, "its 'version' must be 1, got True"),
    ({"version": [1]}, r"its 'version' must be 1, got \[1\]"),
    ({"version": Unspeakable()}, "its 'version' must be 1, got <Unspeakable"),
    ({"epoch": -1}, f"its 'epoch' {_COUNTS}-1"),
    ({"epoch": None}, f"its 'epoch' {_COUNTS}None"),
    ({"epoch": "3"}, f"its 'epoch' {_COUNTS}'3'"),
    ({"epoch": 3.0}, f"its 'epoch' {_COUNTS}3.0"),
    ({"epoch": float("nan")}, f"its 'epoch' {_COUNTS}nan"),
    ({"epoch": Decimal(3)}, f"its 'epoch' {_COUNTS}Decimal"),
    ({"epoch": np.float64(3)}, rf"its 'epoch' {_COUNTS}np.float64\(3.0\)"),
    ({"epoch": np.bool_(True)}, rf"its 'epoch' {_COUNTS}np.True_"),
    ({"epoch": np.array([3])}, rf"its 'epoch' {_COUNTS}array\(\[3\]\)"),
    ({"epoch": np.array(3.0)}, rf"its 'epoch' {_COUNTS}array\(3\.\)"),
    ({"epoch": torch.tensor([3, 4])}, rf"its 'epoch' {_COUNTS}tensor\(\[3, 4\]\)"),
    ({"epoch": torch.tensor(3.0)}, rf"its 'epoch' {_COUNTS}tensor\(3\.\)"),
    ({"epoch": 2**63}, f"its 'epoch' {_COUNTS}9223372036854775808"),
    ({"epoch": 10**2100}, f"its 'epoch' {_COUNTS}an integer of 6977 bits"),
    ({"epoch": -(10**5000)}, f"its 'epoch' {_COUNTS}an integer of 16610 bits"),
    ({"epoch": [10**5000]}, rf"its 'epoch' {_COUNTS}\[an integer of 16610 bits\]"),
    ({"epoch": Verbose()}, rf"its 'epoch' {_COUNTS}verbose verbose .*\.\.\..*verbose"),
    ({"epoch": nested(100_000)}, rf"its 'epoch' {_COUNTS}\[\[\["),
    ({"epoch": "3" * 10**6}, rf"its 'epoch' {_COUNTS}'3+\.\.\.3+'"),
    ({"pass": 0.5}, f"its 'pass' {_COUNTS}0.5"),
    ({"pass": True}, f"its 'pass' {_COUNTS}True"),
    ({"pass": -1}, f"its 'pass' {_COUNTS}-1"),
    ({"pass": 2**63}, f"its 'pass' {_COUNTS}9223372036854775808"),
    ({"pass": ITSELF}, rf"its 'pass' {_COUNTS}\[\["),
    ({"segments": []}, rf"{_SEGMENTS}\[\]"),
    ({"segments": None}, f"{_SEGMENTS}None"),
    ({"segments": 3}, f"{_SEGMENTS}3"),
    ({"segments": "[[4, 1, 3]]"}, rf"{_SEGMENTS}'\[\[4, 1, 3\]\]'"),
    ({"segments": {0: [4, 1, 3]}}, f"{_SEGMENTS}{{0: "),
    ({"segments": iter([[4, 1, 3]])}, f"{_SEGMENTS}<list_iterator"),
    ({"segments": np.array([[4, 1, 3]])}, rf"{_SEGMENTS}array\(\[\[4, 1, 3\]\]\)"),
    ({"segments": [4, 1, 3]}, f"{_SEGMENTS}4"),
    ({"segments": [[4, 3]]}, rf"{_SEGMENTS}\[4, 3\]"),
    ({"segments": [[4, 1, 3, 0]]}, rf"{_SEGMENTS}\[4, 1, 3, 0\]"),
    ({"segments": [[4, 1, 3], None]}, f"{_SEGMENTS}None"),
    ({"segments": [[4, 1, 3], "413"]}, f"{_SEGMENTS}'413'"),
    ({"segments": [["4", "1", "3"]]}, rf"{_SEGMENTS}\['4', '1', '3'\]"),
    ({"segments": [[4, None, 3]]}, rf"{_SEGMENTS}\[4, None, 3\]"),
    ({"segments": [[True, True, 3]]}, rf"{_SEGMENTS}\[True, True, 3\]"),
    ({"segments": [[4.0, 1, 3]]}, rf"{_SEGMENTS}\[4.0, 1, 3\]"),
    ({"segments": [[0, 1, 3]]}, rf"{_SEGMENTS}\[0, 1, 3\]"),
    ({"segments": [[4, 0, 3]]}, rf"{_SEGMENTS}\[4, 0, 3\]"),
    ({"segments": [[4, 1, -3]]}, rf"{_SEGMENTS}\[4, 1, -3\]"),
    ({"segments": [[-4, 1, 3]]}, rf"{_SEGMENTS}\[-4, 1, 3\]"),
    ({"segments": [[2**20 + 1, 1, 3]]}, rf"{_SEGMENTS}\[1048577, 1, 3\]"),
    ({"segments": [[10**12, 1, 3]]}, rf"{_SEGMENTS}\[1000000000000, 1, 3\]"),
    ({"segments": [[2, 10**8, 3]]}, rf"{_SEGMENTS}\[2, 100000000, 3\]"),
    ({"segments": [[2, 1, 2**63]]}, rf"{_SEGMENTS}\[2, 1, 9223372036854775808\]"),
    ({"segments": [[2, 1, 10**5000]]}, rf"{_SEGMENTS}\[2, 1, an integer of 16610 bits\]"),
    ({"segments": [[2, 1, 3]] * 101}, rf"{_SEGMENTS}\[\[2, 1, 3\], "),
    ({"segments": [[2, 1, 3]] * 10**6}, rf"{_SEGMENTS}\[\[2, 1, 3\], "),
    ({"segments": nested(100_000)}, rf"{_SEGMENTS}\["),
    ({"segments": ITSELF}, rf"{_SEGMENTS}\["),
    ({"worker": [2, 2]}, rf"{_WORKER}\[2, 2\]"),
    ({"worker": [0, 0]}, rf"{_WORKER}\[0, 0\]"),
    ({"worker": [-1, 2]}, rf"{_WORKER}\[-1, 2\]"),
    ({"worker": [1, 10**9]}, rf"{_WORKER}\[1, 1000000000\]"),
    ({"worker": [1]}, rf"{_WORKER}\[1\]"),
    ({"worker": [0, 1, 2]}, rf"{_WORKER}\[0, 1, 2\]"),
    ({"worker": 1}, f"{_WORKER}1"),
    ({"worker": "01"}, f"{_WORKER}'01'"),
    ({"worker": {"worker": 0}}, f"{_WORKER}{{'worker': 0}}"),
    ({"worker": [False, 2]}, rf"{_WORKER}\[False, 2\]"),
    ({"worker": [0.0, 2]}, rf"{_WORKER}\[0.0, 2\]"),
    ({"worker": ITSELF}, rf"{_WORKER}\["),
    ({"identity": None}, f"{_NAMES}None"),
    ({"identity": "n_obs"}, f"{_NAMES}'n_obs'"),
    ({"identity": [["n_obs", 100]]}, rf"{_NAMES}\[\['n_obs', 100\]\]"),
    ({"identity": {str(name): 0 for name in range(101)}}, f"{_NAMES}{{'0': 0, "),
    ({"identity": {3: 4}}, "its 'identity' must have names of at most 160 characters, got 3"),
    ({"identity": {None: 4}}, "its 'identity' must have names of at most 160 characters, got None"),
    ({"identity": {"x" * 10**6: 4}}, r"its 'identity' must have names of at most 160 characters, got 'x+\.\.\.x+'"),
    ({"identity": {"mask": "x" * 161}}, rf"{_HOLDS}'mask', got 'x+\.\.\.x+'"),
    ({"identity": {"n_obs": 100.0}}, f"{_HOLDS}'n_obs', got 100.0"),
    ({"identity": {"n_obs": True}}, f"{_HOLDS}'n_obs', got True"),
    ({"identity": {"n_obs": -1}}, f"{_HOLDS}'n_obs', got -1"),
    ({"identity": {"root": 2**63}}, f"{_HOLDS}'root', got 9223372036854775808"),
    ({"identity": {"mask": ["0:"]}}, rf"{_HOLDS}'mask', got \['0:'\]"),
    ({"identity": {"mask": b"0:"}}, f"{_HOLDS}'mask', got b'0:'"),
    ({"identity": {"mask": Unspeakable()}}, f"{_HOLDS}'mask', got <Unspeakable"),
    ({"identity": {"mask": ITSELF}}, rf"{_HOLDS}'mask', got \["),
    ({"identity": {"mask": nested(100_000)}}, rf"{_HOLDS}'mask', got \["),
    ({"identity": ENDLESS}, f"{_HOLDS}'identity', got {{'identity': {{"),
]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("changes", "message"), DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_state_is_an_error_that_says_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    from_state(STATE)
    with pytest.raises(ValueError, match=message) as error:
        from_state(STATE | changes)
    assert len(str(error.value)) < 1_000
    assert "Load " in str(error.value)


@pytest.mark.parametrize("name", sorted(STATE.keys() - {"worker"}))
def test_a_truncated_state_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=f"The state is damaged: its '{name}'"):
        from_state({key: value for key, value in STATE.items() if key != name})


#: What is no state at all.
NO_STATES: list[Any] = [
    None,
    3,
    "{}",
    json.dumps(STATE),
    [STATE],
    list(STATE.items()),
    dict,
    nested(100_000),
    ITSELF,
    10**5000,
    Unspeakable(),
    Verbose(),
    np.array([1]),
]


@pytest.mark.parametrize("state", NO_STATES, ids=range(len(NO_STATES)))
def test_what_is_no_dict_is_a_type_error(state: Any) -> None:
    with pytest.raises(TypeError, match="A state must be a dict that state_dict has returned, got") as error:
        from_state(state)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    "changes",
    [
        {"version": np.int64(1)},
        {"version": torch.tensor(1)},
        {"epoch": np.uint8(2)},
        {"epoch": np.array(2)},
        {"epoch": torch.tensor(2)},
        {"pass": np.int32(1)},
        {"segments": ((3, 1, 5), (4, 2, 7))},
        {"segments": [(3, 1, np.int64(5)), [np.array(4), torch.tensor(2), Seven.SEVEN]]},
        {"worker": (np.int16(0), np.int64(2))},
        {"identity": IDENTITY | {"n_obs": np.int64(100), "mask": np.str_("0:")}},
        {"identity": MappingProxyType(IDENTITY)},
        {"written by": "another library", "at": [1, 2, 3]},
    ],
)
def test_what_other_libraries_make_of_a_state_is_the_same_state(changes: dict[str, Any]) -> None:
    found = from_state(MappingProxyType(STATE | changes))
    assert found == from_state(STATE)
    # JSON takes Python's own integers only
    assert json.loads(json.dumps(to_state(*found))) == STATE


def test_the_largest_numbers_that_a_state_can_have_are_read() -> None:
    most = 2**63 - 1
    segments = [[2**20, 2**20, most]] * 100
    state = STATE | {"epoch": most, "pass": most, "segments": segments, "worker": [2**20 - 1, 2**20]}
    at, _ = from_state(state)
    assert at == Position(most, most, (Segment(2**20, 2**20, most),) * 100, Worker(2**20 - 1, 2**20))
    assert len(json.dumps(to_state(at, IDENTITY))) < 5_000


def test_a_value_is_shown_in_few_words() -> None:
    assert shown({"a": [1, "b"]}) == "{'a': [1, 'b']}"
    assert shown(2**128 - 1) == str(2**128 - 1)
    assert shown(2**128) == "an integer of 129 bits"


def test_an_identity_may_be_as_large_as_its_bounds_and_no_larger() -> None:
    def of(identity: Any) -> Any:
        return from_state(STATE | {"identity": identity})[1]

    largest: dict[str, Any] = {str(number): number for number in range(98)} | {"n" * 160: "t" * 160, "none": None}
    assert of(largest) == largest
    for too_large in (largest | {"one more": 1}, {"n" * 161: 1}, {"name": "t" * 161}, {"name": 2**63}, {"name": -1}):
        with pytest.raises(ValueError, match="The state is damaged: its 'identity'"):
            of(too_large)
    with pytest.raises(TypeError, match=r"that state_dict has returned, got \[1, 2\]\."):
        from_state([1, 2])
