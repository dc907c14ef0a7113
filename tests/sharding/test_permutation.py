"""Permutations: every position once, exhaustively, and mixed like random orders, statistically.

Every statistic below is a number of standard deviations: of orders that are drawn at random it is standard normal, or
nearly so, whatever n and the number of orders. The 1,300 that the permutations are held to stay within ``LIMIT``, which
a standard normal number leaves with a probability of 5e-11. Truly random orders would fail any of these tests with a
probability below 1e-6, even if tails were ten times as heavy. That this leaves little through is what the last tests
show: orders that aren't random, or not enough so, are noticed by the statistics made for what is wrong with them.
"""

from __future__ import annotations

import copy
import pickle
import tracemalloc
from fractions import Fraction
from functools import cache
from math import factorial, gcd
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from annbatch_distributed.sharding import permutation
from annbatch_distributed.sharding.permutation import Permutation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    type Places = npt.NDArray[np.int64]

#: The largest n that are sorted, and ciphers: 4**k + 1 (twice), a prime, odd times odd, 2**k.
SORTED, CIPHERS = (1023, 1024), (1025, 4097, 1031, 1225, 2048)
LIMIT = 6.6


def order(n: int, *key: int) -> npt.NDArray[np.int64]:
    return Permutation(n, key)(np.arange(n))


# --- A bijection


@pytest.mark.parametrize("start", range(0, 3001, 500))
def test_every_position_below_n_is_taken_once_for_every_n(start: int) -> None:
    for n in range(start, min(start + 500, 3001)):
        for key in ((n,), (0, 1)):
            image = order(n, *key)
            assert image.dtype == np.int64
            assert image.shape == (n,)
            assert np.array_equal(np.sort(image), np.arange(n)), (n, key)


LARGE = sorted({n for k in range(11, 25) for n in (2**k - 1, 2**k, 2**k + 1)} | {4**k + 1 for k in range(6, 13)})


@pytest.mark.parametrize("n", LARGE)
def test_every_position_is_taken_once_around_powers_of_two(n: int) -> None:
    permuted, taken, chunk = Permutation(n, (7, n)), np.zeros(n, dtype=np.bool_), 2**14
    for start in range(0, n, chunk):
        taken[permuted(np.arange(start, min(start + chunk, n)))] = True
    assert taken.all()  # n positions go to n places, so none was taken twice


@pytest.mark.parametrize("n", [2**40 + 1, 2**61, 2**61 + 1, 3 * 2**60, 2**62 - 1, 2**62])
def test_positions_stay_apart_and_below_n_where_there_are_too_many_to_enumerate(n: int) -> None:
    strides = np.array([1, 2**20, 2**30, n // 10_000])[:, None]  # along one half, along the other, and across
    positions = np.unique(np.concatenate([(strides * np.arange(10_000)).ravel() % n, n - 1 - np.arange(10_000)]))
    image = Permutation(n, (3,))(positions)
    assert len(np.unique(image)) == len(positions) > 40_000
    assert 0 <= image.min() < n // 100
    assert n - n // 100 < image.max() < n


# --- Random access


@pytest.mark.parametrize("n", [1, 2, 3, 10, 127, *SORTED, *CIPHERS])
def test_where_a_position_goes_does_not_depend_on_what_else_is_asked_for(n: int) -> None:
    permuted, image = Permutation(n, (5, 1)), order(n, 5, 1)
    shuffled = np.random.default_rng(0).permutation(n)
    assert np.array_equal(permuted(shuffled), image[shuffled])
    assert np.array_equal(permuted(np.zeros(3 * n, dtype=np.int64)), np.repeat(image[0], 3 * n))
    assert np.array_equal(permuted(np.arange(n)[::-3]), image[::-3])
    for position in range(0, n, max(1, n // 60)):
        assert permuted(np.array([position])).tolist() == [image[position]]


@pytest.mark.parametrize("n", [100, 2000])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", ">i4"])
def test_positions_may_be_of_any_integer_type_and_shape(n: int, dtype: str) -> None:
    permuted, image = Permutation(n, (5, 1)), order(n, 5, 1)
    positions = np.arange(100, dtype=dtype)
    positions.flags.writeable = False
    assert np.array_equal(permuted(positions), image[:100])
    assert np.array_equal(permuted(positions.reshape(4, 25)), image[:100].reshape(4, 25))
    assert permuted(positions[7].reshape(())).tolist() == image[7]
    for answer in (permuted(positions), permuted(positions[:0]), permuted(positions[:0].reshape(0, 3))):
        assert answer.dtype == np.int64
    assert permuted(positions[:0].reshape(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("n", [0, *SORTED, *CIPHERS])
def test_a_position_that_is_not_there_is_an_index_error(n: int) -> None:
    for wrong in (-1, n, n + 10_000, np.iinfo(np.int64).min):
        with pytest.raises(IndexError, match=rf"must be in \[0, {n}\), got {wrong} to {wrong}"):
            Permutation(n, (0,))(np.array([wrong]))


def test_it_takes_no_memory_for_what_is_not_asked_for() -> None:
    positions = np.arange(100)
    Permutation(2**30, (1,))(positions)  # what numpy allocates once
    peaks = {}
    for n in (2**20, 2**40, 2**62):
        tracemalloc.start()
        Permutation(n, (1,))(positions)
        peaks[n] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert max(peaks.values()) < 20_000, peaks


# --- Keys


@pytest.mark.parametrize("n", [50, *SORTED, *CIPHERS])
def test_the_same_key_gives_the_same_order_and_any_other_key_another(n: int) -> None:
    keys = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 0, 0), (0, 2**32), (2**32, 0), (2**64 + 1,), (2**200, 3)]
    orders = {key: tuple(order(n, *key).tolist()) for key in keys}
    assert len(set(orders.values())) == len(keys)
    assert orders == {key: tuple(order(n, *key).tolist()) for key in keys}


@pytest.mark.parametrize("n", [50, *SORTED, *CIPHERS])
def test_one_position_more_makes_another_order_of_all(n: int) -> None:
    assert np.mean(order(n, 0) == order(n + 1, 0)[:n]) < 0.2


def test_permutations_are_equal_by_n_and_key() -> None:
    used = Permutation(2000, (1, 2))
    used(np.arange(10))
    same = Permutation(np.int64(2000), (np.uint8(1), np.int32(2)))
    assert used == same
    assert len({used, same, Permutation(2001, (1, 2)), Permutation(2000, (2, 1))}) == 3
    assert [type(number) for number in (same.n, *same.key)] == [int] * 3


@pytest.mark.parametrize("n", [10, 1024, 1025, 2**40])
def test_a_copy_goes_on_with_the_same_order(n: int) -> None:
    permuted, positions = Permutation(n, (2**70, 3)), np.arange(10)
    fresh = pickle.dumps(permuted)
    image = permuted(positions)
    assert pickle.dumps(permuted) == fresh
    assert len(fresh) < 150
    for other in (pickle.loads(fresh), copy.deepcopy(permuted), copy.copy(permuted)):
        assert other == permuted
        assert np.array_equal(other(positions), image)


@pytest.mark.parametrize(
    ("n", "key", "message"),
    [
        (-1, (0,), r"n must be in \[0, 2\*\*62\], .* got -1"),
        (2**62 + 1, (0,), rf"got {2**62 + 1}"),
        (5, (0, -3), r"key must be integers >= 0, got \(0, -3\)"),
    ],
)
def test_numbers_out_of_range_are_a_value_error(n: int, key: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Permutation(n, key)


@pytest.mark.parametrize(("n", "key"), [(5.0, (0,)), (5, (0.5,)), (5, ("a",)), (5, 3)])
def test_anything_but_integers_is_a_type_error(n: Any, key: Any) -> None:
    with pytest.raises(TypeError):
        Permutation(n, key)


# A job that goes on where it stopped relies on them: they are never to change unnoticed.
PINNED: dict[tuple[int, tuple[int, ...]], list[int]] = {
    (10, (0,)): [5, 2, 6, 9, 8, 4, 7],
    (1000, (0, 1)): [133, 461, 128, 725, 397, 635, 199],
    (1024, (42, 7)): [141, 804, 126, 915, 59, 775, 810],
    (1025, (42, 7)): [421, 946, 341, 224, 805, 852, 494],
    (10**6, (0, 0)): [335334, 786765, 169044, 444210, 90122, 453410, 402467],
    (10**6, (0, 1)): [240740, 325341, 166366, 405779, 555500, 404181, 636065],
    (10**6, (2**70, 3)): [7656, 851824, 853060, 417147, 195027, 825573, 928527],
    (10**9 + 7, (1, 2, 3)): [471349101, 4726007, 233623922, 901443627, 662293397, 526738358, 119853652],
    (2**40 + 1, ()): [
        464793615745,
        860468946664,
        505496208137,
        217872663663,
        1008699734378,
        137975313990,
        525422410683,
    ],
    (4096, (0, 1)): [2269, 3828, 1858, 1960, 619, 1756, 3037],
    (8192, (0, 1)): [6884, 3211, 1351, 6635, 4651, 1360, 5214],
    (8193, (0, 1)): [502, 4737, 4454, 3424, 6973, 4174, 5500],
    (2**62, (0, 0)): [
        3876942140833547243,
        2435372935611348612,
        3460189864627699665,
        1460324403407259242,
        3756687622566085057,
        1905431713988985465,
        1811101867398067815,
    ],
}


@pytest.mark.parametrize(("n", "key"), PINNED)
def test_the_orders_stay_as_they_are(n: int, key: tuple[int, ...]) -> None:
    positions = np.array([0, 1, 2, 3, n // 2, n - 2, n - 1])
    assert Permutation(n, key)(positions).tolist() == PINNED[n, key]


# --- Mixing: the statistics


class Sample:
    """Where positions below n go in each of many orders, which are the rows; the columns are for all n, or for some."""

    def __init__(self, orders: Places, n: int | None = None, positions: Places | None = None) -> None:
        self.orders, self.size = orders, len(orders)
        self.n = orders.shape[1] if n is None else n
        self.positions = np.arange(self.n) if positions is None else positions

    def column(self, position: int) -> Places:
        return self.orders[:, np.searchsorted(self.positions, position)]

    def stretches(self, n: int, most: int) -> Places:
        """The sizes of the stretches of [0, n) to count in: few enough to expect some 30 of the sample in each."""
        width = -(-n // min(n, most, self.size // 30))
        return np.diff(np.append(np.arange(0, n, width), n))


def from_chi_square(counts: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """Pearson's statistic, as standard deviations (Wilson and Hilferty 1931)."""
    assert (expected >= 0).all()
    assert not counts[expected == 0].any()
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic, freedom = ((counts - expected) ** 2 / expected).sum(), len(counts) - 1
    return float(((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / (2 / (9 * freedom)) ** 0.5)


def from_mean(values: npt.NDArray[Any], mean: float) -> float:
    """How far the mean of a number that every order has is from its mean over all n! orders."""
    off = values - mean
    if np.allclose(off, off[0]):
        return 0.0 if np.isclose(off[0], 0) else np.inf
    return float(off.mean() / (off.std() / len(off) ** 0.5))


def places(sample: Sample) -> Iterator[float]:
    """Where a position goes: anywhere."""
    sizes = sample.stretches(sample.n, 64)
    for position in sorted({0, 1, sample.n // 2, sample.n - 1}):
        counts = np.bincount(sample.column(position) // sizes[0], minlength=len(sizes))
        yield from_chi_square(counts, sample.size * (sizes / sample.n))


def steps(n: int) -> set[int]:
    """Distances to look at: neighbours, and what would be neighbours were the positions laid out in a square."""
    return {1, 2, 2 ** (n.bit_length() // 2), 2 ** ((n - 1).bit_length() // 2)}


def pairs(sample: Sample) -> Iterator[float]:
    """Where two positions go: to any two places, at any distance."""
    n = sample.n
    for first in sorted({0, n // 2}):
        for second in sorted(first + step for step in steps(n) if first + step < n > 2):
            one, other = sample.column(first), sample.column(second)
            sizes = sample.stretches(n - 1, 64)
            counts = np.bincount(((other - one) % n - 1) // sizes[0], minlength=len(sizes))
            yield from_chi_square(counts, sample.size * (sizes / (n - 1)))
            sizes = sample.stretches(n, 6)
            counts = np.bincount(one // sizes[0] * len(sizes) + other // sizes[0], minlength=len(sizes) ** 2)
            chances = np.outer(sizes / n, sizes / (n - 1)) - np.diag(sizes / n / (n - 1))
            chances[chances < 1e-12] = 0  # two positions in one place
            yield from_chi_square(counts, sample.size * chances.ravel())


def neighbours(sample: Sample) -> Iterator[float]:
    """How many positions stay at their distance, one way or the other: it is 2 of n - 1 distances."""
    orders, n = sample.orders, sample.n
    for step in sorted(steps(n)):
        if n > 2 * step:
            moved = (np.roll(orders, -step, axis=1) - orders) % n
            yield from_mean(((moved == step) | (moved == n - step)).sum(axis=1), 2 * n / (n - 1))


def fixed_points(sample: Sample) -> Iterator[float]:
    """How many positions stay where they are: as many as guests get their own hats back, nearly Poisson(1)."""
    n = sample.n
    fixed = (sample.orders == np.arange(n)).sum(axis=1)
    yield from_mean(fixed, 1)
    yield from_mean((fixed - 1) ** 2, 1)
    chances = [
        sum((Fraction((-1) ** k, factorial(k)) for k in range(min(n, 20) - hats + 1)), Fraction()) / factorial(hats)
        for hats in range(4)
    ]
    counts = np.bincount(np.minimum(fixed, 4), minlength=5)
    yield from_chi_square(counts, sample.size * np.array([*chances, 1 - sum(chances)], dtype=np.float64))


def parallelograms(sample: Sample) -> Iterator[float]:
    """How often two neighbours are as far apart as two others."""
    orders, n = sample.orders, sample.n
    # that two pairs of opposite corners have the same sum modulo n: of an odd n, each sum is that of (n - 1) / 2 pairs,
    # and of an even n one half of the sums are those of n / 2 pairs, the others of one less
    chance = 1 / (n - 2) if n % 2 else (n - 2) / (n - 1) / (n - 3)
    apart = np.roll(orders, -1, axis=1) - orders
    for step in sorted(steps(n) - {1}):
        if n > 2 * step:
            yield from_mean(((np.roll(apart, -step, axis=1) - apart) % n == 0).sum(axis=1), n * chance)


def n_cycles(orders: Places) -> Places:
    least = np.broadcast_to(np.arange(orders.shape[1]), orders.shape)
    for _ in range(orders.shape[1].bit_length()):  # the least of the first 2, 4, 8... of a cycle
        least = np.minimum(least, np.take_along_axis(least, orders, axis=1))
        orders = np.take_along_axis(orders, orders, axis=1)
    return np.asarray((least == np.arange(orders.shape[1])).sum(axis=1))


def cycles(sample: Sample) -> Iterator[float]:
    """How many cycles there are, and whether an odd or an even number of exchanges makes the order."""
    n, count = sample.n, n_cycles(sample.orders)
    chances = 1 / np.arange(1, n + 1)  # that a cycle closes, when n, n - 1... places are left (Feller 1945)
    yield from_mean(count, chances.sum())
    yield from_mean((count - chances.sum()) ** 2, (chances * (1 - chances)).sum())
    yield from_mean((n - count) % 2, 0.5)


def trends(sample: Sample) -> Iterator[float]:
    """How often it goes down, and how places go along with positions and with the places of neighbours."""
    n, orders = sample.n, sample.orders
    down = (np.diff(orders, axis=1) < 0).sum(axis=1)
    yield from_mean(down, (n - 1) / 2)
    yield from_mean((down - (n - 1) / 2) ** 2, (n + 1) / 12)
    place, position = orders - (n - 1) / 2, np.arange(n) - (n - 1) / 2
    together = place @ position
    yield from_mean(together, 0)
    yield from_mean(together**2, (n * (n * n - 1) / 12) ** 2 / (n - 1))
    yield from_mean((place[:, 1:] * place[:, :-1]).sum(axis=1), -(n - 1) * (n + 1) / 12)


def which(sample: Sample) -> Iterator[float]:
    """Which of the n! orders it is: any."""
    names = np.sort(sample.orders @ sample.n ** np.arange(sample.n))
    counts = np.diff(np.flatnonzero(np.append(True, np.diff(names))), append=len(names))
    possible = factorial(sample.n)
    counts = np.append(counts, np.zeros(possible - len(counts)))
    yield from_chi_square(counts, np.full(possible, sample.size / possible))


STATISTICS = (places, pairs, neighbours, parallelograms, fixed_points, cycles, trends)


def worst(statistics: Iterable[Callable[[Sample], Iterator[float]]], sample: Sample) -> float:
    return max(abs(deviation) for statistic in statistics for deviation in statistic(sample))


# --- Mixing: what the permutations are held to


def keys(size: int) -> list[tuple[int, int]]:
    """Seeds and epochs, each of which follows the one before."""
    return [(seed, epoch) for seed in range(size // 50) for epoch in range(50)]


def permute(n: int, size: int) -> Places:
    return np.stack([order(n, *key) for key in keys(size)])


permuted = cache(permute)


def between(orders: Places) -> Places:
    """What leads from each order to the next: if they are random and independent, so are these."""
    return np.take_along_axis(np.argsort(orders[:-1], axis=1), orders[1:], axis=1)


def of_each(n: int, size: int) -> Sample:
    return Sample(permuted(n, size))


def of_one_epoch_to_the_next(n: int, size: int) -> Sample:
    return Sample(between(permuted(n, size)))


def of_one_seed_to_the_next(n: int, size: int) -> Sample:
    return Sample(between(permuted(n, size).reshape(-1, 50, n).swapaxes(0, 1).reshape(-1, n)))


ORDERS = (of_each, of_one_epoch_to_the_next, of_one_seed_to_the_next)


@pytest.mark.parametrize("sample", ORDERS)
@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 9, 10, 16, 50, *CIPHERS])
def test_orders_mix_like_random_ones(n: int, sample: Callable[[int, int], Sample]) -> None:
    assert worst(STATISTICS, sample(n, 3000 if n <= 50 else 500)) < LIMIT


@pytest.mark.parametrize("sample", ORDERS)
@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_all_orders_are_equally_likely(n: int, sample: Callable[[int, int], Sample]) -> None:
    assert worst([which], sample(n, 3000 if n < 6 else 22_000)) < LIMIT


@pytest.mark.parametrize("n", [10**5, 10**9 + 7, 2**40 + 1, 2**62 - 2**60, 2**62])
def test_large_orders_mix_like_random_ones(n: int) -> None:
    permutations = [Permutation(n, key) for key in keys(3000)]
    asked = {0, 1, n // 2, n - 1} | {first + step for first in (0, n // 2) for step in steps(n) if first + step < n}
    positions = np.array(sorted(asked))
    assert worst([places, pairs], Sample(np.stack([each(positions) for each in permutations]), n, positions)) < LIMIT


# --- Mixing: what would be noticed


def random(n: int, size: int) -> Places:
    return np.random.default_rng(n).permuted(np.tile(np.arange(n), (size, 1)), axis=1)


def always_the_same(n: int, size: int) -> Places:
    return np.tile(random(n, 1), (size, 1))


def rotated(n: int, size: int) -> Places:
    return (np.arange(n) + np.random.default_rng(0).integers(n, size=(size, 1))) % n


def multiplied(n: int, size: int) -> Places:
    factors = [factor for factor in range(n) if gcd(factor, n) == 1]
    return rotated(n, size) * np.random.default_rng(1).choice(factors, size=(size, 1)) % n


def in_one_cycle(n: int, size: int) -> Places:
    orders = random(n, size)
    return np.take_along_axis(np.roll(orders, 1, axis=1), np.argsort(orders, axis=1), axis=1)


def never_odd(n: int, size: int) -> Places:
    orders = random(n, size)
    odd = (n - n_cycles(orders)) % 2 == 1
    orders[odd, :2] = orders[odd, 1::-1]
    return orders


@pytest.mark.parametrize("n", [2, 3, 4, 10, 50, 1031])
def test_random_orders_pass(n: int) -> None:
    orders = random(n, 1000)
    assert worst(STATISTICS, Sample(orders)) < LIMIT
    assert worst(STATISTICS, Sample(between(orders))) < LIMIT
    if n < 5:
        assert worst([which], Sample(orders)) < LIMIT


@pytest.mark.parametrize(
    ("weak", "statistics"),
    [
        (always_the_same, [places, pairs]),
        (rotated, [pairs, neighbours, fixed_points, trends]),
        (multiplied, [neighbours, parallelograms, fixed_points, trends]),
        (in_one_cycle, [fixed_points, cycles]),
        (never_odd, [cycles]),
    ],
)
@pytest.mark.parametrize("n", [9, 50, 1031])
def test_orders_that_are_not_random_are_noticed(
    n: int, weak: Callable[[int, int], Places], statistics: list[Callable[[Sample], Iterator[float]]]
) -> None:
    sample = Sample(weak(n, 2000 if n <= 50 else 500))
    for statistic in statistics:
        assert worst([statistic], sample) > LIMIT, statistic.__name__


@pytest.mark.parametrize("n", [9, 1031])
def test_epochs_that_read_one_order_from_another_start_are_noticed(n: int) -> None:
    orders = np.stack([np.roll(random(n, 1)[0], start) for start in np.random.default_rng(0).integers(n, size=1000)])
    assert worst([places], Sample(orders)) < LIMIT
    assert worst([pairs], Sample(between(orders))) > LIMIT


@pytest.mark.parametrize(
    ("n", "size", "name", "value", "statistics"),
    [
        (1025, 500, "_ROUNDS", 2, [neighbours, parallelograms, fixed_points, trends]),
        (1025, 500, "_ROUNDS", 4, [neighbours]),
        (1025, 500, "_ROUNDS", 5, [neighbours]),
        (1025, 500, "_MULTIPLIER", np.array(1, dtype=np.uint64), [parallelograms, trends]),
        (6, 10_000, "_SORTED", 0, [which]),
    ],
)
def test_any_less_of_the_method_is_noticed(
    n: int,
    size: int,
    name: str,
    value: Any,
    statistics: list[Callable[[Sample], Iterator[float]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(permutation, name, value)
    orders = permute(n, size)
    assert np.array_equal(np.sort(orders, axis=1), np.tile(np.arange(n), (len(orders), 1)))
    for statistic in statistics:
        assert worst([statistic], Sample(orders)) > LIMIT, statistic.__name__
