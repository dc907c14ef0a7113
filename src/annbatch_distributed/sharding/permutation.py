"""Permutation: a keyed order of the numbers below n, any part of which is worked out without the rest.

Where a position goes is computed, not looked up among n entries, so that a call costs in the positions that it asks
for. The method is the generalised Feistel cipher of Black and Rogaway [1]_ with cycle walking:

1. A cell is ``high * 2**bits + low``. Both halves have about ``sqrt(n)`` values, ``2**bits`` and ``ceil(n / 2**bits)``,
   which makes n cells and fewer than ``2**bits`` beyond. One of the two is even: of an odd
   number of values, all rotations are even permutations.
2. A round adds a keyed hash of one half to the other, modulo the values of the latter; the halves take turns. It can
   be undone, whatever the hash, so that the rounds are a bijection of the cells.
3. What ends beyond n goes through the rounds again, until it doesn't. This leaves the cells beyond n out of the cycles
   of a bijection, and what remains of them is a bijection of ``[0, n)``. All n positions together take no more passes
   than there are cells.
4. A hash is a random linear function modulo ``2**64``, of which the upper bits are independent for any two inputs [2]_;
   then a shift and a multiplication, because sums of linear functions keep the differences between positions.

A short order is sorted by random words instead, a list of bounded size: with few cells it takes dozens of rounds until
all n! orders are about equally likely.

.. [1] Black and Rogaway, *Ciphers with arbitrary finite domains*, CT-RSA 2002.
.. [2] Dietzfelbinger, *Universal hashing and k-wise independent random variables via integer arithmetic without
   primes*, STACS 1996.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from annbatch_distributed.sharding.integers import integer, integers

if TYPE_CHECKING:
    import numpy.typing as npt

    from annbatch_distributed.sharding.rows import IntArray

    type _Words = npt.NDArray[np.uint64]

__all__ = ["Permutation"]

#: Up to this n, orders are sorted: the tests notice that eight rounds don't make all orders of a few equally likely.
_SORTED = 1024
#: Above, the tests notice five rounds and no more. With ideal hashes, where any two positions go after eight is within
#: about ``sqrt(n) ** -3`` of uniform in total variation, which is 3e-5 for 1025.
_ROUNDS = 8


def _word(value: int) -> _Words:
    """Return an array without dimensions, for which numpy takes half the time that it takes for a scalar."""
    return np.array(value, dtype=np.uint64)


_HALF = _word(32)
_MULTIPLIER = _word(0xD6E8FEB86659FD93)  # any odd number will do that has its ones and zeros all over the place


@dataclass(frozen=True)
class Permutation:
    """A permutation of ``[0, n)`` that looks random and is the same wherever it is made.

    It is integer arithmetic modulo ``2**64`` on words of numpy's ``SeedSequence``. No platform and no release of numpy
    changes those, because its bit generators begin with them and promise the same numbers, as a ``Generator`` doesn't.

    ``n`` is at most ``2**62``. The key is a tuple of integers >= 0 of any size, such as a seed and an epoch. Keys that
    differ in a number or in their length give unrelated orders, and so do different n under the same key.

    >>> Permutation(10, key=(0, 1))(np.arange(10))
    array([9, 4, 3, 0, 8, 5, 6, 7, 2, 1])
    >>> Permutation(10**15, key=(0, 1))(np.array([0, 1, 10**15 - 1]))
    array([955915721867060, 356149147481450, 626851005304078])
    """

    n: int
    key: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", integer("n", self.n))
        if not isinstance(self.key, tuple):
            raise TypeError(f"The key must be a tuple of integers, got {self.key!r} of type {type(self.key).__name__}.")
        try:
            object.__setattr__(self, "key", tuple(integer("A number of it", part) for part in self.key))
        except TypeError as error:
            raise TypeError(f"The key must be a tuple of integers, got {self.key!r}: {error}") from None
        if not 0 <= self.n <= 2**62:
            raise ValueError(f"n must be in [0, 2**62], so that the arithmetic fits 64 bits, got {self.n}.")
        if min(self.key, default=0) < 0:
            raise ValueError(f"The key must be integers >= 0, got {self.key}. Fold a sign into a number of its own.")

    def __reduce__(self) -> tuple[type[Permutation], tuple[int, tuple[int, ...]]]:
        return type(self), (self.n, self.key)  # what is cached can be a hundred times as large

    def __call__(self, positions: IntArray) -> npt.NDArray[np.int64]:
        """Return where positions in ``[0, n)`` go, in an array of their shape. An IndexError if one is not in it."""
        positions = integers("Positions", positions, below=self.n)
        if not positions.size:
            return positions
        cells = positions.astype(np.uint64)
        if self.n <= _SORTED:
            return self._sorted[cells]
        cells = self._pass(cells)
        while int(cells.max()) >= self.n:
            beyond = cells >= self.n
            cells[beyond] = self._pass(cells[beyond])
        return cells.view(np.int64)

    def _random_words(self, count: int) -> _Words:
        """Return random words that depend on n and on the key."""
        parts = (self.n, *self.key)
        # SeedSequence strings numbers together, 32 bits at a time: their sizes tell (2**32, 0) from (0, 1)
        sizes = (part.bit_length() for part in parts)
        words = np.random.SeedSequence((len(parts), *sizes, *parts)).generate_state(count, np.uint64)
        return words.astype(np.uint64, copy=False)  # they are: numpy's annotations leave it open

    @cached_property
    def _sorted(self) -> npt.NDArray[np.int64]:
        """Where each position goes, in a short order."""
        return np.argsort(self._random_words(self.n), kind="stable").astype(np.int64)

    @cached_property
    def _constants(self) -> tuple[_Words, _Words, _Words, _Words]:
        """The low half's bits, how far down its hash goes and what masks it; how many values the high half has."""
        bits = (self.n - 1).bit_length() // 2
        return _word(bits), _word(64 - bits), _word((1 << bits) - 1), _word(-(-self.n >> bits))

    @cached_property
    def _rounds(self) -> tuple[tuple[_Words, _Words], ...]:
        """The factor and the summand of every round's hash."""
        words = self._random_words(2 * _ROUNDS)
        return tuple((words[2 * turn, ...], words[2 * turn + 1, ...]) for turn in range(_ROUNDS))

    def _pass(self, cells: _Words) -> _Words:
        """Send cells, those beyond n included, through all rounds."""
        bits, down, mask, n_high = self._constants
        high, low, hashed, spare = (np.empty_like(cells) for _ in range(4))
        np.right_shift(cells, bits, out=high)
        np.bitwise_and(cells, mask, out=low)
        for turn, (factor, summand) in enumerate(self._rounds):
            np.multiply(low if turn % 2 else high, factor, out=hashed)
            np.add(hashed, summand, out=hashed)
            np.right_shift(hashed, _HALF, out=spare)
            np.bitwise_xor(hashed, spare, out=hashed)
            np.multiply(hashed, _MULTIPLIER, out=hashed)
            if turn % 2:
                # a fraction of 32 bits times the number of values: a remainder takes several times as long
                np.right_shift(hashed, _HALF, out=hashed)
                np.multiply(hashed, n_high, out=hashed)
                np.right_shift(hashed, _HALF, out=hashed)
                np.add(high, hashed, out=high)
                np.subtract(high, n_high, out=spare)
                np.minimum(high, spare, out=high)  # what would be negative is huge
            else:
                np.right_shift(hashed, down, out=hashed)
                np.add(low, hashed, out=low)
                np.bitwise_and(low, mask, out=low)
        np.left_shift(high, bits, out=high)
        np.bitwise_or(high, low, out=high)
        return high
