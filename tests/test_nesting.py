"""Wrappers within wrappers share each row out once, or are refused with what to do."""

from __future__ import annotations

import warnings
from itertools import product
from typing import TYPE_CHECKING, Any

import annbatch.samplers
import jax
import numpy as np
import pytest
import torch.distributed as dist
from annbatch.samplers import RandomSampler, SequentialSampler
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from annbatch_distributed import DistributedSampler, Rank, deferred, mesh_ranks
from tests.meeting import heard
from tests.samplers import MaskBlind, batches, flat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from annbatch.abc import Sampler

    from annbatch_distributed.checks.exchange import Gather

N_OBS = 1000
ASKED_TWICE = "The rank is asked for twice: a DistributedSampler asks"


@pytest.fixture
def no_group() -> Iterator[None]:
    """Whatever process group a test leaves behind ends with it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def as_process(number: int, n_processes: int = 4) -> None:
    """Be that process of a job of torch whose other processes don't exist."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=number, world_size=n_processes, store=FakeStore())


def group(number: int, groups: list[list[int]]) -> Any:
    """The group of a process; every process makes all of them."""
    made = [dist.new_group(members) for members in groups]
    return next(one for one, members in zip(made, groups, strict=True) if number in members)


def sources(number: int) -> dict[str, Any]:
    """What a process of 2 nodes of 2 ranks can ask, by name."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    return {
        "torch": "torch",
        "deferred": deferred("torch"),
        "WORLD": dist.group.WORLD,
        "all": dist.new_group([0, 1, 2, 3]),
        "nodes": group(number, [[0, 2], [1, 3]]),
        "locals": group(number, [[0, 1], [2, 3]]),
        "node": mesh_ranks(mesh, "node"),
        "local": mesh_ranks(mesh, "local"),
        "both": mesh_ranks(mesh, ("node", "local")),
        "submesh": mesh["local"],
        "deferred submesh": deferred(lambda: mesh["local"]),
        "group of mesh": mesh.get_group("node"),
    }


#: What numbers the processes of a node, what numbers the nodes, and what numbers all processes.
WITHIN_NODES = {"locals", "local", "submesh", "deferred submesh"}
OF_NODES = {"nodes", "node", "group of mesh"}
OF_ALL = {"torch", "deferred", "WORLD", "all", "both"}


def nested(outer: Any, inner: Any, **kwargs: Any) -> DistributedSampler:
    within = DistributedSampler(SequentialSampler(1, 10, 5), dist_info=inner, **kwargs)
    return DistributedSampler(within, dist_info=outer, **kwargs)


def rows(sampler: DistributedSampler) -> list[int]:
    return flat(batches(sampler.sample(N_OBS)))


@pytest.mark.usefixtures("no_group")
def test_of_all_pairs_of_torchs_sources_those_that_would_lose_rows_are_refused_and_the_others_read_each_row_once() -> (
    None
):
    read: dict[tuple[str, str], list[int]] = {}
    refused: dict[tuple[str, str], set[str]] = {}
    for number in range(4):
        as_process(number)
        asked = sources(number)
        for outer, inner in product(asked, asked):
            try:
                found = rows(nested(asked[outer], asked[inner]))
            except ValueError as error:
                refused.setdefault((outer, inner), set()).add(str(error))
            else:
                read.setdefault((outer, inner), []).extend(found)
    assert read.keys().isdisjoint(refused)
    for pair, found in read.items():
        assert sorted(found) == list(range(N_OBS)), pair
    legal = {*product(OF_NODES, WITHIN_NODES), *product(WITHIN_NODES, OF_NODES)}
    assert read.keys() == legal
    for messages in refused.values():
        assert len(messages) == 1
        assert ASKED_TWICE in messages.pop()


def test_two_ranks_that_are_the_same_would_lose_rows_and_the_check_of_ranks_notices() -> None:
    job = [nested(Rank(rank, 2), lambda rank=rank: (rank, 2)) for rank in range(2)]
    assert sorted(flat(map(rows, job))) == [*range(250), *range(750, 1000)]

    def check(sampler: DistributedSampler) -> Callable[[Gather], None]:
        return lambda gather: sampler.check_ranks_agree(N_OBS, gather=gather)

    messages = set(heard([check(sampler) for sampler in job]))
    assert messages == {
        """The ranks of this job don't agree:
  there are 2 processes, and the world size is 4
Every process must make its sampler with the same arguments, and be in the same epoch."""
    }


@pytest.mark.parametrize("wrap", [lambda name: name, deferred], ids=["at once", "deferred"])
def test_the_launcher_asked_twice_is_refused(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = set()
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ValueError, match=f"{ASKED_TWICE} 'env', and another one within it asks 'env'") as raised:
            nested(wrap("env"), "env").n_batches(N_OBS)
        messages.add(str(raised.value))
    assert len(messages) == 1


def test_jax_asked_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match=f"{ASKED_TWICE} 'jax'"):
        nested("jax", "jax")


@pytest.mark.usefixtures("no_group")
def test_a_source_asked_again_is_found_however_deep_and_in_whatever_a_sampler_holds() -> None:
    as_process(1)
    other = DistributedSampler(nested(Rank(0, 2), "torch"), dist_info=Rank(0, 2))
    holding = MaskBlind(4)
    vars(holding)["parts"] = {"first": [other]}
    for sampler in (other, holding):
        with pytest.raises(ValueError, match=ASKED_TWICE):
            DistributedSampler(sampler, dist_info="torch")


@pytest.mark.usefixtures("no_group")
def test_a_deferred_rank_that_is_asked_again_is_refused_before_anything_is_read_but_not_earlier() -> None:
    sampler = nested(deferred("torch"), deferred("torch"))
    as_process(1)
    assert (sampler.rank, sampler.world_size) == (1, 4)
    for ask in (sampler.n_batches, sampler.sample, sampler.plan, sampler.validate):
        with pytest.raises(ValueError, match=f"{ASKED_TWICE} 'torch'"):
            ask(N_OBS)


def annbatchs(sampler: Sampler, rank: int = 0) -> annbatch.samplers.DistributedSampler:
    return annbatch.samplers.DistributedSampler(sampler, dist_info=lambda: (rank, 2))


class Holding(MaskBlind):
    """Runs a sampler that it holds."""

    def __init__(self, held: Any) -> None:
        super().__init__(5)
        self.held = [{"inner": held}]

    def n_batches(self, n_obs: int) -> int:
        return int(self.held[0]["inner"].n_batches(n_obs))

    def _sample(self, n_obs: int) -> Any:
        yield from self.held[0]["inner"].sample(n_obs)


class OfAnnbatchs(annbatch.samplers.DistributedSampler):
    """Somebody's own."""


@pytest.mark.parametrize("hold", [lambda sampler: sampler, Holding, lambda sampler: Holding(Holding(sampler))])
@pytest.mark.parametrize("own", [annbatchs, lambda sampler: OfAnnbatchs(sampler, dist_info=lambda: (0, 2))])
def test_annbatchs_own_within_ours_is_refused_wherever_it_is_held(hold: Any, own: Any) -> None:
    wrapped = hold(own(RandomSampler(1, 10, 5)))
    with pytest.raises(ValueError, match=r"annbatch\.samplers\.DistributedSampler .* Wrap the sampler that it wraps"):
        DistributedSampler(wrapped, dist_info=Rank(0, 2))


def test_annbatchs_own_around_ours_is_refused_as_well() -> None:
    for rank in range(2):
        ours = DistributedSampler(RandomSampler(1, 10, 5), dist_info=Rank(rank, 2))
        for sampler in (ours, DistributedSampler(ours, dist_info=Rank(0, 1))):
            with pytest.raises(ValueError, match=r"annbatch\.samplers\.DistributedSampler .* shares out"):
                annbatchs(sampler, rank)


def test_annbatchs_own_around_a_sampler_that_holds_ours_is_refused_before_a_row_is_read() -> None:
    ours = DistributedSampler(RandomSampler(1, 10, 5), dist_info=Rank(0, 2))
    with pytest.raises(ValueError, match=r"annbatch\.samplers\.DistributedSampler .* shares out"):
        next(iter(annbatchs(Holding(ours)).sample(N_OBS)))


class Aware(MaskBlind):
    """Shares out rows by itself."""

    def __init__(self, rank: int) -> None:
        super().__init__(5)
        self.rank = rank

    def n_batches(self, n_obs: int) -> int:
        return super().n_batches(n_obs // 2)

    def _sample(self, n_obs: int) -> Any:
        for request in super()._sample(n_obs // 2):
            first, last = request["requests"][0].start, request["requests"][0].stop
            yield {**request, "requests": [slice(first + self.rank * n_obs // 2, last + self.rank * n_obs // 2)]}


class AwareLater(MaskBlind):
    """Asks for its rank when it is asked."""

    @property
    def world_size(self) -> int:
        msg = "not yet"
        raise RuntimeError(msg)


def test_a_users_own_rank_aware_sampler_gets_a_warning_since_the_job_would_lose_rows() -> None:
    with pytest.warns(UserWarning, match=r"Aware has an attribute 'rank'.* rows are never read") as caught:
        job = [DistributedSampler(Aware(rank), dist_info=Rank(rank, 2)) for rank in range(2)]
    assert [warning.filename for warning in caught] == [__file__] * 2
    assert len(set(flat(map(rows, job)))) == N_OBS // 2
    with pytest.warns(UserWarning, match="AwareLater has an attribute 'world_size'"):
        DistributedSampler(Holding(AwareLater(5)), dist_info=Rank(0, 2))


def test_wrappers_and_samplers_that_know_nothing_of_ranks_get_no_warning_and_a_wrapper_around_one_no_second() -> None:
    with pytest.warns(UserWarning, match="rank"):
        once = DistributedSampler(Aware(0), dist_info=Rank(0, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DistributedSampler(once, dist_info=Rank(0, 2))
        nested(Rank(0, 2), Rank(0, 2))
        DistributedSampler(Holding(MaskBlind(3)), dist_info=Rank(0, 2))


def test_more_wrappers_within_each_other_than_a_machine_has_levels_are_an_error() -> None:
    sampler: Sampler = SequentialSampler(1, 1, 1)
    for _ in range(16):
        sampler = DistributedSampler(sampler, dist_info=Rank(0, 1), remainder="keep")
    with pytest.raises(ValueError, match=r"at most 16 .* within each other, got 17\."):
        DistributedSampler(sampler, dist_info=Rank(0, 1), remainder="keep")
    assert np.array_equal(rows(sampler), range(N_OBS))


def every_rank(worlds: tuple[int, ...], wrapped: Sampler, **kwargs: Any) -> list[DistributedSampler]:
    """All ranks of a job that is nested so deep, the outermost level first."""

    def rank(places: tuple[int, ...]) -> DistributedSampler:
        sampler = wrapped
        for place, world_size in zip(reversed(places), reversed(worlds), strict=True):
            sampler = DistributedSampler(sampler, dist_info=Rank(place, world_size), **kwargs)
        assert isinstance(sampler, DistributedSampler)
        return sampler

    return [rank(places) for places in product(*map(range, worlds))]


@pytest.mark.parametrize("options", [{}, {"sharding": "shuffled", "seed": 3}], ids=["contiguous", "shuffled"])
@pytest.mark.parametrize(
    ("worlds", "batch_size", "n_rows"),
    [((1, 2), 2, 7), ((2, 2), 1, 15), ((2, 3), 2, 35), ((3, 1), 4, 40), ((2, 1, 2), 3, 26), ((1, 2, 2), 2, 23)],
)
def test_what_nested_wrappers_drop_moves_as_if_there_was_one(
    worlds: tuple[int, ...], batch_size: int, n_rows: int, options: dict[str, Any]
) -> None:
    window = [*range(3), *range(5, 2 + n_rows)]
    wrapped = RandomSampler(1, batch_size, batch_size)
    job = every_rank(worlds, wrapped, remainder="drop", mask=[slice(0, 3), slice(5, 2 + n_rows)], **options)
    step = len(job) * batch_size
    assert len(window) % step
    times_read = dict.fromkeys(window, 0)
    before: set[int] = set()
    for epoch in range(len(window)):
        read: list[int] = []
        for sampler in job:
            sampler.set_epoch(epoch)
            share = batches(sampler.sample(n_rows + 7))
            assert [len(batch) for batch in share] == [batch_size] * (len(window) // step)
            read += flat(share)
        assert len(read) == len(set(read)) == len(window) // step * step
        assert before | set(read) >= set(window) or not epoch
        before = set(read)
        for row in read:
            times_read[row] += 1
    assert len(set(times_read.values())) == 1


def written(n_obs: int, done: int, sampler: str, remainder: str = "drop") -> dict[str, Any]:
    """A state in epoch 1 of two nodes, as the first version of format 1 wrote it."""
    identity = {"n_obs": n_obs, "mask": "0:", "batch_size": 2, "remainder": remainder}
    identity |= {"sharding": "Contiguous()", "seed": 0, "root": None, "sampler": sampler}
    segments = [[2, 1, done]]
    return {"version": 1, "epoch": 1, "pass": int(not done), "segments": segments, "identity": identity}


#: How that version wrote the samplers within.
TEXT = (
    "DistributedSampler(batch_size=2, remainder='{}', sampler='SequentialSampler(batch_size=2, chunk_size=1, drop_last="
)
DROP = TEXT.format("drop") + "Fals... a60a13e6128322237ccb3de3b54a1eb3"
EXACT = TEXT.format("exact") + "Fal... dd3e539e70e79b4e2dc6faedc1210724"


@pytest.mark.parametrize(
    ("state", "due"),
    [
        (written(24, 1, DROP), [[20, 21], [22, 23]]),
        (written(22, 1, EXACT, "exact"), [[18, 19], [20, 21]]),
        (written(22, 0, DROP), None),  # nothing was read of the pass
    ],
)
def test_old_states_of_nested_wrappers_that_lost_the_same_rows_load(
    state: dict[str, Any], due: list[list[int]] | None
) -> None:
    remainder = state["identity"]["remainder"]
    sampler = every_rank((2, 2), SequentialSampler(1, 2, 2), seed=0, remainder=remainder)[3]
    sampler.load_state_dict(state)
    assert due is None or batches(sampler.sample(state["identity"]["n_obs"])) == due


@pytest.mark.parametrize("n_obs", [22, 26, None])
def test_old_states_of_nested_wrappers_that_lost_other_rows_are_refused_and_leave_the_sampler_alone(
    n_obs: Any,
) -> None:
    for sampler in every_rank((2, 2), SequentialSampler(1, 2, 2), seed=0):
        before = sampler.state_dict(batches_done=0)
        state = written(n_obs, 1, DROP)
        if n_obs == 26:  # two rows were lost outside, and none within
            sampler.load_state_dict(state)
            continue
        with pytest.raises(ValueError, match=r"of an earlier version, in which .* lost other rows .* set_epoch\(1\)"):
            sampler.load_state_dict(state)
        assert sampler.state_dict(batches_done=0) == before


def test_a_state_of_nested_wrappers_with_other_numbers_of_ranks_within_is_refused() -> None:
    wrapped = SequentialSampler(1, 2, 2)
    ours, other = (every_rank((2, within), wrapped, seed=0, remainder="keep")[0] for within in (2, 3))
    again = every_rank((2, 2), wrapped, seed=0, remainder="keep")[1]
    list(ours.sample(36))
    state = ours.state_dict(batches_done=1)
    again.load_state_dict(state)
    with pytest.raises(ValueError, match=r"ranks=2, .* in the state .*ranks=3, "):
        other.load_state_dict(state)
