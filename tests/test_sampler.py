"""The public interface of DistributedSampler."""

# mypy ignores some lines: annbatch's LoadRequest doesn't declare the keys that samplers may add to it.

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import annbatch
import numpy as np
import pytest
from annbatch.abc import Sampler
from annbatch.samplers import RandomSampler, SequentialSampler

from annbatch_distributed import DistributedSampler, Rank
from annbatch_distributed.core.stream import Pass
from tests.samplers import (
    IndexArrays,
    Locked,
    MaskBlind,
    Uncopyable,
    batches,
    flat,
    job,
    request_rows,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from annbatch.types import LoadRequest


def random(seed: int | None = 0, **kwargs: Any) -> RandomSampler:
    return RandomSampler(4, 4, 8, rng=np.random.default_rng(seed), **kwargs)


def one(sampler: Sampler | None = None, rank: int = 0, world_size: int = 2, **kwargs: Any) -> DistributedSampler:
    return DistributedSampler(random() if sampler is None else sampler, dist_info=Rank(rank, world_size), **kwargs)


def order(sampler: DistributedSampler, n_obs: int = 100) -> list[int]:
    return flat(batches(sampler.sample(n_obs)))


def test_sampler_has_annbatchs_interface() -> None:
    """A DistributedSampler is an annbatch sampler, with the batch size and `shuffle` of the wrapped sampler."""
    sampler = one(rank=1)
    assert isinstance(sampler, Sampler)
    assert (sampler.rank, sampler.world_size, sampler.batch_size, sampler.shuffle) == (1, 2, 8, True)
    assert not one(SequentialSampler(4, 4, 8)).shuffle
    assert 'RandomSampler, rank=1, world_size=2, remainder="drop"' in repr(sampler)
    assert sampler.n_iters(100) == sampler.n_batches(100)


@pytest.mark.parametrize(
    ("mask", "rows"),
    [
        (None, range(10, 60)),
        (slice(30, None), range(30, 60)),
        ([slice(None, 20), slice(40, None)], [*range(10, 20), *range(40, 60)]),
    ],
)
def test_mask_narrows_the_wrapped_samplers_mask(mask: Any, rows: Sequence[int]) -> None:
    """The mask of the wrapper narrows down the mask of the wrapped sampler."""
    read = [order(one(random(mask=slice(10, 60)), rank, mask=mask, remainder="keep")) for rank in range(2)]
    assert sorted(flat(read)) == [*rows]


def test_mask_can_be_assigned_between_passes() -> None:
    """A mask can be read and assigned between passes; an open pass keeps its old mask."""
    sampler = one(random(), remainder="keep", world_size=1, mask=slice(None, 60))
    assert sampler.mask == slice(0, 60)
    open_pass = sampler.sample(100)
    sampler.mask = [slice(80, None), slice(0, 8)]
    assert sampler.mask == [slice(0, 8), slice(80, None)]
    assert sorted(order(sampler)) == [*range(8), *range(80, 100)]
    assert sorted(flat(batches(open_pass))) == list(range(60))
    with pytest.raises(ValueError, match="start < stop"):
        sampler.mask = slice(9, 3)
    assert sampler.mask == [slice(0, 8), slice(80, None)]


def test_seed_makes_the_order_reproducible() -> None:
    """A seed determines the order; if there is none, the wrapped sampler's generator does."""
    assert order(one(random(None), seed=3)) == order(one(random(None), seed=3))
    assert order(one(random(None), seed=3)) != order(one(random(None), seed=4))
    assert order(one(random(None))) != order(one(random(None)))
    assert order(one(random(5))) == order(one(random(5))) != order(one(random(6)))


class Bare(IndexArrays):
    """A sampler without a generator, which leaves shuffling to the loader."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size)
        self._rng = None

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        yield {"requests": np.arange(n_obs)}


def test_seed_covers_samplers_without_generator_or_splits() -> None:
    """A seed determines the order of samplers that have no generator and leave the splits to the loader."""
    assert order(one(Bare(4), seed=3)) == order(one(Bare(4), seed=3)) != order(one(Bare(4), seed=4))
    assert order(one(Bare(4))) != order(one(Bare(4)))


def test_generator_can_be_read_and_assigned() -> None:
    """Reading the generator has no effect on the order; assigning one changes it."""
    sampler = one(random(5), seed=3)
    expected = order(one(random(5), seed=3))
    assert sampler.rng is not None
    sampler.rng.random(100)
    assert order(sampler) == expected
    new_rng = np.random.default_rng(6)
    sampler.rng = new_rng
    sampler.set_epoch(0)
    assert order(sampler) == order(one(random(6))) != expected
    assert new_rng.bit_generator.state == np.random.default_rng(6).bit_generator.state
    assert sampler.rng.bit_generator.state == new_rng.bit_generator.state


def test_copy_of_a_subclass_is_deep() -> None:
    """A deep copy of a subclass has copies of its attributes."""

    class Logging(DistributedSampler):
        log: list[int]

    sampler = Logging(random(), dist_info=Rank(0, 2))
    sampler.log = []
    duplicate = copy.deepcopy(sampler)
    duplicate.log.append(1)
    assert type(duplicate) is Logging
    assert sampler.log == []


def test_later_changes_of_wrapped_sampler_are_ignored() -> None:
    """Changes of the wrapped sampler after construction have no effect."""
    wrapped = random()
    expected = order(one(wrapped))
    sampler = one(wrapped)
    wrapped.mask = slice(0, 3)
    assert wrapped.rng is not None
    wrapped.rng.random(7)
    assert order(sampler) == expected


@pytest.mark.parametrize("cls", [Locked, Uncopyable])
def test_samplers_that_cannot_be_deep_copied_work(cls: type[RandomSampler]) -> None:
    wrapped = cls(4, 4, 8, rng=np.random.default_rng(0))
    assert order(one(wrapped)) == order(one(random()))
    assert order(copy.deepcopy(one(wrapped))) == order(one(random()))


def test_copied_sampler_is_independent() -> None:
    """Changes of a copied or unpickled sampler have no effect on the original."""
    sampler = one(seed=3)
    for duplicate in (copy.deepcopy(sampler), copy.copy(sampler), pickle.loads(pickle.dumps(sampler))):
        duplicate.set_epoch(5)
        duplicate.mask = slice(0, 40)
        duplicate.rng = np.random.default_rng(0)
        assert order(duplicate)
        assert (sampler.epoch, sampler.mask) == (0, slice(0, None))
    assert order(sampler) == order(one(seed=3))


def test_enforce_equal_batches_is_drop_or_keep() -> None:
    assert one(enforce_equal_batches=True).plan(100) == one(remainder="drop").plan(100)
    assert one(enforce_equal_batches=False).plan(100) == one(remainder="keep").plan(100)
    assert one(remainder="keep").plan(100) != one(remainder="drop").plan(100)


def test_closed_pass_yields_nothing() -> None:
    """A closed pass yields no more load requests, and neither does its copy."""
    closed = one(MaskBlind(2)).sample(100)
    assert isinstance(closed, Pass)
    assert request_rows(next(closed))
    closed.close()
    assert list(closed) == list(copy.deepcopy(closed)) == []


def test_annbatchs_hook_gives_the_same_pass() -> None:
    """`_sample`, the hook of annbatch's base class, has the same batches as `sample`."""
    assert batches(one(seed=1)._sample(100)) == batches(one(seed=1).sample(100))


def test_overridden_sample_is_used() -> None:
    """A wrapped sampler may override `sample` itself."""

    class Replacing(MaskBlind):
        def sample(self, n_obs: int) -> Iterator[LoadRequest]:
            yield {"requests": [slice(0, n_obs)], "splits": [np.arange(n_obs)]}

        def n_batches(self, n_obs: int) -> int:
            return 1

    assert [order(rank) for rank in job(Replacing(50), 2)] == [list(range(50)), list(range(50, 100))]


@pytest.mark.parametrize("name", ["batch_size", "shuffle", "mask", "rng"])
@pytest.mark.parametrize("error", [RuntimeError("boom"), AttributeError("boom"), KeyError("boom")])
def test_failing_property_of_the_sampler_is_named(name: str, error: Exception) -> None:
    """A property of the wrapped sampler that raises is named in a `TypeError`, with the cause."""

    def fail(_: Sampler) -> None:
        raise error

    broken = type("Broken", (MaskBlind,), {name: property(fail)})
    message = rf"Broken\.{name} raised {type(error).__name__}: .*boom.* Every sampler must have"
    with pytest.raises(TypeError, match=message) as raised:
        one(broken(4))
    assert raised.value.__cause__ is error


def test_wrapped_mask_of_several_slices_is_sharded() -> None:
    """A wrapped sampler's mask of several slices is sharded across the ranks."""
    wrapped = MaskBlind(2)
    wrapped.mask = [slice(0, 4), slice(6, 10)]  # type: ignore[assignment]  # annbatch's type is a single slice
    assert sorted(order(one(wrapped))) == [0, 1, 2, 3]
    assert sorted(order(one(wrapped, rank=1))) == [6, 7, 8, 9]


class Holder(SequentialSampler):
    """A custom sampler that contains a sampler."""

    def __init__(self, inner: Sampler) -> None:
        super().__init__(4, 2, 4)
        self.inner = inner


def test_annbatchs_sampler_around_ours_is_an_error() -> None:
    """annbatch's own DistributedSampler would shard the rows of a rank a second time."""
    inner = DistributedSampler(RandomSampler(4, 2, 4), dist_info=Rank(0, 2))
    with pytest.raises(ValueError, match="sharded already"):
        annbatch.samplers.DistributedSampler(inner, dist_info=lambda: (0, 2))
    inner.mask = slice(0, 40)
    assert inner.n_batches(48) == 5


@pytest.mark.parametrize("around", ["ours", "a sampler that contains it"])
@pytest.mark.parametrize("within", [DistributedSampler, annbatch.samplers.DistributedSampler])
def test_nested_distributed_samplers_are_refused(within: type[Any], around: str) -> None:
    """A distributed sampler within a distributed sampler raises a `TypeError` that suggests `Rank.from_mesh`."""
    inner = within(RandomSampler(4, 2, 4), dist_info=lambda: (0, 2))
    with pytest.raises(TypeError, match=r"must not wrap another.*Rank.from_mesh"):
        DistributedSampler(inner if around == "ours" else Holder(inner), dist_info=Rank(0, 2))
