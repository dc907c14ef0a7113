"""Memory that is used again, and what a loader reads into it."""

from __future__ import annotations

import copy
import os
import pickle
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from annbatch.samplers import RandomSampler
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from annbatch_distributed.loader.memory import Memory

if TYPE_CHECKING:
    import numpy.typing as npt

SHAPES = st.lists(st.integers(0, 6), min_size=1, max_size=2).map(tuple)
DTYPES = st.sampled_from([np.dtype(name) for name in ("float32", "int64", "uint16", "bool")])


def address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


@given(st.lists(st.tuples(SHAPES, DTYPES, st.integers(0, 3)), max_size=12))
def test_no_array_shares_memory_with_another_one_that_is_in_use(asked: list[tuple[Any, Any, int]]) -> None:
    memory, in_use = Memory(), []
    for number, (shape, dtype, n_kept) in enumerate(asked):
        array = memory.array(shape, dtype)
        assert (array.shape, array.dtype) == (shape, dtype)
        array[...] = number % 2
        # of some, there is only a view any more
        in_use = [*in_use, (array.T if number % 3 else array, number % 2)][-1 - n_kept :]
        del array
        assert all((other == value).all() for other, value in in_use)
        assert not any(
            np.shares_memory(one, other) for place, (one, _) in enumerate(in_use) for other, _ in in_use[:place]
        )


def test_memory_is_used_again_when_nobody_has_an_array_in_it_and_not_before() -> None:
    memory = Memory()
    array = memory.array((4, 1_000), np.dtype("float32"))
    first, column = address(array), array[:, 0]
    del array
    other = memory.array((4, 1_000), np.dtype("float32"))
    assert address(other) != first
    del column
    assert address(memory.array((2_000,), np.dtype("int64"))) == first


def test_arrays_that_are_needed_together_find_the_memory_that_they_had() -> None:
    memory = Memory()

    def load_request(n_values: int) -> list[int]:
        arrays = [memory.array((n_values,), np.dtype(name)) for name in ("float32", "uint16")]
        return [address(array) for array in arrays]

    first = load_request(10_000)
    # somewhat more and fewer values, too
    assert [load_request(n_values) for n_values in (9_000, 11_000, 10_500)] == [first] * 3
    # whichever ends first
    for order in (slice(None), slice(None, None, -1)):
        arrays = [memory.array((10_000,), np.dtype(name)) for name in ("float32", "uint16")][order]
        while arrays:
            del arrays[-1]
        small = memory.array((10_000,), np.dtype("uint16"))
        assert [address(small), address(memory.array((10_000,), np.dtype("float32")))] == first[::-1]
        del small
    # twice as many don't fit: what there was goes
    larger = load_request(20_000)
    assert load_request(20_000) == larger
    assert sum(map(len, memory._spare.values())) < 1.2 * 20_000 * 6


FAULTS = """
import resource, sys, threading
import numpy as np
from annbatch_distributed.loader.memory import keep_what_is_free

def n_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    batches = [np.ones(7 << 19, np.uint8) for _ in range(7)]
    del batches
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def measure():
    found.append([n_faults() for _ in range(8)])

found = []
if sys.argv[1] == "kept":
    keep_what_is_free()
measure()
thread = threading.Thread(target=measure)
thread.start()
thread.join()
print(*(max(of_thread[2:]) for of_thread in found))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc has these thresholds")
def test_malloc_keeps_what_is_free_of_batches_in_any_thread() -> None:
    def most_faults(of: str, **thresholds: str) -> list[int]:
        others = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
        command = [sys.executable, "-c", FAULTS, of]
        found = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=60, check=True, env=others | thresholds
        )
        return list(map(int, found.stdout.split()))

    # where a kernel makes huge pages unasked, there are few of them either way
    kept = most_faults("kept")
    assert 4 * max(kept) < min(most_faults("not kept"))
    # whoever has set a threshold has it
    assert 4 * max(kept) < min(most_faults("kept", MALLOC_TRIM_THRESHOLD_="131072"))


def test_memory_that_is_closed_keeps_nothing_also_of_arrays_that_are_in_use() -> None:
    memory = Memory()
    array, other = (memory.array((1_000,), np.dtype("int8")) for _ in range(2))
    del array
    assert len(memory._spare) == 1
    memory.close()
    assert memory._spare == {}
    other[:] = 1
    del other
    assert memory._spare == {}
    memory.array((1_000,), np.dtype("int8"))
    assert len(memory._spare) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda memory: pickle.loads(pickle.dumps(memory))])
def test_a_copy_has_memory_of_its_own(copied: Any) -> None:
    memory = Memory()
    memory.array((100_000,), np.dtype("int8"))
    assert len(pickle.dumps(memory)) < 1_000
    assert copied(memory)._spare == {}


def test_threads_have_arrays_of_their_own() -> None:
    memory = Memory()

    def use(value: int) -> int:
        n_right = 0
        for number in range(2_000):
            array = memory.array((1 + number % 7,), np.dtype("int64"))
            array[:] = value
            if number % 50 == value:
                memory.close()
            n_right += bool((array == value).all())
        return n_right

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(use, range(4), timeout=60)) == [2_000] * 4
    finally:
        sys.setswitchinterval(interval)


def test_values_that_are_objects_have_arrays_of_numpy_s() -> None:
    assert Memory().array((2,), np.dtype(object)).tolist() == [None, None]
    assert Memory().array((2,), np.dtypes.StringDType()).tolist() == ["", ""]


class Noting(StatefulLoader):
    """Notes where load requests are read to."""

    rooms: list[tuple[int, int]]

    def _alloc(self, shape: tuple[int, ...], dtype: Any, *, use_pinned: bool) -> Any:
        array = super()._alloc(shape, dtype, use_pinned=use_pinned)
        self.rooms.append((address(array), array.nbytes))
        return array


@pytest.mark.parametrize("read_ahead", [0, 1])
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("to", [None, "torch", "jax"])
def test_all_load_requests_of_a_pass_are_read_into_the_same_memory_which_no_batch_is_in(
    read_ahead: int, is_sparse: bool, to: Any
) -> None:
    values = np.arange(480 * 50, dtype="float32").reshape(480, 50)
    group = zarr.open_group(zarr.storage.MemoryStore())
    ad.io.write_elem(group, "X", sp.csr_matrix(values) if is_sparse else values)
    cells = ad.io.sparse_dataset(group["X"]) if is_sparse else group["X"]
    sampler = DistributedSampler(RandomSampler(8, 4, 16), dist_info=Rank(0, 1), seed=0)
    loader = Noting(batch_sampler=sampler, preload_to_gpu=False, read_ahead=read_ahead, to=to, return_index=True)
    loader.add_adata(ad.AnnData(X=cells))
    for _ in range(2):
        loader.rooms = []
        batches = list(loader)  # all of them are in use
        assert len(loader.rooms) == 15 * (1 + is_sparse)
        assert len({room for room, _ in loader.rooms}) == 1 + is_sparse
        for batch in batches:
            dense = batch["X"] if not is_sparse else batch["X"].to_dense() if to == "torch" else batch["X"].todense()
            np.testing.assert_array_equal(np.asarray(dense), values[batch["index"]])
        # of the memory, nothing is kept beyond the pass
        assert loader._memory._spare == {}


def test_two_passes_side_by_side_and_one_that_is_given_up_have_the_right_cells() -> None:
    values = np.arange(240.0).reshape(240, 1)
    sampler = DistributedSampler(RandomSampler(8, 4, 16), dist_info=Rank(0, 1), seed=0)
    loader = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False, return_index=True)
    loader.add_adata(ad.AnnData(values))
    one, other = iter(loader), iter(loader)
    taken = [batch for batches in (one, other) for batch in islice(batches, 3)]
    one.close()
    taken += [*other, *loader]
    assert len(taken) == 3 + 15 + 15
    assert all((batch["X"] == values[batch["index"]]).all() for batch in taken)
