"""Odd inputs, room by room: each gives an error that says what is wrong, or what is right; see ``odd_inputs``."""

from __future__ import annotations

import collections
import copy
import math
import pickle
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any

import anndata as ad
import jax
import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed
from annbatch.samplers import RandomSampler, SequentialSampler
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from annbatch_distributed import (
    Contiguous,
    DistributedSampler,
    Independent,
    Rank,
    Shuffled,
    StatefulLoader,
    deferred,
    mesh_ranks,
)
from annbatch_distributed.passes.randomness import draw_root_seed, generator
from annbatch_distributed.ranks import resolve
from annbatch_distributed.ranks.environment import launched
from annbatch_distributed.sharding import Rows, resolve_mask, window
from annbatch_distributed.sharding.permutation import Permutation
from annbatch_distributed.testing import Deal, check_sharding, deals, masks
from tests.odd_inputs import PACKAGE, Odd, check, refused, taken, theirs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


def told_apart(values: Sequence[Any]) -> list[tuple[str, Any]]:
    """Values with a short name for each, the same in every process."""
    names = [f"a set of {len(value)}" if isinstance(value, set) else repr(value) for value in values]
    return [(re.sub(" at 0x.*| from .*", "", name)[:40], value) for name, value in zip(names, values, strict=True)]


class Nothing:
    """An object that is nothing in particular."""

    def __repr__(self) -> str:
        return "Nothing()"


#: What is no integer, although some of it looks like one.
NO_INTEGERS: list[Any] = [
    1.0,
    1.5,
    math.nan,
    math.inf,
    np.float64(1.0),
    np.array([1]),
    "1",
    b"1",
    "",
    None,
    True,
    np.True_,
    Fraction(1, 1),
    1j,
    (1,),
    [1],
    {1},
    {"rank": 1},
    slice(1),
    Nothing(),
    int,
]
FEWER_NO_INTEGERS: list[Any] = [1.5, math.nan, "1", None, True, np.array([1]), [1]]


# Rank

RANKS: list[Odd] = [
    *[
        refused(f"Rank of rank {name}", partial(Rank, value, 2), TypeError, "must be two integers", f"rank={value!r}")
        for name, value in told_apart(NO_INTEGERS)
    ],
    *[
        refused(f"Rank of world size {name}", partial(Rank, 0, value), TypeError, "two integers", f"size={value!r}")
        for name, value in told_apart(NO_INTEGERS)
    ],
    *[
        refused(f"Rank({rank}, {size})", partial(Rank, rank, size), ValueError, expected, f"got {arrived} {rank}")
        for rank, size, expected, arrived in [
            (2, 2, "[0, world_size)", "rank"),
            (-1, 2, "[0, world_size)", "rank"),
            (10**30, 2, "[0, world_size)", "rank"),
            (np.int64(-(2**63)), 2, "[0, world_size)", "rank"),
        ]
    ],
    *[
        refused(f"Rank(0, {size})", partial(Rank, 0, size), ValueError, "at least 1", f"got world size {size}")
        for size in (0, -1, np.int8(-128), -(10**30))
    ],
    taken("Rank of numpy's integers", lambda: Rank(np.uint8(1), np.int32(2)), Rank(1, 2)),
    refused(
        "Rank that is set", lambda rank: Rank(rank, 2), TypeError, "integers", "Rank(rank=0, w", on=lambda: Rank(0, 1)
    ),
]

# callables, and what can be asked later


def _resolve(who: Any) -> Any:
    return resolve(who)


def _returns(answer: Any) -> Callable[[], Any]:
    return lambda: answer


def _raises(error: Exception) -> Callable[[], Any]:
    def ask() -> Any:
        raise error

    return ask


def _needs_an_argument(rank: int) -> tuple[int, int]:
    return rank, 2


def _yields() -> Iterator[int]:
    yield from (0, 2)


ANSWERS_OF_ANOTHER_TYPE: list[Any] = [
    None,
    1,
    "01",
    b"01",
    {"rank": 0, "world_size": 2},
    {0, 1},
    np.array([0, 2]),
    (0.0, 2),
    (0, 2.0),
    ("0", "2"),
    (False, True),
    (None, None),
    ((0, 2), (0, 2)),
    [[0, 2], 3],
    (0, math.nan),
    range(2),
    Nothing(),
]
ASKED: list[Odd] = [
    *[
        refused(
            f"a callable that returns {name}",
            partial(_resolve, _returns(answer)),
            TypeError,
            "must return a tuple of two integers (rank, world_size)",
            repr(answer),
        )
        for name, answer in told_apart(ANSWERS_OF_ANOTHER_TYPE)
    ],
    *[
        refused(
            f"a callable that returns {answer}",
            partial(_resolve, _returns(answer)),
            ValueError,
            "must return a tuple of two integers (rank, world_size)",
            repr(answer),
        )
        for answer in [(), (0,), (0, 1, 2), (2, 2), (-1, 2), (0, 0), (0, -2), [5, 2]]
    ],
    *[
        refused(
            f"{how} of the class {thing.__name__}",
            partial(ask, thing),
            TypeError,
            "an instance, not the class",
            thing.__name__,
        )
        for how, ask in [("dist_info", resolve), ("deferred", deferred)]
        for thing in [Rank, tuple, Nothing, torch.distributed.ProcessGroup]
    ],
    *[
        refused(
            f"{how} of {name}", partial(ask, value), TypeError, "Expected one of 'torch', 'jax', 'env'", repr(value)
        )
        for how, ask in [("dist_info", resolve), ("deferred", deferred)]
        for name, value in told_apart([None, 0, 1.5, (0, 2), [0, 2], {"rank": 0}, b"env", True, np.array([0, 2])])
    ],
    *[
        refused(
            f"{how} of {name!r}", partial(ask, name), ValueError, "Expected one of 'torch', 'jax', 'env'", repr(name)
        )
        for how, ask in [("dist_info", resolve), ("deferred", deferred)]
        for name in ["", "Torch", "nccl", "env ", "slurm"]
    ],
    *[
        refused(
            f"{how} of {arrived}, which needs an argument", partial(ask, thing), TypeError, "without arguments", arrived
        )
        for how, ask in [("dist_info", resolve), ("deferred", deferred)]
        for thing, arrived in [(_needs_an_argument, "_needs_an_argument"), (lambda *, rank: (rank, 2), "lambda")]
    ],
    refused(
        "a callable that returns a callable",
        lambda: _resolve(_returns(_returns((0, 2)))),
        TypeError,
        "must return a tuple of two integers",
        "<lambda>",
    ),
    refused(
        "a callable that yields", lambda: resolve(_yields), TypeError, "must return a tuple of two integers", "_yields"
    ),
    refused(
        "a callable that returns what is asked later",
        lambda: _resolve(_returns(deferred("env"))),
        TypeError,
        "must return a tuple of two integers",
        "Deferred",
    ),
    taken("deferred of deferred", lambda: deferred(deferred(lambda: (1, 2))).membership().rank, Rank(1, 2)),
    taken("deferred of a partial", lambda: deferred(partial(Rank, 1, 2)).membership().rank, Rank(1, 2)),
    taken("a callable with defaults", lambda: _resolve(lambda rank=1: (rank, 2)).rank, Rank(1, 2)),
    *[
        theirs(f"a callable that raises {type(error).__name__}", partial(ask, error), type(error), "mine alone")
        for error in [KeyError("mine alone"), TypeError("mine alone"), ValueError("mine alone"), OSError("mine alone")]
        for ask in [lambda error: resolve(_raises(error))]
    ],
    theirs(
        "what is asked later and raises",
        lambda: deferred(_raises(ZeroDivisionError("mine alone"))).membership(),
        ZeroDivisionError,
        "mine alone",
    ),
    refused("torch without a group", lambda: resolve("torch"), RuntimeError, "init_process_group()", "not initialized"),
    refused(
        "jax without a job", lambda: resolve("jax"), RuntimeError, "jax.distributed.initialize()", "not initialized"
    ),
    refused(
        "no member of a group",
        lambda: resolve(torch.distributed.GroupMember.NON_GROUP_MEMBER),
        ValueError,
        "in the processes of the group only",
        "isn't in the group",
    ),
]

# environments

_LAUNCHERS = [
    ("RANK", "WORLD_SIZE", {}),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", {}),
    ("PMI_RANK", "PMI_SIZE", {}),
    ("SLURM_PROCID", "SLURM_NTASKS", {"SLURM_STEP_ID": "0"}),
]
ENVIRONMENTS: list[Odd] = [
    *[
        refused(
            f"{names[0]}={rank!r}, {names[1]}={size!r}",
            partial(launched, {**step, names[0]: rank, names[1]: size}),
            ValueError,
            "two integers, the first below the second",
            f"{names[0]}={rank}" if rank.isalnum() else names[0],
        )
        for *names, step in _LAUNCHERS
        for rank, size in [
            ("", "2"),
            ("x", "2"),
            ("2", "2"),
            ("-1", "2"),
            ("0", "0"),
            ("0", "1e3"),
            ("1" * 50, "2" * 50),
        ]
    ],
    *[
        refused(
            f"{names[0]} alone",
            partial(launched, {**step, names[0]: "0"}),
            ValueError,
            "Set both, or unset both",
            f"no {names[1]}",
        )
        for *names, step in _LAUNCHERS
    ],
    refused("no variables", lambda: launched({}), RuntimeError, "torchrun, mpirun, mpiexec or srun", "of no launcher"),
    refused(
        "launchers that contradict each other",
        lambda: launched({"RANK": "0", "WORLD_SIZE": "2", "PMI_RANK": "1", "PMI_SIZE": "2"}),
        ValueError,
        "Unset those that",
        "PMI_RANK=1",
    ),
    refused(
        "a batch script",
        lambda: launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "4294967291"}),
        RuntimeError,
        "start the script with srun",
        "SLURM_STEP_ID=4294967291",
    ),
]

# meshes


def _jax_mesh() -> Any:
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))


def torch_mesh() -> Any:
    """A mesh of torch of this process alone."""
    return init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))


NO_NAMES: list[Any] = [
    5,
    1.5,
    True,
    b"data",
    {"data"},
    {"data", "model"},
    {"data": 1},
    [0],
    [None],
    [b"data"],
    (x for x in "a"),
]
MESHES: list[Odd] = [
    *[
        refused(f"a mesh that is {name}", partial(mesh_ranks, value), TypeError, "Expected a mesh of devices", arrived)
        for name, value, arrived in [
            ("None", None, "None"),
            ("a string", "dp", "'dp'"),
            ("an array", np.zeros((2, 2)), "ndarray"),
            ("a shape", (2, 2), "(2, 2)"),
            ("a Rank", Rank(0, 2), "Rank"),
            ("a class", jax.sharding.Mesh, "Mesh"),
            ("a function", _jax_mesh, "function"),
            ("an empty mesh", jax.sharding.Mesh(np.empty((0,), dtype=object), ("data",)), "Mesh"),
        ]
    ],
    *[
        refused(
            f"{kind} by names {name}",
            lambda mesh, value=value: mesh_ranks(mesh, value),
            TypeError,
            "a name, or a list of names",
            repr(value),
            on=make,
        )
        for kind, make in [("a JAX mesh", _jax_mesh), ("a torch mesh", torch_mesh)]
        for name, value in told_apart(NO_NAMES)
    ],
    refused("an axis there isn't", lambda m: mesh_ranks(m, "dp"), ValueError, "'data', 'model'", "'dp'", on=_jax_mesh),
    refused(
        "an axis by no name", lambda m: mesh_ranks(m, ""), ValueError, "'data', 'model'", "no axis ''", on=_jax_mesh
    ),
    refused(
        "an axis twice",
        lambda mesh: mesh_ranks(mesh, ("data", "data")),
        ValueError,
        "only once",
        "'data', 'data'",
        on=_jax_mesh,
    ),
    refused(
        "a mesh of two axes", mesh_ranks, ValueError, "Name those that split rows", "'data', 'model'", on=_jax_mesh
    ),
    refused(
        "a mesh of JAX without a job",
        lambda mesh: mesh_ranks(mesh, "data"),
        RuntimeError,
        "jax.distributed.initialize()",
        "not initialized",
        on=_jax_mesh,
    ),
    *[
        refused(
            f"a torch mesh by names {names}",
            lambda mesh, names=names: mesh_ranks(mesh, names),
            ValueError,
            "Its dimensions are 'dp', 'tp'",
            arrived,
            on=torch_mesh,
        )
        for names, arrived in [("pp", "'pp'"), ([], "[]"), (("dp", "dp"), "'dp', 'dp'"), (None, "2 dimensions")]
    ],
]


@pytest.fixture
def in_a_torch_job() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


# masks

NO_MASKS: list[Any] = [
    None,
    5,
    1.5,
    "train",
    "0:10",
    b"0",
    range(5),
    Ellipsis,
    True,
    Nothing(),
    slice,
    {slice(0, 5)},
    {"train": slice(0, 5)},
    np.ones(3),
    np.array([slice(0, 5)]),
    pd.Series([1.0, np.nan]),
    pd.Series(["train", "test"]),
    collections.deque([slice(0, 5)]),
    (part for part in [slice(0, 5)]),
]
NO_PARTS: list[Any] = [7, 1.5, None, "0:5", range(5), (0, 5), [slice(0, 5)], np.arange(3), True, Ellipsis, slice]
NO_BOUNDS: list[Any] = [
    slice(0.0, 5),
    slice(0, 5.0),
    slice(0, math.nan),
    slice("a", None),
    slice(0, "5"),
    slice(0, (5,)),
    slice(0, 10, 1.0),
    slice(0, np.float32(5)),
    slice(np.array([0, 1]), 5),
    slice(0, Nothing()),
    slice(0, 1j),
    slice(False, 5),
    slice(0, True),
    slice(0, 5, True),
    slice(np.False_, 5),
]
MASKS: list[Odd] = [
    *[
        refused(
            f"a mask that is {name}",
            partial(resolve_mask, value),
            TypeError,
            "a slice or a list of slices",
            shortened(value),
        )
        for name, value in told_apart(NO_MASKS)
    ],
    *[
        refused(
            f"a mask with {name} in it",
            partial(resolve_mask, [slice(10, 20), value]),
            TypeError,
            "a slice or a list of slices",
            repr(value),
        )
        for name, value in told_apart(NO_PARTS)
    ],
    *[
        refused(f"a mask that is {name}", partial(resolve_mask, value), TypeError, "integers or None", repr(value))
        for name, value in told_apart(NO_BOUNDS)
    ],
    *[
        refused(f"a mask with {name} in it", partial(resolve_mask, [value]), TypeError, "integers or None", repr(value))
        for name, value in told_apart(NO_BOUNDS[:3])
    ],
    *[
        refused(f"a mask that is {name}", partial(resolve_mask, value), ValueError, expected, repr(value))
        for (name, value), expected in zip(
            told_apart(
                [
                    slice(-5, None),
                    slice(0, -5),
                    slice(9, 3),
                    slice(5, 5),
                    slice(0, 10, 2),
                    slice(10, 0, -1),
                    slice(0, 9, 0),
                ]
            ),
            [
                ">= 0",
                ">= 0",
                "start < stop",
                "start < stop",
                "a list of slices",
                "a list of slices",
                "a list of slices",
            ],
            strict=True,
        )
    ],
    refused("a mask of nothing", lambda: resolve_mask([]), ValueError, "at least one slice", "empty"),
    refused("a mask of nothing at all", lambda: resolve_mask(()), ValueError, "at least one slice", "empty"),
    *[
        refused(f"a mask that overlaps {name}", partial(resolve_mask, value), ValueError, "must not overlap", arrived)
        for name, value, arrived in [
            ("by a row", [slice(0, 10), slice(9, 20)], "[0, 10) and [9, 20)"),
            ("at its open end", [slice(None), slice(9, 20)], "[0, end) and [9, 20)"),
            ("itself", [slice(3, 4)] * 2, "[3, 4) and [3, 4)"),
        ]
    ],
    *[
        refused(f"a mask of 100 rows that is {name}", partial(window, value, 100), ValueError, "within the c", arrived)
        for (name, value), arrived in zip(
            told_apart([slice(0, 101), slice(100, None), slice(2**70, None), slice(0, 10**30)]),
            ["[0, 101)", "[100, end)", f"[{2**70}, end)", f"[0, {10**30})"],
            strict=True,
        )
    ],
    *[
        refused(f"a mask that is {name}", partial(resolve_mask, value), ValueError, *says)
        for name, value, says in [
            ("False for all", np.zeros(9, dtype=bool), ("at least one row", "9 values that are all False")),
            ("no booleans", np.zeros(0, dtype=bool), ("at least one row", "0 values")),
            ("no rows", np.zeros(0, dtype=int), ("at least one row", "an array of none")),
            ("Rows without any", Rows(), ("at least one row", "Rows without any")),
            ("a table", np.ones((3, 2), dtype=bool), ("one dimension", "(3, 2)")),
            ("a frame", pd.DataFrame({"split": [True]}), ("one dimension", "(1, 1)")),
            ("rows that come again", np.array([5, 3, 5, 3, 4]), ("different ones", "got 5 of which 2 come again")),
            ("far rows that come again", np.array([10**9, 3, 10**9]), ("different ones", "3 of which 1 come again")),
            ("flags of 0 and 1", np.arange(10) % 2, ("pass them as booleans: values == 1", "got 10 of which 8")),
            (
                "a masked array",
                np.ma.array([True] * 3, mask=[0, 1, 0]),
                ("True or False for each row", "1 missing values among 3"),
            ),
            (
                "an Arrow Series with missing values",
                pd.Series([True, None, False], dtype="bool[pyarrow]"),
                ("True or False for each row", "1 missing values among 3"),
            ),
            (
                "a shuffled Arrow Series",
                pd.Series([True, True, False], index=[2, 0, 1], dtype="bool[pyarrow]"),
                ("compared with 0, 1, 2", "has 2 at place 0"),
            ),
            (
                "a Series by floats in another order",
                pd.Series([True, True, False], index=[2.0, 0.0, 1.0]),
                ("compared with 0, 1, 2", "has 2.0 at place 0"),
            ),
            ("a row below 0", np.array([5, -3]), ("count from 0", "got -3")),
            ("a row beyond all numbers", np.array([2**63 - 1]), ("below 2**63 - 1", str(2**63 - 1))),
            ("Rows that come again", Rows((range(5), range(3, 7))), ("different ones", "got 9 of which 2")),
            (
                "a Series with missing values",
                pd.Series([True, None, False], dtype="boolean"),
                ("True or False for each row", "1 missing values among 3"),
            ),
            (
                "a Series that was filtered",
                pd.Series([True] * 9)[lambda series: series.index % 2 == 0],
                ("compared with 0, 1, 2", "has 2 at place 1"),
            ),
            (
                "a Series that was sorted",
                pd.Series([True, False, True]).sort_values(),
                ("compared with 0, 1, 2", "has 1 at place 0"),
            ),
        ]
    ],
    *[
        refused(
            f"a mask of {name} for 100 rows", partial(window, resolve_mask(value), 100), ValueError, expected, arrived
        )
        for name, value, expected, arrived in [
            ("99 booleans", np.ones(99, dtype=bool), "the collection has 100 rows", "99 values"),
            ("101 booleans", np.ones(101, dtype=bool), "the collection has 100 rows", "101 values"),
            ("row 100", np.array([100, 5]), "within the collection's rows [0, 100)", "2 rows (5:6, 100:101)"),
            ("rows up to 103", Rows((range(103),)), "within the collection's rows [0, 100)", "103 rows (0:103)"),
        ]
    ],
    *[
        taken(
            f"a mask that is {name}", lambda value=value: window(resolve_mask(value), 4), Rows((range(1), range(2, 4)))
        )
        for name, value in [
            ("booleans", np.array([True, False, True, True])),
            ("a Series of booleans", pd.Series([True, False, True, True])),
            ("a Series of two data sets", pd.Series([True, False, True, True], index=[0, 1, 0, 1])),
            ("a Series by barcodes", pd.Series([True, False, True, True], index=list("dbca"))),
            ("a Series as AnnData counts", pd.Series([True, False, True, True], index=list("2013"))),
            ("an Arrow Series", pd.Series([True, False, True, True], dtype="bool[pyarrow]")),
            ("a nullable array", pd.array([True, False, True, True], dtype="boolean")),
            ("a masked array with nothing masked", np.ma.array([True, False, True, True])),
            ("a nullable Series", pd.Series([True, False, True, True], dtype="boolean")),
            ("rows in any order", np.array([3, 0, 2], dtype=np.uint8)),
            ("a Series of rows", pd.Series([3, 0, 2], index=[7, 8, 9])),
            ("an Index", pd.Index([3, 0, 2])),
            ("Rows in any order", Rows((range(2, 4), range(1)))),
            ("a tensor", torch.tensor([True, False, True, True])),
            ("a JAX array", jax.numpy.array([3, 0, 2])),
        ]
    ],
    taken("a mask of numpy's integers", lambda: resolve_mask(slice(np.uint8(3), np.int64(9))), slice(3, 9)),
    taken("a mask that touches itself", lambda: window(resolve_mask([slice(5, 9), slice(0, 5)]), 9), Rows((range(9),))),
]

# rows

NO_ROWS: list[Any] = [
    None,
    5,
    1.5,
    "0:5",
    slice(0, 5),
    {3, 4},
    {3: 4},
    (x for x in range(3)),
    Nothing(),
    Rows((range(3),)),
]
NO_PIECES: list[Any] = [5, 1.5, None, "0:5", (0, 5), [0, 5], slice(0, 5), np.arange(5), True, Nothing(), range]
NO_NUMBERS: list[Any] = [
    [1.0, 2.0],
    [0.5],
    np.array([1.0, math.nan]),
    ["1", "2"],
    "12",
    b"12",
    [None],
    [1, None],
    [Nothing()],
    [1j],
    np.array(["a"]),
    np.array([1, 2], dtype=object),
    np.array(["2020-01-01"], dtype="datetime64[D]"),
    np.array([3], dtype="timedelta64[s]"),
    pd.Series([1, None]),
    pd.array([1, None], dtype="Int64"),
]
THREE = partial(Rows, (range(3), range(10, 14)))
FULL = partial(Rows.of, range(10))


def blocks() -> Rows:
    """Ten rows in blocks, worked out when they are asked for."""
    rows = Shuffled(2).deal(FULL(), world_size=1, epoch=0, seed=0)
    assert len(rows) == 10
    return rows


ROWS: list[Odd] = [
    *[
        refused(f"Rows of {name}", partial(Rows, value), TypeError, "a tuple of ranges", repr(value))
        for name, value in told_apart([*NO_ROWS, range(5), np.arange(3)])
    ],
    *[
        refused(f"Rows of {name} among ranges", partial(Rows, (range(3), value)), TypeError, "ranges", repr(value))
        for name, value in told_apart(NO_PIECES)
    ],
    *[
        refused(f"Rows of {piece}", partial(Rows, (piece,)), ValueError, expected, repr(piece))
        for piece, expected in [
            (range(0, 9, 2), "step 1"),
            (range(5, 0, -1), "step 1"),
            (range(-3, 3), "count from 0"),
            (range(-5, -3), "count from 0"),
            (range(2**63), "below 2**63"),
            (range(2**70, 2**70 + 5), "below 2**63"),
        ]
    ],
    taken("Rows of a list of ranges", lambda: list(Rows([range(3), range(5, 6)])), [0, 1, 2, 5]),
    taken("Rows of nothing", lambda: list(Rows()), []),
    taken("Rows of ranges without rows", lambda: Rows((range(0), range(5, 2), range(4, 4))), Rows()),
    *[
        refused(f"Rows.of {name}", partial(Rows.of, value), TypeError, "integers", "Rows.where", arrived)
        for name, value, arrived in [
            ("a mask", np.array([True, False]), "bool"),
            ("a list of booleans", [True, False], "bool"),
            ("a Series of booleans", pd.Series([True, False]), "bool"),
        ]
    ],
    *[
        refused(f"Rows.of {name}", partial(Rows.of, value), TypeError, "Rows must be integers", _shown(value))
        for _shown in [lambda value: "got"]
        for name, value in told_apart(NO_NUMBERS)
    ],
    *[
        refused(f"Rows.of {name}", partial(Rows.of, value), TypeError, "integers in a list or an array", "got")
        for name, value in told_apart(NO_ROWS)
    ],
    *[
        refused(f"Rows.of {name}", partial(Rows.of, value), ValueError, expected, arrived)
        for (name, value), expected, arrived in [
            (("a table", np.zeros((2, 2), dtype=int)), "one dimension", "(2, 2)"),
            (("nested lists", [[1, 2], [3, 4]]), "one dimension", "(2, 2)"),
            (("an empty table", np.zeros((0, 2), dtype=int)), "one dimension", "(0, 2)"),
            (("a number", np.array(3)), "one dimension", "()"),
            (("a negative row", [3, -1]), "count from 0", "-1"),
            (("numpy's least", np.array([-(2**63)])), "count from 0", str(-(2**63))),
            (("a descent below 0", range(3, -3, -1)), "count from 0", "-2"),
            (("the last row of all", [2**63 - 1]), "below 2**63 - 1", str(2**63 - 1)),
            (("what int64 can't hold", np.array([2**63], dtype=np.uint64)), "below 2**63", str(2**63)),
        ]
    ],
    refused(
        "Rows.of lists of many lengths",
        lambda: Rows.of([[1], [2, 3]]),
        TypeError,
        "in a list or an array",
        "[[1], [2, 3]]",
    ),
    refused("Rows.of what no word can hold", lambda: Rows.of([2**70]), TypeError, "Rows must be integers", "got"),
    *[
        taken(f"Rows.of {name}", lambda value=value: list(Rows.of(value)), right)
        for (name, value), right in zip(
            told_apart(
                [[], (), np.array([]), [5], range(5, 0, -2), np.array([3, 4], dtype=np.uint8), pd.Series([7, 1])]
            ),
            [[], [], [], [5], [5, 3, 1], [3, 4], [7, 1]],
            strict=True,
        )
    ],
    *[
        refused(f"cyclic({start}, {length})", lambda rows, s=start, n=length: rows.cyclic(s, n), error, *says, on=THREE)
        for start, length, error, *says in [
            (0, -1, ValueError, "at least 0", "-1"),
            (0, 1.0, TypeError, "must be an integer", "1.0"),
            (0.5, 1, TypeError, "must be an integer", "0.5"),
            ("0", 1, TypeError, "must be an integer", "'0'"),
            (None, 1, TypeError, "must be an integer", "None"),
            (0, None, TypeError, "must be an integer", "None"),
            (0, True, TypeError, "must be an integer", "True"),
            (0, math.inf, TypeError, "must be an integer", "inf"),
            (math.nan, 0, TypeError, "must be an integer", "nan"),
        ]
    ],
    refused("cyclic of no rows", lambda rows: rows.cyclic(0, 1), ValueError, "there are none", "1", on=Rows),
    taken("nothing of no rows", lambda: Rows().cyclic(5, 0), Rows()),
    taken("a place from behind", lambda: list(THREE().cyclic(-1, 2)), [13, 0]),
    taken("a place of numpy's", lambda: list(THREE().cyclic(np.int8(6), np.uint64(2))), [13, 0]),
    *[
        refused(f"within({start!r}, {stop!r})", lambda rows, s=start, n=stop: rows.within(s, n), *expected, on=THREE)
        for start, stop, *expected in [
            (0.0, 5, TypeError, "must be an integer", "0.0"),
            (0, math.inf, TypeError, "must be an integer", "inf"),
            (None, 5, TypeError, "must be an integer", "None"),
            (0, "5", TypeError, "must be an integer", "'5'"),
            (0, True, TypeError, "must be an integer", "True"),
        ]
    ],
    refused(
        "within of what is worked out",
        lambda rows: rows.within(0, 5),
        TypeError,
        "Only rows in ranges",
        "blocks",
        on=lambda: Shuffled(2).deal(FULL(), world_size=1, epoch=0, seed=0),
    ),
    taken("within more than there are", lambda: THREE().within(-5, 10**30), THREE()),
    taken("within nothing", lambda: THREE().within(5, 2), Rows()),
    *[
        refused(f"of_bounds of {name}", partial(Rows.of_bounds, starts, stops), error, *says)
        for name, starts, stops, error, *says in [
            ("floats", np.array([0.0]), np.array([5.0]), TypeError, "must be integers", "float64"),
            ("booleans", np.array([False]), np.array([True]), TypeError, "must be integers", "bool"),
            ("texts", ["a"], ["b"], TypeError, "must be integers", "<U1"),
            ("numbers", 0, 5, TypeError, "integers in a list or an array", "0"),
            ("numpy's numbers", np.array(0), np.array(5), ValueError, "one dimension", "()"),
            ("None", None, None, TypeError, "integers in a list or an array", "None"),
            ("a table", np.zeros((2, 2), dtype=int), np.ones((2, 2), dtype=int), ValueError, "one dimension", "(2, 2)"),
            ("other lengths", np.array([0, 5]), np.array([3]), ValueError, "as many stops", "2 starts and 1 stops"),
            ("negative rows", np.array([-5]), np.array([3]), ValueError, "count from 0", "-5"),
            (
                "too large",
                np.array([0], np.uint64),
                np.array([2**64 - 1], np.uint64),
                ValueError,
                "2**63",
                str(2**64 - 1),
            ),
        ]
    ],
    taken("of_bounds of lists", lambda: Rows.of_bounds([0, 5], [3, 9]), Rows((range(3), range(5, 9)))),
    taken("of_bounds of nothing", lambda: Rows.of_bounds(np.array([]), np.array([])), Rows()),
    *[
        refused(
            f"{kind} to_global({name})",
            lambda rows, value=value: rows.to_global(value),
            error,
            *says,
            on=make,
        )
        for kind, make in [("ranges", THREE), ("a range", FULL), ("blocks", blocks)]
        for name, value, error, *says in [
            ("[10]", np.array([10]), IndexError, "[0, ", "10"),
            ("[-1]", np.array([-1]), IndexError, "[0, ", "-1"),
            ("[2**63]", np.array([2**63], dtype=np.uint64), IndexError, "[0, ", str(2**63)),
            ("[1.0]", np.array([1.0]), TypeError, "must be integers", "float64"),
            ("[True]", np.array([True]), TypeError, "must be integers", "bool"),
            ("None", None, TypeError, "integers in a list or an array", "None"),
        ]
    ],
    taken("to_global of a list", lambda: THREE().to_global([3, 0]), np.array([10, 0])),
    taken("to_global of nothing", lambda: THREE().to_global(np.array([])), np.array([], dtype=np.int64)),
    *[
        refused(
            f"{kind} slices_to_global({name})",
            lambda rows, starts=starts, stops=stops: rows.slices_to_global(starts, stops),
            error,
            *says,
            on=make,
        )
        for kind, make in [("ranges", THREE), ("a range", FULL), ("blocks", blocks)]
        for name, starts, stops, error, *says in [
            ("beyond", np.array([0, 5]), np.array([1, 11]), IndexError, "[0, ", "11"),
            ("before", np.array([-1]), np.array([2]), IndexError, "[0, ", "-1"),
            ("floats", np.array([0.0]), np.array([2.0]), TypeError, "must be integers", "float64"),
            (
                "other lengths",
                np.array([0, 1, 2]),
                np.array([1, 2]),
                ValueError,
                "as many stops",
                "3 starts and 2 stops",
            ),
        ]
    ],
    *[
        refused(f"Rows and {name}", lambda rows, value=value: rows + value, TypeError, "Rows.of", repr(value), on=THREE)
        for name, value in told_apart([[1, 2], None, range(3), 5, np.arange(3)])
    ],
]


# permutations and random numbers


def permutation(n: int = 5000) -> Permutation:
    return Permutation(n, (0, 1))


PERMUTATIONS: list[Odd] = [
    *[
        refused(
            f"Permutation of {name}", partial(Permutation, value, (0,)), TypeError, "n must be an integer", repr(value)
        )
        for name, value in told_apart(FEWER_NO_INTEGERS)
    ],
    *[
        refused(
            f"Permutation by key {name}", partial(Permutation, 5, value), TypeError, "tuple of integers", repr(value)
        )
        for name, value in told_apart(
            [0, None, "01", 1.5, (0.5,), ("0",), (None,), (True,), {0: 1}, (0, (1,)), Nothing()]
        )
    ],
    *[
        refused(f"Permutation({n}, {key})", partial(Permutation, n, key), ValueError, *says)
        for n, key, *says in [
            (-1, (0,), "[0, 2**62]", "-1"),
            (2**62 + 1, (0,), "[0, 2**62]", str(2**62 + 1)),
            (5, (-1,), ">= 0", "(-1,)"),
            (5, (0, -(10**30)), ">= 0", str(-(10**30))),
        ]
    ],
    *[
        refused(f"where {name} goes of {n}", lambda p, value=value: p(value), error, *says, on=partial(permutation, n))
        for n in (5000, 10)
        for name, value, error, *says in [
            ("[-1]", np.array([-1]), IndexError, "[0, ", "-1"),
            ("[n]", np.array([5000]), IndexError, "[0, ", "5000"),
            ("[2**64 - 1]", np.array([2**64 - 1], dtype=np.uint64), IndexError, "[0, ", str(2**64 - 1)),
            ("[1.5]", np.array([1.5]), TypeError, "must be integers", "float64"),
            ("[nan]", np.array([math.nan]), TypeError, "must be integers", "float64"),
            ("[True]", np.array([True]), TypeError, "must be integers", "bool"),
            ("'0'", "0", TypeError, "integers in a list or an array", "'0'"),
            ("None", None, TypeError, "integers in a list or an array", "None"),
        ]
    ],
    taken("where a list goes", lambda: sorted(permutation(3)([0, 1, 2]).tolist()), [0, 1, 2]),
    taken("where nothing goes", lambda: permutation()(np.array([])), np.array([], dtype=np.int64)),
    taken(
        "a permutation of nothing", lambda: permutation(0)(np.array([], dtype=np.int64)), np.array([], dtype=np.int64)
    ),
    *[
        refused(f"a generator of {name} {told}", partial(_generator, name, value), TypeError, name, repr(value))
        for _generator in [lambda name, value: generator(**({"root_seed": 0, "rank": 0, "epoch": 0} | {name: value}))]
        for name in ("root_seed", "rank", "epoch", "passes", "segment")
        for told, value in told_apart([1.5, "1", None, True])
    ],
    *[
        refused(f"a generator of {name} -1", partial(_generator, name), ValueError, f"{name} must be at least 0", "-1")
        for _generator in [lambda name: generator(**({"root_seed": 0, "rank": 0, "epoch": 0} | {name: -1}))]
        for name in ("root_seed", "rank", "epoch", "passes", "segment")
    ],
    *[
        refused(
            f"a root of {name}", partial(draw_root_seed, value), TypeError, "numpy.random.Generator", repr(value)[:20]
        )
        for name, value in told_apart([0, 1.5, "0", np.random.RandomState(0), np.random, np.random.Generator])
    ],
]

# shardings


@dataclass(frozen=True)
class Answers:
    """A sharding that answers what it is told to."""

    answer: Any

    def deal(self, rows: Rows, *, world_size: int, epoch: int, seed: int | None) -> Any:
        return self.answer(rows, world_size) if callable(self.answer) else self.answer

    def __repr__(self) -> str:
        return "Answers()"


class TakesNoSeed:
    """Has a deal that can't be asked."""

    def deal(self, rows: Rows, world_size: int) -> Rows:
        return rows

    def __repr__(self) -> str:
        return "TakesNoSeed()"


class HasNoDeal:
    deal = 5

    def __repr__(self) -> str:
        return "HasNoDeal()"


class Raises:
    def deal(self, rows: Rows, *, world_size: int, epoch: int, seed: int | None) -> Rows:
        msg = "mine alone"
        raise TypeError(msg)

    def __repr__(self) -> str:
        return "Raises()"


class OrderThenShares:
    """Answers an order for all rows, and shares for fewer."""

    def deal(self, rows: Rows, *, world_size: int, epoch: int, seed: int | None) -> Any:
        return (
            rows if len(rows) == 11 else [rows.cyclic(0, len(rows) // 2), rows.cyclic(len(rows) // 2, len(rows) // 2)]
        )

    def __repr__(self) -> str:
        return "OrderThenShares()"


def plan_of(sharding: Any, n_obs: int = 10, **options: Any) -> Any:
    """The plan of two ranks with batches of two rows."""
    made = DistributedSampler(SequentialSampler(2, 1, 2), dist_info=Rank(0, 2), sharding=sharding, seed=0, **options)
    return made.plan(n_obs)


def once_more(rows: Rows) -> Rows:
    return rows + rows


ANSWERS_THAT_ARE_NO_ROWS: list[tuple[str, Any]] = [
    ("None", None),
    ("a number", 5),
    ("a text", "01"),
    ("an array", np.arange(10)),
    ("a list of numbers", list(range(10))),
    ("ranges", [range(5), range(5, 10)]),
    ("arrays", [np.arange(5), np.arange(5, 10)]),
    ("lists", [[0, 1], [2, 3]]),
    ("a set", {1, 2}),
    ("a dict", {0: Rows(), 1: Rows()}),
    ("a share that is None", [Rows(), None]),
    ("a generator", lambda rows, world_size: (rows for _ in range(world_size))),
    ("a map", lambda rows, world_size: map(Rows, [(range(5),), (range(5, 10),)])),
    ("the class", lambda rows, world_size: Rows),
]
ANSWERS_THAT_LIE: list[tuple[str, Any, str]] = [
    ("no rows", lambda rows, n: Rows(), "it dealt 0"),
    ("a row too few", lambda rows, n: rows.cyclic(0, len(rows) - 1), "it dealt 9"),
    ("a row twice", lambda rows, n: rows.cyclic(0, len(rows) + 1), "it dealt 11"),
    ("one row instead of another", lambda rows, n: rows.cyclic(0, len(rows) - 1) + rows.cyclic(0, 1), "it dealt 10"),
    ("all rows twice", lambda rows, n: once_more(rows), "it dealt 20"),
    ("rows outside", lambda rows, n: Rows.of([row + 1 for row in rows]), "it dealt 10"),
    ("all rows to all", lambda rows, n: [rows] * n, "it dealt 20"),
    ("the first half to all", lambda rows, n: [rows.cyclic(0, 5)] * n, "it dealt 10"),
]
QUESTION: dict[str, Any] = {"world_size": 2, "epoch": 0, "seed": 0}
SHARDINGS: list[Odd] = [
    *[
        refused(
            f"a sharding that answers {name}",
            partial(plan_of, Answers(answer)),
            TypeError,
            "must return Rows, or a list of them",
            "got",
        )
        for name, answer in ANSWERS_THAT_ARE_NO_ROWS
    ],
    *[
        refused(
            f"a sharding that deals {name}",
            partial(plan_of, Answers(answer)),
            ValueError,
            "each of the 10 rows of 0:10 once and no other",
            arrived,
        )
        for name, answer, arrived in ANSWERS_THAT_LIE
    ],
    *[
        refused(
            f"a sharding with {n} shares",
            partial(plan_of, Answers(lambda rows, world_size, n=n: [rows] + [Rows()] * (n - 1) if n else [])),
            ValueError,
            "Rows for each of the 2 ranks",
            f"got {n}",
        )
        for n in (0, 1, 3)
    ],
    refused(
        "a sharding that answers one thing, then another",
        lambda: plan_of(OrderThenShares(), 11),
        TypeError,
        "one Rows for every window, or a list of them for every window",
        "OrderThenShares",
    ),
    refused(
        "a sharding with an empty share",
        lambda: plan_of(Answers(lambda rows, n: [rows, Rows()])),
        ValueError,
        "at least 2",
        "gives rank 1 of 2 only 0 rows",
    ),
    *[
        refused(f"sharding={name}", partial(plan_of, value), TypeError, "'contiguous', 'shuffled'", arrived)
        for name, value, arrived in [
            ("None", None, "None"),
            ("5", 5, "5"),
            ("b''", b"contiguous", "b'contiguous'"),
            ("a class", Contiguous, "an instance, not the class"),
            ("a class of one's own", TakesNoSeed, "an instance, not the class"),
            ("Nothing()", Nothing(), "Nothing()"),
            ("HasNoDeal()", HasNoDeal(), "HasNoDeal()"),
            ("a function", plan_of, "plan_of"),
            ("a list", ["contiguous"], "['contiguous']"),
            ("Rows", Rows((range(5),)), "Rows(0:5)"),
        ]
    ],
    *[
        refused(f"sharding={name!r}", partial(plan_of, name), ValueError, "'contiguous', 'shuffled'", repr(name))
        for name in ("", "Contiguous", "shuffle", "random")
    ],
    refused(
        "a sharding that can't be asked",
        lambda: plan_of(TakesNoSeed()),
        TypeError,
        "deal(rows, *, world_size, epoch, seed)",
        "TakesNoSeed()",
    ),
    theirs("a sharding that raises", lambda: plan_of(Raises()), TypeError, "mine alone"),
    *[
        refused(f"Shuffled({name})", partial(Shuffled, value), TypeError, "block_size must be an integer", repr(value))
        for name, value in told_apart([value for value in NO_INTEGERS if value is not None])
    ],
    *[
        refused(f"Shuffled({size})", partial(Shuffled, size), ValueError, "block_size must be at least 1", str(size))
        for size in (0, -1, np.int64(-5), -(10**30))
    ],
    taken("Shuffled of numpy's integer", lambda: Shuffled(np.uint16(5)), Shuffled(5)),
    taken("Shuffled in blocks of more than all", lambda: list(plan_of(Shuffled(10**30)).window), list(range(10))),
    refused(
        "Shuffled without a size",
        lambda: Shuffled().deal(FULL(), **QUESTION),
        ValueError,
        "Shuffled(block_size=...)",
        "no block size of its own",
    ),
    refused(
        "Shuffled without a seed",
        lambda: Shuffled(2).deal(FULL(), **(QUESTION | {"seed": None})),
        ValueError,
        "Pass the same seed=...",
        "needs a seed",
    ),
    *[
        refused(
            f"Shuffled with {name} {value!r}",
            partial(_deal, name, value),
            error,
            expected,
            repr(value),
        )
        for _deal in [lambda name, value: Shuffled(2).deal(FULL(), **(QUESTION | {name: value}))]
        for name in ("seed", "epoch")
        for value, error, expected in [
            (1.5, TypeError, "tuple of integers"),
            ("0", TypeError, "tuple of integers"),
            (True, TypeError, "tuple of integers"),
            (-1, ValueError, "integers >= 0"),
        ]
    ],
    *[
        refused(
            f"{sharding} of {name}",
            lambda sharding=sharding, value=value: sharding.deal(value, **QUESTION),
            TypeError,
            "rows must be Rows",
            repr(value),
        )
        for sharding in (Contiguous(), Shuffled(2), Independent())
        for name, value in told_apart([[0, 1, 2], np.arange(3), range(3), None])
    ],
    refused(
        "Shuffled of what was shuffled",
        lambda: Shuffled(2).deal(blocks(), **QUESTION),
        TypeError,
        "Only rows in ranges",
        "5 blocks of 2",
    ),
    *[
        refused(
            f"Independent of world size {name}",
            lambda value=value: Independent().deal(FULL(), **(QUESTION | {"world_size": value})),
            error,
            "world_size must be",
            repr(value),
        )
        for (name, value), error in zip(
            told_apart([2.0, "2", None, True, 0, -1]), [TypeError] * 4 + [ValueError] * 2, strict=True
        )
    ],
]

# what holds shardings to the laws

STRATEGIES: list[tuple[str, Callable[..., Any]]] = [("deals", deals), ("masks", masks)]
CHECKS: list[Odd] = [
    *[
        refused(
            f"check_sharding of {name}",
            partial(check_sharding, value),
            TypeError,
            "an object with a method deal",
            arrived,
        )
        for name, value, arrived in [
            ("a name", "contiguous", "'contiguous'"),
            ("None", None, "None"),
            ("a number", 5, "5"),
            ("a class", Contiguous, "an instance, not the class"),
            ("Nothing()", Nothing(), "Nothing()"),
            ("a deal that is a number", HasNoDeal(), "HasNoDeal()"),
            ("Rows", Rows((range(5),)), "Rows(0:5)"),
        ]
    ],
    refused(
        "check_sharding of what can't be asked",
        lambda: check_sharding(TakesNoSeed()),
        TypeError,
        "deal(rows, *, world_size, epoch, seed)",
        "TakesNoSeed()",
    ),
    refused(
        "check_sharding of Shuffled()",
        lambda: check_sharding(Shuffled()),
        AssertionError,
        "Pass Shuffled(block_size=...)",
        "no block size of its own",
    ),
    *[
        refused(
            f"check_sharding with {option}={name}",
            partial(check_sharding, Contiguous(), **{option: value}),
            TypeError,
            f"{option} must be an integer",
            repr(value),
        )
        for option, values in [
            ("n_obs", [1.5, "5", math.nan, True, [5]]),
            ("max_world_size", [1.5, "5", math.nan, True, [5], None]),
        ]
        for name, value in told_apart(values)
    ],
    *[
        refused(
            f"check_sharding with {option}={value}",
            partial(check_sharding, Contiguous(), **{option: value}),
            ValueError,
            f"{option} must be at {'least 1' if value < 1 else 'most'}",
            str(value),
        )
        for option in ("n_obs", "max_world_size")
        for value in (0, -1, 10**12)
    ],
    *[
        refused(
            f"a Deal of {name}={value!r}",
            lambda asked: asked.rows,
            error,
            *says,
            on=partial(Deal, **(GOOD | {name: value})),
        )
        for GOOD in [{"n_obs": 5, "mask": None, "world_size": 2, "epoch": 0, "seed": 0}]
        for name, value, error, *says in [
            ("mask", "all", TypeError, "a slice or a list of slices", "'all'"),
            ("mask", slice(0, 9), ValueError, "within the collection's rows", "[0, 9)"),
            ("n_obs", 0, ValueError, "within the collection's rows", "[0, 0)"),
        ]
    ],
    *[
        refused(f"{name} of {value!r}", partial(make, value), error, expected, repr(value))
        for name, make in STRATEGIES
        for value, error, expected in [
            (0, ValueError, "n_obs must be at least 1"),
            (-1, ValueError, "n_obs must be at least 1"),
            ("5", TypeError, "n_obs must be an integer"),
            (1.5, TypeError, "n_obs must be an integer"),
        ]
    ],
    refused("deals for no ranks", lambda: deals(5, 0), ValueError, "max_world_size must be at least 1", "0"),
]

# samplers and their plans


def sampler(**options: Any) -> DistributedSampler:
    wrapped = RandomSampler(chunk_size=4, preload_nchunks=2, batch_size=4, rng=np.random.default_rng(0))
    return DistributedSampler(wrapped, dist_info=Rank(0, 2), **options)


def begun() -> DistributedSampler:
    """A sampler in the middle of epoch 3."""
    made = sampler(seed=0, mask=[slice(0, 30), slice(40, 70)])
    made.set_epoch(3)
    next(made.sample(100))
    return made


def wide() -> DistributedSampler:
    """A sampler of all rows."""
    return sampler(seed=0)


WITH_N_OBS: list[str] = ["n_batches", "plan", "validate", "sample"]
SAMPLERS: list[Odd] = [
    *[
        refused(
            f"{method}({name})",
            lambda made, method=method, value=value: getattr(made, method)(value),
            TypeError,
            "n_obs must be an integer",
            repr(value),
            on=begun,
        )
        for method in WITH_N_OBS
        for name, value in told_apart([1.5, 100.0, "100", "x", None, True, math.nan, [100], np.array([100])])
    ],
    *[
        refused(f"{method}({value})", lambda made, m=method, n=value: getattr(made, m)(n), ValueError, *says, on=begun)
        for method in WITH_N_OBS
        for value, *says in [
            (-1, "n_obs must be at least 0", "-1"),
            (0, "must lie within the collection's rows", "[0, 0)"),
            (50, "must lie within the collection's rows", "[40, 70)"),
        ]
    ],
    *[
        refused(
            f"{method}({value}) of all rows",
            lambda made, m=method, n=value: getattr(made, m)(n),
            ValueError,
            *says,
            on=wide,
        )
        for method in WITH_N_OBS
        for value, *says in [
            (0, "must lie within the collection's rows", "[0, 0)"),
            (7, "Use fewer ranks", "The window has 7 rows"),
            (2**63, "below 2**63", str(2**63)),
            (2**70, "below 2**63", str(2**70)),
        ]
    ],
    *[
        taken(f"n_batches of {name}", lambda value=value: wide().n_batches(value), 12)
        for name, value in told_apart([np.int64(100), np.uint8(100), 100])
    ],
    *[
        refused(
            f"set_epoch({name})",
            lambda made, value=value: made.set_epoch(value),
            TypeError,
            "epoch must be an integer",
            repr(value),
            on=begun,
        )
        for name, value in told_apart([1.5, 1.0, "1", None, True, math.nan, [1], np.array([1]), Nothing()])
    ],
    refused("set_epoch(-1)", lambda made: made.set_epoch(-1), ValueError, "at least 0", "-1", on=begun),
    *[
        refused(
            f"state_dict of {name} batches",
            lambda made, value=value: made.state_dict(batches_done=value),
            TypeError,
            "batches_done must be an integer",
            repr(value),
            on=begun,
        )
        for name, value in told_apart([1.5, "1", None, True, math.nan])
    ],
    *[
        refused(
            f"state_dict of {value} batches",
            lambda made, value=value: made.state_dict(batches_done=value),
            ValueError,
            expected,
            str(value),
            on=begun,
        )
        for value, expected in [(-1, "at least 0"), (8, "at most 7"), (10**30, "below 9223372036854775808")]
    ],
    *[
        refused(
            f"the mask set to {name}",
            lambda made, value=value: setattr(made, "mask", value),
            TypeError,
            "mask",
            repr(value),
            on=begun,
        )
        for name, value in told_apart([*NO_MASKS[:8], NO_BOUNDS[0], slice(False, 5)])
    ],
    *[
        refused(
            f"the mask set to {name}",
            lambda made, value=value: setattr(made, "mask", value),
            ValueError,
            "mask",
            arrived,
            on=begun,
        )
        for (name, value), arrived in zip(
            told_apart([slice(5, 2), slice(-3, None), [], [slice(0, 5), slice(3, 9)]]),
            ["slice(5, 2, None)", "slice(-3, None, None)", "empty", "[0, 5) and [3, 9)"],
            strict=True,
        )
    ],
    *[
        refused(
            f"rng set to {name}",
            lambda made, value=value: setattr(made, "rng", value),
            TypeError,
            "numpy.random.Generator or None",
            repr(value)[:20],
            on=begun,
        )
        for name, value in told_apart([0, 1.5, "0", np.random.RandomState(0), np.random, np.random.default_rng, True])
    ],
    *[
        refused(
            f"{method} of rank {name}",
            lambda made, method=method, value=value: getattr(made.plan(100), method)(value),
            TypeError,
            "rank must be an integer",
            repr(value),
            on=begun,
        )
        for method in ("shard", "n_batches")
        for name, value in told_apart([0.0, 0.5, "0", None, True, math.nan, np.array([0]), [0], slice(1), Rank(0, 2)])
    ],
    *[
        refused(
            f"{method} of rank {value}",
            lambda made, method=method, value=value: getattr(made.plan(100), method)(value),
            IndexError,
            "rank must be in [0, 2)",
            str(value),
            on=begun,
        )
        for method in ("shard", "n_batches")
        for value in (2, -1, np.int64(-2), 10**30)
    ],
    taken("n_batches of numpy's rank", lambda: wide().plan(100).n_batches(np.int64(1)), 12),
    taken("the shard of numpy's rank", lambda: len(wide().plan(100).shard(np.uint8(1))), 48),
]

# passes and loaders


def loader(**options: Any) -> StatefulLoader:
    made = StatefulLoader(batch_sampler=sampler(seed=0), return_index=True, preload_to_gpu=False)
    return made.add_adata(ad.AnnData(np.arange(100.0).reshape(100, 1)), **options)


def _rows(batches: Iterable[Any]) -> list[int]:
    return [int(row) for batch in batches for row in batch["index"]]


def _grow_in_mid_pass(made: StatefulLoader) -> None:
    batches = iter(made)
    next(batches)
    try:
        made.add_adata(ad.AnnData(np.arange(100.0).reshape(100, 1)))
    finally:
        made.set_epoch(0)


def _grown() -> tuple[int, int]:
    """A loader that is given more rows after a pass: of the next pass, and as it is told."""
    made = loader()
    _rows(made)
    made.add_adata(ad.AnnData(np.arange(100.0).reshape(100, 1)))
    return len(set(_rows(made))), len(made)


def _closed() -> list[Any]:
    batches = iter(loader())
    next(batches)
    batches.close()
    return list(batches)


def _closed_pass() -> list[Any]:
    requests = sampler(seed=0).sample(100)
    next(requests)
    requests.close()
    return [*requests, *copy.copy(requests), *pickle.loads(pickle.dumps(requests))]


def _changed_in_mid_pass() -> bool:
    made, same = sampler(seed=0), sampler(seed=0)
    requests, undisturbed = made.sample(100), list(same.sample(100))
    found = [next(requests)]
    made.mask, made.rng = slice(0, 50), np.random.default_rng(5)
    made.set_epoch(7)
    return repr(found + list(requests)) == repr(undisturbed)


LOADERS: list[Odd] = [
    *[
        refused(
            f"a StatefulLoader of {name}",
            lambda value=value: StatefulLoader(batch_sampler=value),
            TypeError,
            "needs a DistributedSampler",
            repr(value)[:20],
        )
        for name, value in told_apart([None, 5, "torch", RandomSampler(4, 2, 4), DistributedSampler, [sampler()]])
    ],
    *[
        refused(
            f"{name} without data sets", do, ValueError, "check that every dataset has been added", "[0, 0)", on=make
        )
        for make in [lambda: StatefulLoader(batch_sampler=sampler(seed=0), preload_to_gpu=False)]
        for name, do in [("iteration", list), ("len", len)]
    ],
    *[
        refused(
            f"set_epoch({value!r}) of a loader",
            lambda made, value=value: made.set_epoch(value),
            error,
            "epoch must be",
            repr(value),
            on=loader,
        )
        for value, error in [(1.5, TypeError), ("1", TypeError), (None, TypeError), (True, TypeError), (-1, ValueError)]
    ],
    *[
        refused(
            f"state_dict of {value!r} batches of a loader",
            lambda made, value=value: made.state_dict(batches_done=value),
            error,
            "batches_done must be",
            repr(value),
            on=loader,
        )
        for value, error in [(1.5, TypeError), ("1", TypeError), (True, TypeError), (-1, ValueError)]
    ],
    theirs(
        "a loader that grows in mid-pass",
        _grow_in_mid_pass,
        RuntimeError,
        "Cannot add datasets while the loader is being iterated. Finish or close the iterator first.",
        on=loader,
    ),
    taken("a loader that grows after a pass", _grown, (100, 25)),
    taken("an iterator that was closed", _closed, []),
    taken("a pass that was closed", _closed_pass, []),
    taken("settings that change in mid-pass", _changed_in_mid_pass, right=True),
    *[
        refused(
            f"a DataLoader with {name}",
            lambda made, options=options: list(DataLoader(made, **options)),
            ValueError,
            "batch_size=None",
            "makes the batches",
            on=loader,
        )
        for name, options in [
            ("its own batch size", {}),
            ("a batch size", {"batch_size": 4}),
            ("a batch size and drop_last", {"batch_size": 4, "drop_last": True}),
        ]
    ],
    taken("a DataLoader without", lambda: len(list(DataLoader(loader(), batch_size=None))), 12),
]

TABLES: dict[str, list[Odd]] = {
    "ranks": RANKS,
    "asked": ASKED,
    "environments": ENVIRONMENTS,
    "meshes": MESHES,
    "masks": MASKS,
    "rows": ROWS,
    "permutations": PERMUTATIONS,
    "shardings": SHARDINGS,
    "checks": CHECKS,
    "samplers": SAMPLERS,
    "loaders": LOADERS,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "odd", [pytest.param(odd, id=f"{room}: {odd.name}") for room, table in TABLES.items() for odd in table]
)
def test_an_odd_input_is_right_or_an_error_that_says_what_is_wrong(odd: Odd, request: pytest.FixtureRequest) -> None:
    if "torch mesh" in odd.name:
        request.getfixturevalue("in_a_torch_job")
    check(odd)


def test_there_are_as_many_odd_inputs_as_it_takes_and_no_two_are_the_same() -> None:
    names = [f"{room}: {odd.name}" for room, table in TABLES.items() for odd in table]
    assert len(names) >= 300
    assert [name for name, times in collections.Counter(names).items() if times > 1] == []


def _complains(message: str) -> Callable[..., None]:
    """A call that fails with a message of a file of the package."""

    def complain(*args: Any) -> None:
        for arg in args:
            arg.append(1)
        exec(compile("raise ValueError(message)", str(PACKAGE / "a.py"), "exec"), {"message": message})

    return complain


CLEAR = "n_obs must be at least 0, got -1."


@pytest.mark.parametrize(
    ("odd", "wrong"),
    [
        (refused("nothing raised", lambda: None, ValueError, "at least 0", "-1"), "DID NOT RAISE"),
        (refused("another error", _complains(CLEAR), TypeError, "at least 0", "-1"), "n_obs must be"),
        (refused("a kind of the error", _complains(CLEAR), Exception, "at least 0", "-1"), "it is a ValueError"),
        (refused("other words", _complains(CLEAR), ValueError, "at least 0", "-2"), "'-2' is not in"),
        (refused("few words", _complains("too small: -1"), ValueError, "small", "-1"), "too small: -1"),
        (
            refused(
                "Python's words",
                _complains("'int' object is not iterable, and what it is nobody knows"),
                ValueError,
                "i",
                "i",
            ),
            "it says no more than",
        ),
        (refused("numpy's own error", lambda: np.zeros(3).reshape(-1, 2), ValueError, "shape", "3"), "says it"),
        (
            refused("a change", _complains(CLEAR), ValueError, "at least 0", "-1", on=list),
            "leaves the object as it was",
        ),
        (taken("a wrong value", lambda: 2, 3), "it gives 2, not 3"),
        (theirs("a message that is changed", lambda: {}["a"], KeyError, "b"), "it says a"),
        (theirs("an error of ours", _complains(CLEAR), ValueError, CLEAR), "a.py says it"),
    ],
    ids=lambda value: value.name if isinstance(value, Odd) else "",
)
def test_what_comes_to_something_else_is_noticed(odd: Odd, wrong: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception, ValueError), match=wrong):
        check(odd)


def test_what_is_noticed_is_not_what_is_right() -> None:
    check(refused("right", _complains(CLEAR), ValueError, "at least 0", "-1"))
    check(taken("right", lambda: 3, 3))
    check(theirs("right", lambda: {}["a"], KeyError, "a"))
