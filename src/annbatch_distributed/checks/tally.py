"""Tally: which rows were read, and how often, as three numbers.

The rows are mixed and added up, see :func:`rows.mixed_sum`. The sum doesn't depend on their order, the ranks' sums add
up to the job's, and other rows have the same sum in one of 2**64 cases, unless they were chosen to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from annbatch_distributed.integers import integer, integers
from annbatch_distributed.rows import mixed_sum

if TYPE_CHECKING:
    import numpy.typing as npt

    from annbatch_distributed.rows import Int64Array

__all__ = ["Tally"]

#: How many rows are mixed together, since numpy takes as long for a few as for thousands.
_AT_ONCE = 1 << 14


class Tally:
    """Counts rows, so that they can be compared with those that were planned.

    Parameters
    ----------
    n_batches
        How many batches were counted; tallies of the same rows are equal whatever the batches were.
    n_rows
        How many rows, each as often as it was counted.
    value
        What tells other rows apart: the sum of all rows, each mixed.

    Raises
    ------
    TypeError
        If one of them is not an integer.
    ValueError
        If one is negative, or the value is 2**64 or more.

    Examples
    --------
    >>> import numpy as np
    >>> from annbatch_distributed import Tally
    >>> read, planned = Tally(), Tally()
    >>> for rows in (np.array([3, 0, 1]), np.array([2, 4])):
    ...     read.add(rows)
    >>> planned.add(np.arange(5))
    >>> read == planned
    True
    >>> planned.add(np.array([4]))
    >>> read == planned
    False
    """

    def __init__(self, n_batches: int = 0, n_rows: int = 0, value: int = 0) -> None:
        self.n_batches = integer("n_batches of a Tally", n_batches, least=0)
        self.n_rows = integer("n_rows of a Tally", n_rows, least=0)
        self._value = integer("value of a Tally", value, least=0, below=2**64)
        self._pending: list[Int64Array] = []
        self._n_pending = 0

    @property
    def value(self) -> int:
        """What tells other rows apart."""
        if self._pending:
            self._value = (self._value + mixed_sum(np.concatenate(self._pending))) % 2**64
            self._pending, self._n_pending = [], 0
        return self._value

    def add(self, rows: npt.ArrayLike) -> None:
        """Count the rows of a batch.

        Parameters
        ----------
        rows
            Global rows, in any order and each as often as it was read: ``batch["index"]`` of a loader with
            ``return_index=True``.

        Raises
        ------
        TypeError
            If they are not integers.
        ValueError
            If one is negative, or if they have more than one dimension. The tally is then as it was.
        """
        if rows is None:
            raise TypeError("Rows must be integers, got None: make the loader with return_index=True.")
        batch = integers("Rows", rows)
        if batch.ndim != 1:
            raise ValueError(f"Rows must have one dimension, got shape {batch.shape}: pass batch['index'] as it is.")
        if batch.size and batch.min() < 0:
            raise ValueError(f"Rows are counted from 0, got {batch.min()}.")
        self._pending.append(batch.copy())  # whoever has the batch may change it
        self._n_pending += batch.size
        self.n_batches += 1
        self.n_rows += batch.size
        if self._n_pending >= _AT_ONCE:
            self._value = self.value

    def to_dict(self) -> dict[str, int]:
        """Return the arguments of a Tally that is equal, as numbers that JSON can hold."""
        return {"n_batches": self.n_batches, "n_rows": self.n_rows, "value": self.value}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tally):
            return NotImplemented
        return (self.n_rows, self.value) == (other.n_rows, other.value)

    __hash__ = None  # type: ignore[assignment]  # it goes on counting

    def __add__(self, other: Tally) -> Tally:
        if not isinstance(other, Tally):
            return NotImplemented
        value = (self.value + other.value) % 2**64
        return Tally(self.n_batches + other.n_batches, self.n_rows + other.n_rows, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tally, tuple(self.to_dict().values())

    def __repr__(self) -> str:
        return ", ".join(f"{name}={number}" for name, number in self.to_dict().items()).join(("Tally(", ")"))
