"""Ranks on JAX meshes: compared with an enumeration of all positions, and on meshes of one process."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from annbatch_distributed.ranks.jax import Share, mesh, rows_of, shares

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

type Places = dict[int, set[tuple[int, ...]]]


def places_of(processes: np.ndarray, axes: Sequence[int]) -> Places:
    """Return the coordinates, along the data axes, of the devices of each process."""
    owned: Places = {}
    for device in np.ndindex(processes.shape):
        owned.setdefault(int(processes[device]), set()).add(tuple(device[axis] for axis in axes))
    return owned


def can_be_sharded(owned: Places) -> bool:
    """Return True if the rows can be sharded.

    The places of any two processes are then equal, or disjoint and equal in number, and all processes have the same
    number of peers.
    """
    pairs = itertools.combinations(owned.values(), 2)
    n_peers = {sum(one == other for other in owned.values()) for one in owned.values()}
    alike = all(one == other or (not one & other and len(one) == len(other)) for one, other in pairs)
    return alike and len(n_peers) == 1


def layouts() -> Iterator[tuple[np.ndarray, Sequence[int]]]:
    """Generate all meshes of some shapes with up to four processes, and all choices of data axes."""
    for shape, n_processes in [((4,), 4), ((2, 2), 4), ((2, 3), 3), ((3, 2), 3), ((2, 2, 2), 2)]:
        choices = [axes for n in range(len(shape) + 1) for axes in itertools.permutations(range(len(shape)), n)]
        for owners in itertools.product(range(n_processes), repeat=int(np.prod(shape))):
            for axes in choices:
                yield np.array(owners).reshape(shape), axes


def test_ranks_of_mesh_follow_positions_of_devices() -> None:
    """A process has the positions of its devices, and ranks are numbered by position."""
    checked = 0
    for processes, axes in layouts():
        owned = places_of(processes, axes)
        if not can_be_sharded(owned):
            continue
        coordinates = sorted({place for places in owned.values() for place in places})
        by_rank = shares(processes, axes)
        for process, places in owned.items():
            (share,) = [share for share in by_rank if process in share.processes]
            assert [coordinates[place] for place in share.places] == sorted(places)
            assert list(share.processes) == sorted(other for other in owned if owned[other] == places)
        assert [min(share.places) for share in by_rank] == sorted(min(share.places) for share in by_rank)
        assert len(by_rank) == len(set(map(frozenset, owned.values())))
        checked += len(by_rank) > 1
    assert checked > 500


def test_mesh_that_cannot_split_rows_raises() -> None:
    """Only meshes whose rows can't be sharded raise."""
    refused = 0
    for processes, axes in layouts():
        try:
            shares(processes, axes)
        except ValueError:
            assert not can_be_sharded(places_of(processes, axes))
            refused += 1
        else:
            assert can_be_sharded(places_of(processes, axes))
    assert refused > 500


@pytest.mark.parametrize(
    ("processes", "problem"),
    [
        # process 0 has devices in the rows 0 and 1, process 1 in 1 and 2
        ([[0, 0], [0, 1], [1, 1]], "Process 0 has position 0, 1, and process 1 has position 1, 2: these overlap"),
        ([[0, 0], [0, 0], [1, 1]], "Process 0 has position 0, 1, and process 1 has position 2: these differ in number"),
        ([[0, 1], [2, 2]], "Process 0, 1 has position 0, and process 2 has position 1: these are held by different"),
    ],
)
def test_error_lists_positions_of_processes(processes: list[list[int]], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        shares(np.array(processes), [0])


def test_the_axis_named_first_varies_slowest() -> None:
    processes = np.arange(6).reshape(2, 3)
    assert [share.processes[0] for share in shares(processes, [0, 1])] == [0, 1, 2, 3, 4, 5]
    assert [share.processes[0] for share in shares(processes, [1, 0])] == [0, 3, 1, 4, 2, 5]


@pytest.fixture
def line() -> Mesh:
    """Return a mesh of one dimension with the device of this process."""
    return Mesh(np.array(jax.devices()[:1]), ("data",))


@pytest.fixture
def cube() -> Mesh:
    """Return a mesh of three dimensions with the device of this process."""
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("replica", "data", "model"))


@pytest.mark.parametrize("spec", [(), (None,), ("data",), (("replica", "data"), "model")])
def test_sharding_of_single_process_has_all_rows(cube: Mesh, spec: Any) -> None:
    """The sharding of a single process gives it all rows."""
    assert rows_of(NamedSharding(cube, PartitionSpec(*spec))) == ([Share((0,), (0,))], 0)


def test_jax_must_be_initialized(line: Mesh) -> None:
    with pytest.raises(RuntimeError, match="JAX distributed is not initialized"):
        mesh(line)


def test_mesh_without_axes_raises_and_lists_them(cube: Mesh) -> None:
    """A mesh of several dimensions without named axes raises, and lists its axes."""
    with pytest.raises(ValueError, match=r"has axes 'replica', 'data', 'model'\. Name"):
        mesh(cube)


@pytest.mark.parametrize(
    ("axes", "problem"),
    [
        ("dat", r"no axis 'dat'\. It has axes 'replica', 'data', 'model'"),
        (("data", "rows", "columns"), r"no axes 'rows', 'columns'\. It has"),
        (("data", "model", "data"), r"different, got axes 'data', 'model', 'data'\. The JAX mesh has"),
    ],
)
def test_unknown_or_repeated_axes_raise(cube: Mesh, axes: Any, problem: str) -> None:
    """Unknown or repeated axes raise, and the error lists the axes of the mesh."""
    for meshlike in (cube, NamedSharding(cube, PartitionSpec("data"))):
        with pytest.raises(ValueError, match=problem):
            mesh(meshlike, axes)


def test_sharding_with_unconstrained_rows_raises() -> None:
    """A sharding that leaves the rows to JAX raises."""
    auto = Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match="must name the axes"):
        mesh(NamedSharding(auto, PartitionSpec(PartitionSpec.UNCONSTRAINED)))


def test_non_mesh_raises_type_error(line: Mesh) -> None:
    """Anything but a mesh of devices raises TypeError, with the value."""
    abstract = line.abstract_mesh
    empty = Mesh(np.empty((), dtype=object), ())  # the value if no mesh was set
    for wrong in (abstract, NamedSharding(abstract, PartitionSpec("data")), empty, jax.devices(), "data", None):
        with pytest.raises(TypeError, match="mesh must be a PyTorch DeviceMesh") as raised:
            mesh(wrong)
        assert repr(wrong) in str(raised.value)
