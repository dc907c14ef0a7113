"""States: their contents, and damaged states."""

from __future__ import annotations

import json
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, Rank
from annbatch_distributed.core.lanes import Segment
from annbatch_distributed.core.state import Position, check_identity, differences, from_state, listed, to_state
from annbatch_distributed.sampler import cursor_of

#: A state as in a file, written by hand.
STATE: dict[str, Any] = {
    "version": 1,
    "epoch": 2,
    "segments": [[3, 1, 5], [4, 2, 7]],
    "finished": False,
    "identity": {"n_obs": 100, "rows": [[0, None]], "seed": None, "sampler": {"type": "Mine", "sizes": [8, 4]}},
}
IDENTITY: dict[str, Any] = {
    "n_obs": 100,
    "rows": [[0, None]],
    "seed": None,
    "sampler": {"type": "Mine", "sizes": [8, 4]},
}


def test_state_is_read_as_written() -> None:
    """`from_state` returns the position and the identity that a state contains."""
    at, identity = from_state(STATE)
    assert at.epoch == 2
    first, second = at.segments
    assert (first.n_lanes, first.n_workers, first.done) == (3, 1, 5)
    assert (second.n_lanes, second.n_workers, second.done) == (4, 2, 7)
    assert (at.finished, at.unverified) == (False, False)
    assert identity == IDENTITY
    finished, _ = from_state(STATE | {"finished": True, "unverified": True})
    assert (finished.finished, finished.unverified) == (True, True)


def test_position_is_written_to_the_state() -> None:
    """`to_state` writes a position and an identity to a state."""
    segments = (Segment(n_lanes=3, n_workers=1, done=5), Segment(n_lanes=4, n_workers=2, done=7))
    position = Position(epoch=2, segments=segments)
    assert json.loads(json.dumps(to_state(position, IDENTITY))) == STATE
    others = {"finished": True, "unverified": True}
    assert to_state(replace(position, **others), IDENTITY) == STATE | others


def test_state_stays_small_whatever_is_selected() -> None:
    """A state contains digests of a mask of very many ranges and of very many datasets."""
    sampler = DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 2), mask=np.arange(0, 10**5, 2), seed=0)
    datasets = listed([[1000, 20_000]] * 10**5)
    state = json.dumps(cursor_of(sampler).state(Position(), {"datasets": datasets, "cells": "0" * 32}))
    assert len(state) < 1_500
    others = [
        cursor_of(sampler).state(Position(), {"datasets": listed([[1000, 20_000]] * n)})["identity"] for n in (2, 10**5)
    ]
    assert differences(*others)
    segments = (Segment(2**20, 2**20, 10**9),) * 100
    assert len(json.dumps(to_state(Position(2**63 - 1, segments), IDENTITY))) < 5_000


def test_differences_name_their_path() -> None:
    """A difference is named by its path, with both values; digests of rows are not shown."""
    _, saved = from_state(STATE)
    assert differences(saved, IDENTITY) == []
    assert differences(saved, IDENTITY | {"n_obs": None}) == []
    assert differences(saved, IDENTITY | {"datasets": [[100, 3]], "cells": "ab"}) == []
    sampler = {"type": "Mine", "sizes": [8, 5]}
    assert differences(saved, IDENTITY | {"n_obs": 101, "sampler": sampler, "rows": [[0, 10]]}) == [
        "n_obs is 100 in the state and 101 here",
        "rows is '[[0, null]]' in the state and '[[0, 10]]' here",
        "sizes is '[8, 4]' in the state and '[8, 5]' here",
    ]
    assert differences(saved, {"n_obs": 100, "rows": {"length": 17, "digest": "ab"}, "sampler": sampler}) == [
        "sizes is '[8, 4]' in the state and '[8, 5]' here",
        "the mask selects different rows",
    ]
    _, complete = from_state(STATE | {"identity": IDENTITY | {"datasets": [[60, 3], [40, 3]], "cells": "ab"}})
    assert differences(complete, IDENTITY) == []
    assert differences(complete, IDENTITY | {"datasets": [[40, 3], [60, 3]], "cells": "cd"}) == [
        "cells is 'ab' in the state and 'cd' here",
        "datasets is '[[60, 3], [40, 3]]' in the state and '[[40, 3], [60, 3]]' here",
    ]
    with pytest.raises(ValueError, match=r"cells is 'ab' .* The obs_names differ"):
        check_identity(complete, IDENTITY | {"cells": "cd"})


#: Changes that damage a state, and the error message.
DAMAGED: list[tuple[dict[str, Any], str]] = [
    ({"version": 2}, "format of a state must be at most 1 .* got 2"),
    ({"version": 0}, "version must be at least 1 and below 2, got 0"),
    ({"version": "1"}, "version must be an integer, got '1' of type str"),
    ({"epoch": -1}, "epoch must be at least 0 and below 9223372036854775808, got -1"),
    ({"epoch": 2**63}, "epoch must be at least 0 and below 9223372036854775808, got 9223372036854775808"),
    ({"epoch": np.array([3])}, r"epoch must be an integer, got array\(\[3\]\)"),
    ({"epoch": torch.tensor(3.0)}, r"epoch must be an integer, got tensor\(3\.\)"),
    ({"epoch": 0.5}, "epoch must be an integer, got 0.5"),
    ({"segments": []}, "number of segments must be at least 1 and below 101, got 0"),
    ({"segments": [[2, 1, 3]] * 101}, "number of segments must be at least 1 and below 101, got 101"),
    ({"segments": [4, 1, 3]}, "cannot unpack non-iterable int object"),
    ({"segments": [[4, 3]]}, r"not enough values to unpack \(expected 3, got 2\), in "),
    ({"segments": ["413"]}, "number of lanes must be an integer, got '4'"),
    ({"segments": [[0, 1, 3]]}, "number of lanes must be at least 1 and below 1048577, got 0"),
    ({"segments": [[2**20 + 1, 1, 3]]}, "number of lanes must be at least 1 and below 1048577, got 1048577"),
    ({"segments": [[2, 10**8, 3]]}, "number of workers must be at least 1 and below 1048577, got 100000000"),
    ({"segments": [[2, 1, -3]]}, "batches done must be at least 0 and below 9223372036854775808, got -3"),
    ({"finished": 2}, "finished must be at least 0 and below 2, got 2"),
    ({"finished": "no"}, "finished must be an integer, got 'no'"),
    ({"identity": None}, "not iterable"),
    ({"identity": {"sampler": {"at": object()}}}, "identity.sampler.at must be an integer, got <object obj"),
    ({"identity": {"rows": [b"0"] * 10**6}}, "identity.rows must be an integer, got b'0'"),
    ({"identity": IDENTITY | {"n_obs": 1.5}}, "identity.n_obs must be an integer, got 1.5"),
    ({"identity": IDENTITY | {"versions": ["1"]}}, r"identity.versions must be a dict, got \['1'\]"),
    ({"identity": IDENTITY | {"rows": {"ranges": 5}}}, "identity.rows.ranges must be a list of pairs, got 5"),
    (
        {"identity": IDENTITY | {"rows": {"ranges": [[0]]}}},
        r"identity.rows.ranges must be a list of pairs, got \[\[0\]\]",
    ),
]


@pytest.mark.parametrize(("changes", "message"), DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_state_raises_and_is_explained(changes: dict[str, Any], message: str) -> None:
    """The error for a damaged state names the problem and a fix, in fewer than 1,000 characters."""
    from_state(STATE)
    with pytest.raises(ValueError, match=message) as error:
        from_state(STATE | changes)
    assert len(str(error.value)) < 1_000
    assert "Load " in str(error.value)


@pytest.mark.parametrize("name", sorted(STATE.keys() - {"finished"}))
def test_truncated_state_names_the_missing_key(name: str) -> None:
    """The error for a state without one of its keys names the key."""
    with pytest.raises(ValueError, match=f"The state is damaged: (it has no '{name}'|version must be)"):
        from_state({key: value for key, value in STATE.items() if key != name})


#: Objects that aren't states.
NO_STATES: list[Any] = [None, json.dumps(STATE), list(STATE.items()), np.array([1]), "x" * 10**6]


@pytest.mark.parametrize("state", NO_STATES, ids=range(len(NO_STATES)))
def test_state_must_be_a_dict(state: Any) -> None:
    """A state that isn't a dict raises a `TypeError` with a short message."""
    with pytest.raises(TypeError, match="state must be a dict, got") as error:
        from_state(state)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    "changes",
    [
        {"version": torch.tensor(1)},
        {"epoch": np.array(2)},
        {"epoch": torch.tensor(2), "finished": np.int32(0)},
        {"segments": ((3, 1, np.int64(5)), [np.array(4), torch.tensor(2), 7])},
        {"finished": np.int16(0)},
        {"identity": MappingProxyType(IDENTITY | {"n_obs": np.int64(100), "rows": ((np.int8(0), None),)})},
        {"written by": "another library", "at": [1, 2, 3]},
    ],
)
def test_state_survives_other_libraries(changes: dict[str, Any]) -> None:
    """A state with the types of other libraries, or with keys of their own, is read as the same state."""
    result = from_state(MappingProxyType(STATE | changes))
    assert result == from_state(STATE)
    # JSON accepts only Python's own integers
    assert json.loads(json.dumps(to_state(*result))) == STATE


def test_state_reads_its_largest_numbers() -> None:
    """The largest numbers that a state can have are read, and the state stays small."""
    most = 2**63 - 1
    segments = [[2**20, 2**20, most]] * 100
    state = STATE | {"epoch": most, "segments": segments}
    at, _ = from_state(state)
    assert at == Position(most, (Segment(2**20, 2**20, most),) * 100)
    assert len(json.dumps(to_state(at, IDENTITY))) < 5_000
