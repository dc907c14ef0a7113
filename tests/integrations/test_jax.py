"""Batches as JAX arrays in one process with four devices: what they hold, where it lies, and what can't be placed."""

from __future__ import annotations

import math
import struct
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

from annbatch_distributed.integrations.jax import global_batch, pmap_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

CELLS = np.arange(1, 33, dtype=np.float32).reshape(8, 4) * (np.arange(32).reshape(8, 4) % 3 == 0)


def as_jax_csr(matrix: sparse.csr_matrix) -> CSR:
    """A sparse matrix as annbatch's Loader(to="jax") has it."""
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
    """Let jax begin again with four devices, and afterwards with as many as before."""
    before = jax.config.jax_num_cpu_devices
    clear_backends()
    jax.config.update("jax_num_cpu_devices", 4)
    yield
    clear_backends()
    jax.config.update("jax_num_cpu_devices", before)


def over(*spec: Any) -> NamedSharding:
    """A sharding over two by two devices."""
    return NamedSharding(Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model")), PartitionSpec(*spec))


def both(batch: Any) -> list[Any]:
    """A batch on all devices; the second time, what all devices have of it under pmap is put together again."""
    split = pmap_batch(batch)
    return [global_batch(batch, over("data")), jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), split)]


@pytest.mark.parametrize("kind", MATRICES)
def test_every_kind_of_matrix_becomes_a_dense_array_of_the_same_values(kind: str) -> None:
    for placed in both(MATRICES[kind](CELLS)):
        assert isinstance(placed, jax.Array)
        assert placed.dtype == np.float32
        assert np.array_equal(placed, CELLS)


def test_a_table_becomes_its_columns_with_codes_for_categories_and_what_is_none_stays_none() -> None:
    types = pd.Categorical(["T", "B", None, "T"] * 2, categories=["B", "T", "NK"])
    obs = pd.DataFrame({"type": types, "var": np.arange(8), "share": np.arange(8) / 8, "kept": [True, False] * 4})
    batch = {"X": CELLS, "obs": obs, "layers": None, "index": np.arange(8) * 3, "repeated": np.arange(8) > 5}
    for placed in both(batch | {"var": pd.DataFrame({"gene": list("abcd")})}):
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


def test_tuples_and_lists_stay_what_they_are_and_each_part_of_them_is_an_array() -> None:
    labels = np.arange(8)
    for found in both((labels, [labels + 1, {"z": pd.Categorical(["a", "b"] * 4)}])):
        assert isinstance(found, tuple)
        assert found[0].tolist() == labels.tolist()
        assert found[1][0].tolist() == (labels + 1).tolist()
        assert found[1][1]["z"].tolist() == [0, 1] * 4


def test_a_series_or_an_index_alone_and_a_batch_of_nothing_are_placed_too() -> None:
    for series in (pd.Series(pd.Categorical(list("baab") * 2)), pd.CategoricalIndex(list("baab") * 2)):
        for placed in both(series):
            assert placed.tolist() == [1, 0, 0, 1] * 2
    assert both({"X": None, "obs": None}) == [{"X": None, "obs": None}] * 2


# what each of the four devices has of 8 rows and 4 columns, in the order of the mesh
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
def test_each_device_has_the_rows_and_columns_of_its_place_and_the_labels_of_its_rows(spec: Any, where: Any) -> None:
    sharding = over(*spec)
    placed = global_batch({"X": sparse.csr_matrix(CELLS), "labels": np.arange(8)}, sharding)
    assert placed["X"].sharding.is_equivalent_to(sharding, 2)
    cells = {shard.device: shard.data for shard in placed["X"].addressable_shards}
    labels = {shard.device: shard.data for shard in placed["labels"].addressable_shards}
    for device, (first, last, left, right) in zip(sharding.mesh.devices.flat, where, strict=True):
        assert np.array_equal(cells[device], CELLS[first:last, left:right])
        assert labels[device].tolist() == list(range(first, last))
    assert jax.jit(lambda batch: batch["X"].sum())(placed) == CELLS.sum()


def test_under_pmap_each_device_has_consecutive_rows_in_the_order_of_the_devices() -> None:
    local = jax.local_devices()
    for devices, used in [(None, local), (2, local[:2]), (local[2:], local[2:]), (local[::-1], local[::-1])]:
        placed = pmap_batch({"X": CELLS, "labels": np.arange(8)}, devices)
        n_rows = 8 // len(used)
        assert placed["X"].shape == (len(used), n_rows, 4)
        assert placed["labels"].tolist() == np.arange(8).reshape(len(used), n_rows).tolist()
        lies = {shard.device: shard.data for shard in placed["X"].addressable_shards}
        for number, device in enumerate(used):
            assert np.array_equal(lies[device][0], CELLS[number * n_rows : (number + 1) * n_rows])
        sums = jax.pmap(lambda batch: jax.lax.psum(batch["X"].sum(), "devices"), "devices", devices=used)(placed)
        assert sums.tolist() == [CELLS.sum()] * len(used)


def test_rows_that_do_not_divide_by_the_devices_are_an_error_with_a_way_out() -> None:
    problem = r"7 rows doesn't divide by {}, .* multiple of {}, with remainder='drop' or 'pad'"
    with pytest.raises(ValueError, match=problem.format(2, 2)):
        global_batch(CELLS[:7], over("data"))
    with pytest.raises(ValueError, match=problem.format(4, 4)):
        global_batch(CELLS[:7], over(("data", "model")))
    with pytest.raises(ValueError, match=problem.format(4, 4)):
        pmap_batch(CELLS[:7])
    assert global_batch(CELLS[:7], over()).shape == (7, 4)


def test_columns_that_do_not_divide_by_the_devices_are_an_error_that_names_the_array() -> None:
    with pytest.raises(ValueError, match=r"batch\['X'\] is 3 long in dimension 1, .* by 2, .* along 'model'"):
        global_batch({"X": CELLS[:, :3], "index": np.arange(8)}, over("data", "model"))


def test_parts_with_different_numbers_of_rows_are_an_error_that_tells_them() -> None:
    obs = pd.DataFrame({"type": np.arange(6)})
    for place in (lambda batch: global_batch(batch, over("data")), pmap_batch):
        with pytest.raises(ValueError, match=r"got batch\['X'\] 8, batch\['obs'\]\['type'\] 6\."):
            place({"X": CELLS, "obs": obs})
        with pytest.raises(ValueError, match="batch must have rows, got the single value 3"):
            place(3)


@pytest.mark.parametrize(
    "column",
    [pd.Series(["a", "b"] * 4), pd.Series([1, "b"] * 4), pd.Series(pd.date_range("2026-01-01", periods=8))],
    ids=["strings", "objects", "times"],
)
def test_a_column_without_numbers_is_a_type_error_that_names_it_and_a_way_out(column: pd.Series) -> None:
    for place in (lambda batch: global_batch(batch, over("data")), pmap_batch):
        with pytest.raises(TypeError, match=r"batch\['obs'\]\['donor'\] has dtype .* make it categorical"):
            place({"obs": pd.DataFrame({"donor": column})})


def placements(batch: Any) -> Iterator[Callable[[], Any]]:
    """Both ways to place a batch of any number of rows, each giving all rows in their order."""
    yield lambda: global_batch(batch, over())
    yield lambda: jax.tree.map(lambda array: array[0], pmap_batch(batch, 1))


def masked(numbers: Sequence[Any], dtype: str) -> np.ma.MaskedArray:
    """A masked array; what a mask hides is the most that the type can hold, and nobody should look at it."""
    least_wanted = 0 if dtype == "bool" else np.iinfo(dtype).max if dtype[0] in "iu" else np.finfo(dtype).max
    data = [least_wanted if number is None else number for number in numbers]
    return np.ma.MaskedArray(np.array(data, dtype), [number is None for number in numbers])


WHOLE = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
# how a column may hold whole numbers of a type, some of them missing
NULLABLE: dict[str, Callable[[Sequence[int | None], str], Any]] = {
    "pandas": lambda numbers, dtype: pd.Series(
        numbers, dtype=dtype.replace("i", "I", 1) if dtype[0] == "i" else dtype.replace("ui", "UI")
    ),
    "pandas array": lambda numbers, dtype: NULLABLE["pandas"](numbers, dtype).array,
    "pandas index": lambda numbers, dtype: pd.Index(NULLABLE["pandas"](numbers, dtype)),
    "arrow": lambda numbers, dtype: pd.Series(numbers, dtype=f"{dtype}[pyarrow]"),
    "numpy.ma": masked,
}
# powers of two and their neighbours: where types end, and where floats begin to leave numbers out
EDGES = st.builds(
    lambda sign, power, more: sign * 2**power + more, st.sampled_from([-1, 1]), st.integers(0, 64), st.integers(-2, 2)
)


@st.composite
def whole_numbers(draw: st.DrawFn, missing: bool) -> tuple[str, list[int | None]]:
    """A type of integers, and numbers that it can hold."""
    dtype = draw(st.sampled_from(WHOLE))
    limits = np.iinfo(dtype)
    numbers: st.SearchStrategy[int | None] = EDGES.filter(lambda number: limits.min <= number <= limits.max)
    return dtype, draw(st.lists(st.none() | numbers if missing else numbers, min_size=1, max_size=4))


@example(("int64", [2**31 - 1, -(2**31)]))
@example(("uint64", [2**64 - 1]))
@example(("uint64", [0, 2**24 + 1]))
@given(whole_numbers(missing=False))
def test_a_whole_number_is_kept_exactly_or_is_an_error(drawn: tuple[str, list[int]]) -> None:
    dtype, numbers = drawn
    fits = range(2**32) if dtype[0] == "u" else range(-(2**31), 2**31)
    for column in (np.array(numbers, dtype), pd.Series(pd.arrays.SparseArray(np.array(numbers, dtype)))):
        for place in placements(column):
            if all(number in fits for number in numbers):
                assert [int(number) for number in place()] == numbers
            else:
                with pytest.raises(ValueError, match=r"batch has integers from .* 32 bits"):
                    place()
        with jax.enable_x64(True):
            for place in placements(column):
                assert [int(number) for number in place()] == numbers


@example(("int64", [2**60 + 1]), "pandas")
@example(("int64", [2**24 + 1, None]), "pandas")
@example(("uint64", [2**24, None]), "numpy.ma")
@given(whole_numbers(missing=True), st.sampled_from(sorted(NULLABLE)))
def test_a_whole_number_of_a_nullable_column_is_kept_exactly_or_is_an_error(
    drawn: tuple[str, list[int | None]], how: str
) -> None:
    dtype, numbers = drawn
    column = NULLABLE[how](numbers, dtype)
    for x64, bits in ((False, 24), (True, 53)):
        with jax.enable_x64(x64):
            for place in placements(column):
                if all(number is None or abs(number) <= 2**bits for number in numbers):
                    found = place()
                    assert found.dtype == (np.float64 if x64 else np.float32)
                    assert [None if math.isnan(number) else int(number) for number in found.tolist()] == numbers
                else:
                    with pytest.raises(ValueError, match=rf"batch has integers from .* float{64 if x64 else 32}"):
                        place()


def in_32_bits(number: float) -> float:
    """The nearest 32-bit float, by C's rules; an OverflowError if it is infinity instead of the number."""
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


FLOATS: dict[str, Callable[[Sequence[float | None]], Any]] = {
    "pandas": lambda numbers: pd.Series(numbers, dtype="Float64"),
    "arrow": lambda numbers: pd.Series(numbers, dtype="double[pyarrow]"),
    "numpy.ma": lambda numbers: masked(numbers, "float64"),
    "numpy": lambda numbers: np.array([math.nan if number is None else number for number in numbers]),
    "complex": lambda numbers: np.array([1j * (math.nan if number is None else number) for number in numbers]),
    "sparse": lambda numbers: sparse.csr_matrix(np.array([[math.nan if x is None else x] for x in numbers])),
}


@example([1e300], "numpy")
@example([1e300, None], "pandas")
@example([math.inf, -math.inf, 3.4028235677973366e38, -1e-300], "numpy")
@example([3.4028235677973362e38], "numpy.ma")
@example([1e300], "complex")
@given(st.lists(st.none() | st.floats(allow_nan=False), min_size=1, max_size=4), st.sampled_from(sorted(FLOATS)))
def test_a_float_becomes_the_nearest_of_32_bits_and_never_infinity(numbers: list[float | None], how: str) -> None:
    column = FLOATS[how](numbers)

    def values(found: jax.Array) -> list[float | None]:
        flat = (found.imag if how == "complex" else found).reshape(-1)
        return [None if math.isnan(number) else number for number in flat.tolist()]

    try:
        nearest = [None if number is None else in_32_bits(number) for number in numbers]
    except OverflowError:
        for place in placements(column):
            with pytest.raises(ValueError, match=r"batch has numbers of up to .* 32 bits .*jax_enable_x64"):
                place()
    else:
        for place in placements(column):
            assert values(place()) == nearest
    with jax.enable_x64(True):
        for place in placements(column):
            assert values(place()) == numbers


def test_what_a_mask_hides_is_nan_and_the_type_does_not_depend_on_whether_anything_is_hidden() -> None:
    for dtype, kept in [("int64", "float32"), ("bool", "float32"), ("float32", "float32"), ("complex128", "complex64")]:
        matrix = np.ma.MaskedArray(np.ones((8, 2), dtype), mask=np.arange(16).reshape(8, 2) % 5 == 0)
        bare = np.ma.MaskedArray(np.ones((8, 2), dtype))
        for placed in both({"X": matrix, "bare": bare}):
            assert placed["X"].dtype == placed["bare"].dtype == kept
            assert np.isnan(placed["X"]).tolist() == matrix.mask.tolist()
            assert placed["bare"].tolist() == [[1, 1]] * 8


def test_a_sparse_column_of_a_table_keeps_the_type_of_its_numbers() -> None:
    flags = pd.Series(pd.arrays.SparseArray([False, True] * 4))
    for placed in both({"flags": flags, "counts": flags.astype("Sparse[int64]")}):
        assert (placed["flags"].dtype, placed["counts"].dtype) == (np.bool_, np.int32)
        assert placed["flags"].tolist() == placed["counts"].tolist() == [0, 1] * 4


def test_names_that_come_twice_or_that_jax_cannot_sort_are_an_error_that_shows_them() -> None:
    obs = pd.DataFrame(np.ones((8, 3)), columns=["share", "depth", "share"])
    for place in placements({"X": CELLS, "obs": obs}):
        with pytest.raises(ValueError, match=r"two columns of the same name: 'share'\. Rename"):
            place()
    for place in placements({"X": CELLS, 0: np.arange(8)}):
        with pytest.raises(TypeError, match=r"JAX sorts them, got \['X', 0\]"):
            place()


@pytest.mark.parametrize("dtype", [np.longdouble, ">f4", "m8[s]"])
def test_numbers_of_a_type_that_jax_does_not_have_are_a_type_error_that_names_the_array(dtype: Any) -> None:
    for place in placements({"X": CELLS.astype(np.int64).astype(dtype)}):
        with pytest.raises(TypeError, match=r"batch\['X'\] has dtype"):
            place()


def test_a_sharding_must_be_named_and_have_devices() -> None:
    abstract = NamedSharding(over().mesh.abstract_mesh, PartitionSpec("data"))
    for wrong in (jax.sharding.SingleDeviceSharding(jax.devices()[0]), over().mesh, None):
        with pytest.raises(TypeError, match="Expected a NamedSharding, got"):
            global_batch(CELLS, wrong)
    with pytest.raises(TypeError, match="Expected a mesh of devices"):
        global_batch(CELLS, abstract)


@pytest.mark.parametrize("devices", [0, 5, -1, []])
def test_devices_that_are_not_there_are_an_error_that_says_which_are(devices: Any) -> None:
    with pytest.raises(ValueError, match="devices must be"):
        pmap_batch(CELLS, devices)
