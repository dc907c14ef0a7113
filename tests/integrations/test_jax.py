"""Batches as JAX arrays in one process with four devices: values, placement and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.experimental.sparse import CSR
from jax.extend.backend import clear_backends
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from scipy import sparse

from annbatch_distributed.integrations.jax import global_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CELLS = np.arange(1, 33, dtype=np.float32).reshape(8, 4) * (np.arange(32).reshape(8, 4) % 3 == 0)


def as_jax_csr(matrix: sparse.csr_matrix) -> CSR:
    """Return a sparse matrix in the type of annbatch's Loader(to="jax")."""
    parts = jnp.asarray(matrix.data), jnp.asarray(matrix.indices), jnp.asarray(matrix.indptr)
    return CSR(parts, shape=matrix.shape)


MATRICES: dict[str, Callable[[np.ndarray], Any]] = {
    "numpy": np.asarray,
    "jax": jnp.asarray,
    "csr_matrix": sparse.csr_matrix,
    "csr_array": sparse.csr_array,
    "csc_matrix": sparse.csc_matrix,
    "jax csr": lambda cells: as_jax_csr(sparse.csr_matrix(cells)),
}


@pytest.fixture(scope="module", autouse=True)
def _four_devices() -> Iterator[None]:
    """Restart JAX with four devices, and afterwards with the number of devices before."""
    before = jax.config.jax_num_cpu_devices
    clear_backends()
    jax.config.update("jax_num_cpu_devices", 4)
    yield
    clear_backends()
    jax.config.update("jax_num_cpu_devices", before)


def over(*spec: Any) -> NamedSharding:
    """Return a sharding over two by two devices."""
    return NamedSharding(Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model")), PartitionSpec(*spec))


@pytest.mark.parametrize("kind", MATRICES)
def test_matrices_become_equal_dense_arrays(kind: str) -> None:
    """Every kind of matrix becomes a dense array of the same values."""
    placed = global_batch(MATRICES[kind](CELLS), over("data"))
    assert isinstance(placed, jax.Array)
    assert placed.dtype == np.float32
    assert np.array_equal(placed, CELLS)


def test_table_becomes_dict_of_columns() -> None:
    """A table becomes its columns, with codes for categories; None stays None."""
    types = pd.Categorical(["T", "B", None, "T"] * 2, categories=["B", "T", "NK"])
    obs = pd.DataFrame({"type": types, "var": np.arange(8), "share": np.arange(8) / 8, "kept": [True, False] * 4})
    batch = {"X": CELLS, "obs": obs, "layers": None, "index": np.arange(8) * 3, "repeated": np.arange(8) > 5}
    placed = global_batch(batch | {"var": pd.DataFrame({"gene": list("abcd")})}, over("data"))
    assert placed.keys() == batch.keys()
    assert placed["layers"] is None
    assert placed["obs"].keys() == set(obs)
    assert placed["obs"]["type"].tolist() == [1, 0, -1, 1] * 2
    assert placed["obs"]["type"].dtype == np.int32
    assert placed["obs"]["var"].tolist() == list(range(8))
    assert placed["obs"]["share"].tolist() == [row / 8 for row in range(8)]
    assert placed["obs"]["kept"].tolist() == [True, False] * 4
    assert placed["index"].tolist() == [0, 3, 6, 9, 12, 15, 18, 21]
    assert placed["repeated"].tolist() == [False] * 6 + [True] * 2


def test_tuples_and_lists_keep_their_type() -> None:
    """Tuples and lists keep their type, and their parts become arrays."""
    labels = np.arange(8)
    placed = global_batch((labels, [labels + 1, {"z": pd.Categorical(["a", "b"] * 4)}]), over("data"))
    assert isinstance(placed, tuple)
    assert placed[0].tolist() == labels.tolist()
    assert placed[1][0].tolist() == (labels + 1).tolist()
    assert placed[1][1]["z"].tolist() == [0, 1] * 4


def test_series_index_and_empty_batch_are_placed() -> None:
    """A Series, an Index and an empty batch are placed, too."""
    for series in (pd.Series(pd.Categorical(list("baab") * 2)), pd.CategoricalIndex(list("baab") * 2)):
        assert global_batch(series, over("data")).tolist() == [1, 0, 0, 1] * 2
    assert global_batch({"X": None, "obs": None}, over("data")) == {"X": None, "obs": None}


# for each sharding, the rows and columns of each device (first and last row, left and right column)
WHERE = [
    ((), [(0, 8, 0, 4)] * 4),
    (("data",), [(0, 4, 0, 4), (0, 4, 0, 4), (4, 8, 0, 4), (4, 8, 0, 4)]),
    (("model",), [(0, 4, 0, 4), (4, 8, 0, 4), (0, 4, 0, 4), (4, 8, 0, 4)]),
    (("data", "model"), [(0, 4, 0, 2), (0, 4, 2, 4), (4, 8, 0, 2), (4, 8, 2, 4)]),
    ((None, "model"), [(0, 8, 0, 2), (0, 8, 2, 4), (0, 8, 0, 2), (0, 8, 2, 4)]),
    ((("data", "model"),), [(0, 2, 0, 4), (2, 4, 0, 4), (4, 6, 0, 4), (6, 8, 0, 4)]),
    ((("model", "data"), None), [(0, 2, 0, 4), (4, 6, 0, 4), (2, 4, 0, 4), (6, 8, 0, 4)]),
]


@pytest.mark.parametrize(("spec", "where"), WHERE)
def test_devices_have_parts_of_their_position(spec: Any, where: Any) -> None:
    """Each device has the rows and columns of its position, and the labels of its rows."""
    sharding = over(*spec)
    placed = global_batch({"X": sparse.csr_matrix(CELLS), "labels": np.arange(8)}, sharding)
    assert placed["X"].sharding.is_equivalent_to(sharding, 2)
    cells = {shard.device: shard.data for shard in placed["X"].addressable_shards}
    labels = {shard.device: shard.data for shard in placed["labels"].addressable_shards}
    for device, (first, last, left, right) in zip(sharding.mesh.devices.flat, where, strict=True):
        assert np.array_equal(cells[device], CELLS[first:last, left:right])
        assert labels[device].tolist() == list(range(first, last))
    assert jax.jit(lambda batch: batch["X"].sum())(placed) == CELLS.sum()


def test_indivisible_rows_raise_with_fix() -> None:
    """Rows that don't divide evenly among the devices raise, and the error names a fix."""
    problem = r"must be a multiple of {}, .* into {} parts, got 7 rows"
    with pytest.raises(ValueError, match=problem.format(2, 2)):
        global_batch(CELLS[:7], over("data"))
    with pytest.raises(ValueError, match=problem.format(4, 4)):
        global_batch(CELLS[:7], over(("data", "model")))
    assert global_batch(CELLS[:7], over()).shape == (7, 4)


def test_indivisible_columns_raise_and_name_array() -> None:
    """Columns that don't divide evenly among the devices raise, and the error names the array."""
    with pytest.raises(ValueError, match=r"full shape: \(8, 3\)") as raised:
        global_batch({"X": CELLS[:, :3], "index": np.arange(8)}, over("data", "model"))
    assert raised.value.__notes__[0].startswith("The array is batch['X'], ")


def test_unequal_parts_raise_with_row_counts() -> None:
    """Parts with different numbers of rows raise, and the error lists the numbers."""
    with pytest.raises(ValueError, match=r"got batch\['X'\] 8, batch\['obs'\]\['type'\] 6\."):
        global_batch({"X": CELLS, "obs": pd.DataFrame({"type": np.arange(6)})}, over("data"))


#: Parts of a batch that JAX arrays don't support, and a part of the error.
REFUSED: dict[str, tuple[Any, str]] = {
    "strings": (pd.Series(["a", "b"] * 4, dtype=object), "Series of dtype object"),
    "pandas strings": (pd.Series(["a", "b"] * 4, dtype="string"), "Series of dtype string"),
    "times": (pd.Series(pd.date_range("2026-01-01", periods=8)), "Series of dtype datetime64"),
    "nullable integers": (pd.Series([1, None] * 4, dtype="Int64"), "Series of dtype Int64"),
    "nullable integers, none missing": (pd.array(range(8), dtype="Int64"), "IntegerArray of dtype Int64"),
    "arrow floats": (pd.Series([0.5, None] * 4, dtype="double[pyarrow]"), r"Series of dtype double\[pyarrow\]"),
    "pandas sparse": (pd.Series(pd.arrays.SparseArray([0, 1] * 4)), r"Series of dtype Sparse\[int64, 0\]"),
    "masked": (np.ma.MaskedArray(CELLS, CELLS == 0), "MaskedArray of dtype float32"),
    "durations": (np.arange(8).astype("m8[s]"), r"ndarray of dtype timedelta64\[s\]"),
    "longdouble": (CELLS.astype(np.longdouble), "ndarray of dtype float128"),
    "big-endian": (CELLS.astype(">f4"), "ndarray of dtype >f4"),
    "a name": ("tahoe", "str of dtype None"),
    "a single value": (np.array(3), "ndarray of dtype int64"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_part_raises_type_error(kind: str) -> None:
    """A part that JAX can't hold raises TypeError, and the error names it."""
    part, described = REFUSED[kind]
    way_out = "Pass only the parts that you need, .* convert strings to categories"
    with pytest.raises(TypeError, match=rf"^batch\['y'\] must be .*, got {described}.* {way_out}"):
        global_batch({"X": CELLS, "y": part}, over("data"))


def test_a_column_that_jax_cannot_hold_is_named() -> None:
    obs = pd.DataFrame({"type": pd.Categorical(list("ab") * 4), "donor": ["d1", "d2"] * 4})
    with pytest.raises(TypeError, match=r"^batch\['obs'\]\['donor'\] must be "):
        global_batch({"X": CELLS, "obs": obs}, over("data"))


WHOLE = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
# powers of two and their neighbors, at the limits of dtypes
EDGES = st.builds(
    lambda sign, power, more: sign * 2**power + more, st.sampled_from([-1, 1]), st.integers(0, 64), st.integers(-2, 2)
)


@st.composite
def whole_numbers(draw: st.DrawFn) -> tuple[str, list[int]]:
    """Generate an integer dtype, and numbers within its limits."""
    dtype = draw(st.sampled_from(WHOLE))
    limits = np.iinfo(dtype)
    numbers = EDGES.filter(lambda number: limits.min <= number <= limits.max)
    return dtype, draw(st.lists(numbers, min_size=1, max_size=4))


@example(("int64", [2**31 - 1, -(2**31)]))
@example(("uint64", [2**64 - 1]))
@given(whole_numbers())
def test_integers_are_exact_or_raise(drawn: tuple[str, list[int]]) -> None:
    """Integers are exact, or raise if they don't fit."""
    dtype, numbers = drawn
    column = np.array(numbers, dtype)
    if all(number in (range(2**32) if dtype[0] == "u" else range(-(2**31), 2**31)) for number in numbers):
        assert [int(number) for number in global_batch(column, over())] == numbers
    else:
        with pytest.raises(ValueError, match=rf"^batch has {dtype} values that don't fit into u?int32, .*enable_x64"):
            global_batch(column, over())
    with jax.enable_x64(True):
        assert [int(number) for number in global_batch(column, over())] == numbers


def test_floats_are_rounded_without_x64() -> None:
    """Floats are rounded to 32 bits, unless JAX has 64 bits."""
    floats = np.array([0.1, np.nan, np.inf, 1e-300, 3e38, 2**24 + 1, 0, -1.5])
    placed = global_batch({"y": floats}, over("data"))["y"]
    assert placed.dtype == np.float32
    assert np.array_equal(placed, floats.astype(np.float32), equal_nan=True)
    with jax.enable_x64(True):
        assert np.array_equal(global_batch(floats, over("data")), floats, equal_nan=True)


def test_a_sharding_must_be_named_and_have_devices() -> None:
    abstract = NamedSharding(over().mesh.abstract_mesh, PartitionSpec("data"))
    for wrong in (jax.sharding.SingleDeviceSharding(jax.devices()[0]), over().mesh, None):
        with pytest.raises(TypeError, match="must be a NamedSharding"):
            global_batch(CELLS, wrong)
    with pytest.raises(TypeError, match="mesh must be a PyTorch DeviceMesh"):
        global_batch(CELLS, abstract)


def test_arrays_lie_in_the_memory_of_the_sharding() -> None:
    kind = over().with_memory_kind("unpinned_host")
    placed = global_batch({"X": CELLS, "labels": np.arange(8)}, kind)
    assert {array.sharding.memory_kind for array in placed.values()} == {"unpinned_host"}
