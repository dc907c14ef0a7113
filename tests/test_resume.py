"""An interrupted epoch continues where it stopped."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pytest
from annbatch.samplers import RandomSampler, SequentialSampler
from hypothesis import event, given
from hypothesis import strategies as st
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore

from annbatch_distributed import DistributedSampler, MixedLoader, Rank, StatefulLoader, deferred
from tests.loaders import numbered
from tests.meeting import agreement
from tests.samplers import batches, job, repeats
from tests.strategies import jobs
from tests.workers import read_by_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from annbatch_distributed.core.rows import Rows
    from annbatch_distributed.core.stream import Pass
    from tests.strategies import Job


def random(**options: Any) -> DistributedSampler:
    """A rank whose epoch has 12 batches, in 3 requests."""
    sampler = options.pop("wrapped", RandomSampler(4, 4, 4, rng=np.random.default_rng(0)))
    return DistributedSampler(sampler, dist_info=Rank(0, 2), **({"seed": 0} | options))


N_OBS = 96
EVERY_THIRD = np.arange(N_OBS) % 3


def resumed(before: DistributedSampler, done: int, **options: Any) -> DistributedSampler:
    """A new sampler that has loaded the state of a sampler, as in a new process."""
    after = random(**options)
    after.load_state_dict(json.loads(json.dumps(before.state_dict(batches_done=done))))
    return after


#: A batch: its rows, and their marks of repeated rows.
type Batch = tuple[tuple[int, ...], tuple[bool, ...]]


def read_by(sampler: DistributedSampler, n_obs: int) -> list[Batch]:
    """The batches of a pass."""
    return batches_in(sampler.sample(n_obs))


def batches_in(open_pass: Pass) -> list[Batch]:
    requests = list(open_pass)
    rows = batches(requests)
    marks = (
        repeats(requests) if any("repeated" in request for request in requests) else [[False] * len(r) for r in rows]
    )
    return [(tuple(own), tuple(own_marks)) for own, own_marks in zip(rows, marks, strict=True)]


def rows_by_step(sampler: DistributedSampler, n_obs: int, **options: Any) -> dict[tuple[int, int], tuple[int, ...]]:
    """The rows of each step and rank, as `rows_of` returns them."""
    frame = sampler.rows_of(n_obs, slice(None), **options)
    return {key: tuple(rows.tolist()) for key, rows in frame.groupby(["step", "rank"])["row"]}


def remaining(samplers: list[DistributedSampler], n_obs: int) -> list[int] | str:
    """The number of remaining batches of each rank, or the error, which must be the same on all ranks."""
    messages: set[str] = set()
    counts = []
    for sampler in samplers:
        try:
            counts.append(sampler.n_batches(n_obs))
        except ValueError as error:
            messages.add(str(error))
    assert len(messages) + bool(counts) == 1
    return counts or messages.pop()


@given(
    jobs(),
    st.integers(0, 2) | st.just(2**63 - 1),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.integers(0, 8)), min_size=1, max_size=4),
)
def test_workers_and_ranks_read_the_same_batches(drawn: Job, epoch: int, parts: list[tuple[int, int, int]]) -> None:
    """An epoch has the batches of an uninterrupted epoch, and `rows_of` returns them by step and rank.

    Each part of the epoch has its own number of ranks and of workers; the last part runs to the end.
    """
    n_obs, policy = drawn.n_obs, drawn.options["remainder"]
    whole = Counter[Batch]()
    read: dict[tuple[int, int], Batch] = {}
    segments: list[list[int]] = []
    n_steps = 0
    for number, (world_size, n_workers, n_done) in enumerate(parts):
        ranks = of_epoch(drawn, world_size, epoch, segments)
        counts = remaining(ranks, n_obs)
        if isinstance(counts, str):
            assert not segments or "would be split" in counts
            return
        assert policy == "keep" or len(set(counts)) == 1
        if not segments:  # no batch is done yet
            whole = Counter(batch for rank in of_epoch(drawn, world_size, epoch, []) for batch in read_by(rank, n_obs))
        done = min(max(counts), n_done if number < len(parts) - 1 else max(counts))
        for rank, (sampler, count) in enumerate(zip(ranks, counts, strict=True)):
            yielded = read_by_workers(sampler, n_obs, n_workers, batches_in) if n_workers else read_by(sampler, n_obs)
            assert len(yielded) == count
            read |= {(n_steps + step, rank): batch for step, batch in enumerate(yielded[:done])}
        n_steps += done
        part = [world_size, max(1, n_workers) if ranks[0].shuffle else 1]
        if segments and segments[-1][:2] == part:
            segments[-1][2] += done
        elif done:
            segments.append([*part, done])
        if done == max(counts):
            break
    event(f"{drawn.kind}, {policy}, {len(segments)} segments")
    check_same_batches(whole, Counter(read.values()), policy, world_size)
    (anyone, *_) = of_epoch(drawn, world_size, epoch, segments)
    assert rows_by_step(anyone, n_obs) == {key: rows for key, (rows, _) in read.items()}
    n_dropped = (whole - Counter(read.values())).total() if policy == "drop" else 0
    assert anyone.plan(n_obs).n_dropped_batches == n_dropped


def check_same_batches(whole: Counter[Batch], read: Counter[Batch], policy: str, n_ranks: int) -> None:
    """Check that the batches are the batches of an uninterrupted epoch, as far as the policy promises it."""
    missing, others = whole - read, read - whole
    if policy == "drop":
        assert not others
        assert missing.total() < n_ranks
    elif policy == "pad":
        assert not missing
        assert all(all(marks) and any(rows == own for own, _ in whole) for rows, marks in others)
    elif policy == "exact":  # a batch that several lanes share has parts
        assert sorted(rows_in(missing)) == sorted(rows_in(others))
        assert others.total() <= n_ranks
    else:
        assert not missing
        assert not others


def of_epoch(drawn: Job, world_size: int, epoch: int, segments: list[list[int]]) -> list[DistributedSampler]:
    """The ranks of a job that starts or resumes an epoch."""
    ranks = job(drawn.sampler, world_size, **drawn.options | {"seed": drawn.options["seed"] or 0})
    for rank in ranks:
        if segments:
            rank.load_state_dict(rank.state_dict(batches_done=0) | {"epoch": epoch, "segments": segments})
        rank.set_epoch(epoch)
    return ranks


def rows_in(counted: Counter[Batch]) -> list[int]:
    return [row for rows, _ in counted.elements() for row in rows]


def test_epoch_without_batches_is_finished_in_its_state() -> None:
    """A rank that has no batch in an epoch continues with the next epoch, also after a restart."""

    def sampler() -> DistributedSampler:
        wrapped = RandomSampler(4, 2, 8, drop_last=True)
        return DistributedSampler(wrapped, dist_info=Rank(0, 2), remainder="keep", seed=0)

    saved, loaded = sampler(), sampler()
    saved.set_epoch(3)
    assert list(saved.sample(5)) == []
    loaded.load_state_dict(saved.state_dict(batches_done=0))
    assert loaded.next_epoch == saved.next_epoch == 4


def forked(loader: StatefulLoader) -> Any:
    return loader.to_dataloader(num_workers=2, multiprocessing_context="fork", persistent_workers=False)


@pytest.mark.parametrize("make", [StatefulLoader.to_dataloader, forked])
def test_uneven_ranks_save_the_same_state(make: Callable[[StatefulLoader], Any]) -> None:
    """Under ``keep``, all ranks save the same state after each step, and the epoch is finished on all ranks at once."""

    def ranks(world_size: int) -> list[Any]:
        loaders = [numbered(rank, 5) for rank in job(RandomSampler(1, 1, 1), world_size, seed=0, remainder="keep")]
        return list(map(make, loaders))

    assert list(map(len, ranks(2))) == [2, 3]
    for done in range(4):
        saving, resumed = ranks(2), ranks(1)
        iterators = list(map(iter, saving))
        steps = [[next(iterator, None) for iterator in iterators] for _ in range(done)]
        read = [int(batch["index"][0]) for step in steps for batch in step if batch is not None]
        (state,) = {json.dumps(rank.state_dict()) for rank in saving}
        assert {rank.next_epoch for rank in saving} == {int(done == 3)}
        for rank in resumed:
            rank.load_state_dict(json.loads(state))
            rank.set_epoch(0)
            read += [int(batch["index"][0]) for batch in rank]
        assert sorted(read) == [*range(5)]
        assert {rank.next_epoch for rank in resumed} == {1}


def test_epoch_is_finished_once_all_batches_are_done() -> None:
    """A loader's state after all batches of an epoch is finished, even if it was saved before a pass began."""
    loader, after = numbered(random(), N_OBS), random()
    whole = len(loader)
    states = [loader.state_dict(batches_done=number) for number in (whole - 1, whole)]
    with pytest.raises(ValueError, match=f"must be from 0 to {whole}"):
        loader.state_dict(batches_done=whole + 1)
    assert [state["finished"] for state in states] == [False, True]
    for state in states:
        after.load_state_dict(state)
        assert (after.next_epoch, after.n_batches(N_OBS)) == ((1, whole) if state["finished"] else (0, 1))


def test_state_is_independent_of_earlier_questions() -> None:
    """A question about some number of rows doesn't change a later state, which doesn't know that number."""
    before, asked = random(), random()
    n_batches = asked.n_batches(N_OBS)
    assert asked.state_dict(batches_done=n_batches) == before.state_dict(batches_done=n_batches)
    asked.reshard(Rank(0, 1), batches_done=n_batches + 1)  # the collection may be larger


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_finished_epoch_stays_finished_on_fewer_ranks(world_size: int) -> None:
    """Batches that ``drop`` drops when ranks change stay dropped in that epoch, also on fewer ranks."""

    def sampler(rank: int, world_size: int) -> DistributedSampler:
        return DistributedSampler(SequentialSampler(1, 1, 1), dist_info=Rank(rank, world_size), seed=0)

    before, after = sampler(0, 1), sampler(0, 3)
    after.load_state_dict(before.state_dict(batches_done=1))  # 5 of 6 batches remain: one on each rank, 2 dropped
    assert len(list(after.sample(6))) == 1
    again = sampler(0, world_size)
    again.load_state_dict(after.state_dict(batches_done=2))
    again.set_epoch(0)
    assert again.n_batches(6) == 0
    assert list(again.sample(6)) == []
    assert again.next_epoch == 1


def test_new_generator_restarts_the_epoch() -> None:
    """Assigning a generator starts the epoch from its first batch, even after a state was loaded."""
    before = random()
    before.sample(N_OBS)
    after = resumed(before, 5)
    after.rng = np.random.default_rng(3)
    assert after.n_batches(N_OBS) == 12


def test_sharding_is_identified_by_its_attributes() -> None:
    """A state identifies a custom sharding by its attributes, not by its repr."""

    class Rotation:
        def __init__(self, by: int) -> None:
            self.by = by

        def __call__(self, rows: Rows, *, epoch: int, seed: int | None) -> Rows:
            return rows.cyclic(self.by, len(rows))

    state = random(sharding=Rotation(3)).state_dict(batches_done=1)
    random(sharding=Rotation(3)).load_state_dict(state)
    with pytest.raises(ValueError, match=r"sharding.digest is '\w{32}' in the state and '\w{32}' here"):
        random(sharding=Rotation(4)).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "differences"),
    [
        ({"seed": 1}, ["seed is 0 in the state and 1 here"]),
        ({"mask": slice(0, 90)}, ["mask is '[[0, null]]' in the state and '[[0, 90]]' here"]),
        ({"remainder": "exact"}, ["remainder is 'drop' in the state and 'exact' here"]),
        (
            {"sharding": "shuffled"},
            ["sharding.block_size is None", "sharding.type is 'Contiguous' in the state and 'Shuf"],
        ),
        ({"wrapped": RandomSampler(4, 2, 4)}, ["preload_nchunks is 4 in the state and 2 here"]),
        ({"wrapped": RandomSampler(8, 2, 8)}, ["batch_size is 4 in the state and 8 here"]),
    ],
)
def test_state_with_different_settings_is_refused(options: dict[str, Any], differences: list[str]) -> None:
    """The error for different settings names each of them and changes nothing; `strict=False` loads the state."""
    before = random()
    list(before.sample(N_OBS))
    state = before.state_dict(batches_done=5)
    after = random(**options)
    untouched = batches(random(**options).sample(N_OBS))
    with pytest.raises(ValueError, match="saved by a sampler with different settings") as error:
        after.load_state_dict(state)
    message = str(error.value)
    assert all(difference in message for difference in differences)
    assert message.count(" in the state and ") == len(differences)
    assert batches(after.sample(N_OBS)) == untouched
    after.load_state_dict(state, strict=False)
    assert after.n_batches(N_OBS) == len(untouched) - 5


def test_different_sizes_name_what_chooses_them() -> None:
    """The error for sizes that `from_collection` has chosen names the arguments that it has chosen them by."""
    state = random().state_dict(batches_done=5)
    hint = "from_collection chooses chunk_size and preload_nchunks by memory, batch_size, prefetch, mask and cells."
    for wrapped, has_hint in ((RandomSampler(2, 4, 4), True), (RandomSampler(8, 2, 8), False)):
        with pytest.raises(ValueError, match="sampler") as error:
            random(wrapped=wrapped).load_state_dict(state)
        assert str(error.value).count(hint) == has_hint


@pytest.mark.parametrize(
    ("mask", "same", "other", "message"),
    [
        (None, slice(0, N_OBS), slice(0, 90), r"mask is '\[\[0, null\]\]' in the state and '\[\[0, 90\]\]' here"),
        (EVERY_THIRD != 1, EVERY_THIRD != 1, EVERY_THIRD != 0, "mask selects different rows"),
    ],
)
def test_state_before_first_pass_fits_all_rows(mask: Any, same: Any, other: Any, message: str) -> None:
    """A state before the first pass doesn't know where the collection ends: it fits a mask to its end, and no other."""
    state = random(mask=mask).state_dict(batches_done=5)
    loader(mask=same).load_state_dict(state)
    with pytest.raises(ValueError, match=message):
        loader(mask=other).load_state_dict(state)


def loader(**options: Any) -> StatefulLoader:
    """The same rank with its collection."""
    return numbered(random(**options), N_OBS)


def everything(source: Any) -> list[Any]:
    """The attributes, the state and the next batches of a sampler or loader."""
    sampler = source.sampler
    state = source.state_dict(batches_done=5)
    following = copy.deepcopy(sampler)
    passes = [batches(following.sample(N_OBS)) for _ in range(2)]
    plan = str(copy.deepcopy(sampler).plan(N_OBS))
    attributes = [dict(vars(thing)) for thing in (source, sampler)]
    return [state, sampler.epoch, sampler.batches_done, plan, passes, attributes]


def mixture() -> MixedLoader:
    """A mixture of two loaders."""
    return MixedLoader({"a": loader(), "b": loader(seed=1)}, weights={"a": 2, "b": 1}, n_steps=8)


def with_damage(part: Any) -> Iterator[Any]:
    """A part of a state with each of its nodes replaced by other values, and without each of its keys."""
    yield from (None, -1, 1.5, "x", [], {}, [[0]], {"ranges": 5})
    for key in part if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ():
        yield {other: part[other] for other in part if other != key} if isinstance(part, dict) else part[:key]
        for damaged in with_damage(part[key]):
            changed = copy.copy(part)
            changed[key] = damaged
            yield changed


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("make", [random, loader, mixture])
def test_damaged_state_is_explained_or_resumed(make: Any, strict: bool) -> None:
    """Whatever is damaged in a state, it raises an error about the state, or can be resumed and saved."""
    source, after = make(), make()
    next(source.sample(N_OBS) if make is random else iter(source))
    for state in with_damage(source.state_dict(batches_done=1)):
        try:
            after.load_state_dict(state, strict=strict)
        except (TypeError, ValueError) as error:
            assert isinstance(error, ValueError) or not isinstance(state, dict)  # noqa: PT017 either is right
            assert "state" in str(error)  # noqa: PT017 others are resumed
        else:
            assert json.dumps(after.state_dict(batches_done=after.batches_done))


def test_strict_mixture_requires_all_states() -> None:
    """Under ``strict``, the state of a mixture has the states of all its sources."""
    state = mixture().state_dict()
    del state["sources"]["b"]
    with pytest.raises(ValueError, match=r"The state is damaged: it must have the sources a, b, got a, in .*"):
        mixture().load_state_dict(state)


def of_epoch_3(segments: list[list[int]], **changes: Any) -> dict[str, Any]:
    """A state of 96 rows, as read from a file."""
    identity = {
        "n_obs": N_OBS,
        "rows": {"ranges": [[0, None]]},
        "remainder": "drop",
        "sharding": {"type": "Contiguous"},
        "seed": 0,
        "root": 0,
        "sampler": {
            "type": "annbatch.samplers.RandomSampler",
            "batch_size": 4,
            "chunk_size": 4,
            "drop_last": False,
            "num_samples": None,
            "preload_nchunks": 4,
            "replacement": False,
        },
    } | changes.pop("identity", {})
    return {"version": 1, "epoch": 3, "pass": 0, "segments": segments, "identity": identity} | changes


#: Options of the rank, a state that it can't resume, and the error.
IMPOSSIBLE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "more batches than there are": (
        {},
        of_epoch_3([[2, 1, 13]]),
        r"13 batches of epoch 3 are done, .* has only 12.* skip the rest .* set_epoch\(4\)",
    ),
    "more batches in total than there are": (
        {},
        of_epoch_3([[2, 3, 7], [2, 2, 6]]),
        "6 batches of epoch 3 are done, .* 2 ranks .* has only 5",
    ),
    "more batches than old ranks had": (
        {},
        of_epoch_3([[3, 1, 9]]),
        "9 batches of epoch 3 are done, .* 3 ranks .* has only 8",
    ),
    "the maximum of old ranks": (
        {},
        of_epoch_3([[2**20, 1, 1]]),
        "There are 96 rows, too few .* 1048576 ranks",
    ),
    "more old ranks than rows": (
        {"remainder": "exact"},
        of_epoch_3([[97, 1, 1]], identity={"remainder": "exact"}),
        "There are 96 rows, too few for 97 ranks",
    ),
    "a batch too small to split": (
        {"remainder": "exact", "mask": slice(0, 69), "virtual_ranks": 4},
        of_epoch_3([[1, 1, 17]], identity={"remainder": "exact", "rows": {"ranges": [[0, 69]]}}),
        r"1 of them would be split, .* only 2 rows. Resume on a number of virtual ranks that divides them \(1\)",
    ),
    "the maximum of changes": (
        {},
        of_epoch_3([[3, 1, 1], [4, 1, 1]] * 50),
        "may change at most 99 times",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("options", "state", "message"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
@pytest.mark.parametrize("make", [random, loader])
def test_impossible_state_is_refused_when_loaded(
    make: Any, options: dict[str, Any], state: dict[str, Any], message: str
) -> None:
    """A state that can't be resumed raises when it is loaded, and changes nothing."""
    source = make(**options)
    list(source.sample(N_OBS) if make is random else source)
    before = everything(source)
    with pytest.raises(ValueError, match=message):
        source.load_state_dict(state)
    assert everything(source) == before


@pytest.mark.parametrize("strict", [True, False])
def test_loader_refuses_states_its_rows_cannot_resume(strict: bool) -> None:
    """A loader refuses states that its rows can't resume; `strict=False` accepts a different number of rows."""
    target = loader()
    before = everything(target)
    with pytest.raises(ValueError, match=r"13 batches of epoch 3 are done, .* has only 12"):
        target.load_state_dict(of_epoch_3([[2, 1, 13]], identity={"n_obs": None}), strict=strict)
    assert everything(target) == before
    of_more_rows = of_epoch_3([[2, 1, 4]], identity={"n_obs": 97})
    if strict:
        with pytest.raises(ValueError, match="n_obs is 97 in the state and 96 here"):
            target.load_state_dict(of_more_rows)
        assert everything(target) == before
    else:
        target.load_state_dict(of_more_rows, strict=False)
        assert target.sampler.n_batches(N_OBS) == 8


def test_state_holds_at_most_100_segments() -> None:
    """A state can have 100 segments; one more change of ranks raises."""
    many = random(mask=slice(0, 2000))
    changes = [[3, 1, 1], [4, 1, 1]] * 49
    state = of_epoch_3([*changes, [3, 1, 1]], identity={"n_obs": 2000, "rows": {"ranges": [[0, 2000]]}})
    many.load_state_dict(state)
    last = many.state_dict(batches_done=100)
    assert len(last["segments"]) == 100
    many.load_state_dict(last)
    assert many.n_batches(2000) > 0
    other = DistributedSampler(RandomSampler(4, 4, 4), dist_info=Rank(0, 5), seed=0, mask=slice(0, 2000))
    with pytest.raises(ValueError, match="may change at most 99 times"):
        other.load_state_dict(last)


def test_state_of_different_collection_is_refused() -> None:
    """A state that doesn't fit the number of rows raises before any row is read."""
    before = random()
    before.sample(N_OBS)
    after = resumed(before, 5)
    for call in (after.n_batches, after.sample, after.plan, after.validate):
        with pytest.raises(ValueError, match="collection of 96 rows, but this collection has 95"):
            call(95)
    sampled = random()
    sampled.sample(N_OBS)
    with pytest.raises(ValueError, match="got 13"):
        sampled.state_dict(batches_done=13)
    unknown = random()
    unknown.load_state_dict(random().state_dict(batches_done=13))  # the number of rows is still unknown
    for call in (unknown.n_batches, unknown.sample):
        with pytest.raises(
            ValueError,
            match=r"13 batches of epoch 0 are done, .* has only 12",
        ):
            call(N_OBS)


def test_state_requires_a_common_seed() -> None:
    """A state requires a common seed, unless no batch is done or the sampler has no randomness."""
    ranks = [
        DistributedSampler(RandomSampler(4, 4, 4), dist_info=Rank(0, 2)),
        DistributedSampler(RandomSampler(4, 4, 4), dist_info=Rank(0, 2)),
    ]
    with pytest.raises(
        ValueError,
        match=r"root is .*The root is the seed",
    ):
        ranks[1].load_state_dict(ranks[0].state_dict(batches_done=2))
    ranks[1].load_state_dict(ranks[0].state_dict(batches_done=0))  # no order must be restored
    ordered = job(SequentialSampler(4, 4, 4), 2)
    whole = batches(ordered[0].sample(N_OBS))
    again = DistributedSampler(SequentialSampler(4, 4, 4), dist_info=Rank(0, 2))
    again.load_state_dict(ordered[1].state_dict(batches_done=2))
    assert batches(again.sample(N_OBS)) == whole[2:]


def test_reshard_of_a_sampler_requires_batches_done() -> None:
    """A sampler can't know the number of batches that are done, so `reshard` requires it."""
    before, expected = random(), DistributedSampler(RandomSampler(4, 4, 4), dist_info=Rank(0, 3), seed=0)
    open_pass = before.sample(N_OBS)
    next(open_pass)
    state = before.state_dict(batches_done=3)
    expected.load_state_dict(state)
    with pytest.raises(ValueError, match="batches_done is required"):
        before.reshard(Rank(0, 3))
    before.reshard(Rank(0, 3), batches_done=3)
    with pytest.raises(
        RuntimeError, match=r"was Rank\(rank=0, world_size=2\), and is now Rank\(rank=0, world_size=3\)"
    ):
        next(open_pass)
    assert before.state_dict(batches_done=3) == expected.state_dict(batches_done=3)
    assert batches(before.sample(N_OBS)) == batches(expected.sample(N_OBS))


def test_pass_whose_rank_changes_unnoticed_raises() -> None:
    """If the process group was replaced without calling `reshard`, no row of the old shard is read."""
    places = [(0, 2)]
    for dist_info in (lambda: places[-1], deferred(lambda: places[-1])):
        del places[1:]
        sampler = DistributedSampler(RandomSampler(4, 2, 4), dist_info=dist_info, seed=0)
        loader = numbered(sampler, N_OBS, prefetch=1)
        batches, open_pass = iter(loader), None
        next(batches)
        state = loader.state_dict(batches_done=1)
        places.append((0, 3))
        with pytest.raises(RuntimeError, match=r"world_size=2\), and is now .*3\)"):
            list(batches)
        loader.load_state_dict(state)
        open_pass = sampler.sample(N_OBS)
        with pytest.raises(RuntimeError, match=r"Call loader.reshard\(\) in every process"):
            next(open_pass)


def test_pass_outlives_its_process_group() -> None:
    """A job can destroy its process group before it has read all batches: its rank is still the same."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        loader = numbered(DistributedSampler(RandomSampler(4, 2, 4), dist_info="torch", seed=0), N_OBS)
        batches = iter(loader)
        next(batches)
    finally:
        dist.destroy_process_group()
    assert sum(1 for _ in batches) == N_OBS // 4 - 1


def test_rank_callable_is_called_once() -> None:
    """A callable is called once, because it may create a group, which all processes do together."""
    calls = []

    def make_group() -> Rank:
        calls.append(1)
        return Rank(0, 2)

    list(DistributedSampler(RandomSampler(4, 2, 4), dist_info=make_group, seed=0).sample(N_OBS))
    assert len(calls) == 1


def test_rank_that_is_ahead_goes_back() -> None:
    """If a rank dies within a step, a rank that finished the step can go back to the step before."""
    ranks = [numbered(random_on(rank, 4), N_OBS) for rank in range(3)]
    for loader, n_done in zip(ranks, (3, 4, 3), strict=True):
        list(zip(range(n_done), loader, strict=False))
    for rank, loader in enumerate(ranks):
        loader.reshard(Rank(rank, 3))
    (message,) = set(agreement(ranks))
    assert "batches done: 3 on 4 ranks on ranks 0 and 2; 4 on 4 ranks on rank 1" in message
    assert "To go back to the last step" in message
    assert "loader.reshard(batches_done=3) on rank 1." in message
    ranks[1].reshard(batches_done=3)
    assert agreement(ranks) == ["", "", ""]
    assert len({json.dumps(loader.state_dict()) for loader in ranks}) == 1
    next(iter(ranks[0]))
    with pytest.raises(ValueError, match="batches_done must be from 3"):
        ranks[0].state_dict(batches_done=2)


def test_missing_checkpoint_is_named() -> None:
    """If only some ranks resumed, going back would repeat batches that the loaded model was trained on."""
    ranks = [numbered(random_on(rank, 2), N_OBS) for rank in range(2)]
    ranks[1].load_state_dict(ranks[1].state_dict(batches_done=3))
    (message,) = set(agreement(ranks))
    assert "If only rank 1 resumed, load the same state in every process." in message
    assert "reshard" not in message


def random_on(rank: int, world_size: int) -> DistributedSampler:
    return DistributedSampler(RandomSampler(4, 4, 4), dist_info=Rank(rank, world_size), seed=0, remainder="exact")


def test_source_of_the_rank_stays_in_its_process() -> None:
    """A function can't be pickled. A deferred source is called in each process, and again by reshard."""
    ranks = iter([Rank(0, 2), Rank(1, 2)])
    before = DistributedSampler(SequentialSampler(4, 4, 4), dist_info=lambda: next(ranks))
    unpickled = pickle.loads(pickle.dumps(before))
    with pytest.raises(ValueError, match="was unpickled"):
        unpickled.reshard()
    unpickled.reshard(Rank(2, 3))
    unpickled.reshard()
    assert (unpickled.rank, unpickled.world_size) == (2, 3)
    duplicate = copy.deepcopy(before)
    duplicate.reshard()
    assert (before.rank, duplicate.rank) == (0, 1)
    source = deferred(_newest_place)
    waiting = DistributedSampler(SequentialSampler(4, 4, 4), dist_info=source)
    assert waiting.rank == 0
    PLACES.append(Rank(1, 2))
    other = pickle.loads(pickle.dumps(waiting))
    for one in (waiting, other):
        one.reshard()
        assert one.rank == 1
    assert source.placement == Rank(0, 2)
    waiting.reshard(Rank(0, 1))
    assert waiting.world_size == 1


def test_datasets_added_later_must_match_the_state() -> None:
    """Datasets that are added after loading a state and resharding are compared with the state's datasets."""
    before = numbered(random(), N_OBS)
    next(iter(before))
    after = StatefulLoader(batch_sampler=random(), preload_to_gpu=False)
    after.load_state_dict(before.state_dict())
    after.reshard(Rank(0, 3))
    after.add_adata(ad.AnnData(np.zeros((N_OBS, 3))))
    with pytest.raises(ValueError, match=r"datasets is '\[\[96, 1\]\]' in the state and '\[\[96, 3\]\]' here"):
        next(iter(after))


PLACES = [Rank(0, 2)]


def _newest_place() -> Rank:
    return PLACES[-1]
