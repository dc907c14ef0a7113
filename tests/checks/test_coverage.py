"""Ranks of every kind of job prove that they have read the planned rows, and detect any other rows."""

from __future__ import annotations

import copy
import io
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import annbatch
import numpy as np
import pytest
from annbatch.samplers import RandomSampler, SequentialSampler
from hypothesis import assume, given
from hypothesis import strategies as st

from annbatch_distributed import DistributedSampler, Rank, Rows
from annbatch_distributed.checks import Tally
from annbatch_distributed.ranks import Placement
from tests.loaders import numbered
from tests.meeting import heard, met, verdict
from tests.samplers import MaskBlind, batches, flat, job
from tests.strategies import PASSING, Job, jobs
from tests.test_laws import drops_rows, runnable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from annbatch.types import LoadRequest

    from annbatch_distributed.checks.exchange import Gather


def tally(read: Iterable[list[int]]) -> Tally:
    """Count the rows of some batches."""
    result = Tally()
    for rows in read:
        result.add(np.array(rows, dtype=np.int64))
    return result


def counted(n_rows: int, n_batches: int) -> str:
    """The numbers of rows and batches as a string."""
    return f"{n_rows} row{'s' * (n_rows != 1)} in {n_batches} batch{'es' * (n_batches != 1)}"


def verdict_of(ranks: Sequence[DistributedSampler], n_obs: int, read: Sequence[Iterable[list[int]]]) -> str:
    """Return the verdict on all ranks about the rows that they have read."""
    pairs = zip(ranks, map(tally, read), strict=True)
    (text,) = set(heard([partial(_check, sampler, n_obs, counted) for sampler, counted in pairs]))
    return text


def _check(sampler: DistributedSampler, n_obs: int, counted: Tally, gather: Gather) -> str:
    return sampler.check_epoch_read(n_obs, counted, gather=gather)


@given(jobs(), st.integers(0, 3), st.data())
def test_verdict_accepts_the_plan_and_nothing_else(drawn: Job, epoch: int, data: st.DataObject) -> None:
    """The planned batches pass the check; missing, repeated, different and merged batches don't."""
    ranks = runnable(drawn, epoch)
    assume(all(sampler.n_batches(drawn.n_obs) for sampler in ranks))
    read = [batches(sampler.sample(drawn.n_obs)) for sampler in ranks]
    n_rows, n_batches = len(flat(flat(read))), sum(map(len, read))
    text = verdict_of(ranks, drawn.n_obs, read)
    have = "1 rank has" if drawn.world_size == 1 else f"{drawn.world_size} ranks have"
    assert text.startswith(f"epoch {epoch}: {have} read {counted(n_rows, n_batches)}, as planned")
    if drawn.kind in PASSING and not drops_rows(drawn):
        plan = ranks[0].plan(drawn.n_obs)
        n_once = len(plan.selected) - plan.n_dropped
        assert f"Each of the {n_once} row{'s' * (n_once != 1)} was read once" in text
        assert (f", {plan.n_repeated} were repeated" in text) == bool(plan.n_repeated)
        assert (f"; {plan.n_dropped} of the {len(plan.selected)} are dropped" in text) == bool(plan.n_dropped)
        assert ("; the mask selects" in text) == (len(plan.selected) < drawn.n_obs)

    rank = data.draw(st.integers(0, drawn.world_size - 1))
    wrong = copy.deepcopy(read)
    match data.draw(st.sampled_from(["a batch less", "a batch twice", "another row", "rows in one batch"])):
        case "a batch less":
            wrong[rank] = wrong[rank][1:]
        case "a batch twice":
            wrong[rank] += wrong[rank][-1:]
        case "another row":
            wrong[rank][0] = [*wrong[rank][0][1:], (wrong[rank][0][0] + 1)]
        case "rows in one batch":
            wrong[rank] = [flat(wrong[rank]), *[[] for _ in wrong[rank]]]
    text = verdict_of(ranks, drawn.n_obs, wrong)
    plan = ranks[0].plan(drawn.n_obs)
    few, rows = len(plan.selected.starts) <= 3, f"{len(plan.selected):,} of {drawn.n_obs:,} rows"
    masked = f" (the mask selects {plan.selected if few else rows})"
    which = masked if len(plan.selected) < drawn.n_obs else ""
    assert text.startswith(f"The ranks have not read the planned rows in epoch {epoch}{which}:\n  rank {rank} has read")
    assert text.count("\n") == 1


class Swapped:
    """A sharding that may swap two rows, which aren't compared, by an attribute that no description shows."""

    def __init__(self, *, is_odd: bool) -> None:
        self.hidden = io.StringIO("odd" if is_odd else "")

    def __call__(self, rows: Rows, *, epoch: int, seed: int | None) -> Rows:
        order = rows.to_array()
        if self.hidden.getvalue():
            order[[1, 3001]] = order[[3001, 1]]
        return Rows.from_indices(order)


@pytest.mark.parametrize("done", [0, 3])
def test_shards_that_differ_from_the_plan_raise(done: int) -> None:
    """Shards that don't add up to the plan are an error, even if each rank has read its own shard."""

    def verdict(*are_odd: bool) -> str:
        sampler = SequentialSampler(4, 2, 4)
        ranks = [
            DistributedSampler(sampler, dist_info=Rank(rank, 2), sharding=Swapped(is_odd=is_odd))
            for rank, is_odd in enumerate(are_odd)
        ]
        for one in ranks:
            one.sample(4000)
            one.load_state_dict(one.state_dict(batches_done=done))
        return verdict_of(ranks, 4000, [batches(one.sample(4000)) for one in ranks])

    for both in (False, True):
        assert "as planned" in verdict(both, both)
    assert verdict(False, True).endswith("\n  the shards of all ranks, 4,000 rows, differ from the plan")


def test_epoch_that_drops_batches_claims_no_rows() -> None:
    """When a change of ranks drops a batch, the verdict doesn't claim that each row was read."""
    sampler = SequentialSampler(4, 2, 4)
    state = job(sampler, 3, remainder="drop")[0].state_dict(batches_done=1)  # 21 of 24 batches are left
    ranks = job(sampler, 2, remainder="drop")
    for rank in ranks:
        rank.load_state_dict(state)
    text = verdict_of(ranks, 96, [batches(rank.sample(96)) for rank in ranks])
    assert text == "rest of epoch 0: 2 ranks have read 80 rows in 20 batches, as planned"


def test_rows_of_a_rank_with_peers_count_once() -> None:
    """Processes with the same rank read the same rows, which count once; an error names the process."""
    places = [Placement(number // 2, 2, "a mesh", n_peers=2) for number in range(4)]
    ranks = [DistributedSampler(SequentialSampler(4, 2, 4), dist_info=place) for place in places]
    read = [batches(one.sample(96)) for one in ranks]
    once = "epoch 0: 2 ranks have read 96 rows in 24 batches, as planned. Each of the 96 rows was read once"
    assert verdict_of(ranks, 96, read) == once
    read[3] = read[3][1:]
    wrong = "\n  rank 1 (process 3) has read 44 rows in 11 batches, not 48 rows in 12 batches"
    assert verdict_of(ranks, 96, read).endswith(wrong)


def test_loader_counts_the_batches_it_yields() -> None:
    """The loader counts the batches that it yields, and the check passes only after the last of them."""
    sampler = DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 1), seed=0, remainder="pad")
    loader = numbered(sampler, 50, return_index=False)
    list(loader)
    assert loader.check_epoch_read() == (
        "epoch 0: 1 rank has read 52 rows in 13 batches, as planned. Each of the 50 rows was read once, 2 were repeated"
    )
    loader.set_epoch(1)
    with pytest.raises(ValueError, match="No iteration has started"):
        loader.check_epoch_read()
    iterator = iter(loader)
    for _ in range(12):
        next(iterator)
        with pytest.raises(ValueError, match="have not read the planned rows"):
            loader.check_epoch_read()
    next(iterator)
    assert loader.check_epoch_read().startswith("epoch 1: 1 rank has read 52 rows")


def checked(
    state: dict[str, Any] | None, *, strict: bool = True, n_read: int | None = None
) -> tuple[str, dict[str, Any]]:
    """The verdict and the state of a loader that has loaded a state and then read some or all batches."""
    sampler = DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 1), seed=0, remainder="exact")
    loader = numbered(sampler, 48, return_index=False)
    if state is not None:
        loader.load_state_dict(state, strict=strict)
    for _ in islice(loader, n_read):
        pass
    return "" if n_read else loader.check_epoch_read(), loader.state_dict()


def test_rank_that_resumes_alone_is_no_difference() -> None:
    """If one rank resumes, after a failed read, its earlier batches are unknown, and the others are right."""
    ranks = [numbered(rank, 48) for rank in job(RandomSampler(4, 2, 4), 2, seed=0, remainder="exact")]
    assert len(list(islice(ranks[0], 3))) == 3
    ranks[0].load_state_dict(ranks[0].state_dict())
    assert [len(list(loader)) for loader in ranks] == [3, 6]
    (text,) = set(verdict(ranks))
    read = "2 ranks have read 36 rows in 9 batches, as planned"
    assert text == f"rest of epoch 0: {read}. Earlier batches were not checked"


def changed(state: dict[str, Any], **identity: Any) -> dict[str, Any]:
    return state | {"identity": state["identity"] | identity}


def test_verdict_excludes_batches_that_were_not_compared() -> None:
    """Under `strict=False`, a verdict covers only the batches read after loading, also through later states."""
    _, state = checked(None, n_read=3)
    verdict, _ = checked(state)
    assert verdict.endswith("Including earlier batches, each of the 48 rows was read once")
    other = changed(state, seed=1, root=1)
    verdict, _ = checked(other, strict=False)
    assert verdict.startswith("rest of epoch 0: 1 rank has read 36 rows in 9 batches, as planned")
    assert "each" not in verdict
    assert "Earlier batches were not checked" in verdict
    _, later = checked(other, strict=False, n_read=2)
    assert later["unverified"]
    verdict, after = checked(later)
    assert "each" not in verdict
    verdict, _ = checked(after)  # the next pass is read completely
    assert verdict.endswith("12 batches, as planned. Each of the 48 rows was read once")


def test_different_versions_warn_only_within_an_epoch() -> None:
    """A state of different library versions warns within an epoch, and its earlier batches aren't checked."""
    _, state = checked(None, n_read=3)
    versions = state["identity"]["versions"]
    assert versions == {"annbatch": annbatch.__version__, "numpy": np.__version__}
    other = changed(state, versions=versions | {"numpy": "1.26.4"})
    with pytest.warns(UserWarning, match=rf"numpy 1.26.4 \(here: {np.__version__}\)"):
        verdict, _ = checked(other)
    assert "each" not in verdict
    _, ended = checked(None)
    assert ended["finished"]
    verdict, _ = checked(changed(ended, versions={"numpy": "1.26.4", "annbatch": "0.2"}))
    assert verdict.endswith("Each of the 48 rows was read once")


def reading(rank: int, *, n_obs: Any = 100, read: Any = None) -> Callable[[], str]:
    """A check of one of two ranks that have read the planned rows, unless arguments say otherwise."""
    sampler = job(RandomSampler(4, 2, 4), 2, seed=0, remainder="exact")[rank]
    counted = tally(batches(sampler.sample(100)))
    return lambda: sampler.check_epoch_read(n_obs, counted if read is None else read, timeout=20)


ODD: dict[str, tuple[dict[str, Any], str]] = {
    "rows that are no batches": ({"read": np.arange(50)}, "ValueError: Rows must have one dimension, got shape ()"),
    "no rows": ({"read": 50}, "TypeError: read must be an iterable of integer arrays"),
    "a number of rows that is a string": ({"n_obs": "100"}, "TypeError: n_obs must be an integer"),
    "another number of rows": (
        {"n_obs": 101},
        "ValueError: n_obs must be the number of rows of the last iteration, 100",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_wrong_argument_of_one_rank_raises_on_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invalid argument of one rank raises the same error on every rank."""
    odd, expected = ODD[name]
    (message,) = set(met([reading(0), reading(1, **odd)], monkeypatch))
    assert message.startswith(f"ValueError: The ranks of this job can't be compared:\n  {expected}")
    assert message.endswith("(rank 1)")


class SameRows(MaskBlind):
    """A sampler that reads the same rows in every request, but is otherwise valid."""

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        for request in super()._sample(n_obs):
            (rows,) = request["requests"]
            assert isinstance(rows, slice)
            yield {**request, "requests": [slice(0, rows.stop - rows.start)]}


@pytest.mark.parametrize("done", [0, 2])
@pytest.mark.parametrize("policy", ["keep", "exact", "pad"])
def test_sampler_that_repeats_rows_fails_the_check(policy: str, done: int) -> None:
    """A sampler that reads some rows twice and never reads others fails the check."""
    for cls, is_error in ((SameRows, True), (MaskBlind, False)):
        ranks = job(cls(4), 2, remainder=policy)
        for one in ranks:
            one.sample(100)
            one.load_state_dict(one.state_dict(batches_done=done))
        text = verdict_of(ranks, 100, [batches(rank.sample(100)) for rank in ranks])
        promised = f"SameRows doesn't read each row of its shard once, as remainder={policy!r} requires."
        assert (promised in text) == ("as planned" not in text) == is_error
