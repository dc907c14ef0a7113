"""Sets: cells of one group, such as a perturbation or a donor, with matched control cells.

The sampler treats a set like a row: the wrapped sampler samples the indices of sets, ``[0, n_sets)``, and shards,
remainders, states and replay count sets. :class:`EpochSets` translates a load request to cells in its last step.

The cells of a set depend only on (seed, epoch, group), so they are the same on every rank:

1. The cells of a group are in the order of the collection. If the group has ``n`` cells, ``n % set_size`` consecutive
   cells remain: the tail. It is in the first half of the group in even epochs and in the second half in odd ones. Any
   two consecutive epochs therefore have every cell in a set, even if the tail is dropped.
2. The other cells are cut into chunks of consecutive cells, which are permuted. Every ``set_size // chunk_size`` chunks
   form a set.
3. Each cell of a set has a control from the pool that matches the cell. Controls are chunks of the pool, sampled
   without replacement for each set. Chunks are the same for all sets of an epoch, so that sets of one load request
   share them. They are counted from the front of the pool in even epochs and from its back in odd ones, so that each
   control cell can be sampled.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from reprlib import repr as shortened
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pandas as pd
from annbatch.abc import Sampler

from annbatch_distributed.core.masks import ALL, AnyMask, Mask, check_names, open_ended, resolve_mask
from annbatch_distributed.core.rows import Rows, runs
from annbatch_distributed.core.units import EpochUnits, UnitRows, Units
from annbatch_distributed.core.values import BOUND, Int64Array, as_array, digest, few, integer, names_of, plural

type Flags = npt.NDArray[np.bool_]

_REMAINDERS = "drop", "keep", "pad"

#: Largest number of groups that a message names.
_MOST_GROUPS = 5


class Grouped(NamedTuple):
    """Cells of some groups, group by group, in the order of the collection within each group."""

    rows: Rows
    """Cells of all groups."""
    firsts: Int64Array
    """Position of the first cell of each group, and the number of all cells; of shape ``(n_groups + 1,)``."""

    @classmethod
    def of(cls, rows: Int64Array, groups: Int64Array, n_groups: int) -> Self:
        """Group ascending rows.

        >>> Grouped.of(np.array([2, 5, 6, 7]), np.array([1, 0, 1, 1]), 2).rows
        Rows(5:6, 2:3, 6:8)
        """
        # groups 1 0 1 1 have the order 1 0 2 3 and the sizes 1 3: groups begin at positions 0 and 1, of 4 cells. NumPy
        # sorts integers of 16 bits in linear time
        order = np.argsort(groups.astype(np.min_scalar_type(n_groups)), kind="stable")
        firsts = np.cumsum([0, *np.bincount(groups, minlength=n_groups)])
        return cls(Rows.of_bounds(*runs(rows[order])), firsts)

    @property
    def sizes(self) -> Int64Array:
        """Number of cells of each group."""
        return np.diff(self.firsts)

    def size_of(self, group: int) -> int:
        """Return the number of cells of a group."""
        return int(self.firsts[group + 1] - self.firsts[group])

    def digest(self) -> str:
        """Return a digest of the cells and their groups."""
        return digest(*map(np.ascontiguousarray, (self.rows.starts, self.rows.stops, self.firsts)))


@dataclass(frozen=True, eq=False, repr=False)
class CellSets(Units):
    """Sets of cells of one group, with matched control cells.

    Create them with :meth:`from_obs`, and pass them as ``sets=`` to :class:`DistributedSampler` or
    :meth:`StatefulLoader.from_collection`. ``batch_size`` is then a number of sets. A batch has the cells of its first
    set, then the controls of the first set, then the cells of its second set, and so on. ``batch["set"]`` is the index
    of each cell's set within the batch, and ``batch["is_control"]`` is True for controls.

    Examples
    --------
    >>> sets = CellSets.from_obs(obs, by="donor", set_size=4, chunk_size=2, seed=0)
    >>> sets
    <CellSets: 10 sets of 5 groups, 4 cells each>
    >>> len(sets), sets.n_obs, sets.set_size
    (10, 50, 4)
    """

    labels: tuple[str, ...]
    """Name of each group: its values of ``by``, joined by ``", "``."""
    n_obs: int
    """Number of cells of the collection."""
    treated: Grouped
    """Cells that are in sets, by group."""
    pools: Grouped | None
    """Controls, by pool; None without controls."""
    pool_of: npt.NDArray[np.unsignedinteger[Any]]
    """Pool of each treated cell, in the order of ``treated``; empty without controls."""
    set_size: int
    """Number of cells of a set, without its controls."""
    chunk_size: int
    """Number of consecutive cells of a group that stay together."""
    remainder: str
    """Policy for the remaining cells of a group: one of ``_REMAINDERS``."""
    seed: int | None
    """Seed of the sets; None takes the sampler's seed."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments that determine the sets, as JSON."""
    names: pd.Index[Any] | None = None
    """``obs_names`` of the collection; None if ``obs`` has no names."""

    @classmethod
    def from_obs(
        cls,
        obs: pd.DataFrame,
        *,
        by: str | Sequence[str],
        set_size: int,
        controls: Mapping[str, Any] | npt.ArrayLike | None = None,
        match: str | Sequence[str] | None = None,
        mask: AnyMask | None = None,
        chunk_size: int | None = None,
        remainder: Literal["drop", "keep", "pad"] = "drop",
        seed: int | None = None,
    ) -> Self:
        """Group the cells of a collection into sets, by columns of its ``obs``.

        Examples
        --------
        >>> obs = pd.DataFrame({"line": 12 * ["A"], "drug": 4 * ["DMSO"] + 8 * ["x"]})
        >>> sets = CellSets.from_obs(
        ...     obs,
        ...     by=["line", "drug"],
        ...     set_size=2,
        ...     controls={"drug": "DMSO"},
        ...     match=["line"],
        ...     chunk_size=2,
        ...     seed=0,
        ... )
        >>> len(sets), sets.groups[0]
        (4, 'A, x')
        >>> sampler = DistributedSampler(
        ...     RandomSampler(chunk_size=1, preload_nchunks=2, batch_size=1),
        ...     sets=sets,
        ...     dist_info=Rank(0, 2),
        ...     seed=0,
        ... )
        >>> sampler.rows_of(12, steps=0, ranks=0)
           step  rank  row  set  is_control
        0     0     0    6    0       False
        1     0     0    7    0       False
        2     0     0    2    0        True
        3     0     0    3    0        True

        Parameters
        ----------
        obs
            Annotations of every cell, in the order of the collection: ``collection.obs([...])``.
        by
            Column or columns that define the groups. All cells of a set have the same values in them.
        set_size
            Number of cells of a set, without its controls.
        controls
            Control cells: a dict of columns and their values, such as ``{"drug": "DMSO"}``, or a boolean array of shape
            ``(n_obs,)``. Each set gets one control per cell; if too few match, they repeat. None (default) makes sets
            without controls.
        match
            Columns in which controls have the same values as the cells of their set: the first control as the first
            cell, and so on. None (default) lets every control match.
        mask
            Cells to use, both treated cells and controls, as for :class:`DistributedSampler`. None (default) uses all.
        chunk_size
            Number of consecutive cells of a group that stay together. It must divide ``set_size``. Larger chunks are
            read faster; smaller chunks shuffle the cells of a group better, and chunks of ``set_size`` are the same
            sets in every epoch. None (default) takes the largest divisor up to 16 and up to ``set_size / 2``.
        remainder
            Policy for the remaining cells of a group whose number is not a multiple of ``set_size``:

            ``"drop"``
                They are dropped in this epoch (default). The next epoch drops different cells. Groups of fewer than
                ``set_size`` cells have no sets.
            ``"keep"``
                They form a smaller set, with one control per cell.
            ``"pad"``
                They form a set together with other cells of the group, which are marked in ``batch["repeated"]``.
        seed
            Seed of the sets, within ``[0, 2**63)``. None (default) takes the seed of the sampler, which is then
            required.

        Returns
        -------
        CellSets
            The sets. Each epoch combines chunks differently. A cell is in at most one set of an epoch, unless it is a
            control or fills up a set.

        Raises
        ------
        TypeError
            If an argument has the wrong type.
        ValueError
            If ``obs`` lacks a column, a cell to use has no value in a column, ``chunk_size`` doesn't divide
            ``set_size``, no group is large enough, no control matches a group, or the names of ``mask`` or ``controls``
            have a different order than the rows of ``obs``.

        Warns
        -----
        UserWarning
            If groups of fewer than ``set_size`` cells are dropped in every epoch, under ``remainder="drop"``.
        """
        if not isinstance(obs, pd.DataFrame):
            raise TypeError(f"obs must be a pandas DataFrame, got {type(obs).__name__}. Pass collection.obs([...]).")
        columns, matched = _columns("by", by), [] if match is None else _columns("match", match)
        _check_columns(obs, [*columns, *matched])
        set_size = integer("set_size", set_size, least=1, below=BOUND)
        if chunk_size is None:
            # a chunk of a whole set would be the same set in every epoch
            chunk_size = _largest_divisor(set_size, min(16, max(1, set_size // 2)))
        chunk_size = integer("chunk_size", chunk_size, least=1, below=BOUND)
        if set_size % chunk_size:
            raise ValueError(
                f"chunk_size must divide set_size, got chunk_size={chunk_size} and set_size={set_size}. Pass "
                f"chunk_size={_largest_divisor(set_size, chunk_size)}, for example."
            )
        if remainder not in _REMAINDERS:
            raise ValueError(f"remainder must be one of {', '.join(map(repr, _REMAINDERS))}, got {remainder!r}.")
        seed = None if seed is None else integer("seed", seed, least=0, below=BOUND)
        if match is not None and controls is None:
            raise ValueError(
                f"match requires controls, got match={matched} without. Pass controls=..., or leave it out."
            )
        settings: dict[str, Any] = {
            "by": columns,
            "match": matched,
            "set_size": set_size,
            "chunk_size": chunk_size,
            "remainder": remainder,
            "seed": seed,
        }
        if not len(obs):
            raise ValueError("obs must have at least one cell, got 0. Pass collection.obs([...]).")
        names = names_of("obs", pd.Series(0, index=obs.index))
        is_used, mask_identity = _used(obs, mask, names)
        is_control, controls_identity = _controls(obs, controls, names, is_used)

        rows = np.flatnonzero(is_used & ~is_control)
        if not len(rows):
            raise ValueError(
                "No cells remain for sets, since the mask selects none or all of them are controls. Pass a different "
                "mask, or check controls."
            )
        groups = _numbered(obs, columns, rows)
        # the first cell of each group represents it: groups 0 2 1 2 of rows 3 4 6 7 have the first cells 3 6 4. Rows
        # are assigned from the last to the first, which remains
        first_cells = np.empty(int(groups.max()) + 1, dtype=np.int64)
        first_cells[groups[::-1]] = rows[::-1]
        labels = _labels(obs[columns].iloc[first_cells])
        # groups are sorted by name, so the order of a column's categories doesn't matter. Labels C A B have the order
        # 1 2 0, so group 0 becomes group 2
        order = np.argsort(labels)
        treated = Grouped.of(rows, np.argsort(order)[groups], len(labels))
        settings |= {"mask": mask_identity, "controls": controls_identity, "cells": treated.digest()}
        sets = cls(
            tuple(labels[order]),
            len(obs),
            treated,
            None,
            np.empty(0, dtype=np.uint8),
            set_size,
            chunk_size,
            remainder,
            seed,
            settings,
            names,
        )
        sets._check_sizes()
        if controls is None:
            return sets
        pools, pool_of = _pools(obs, matched, np.flatnonzero(is_used & is_control), treated.rows.to_array())
        sets._check_pools(pools.sizes[pool_of], matched)
        settings["pools"] = digest(pools.digest() + digest(pool_of))
        return replace(sets, pools=pools, pool_of=pool_of)

    def _check_sizes(self) -> None:
        """Warn about groups that are too small for a set, or raise if all are."""
        small = np.flatnonzero(self._n_sets == 0)
        if not len(small):
            return
        sizes = self.treated.sizes
        named = [f"{self.labels[group]} ({plural(int(sizes[group]), 'cell')})" for group in small]
        message = (
            f"remainder='drop' drops {len(small):,} of {plural(len(sizes), 'group')} in every epoch, which have fewer "
            f"than set_size={self.set_size} cells ({int(sizes[small].sum()):,} cells in total): "
            f"{few(named, _MOST_GROUPS)}. Pass a smaller set_size, or remainder='keep' or 'pad'."
        )
        if len(small) == len(sizes):
            raise ValueError(message)
        warnings.warn(message, UserWarning, stacklevel=3)

    def _check_pools(self, sizes: Int64Array, matched: Sequence[str]) -> None:
        """Raise if a cell of a group with sets has no controls; ``sizes`` is the number of controls of each cell."""
        groups = np.repeat(np.arange(len(self.labels)), self.treated.sizes)
        # (n_groups,): number of cells without controls
        n_without = np.bincount(groups[sizes == 0], minlength=len(self.labels)) * (self._n_sets > 0)
        if n_without.any():
            named = [
                f"{self.labels[group]} ({plural(int(n_without[group]), 'cell')})" for group in np.flatnonzero(n_without)
            ]
            raise ValueError(
                f"Each cell must have controls with the same {', '.join(matched)}, got none for cells of "
                f"{plural(len(named), 'group')}: {few(named, _MOST_GROUPS, '; ')}. Exclude these cells with mask, or "
                "match fewer columns."
            )

    @cached_property
    def _n_sets(self) -> Int64Array:
        """Number of sets of each group."""
        sizes = self.treated.sizes
        return sizes // self.set_size if self.remainder == "drop" else -(-sizes // self.set_size)

    @cached_property
    def firsts(self) -> Int64Array:
        """Index of the first set of each group, and the number of all sets; of shape ``(n_groups + 1,)``."""
        return np.cumsum([0, *self._n_sets])

    def __len__(self) -> int:
        return int(self.firsts[-1])

    @property
    def groups(self) -> pd.Categorical:
        """Group of each set, of shape ``(n_sets,)``.

        Pass it to :meth:`EpochPlan.composition`, or as the labels of a class sampler.

        Examples
        --------
        >>> sets = CellSets.from_obs(obs, by="donor", set_size=8, chunk_size=2, seed=0)
        >>> list(sets.groups)
        ['a', 'b', 'c', 'd', 'e']
        """
        return pd.Categorical.from_codes(np.repeat(np.arange(len(self.labels)), self._n_sets), list(self.labels))

    @property
    def most_cells(self) -> int:
        """Largest number of cells of a set, including its controls."""
        return min(self.set_size, int(self.treated.sizes.max())) * (1 if self.pools is None else 2)

    @property
    def identity(self) -> dict[str, Any]:
        """Arguments that determine the sets, as JSON."""
        return {"sets": self.settings}

    @staticmethod
    def checked(sets: object) -> CellSets:
        """Return the argument; raise a TypeError if it isn't ``CellSets``."""
        if not isinstance(sets, CellSets):
            raise TypeError(f"sets must be CellSets, got {shortened(sets)}. Create them with CellSets.from_obs(...).")
        return sets

    def without_names(self) -> Self:
        """Return the same sets without ``obs_names``, which may be many."""
        return replace(self, names=None)

    def check(self, mask: Mask, seed: int | None, sampler: Sampler) -> None:  # noqa: ARG002 any sampler
        """Raise a ValueError if there is a mask of sets, or no seed."""
        # a class sampler has a label for each set, and a mask that selects all sets
        if mask is not ALL and mask.rows != Rows((range(len(self)),)):
            raise ValueError(
                "A mask can't be combined with sets, neither in DistributedSampler nor in the wrapped sampler. Select "
                "cells with CellSets.from_obs(mask=...)."
            )
        if self.seed is None and seed is None:
            raise ValueError(
                "sets require a seed, so that they are the same on every rank. Pass seed=... to DistributedSampler or "
                "to CellSets.from_obs."
            )

    def in_epoch(self, n_obs: int, epoch: int, seed: int | None, mask: Mask = ALL) -> EpochSets:
        """Return the sets of an epoch of a collection of ``n_obs`` cells; ``seed`` is the sampler's seed."""
        del mask  # check raises if there is one
        if n_obs != self.n_obs:
            raise ValueError(
                f"The sets were made for a collection of {self.n_obs:,} cells, but this collection has {n_obs:,}. "
                "Create them from the obs of this collection, or check that every dataset has been added to the loader."
            )
        seed = seed if self.seed is None else self.seed
        assert seed is not None  # check raises without a seed
        return EpochSets(self, epoch, seed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # it never changes

    def __repr__(self) -> str:
        controls = "" if self.pools is None else f" and {self.set_size} controls"
        groups = plural(len(self.labels), "group")
        return f"<CellSets: {plural(len(self), 'set')} of {groups}, {self.set_size} cells{controls} each>"


@dataclass(frozen=True, eq=False)
class EpochSets(EpochUnits):
    """Sets of one epoch, and their cells."""

    sets: CellSets
    """Sets of all epochs."""
    epoch: int
    """Number of the epoch."""
    seed: int
    """Seed of the sets."""
    _chunks: dict[int, tuple[int, Int64Array]] = field(default_factory=dict, repr=False)

    noun = "set"

    def __len__(self) -> int:
        return len(self.sets)

    def _generator(self, kind: int, number: int) -> np.random.Generator:
        # Philox has a stream for each counter of four words; it counts up the first word as it generates numbers
        return np.random.Generator(np.random.Philox(key=self.seed, counter=[0, number, kind, self.epoch]))

    def rows_of(self, numbers: Int64Array, *, first: int = 0) -> UnitRows:
        """Return the cells of some sets, one set after the other. Sets are numbered from ``first`` on."""
        sets = self.sets
        # groups of 3 and 2 sets have the first sets 0 3 (and 5 in all): set 4 is of group 1
        groups = (np.searchsorted(sets.firsts, numbers, side="right") - 1).tolist()
        places, n_own = [np.arange(0)], list[int]()
        for group, number in zip(groups, numbers.tolist(), strict=True):
            own, n_left = self._places(group, number)
            places.append(own)
            n_own.append(n_left)
        lengths = list(map(len, places[1:]))
        rows = sets.treated.rows.to_global(np.concatenate(places))
        # (cells,): the sets of sets of 3 and 2 cells are 0 0 0 1 1
        which = np.repeat(np.arange(len(lengths)), lengths)
        # (cells,): the first cells of their sets are 0 0 0 3 3, so positions within the sets are 0 1 2 0 1
        first_cells = np.repeat(np.cumsum([0, *lengths])[:-1], lengths)
        within = np.arange(len(rows)) - first_cells
        # cells after the first n_own of a set fill it up: with n_own 2 2, these are 0 0 1 0 0
        are_repeats = within >= np.repeat(np.array(n_own, dtype=np.int64), lengths)
        are_controls = np.zeros(len(rows), dtype=np.bool_)
        if sets.pools is not None:
            controls = self._control_places(numbers, which, sets.pool_of[np.concatenate(places)])
            rows = np.append(rows, sets.pools.rows.to_global(controls))
            # controls follow their set: cells of the sets 0 0 0 1 1 and controls of 0 0 0 1 1 are sorted by the keys
            # 0 0 0 2 2 1 1 1 3 3, in the order 0 1 2 5 6 7 3 4 8 9
            order = np.argsort(np.append(2 * which, 2 * which + 1), kind="stable")
            are_controls = order >= len(which)
            rows, which = rows[order], np.tile(which, 2)[order]
            are_repeats = np.tile(are_repeats, 2)[order] & ~are_controls
        marks = {"set": first + which, "is_control": are_controls}
        if sets.remainder == "pad":
            marks["repeated"] = are_repeats
        return UnitRows(rows, which, marks)

    def _places(self, group: int, number: int) -> tuple[Int64Array, int]:
        """Return the positions of the cells of a set, and the number of cells that aren't repeats."""
        sets, n_rows = self.sets, self.sets.treated.size_of(group)
        if group not in self._chunks:
            self._chunks[group] = self._permuted(group, n_rows)
        tail, chunks = self._chunks[group]
        first, place = sets.treated.firsts[group], number - int(sets.firsts[group])
        n_chunks = sets.set_size // sets.chunk_size
        if place < n_rows // sets.set_size:
            # chunks that start at 8 and 2, of 3 cells, are the positions 8 9 10 2 3 4 within the group
            own = chunks[place * n_chunks : (place + 1) * n_chunks]
            return (first + own[:, np.newaxis] + np.arange(sets.chunk_size)).ravel(), sets.set_size
        # the last set is the tail; the cells after it fill it up, and continue at the front of the group
        n_left = n_rows % sets.set_size
        return first + (tail + np.arange(n_left if sets.remainder == "keep" else sets.set_size)) % n_rows, n_left

    def _permuted(self, group: int, n_rows: int) -> tuple[int, Int64Array]:
        """Return the positions of a group's tail and of each of its chunks, in the order of this epoch."""
        size, chunk = self.sets.set_size, self.sets.chunk_size
        n_left = n_rows % size
        n_chunks = (n_rows - n_left) // chunk
        rng = self._generator(0, group)
        # Tails begin at a multiple of the chunk size. Of 10 cells in sets of 4 and chunks of 2, 2 cells remain: the
        # tail begins at 0 or 2 in even epochs, so that it ends in the first half, and at 6 or 8 in odd ones.
        half = n_rows // 2
        if self.epoch % 2 == 0:
            least, most = 0, max(0, (half - n_left) // chunk)
        else:
            least, most = min(n_chunks, -(-(n_rows - half) // chunk)), n_chunks
        tail = int(rng.integers(least, most, endpoint=True)) * chunk if n_left else n_rows
        starts = rng.permutation(n_chunks) * chunk
        # chunks after the tail are moved by its length: with a tail 2:4, chunks 0 2 4 6 begin at 0 4 6 8
        return tail, starts + np.where(starts < tail, 0, n_left)

    def _control_places(
        self, numbers: Int64Array, which: Int64Array, pools: npt.NDArray[np.unsignedinteger[Any]]
    ) -> Int64Array:
        """Return the positions of the controls of sets, one from the pool of each of their cells.

        ``which`` is the index of each cell's set.
        """
        sets, places = self.sets, np.empty(len(pools), dtype=np.int64)
        assert sets.pools is not None
        n_pools = len(sets.pools.firsts) - 1
        # (cells,): cells of the sets 0 0 0 1 and pools 1 0 1 0 have the keys 1 0 1 2 and the order 1 0 2 3, which has a
        # part for each set and pool: 1, 0 2 and 3
        keys = which * n_pools + pools
        order = np.argsort(keys, kind="stable")
        firsts = np.flatnonzero(np.diff(keys[order], prepend=-1))
        # a set's generator differs in its counter only, and to set the counter is faster than to make a generator
        rng = self._generator(1, 0)
        state: Any = rng.bit_generator.state
        last = -1
        for own in np.split(order, firsts[1:]) if len(order) else ():
            index, pool = divmod(int(keys[own[0]]), n_pools)
            if index != last:
                state["state"]["counter"][1] = numbers[index]
                rng.bit_generator.state, last = state, index
            places[own] = self._places_in_pool(rng, pool, len(own))
        return places

    def _places_in_pool(self, rng: np.random.Generator, pool: int, n_controls: int) -> Int64Array:
        """Return the positions of random controls of a pool."""
        sets, chunk = self.sets, self.sets.chunk_size
        assert sets.pools is not None
        n_rows, n_chunks = sets.pools.size_of(pool), -(-n_controls // chunk)
        if n_rows // chunk >= n_chunks:
            # two chunks of 4 in a pool of 11 cells begin at 0 4 in even epochs, and at 3 7 in odd ones
            first = n_rows % chunk if self.epoch % 2 else 0
            starts = first + chunk * rng.choice(n_rows // chunk, n_chunks, replace=False)
            positions = (starts[:, np.newaxis] + np.arange(chunk)).ravel()[:n_controls]
        else:  # too few cells for whole chunks: repeat them, each equally often up to one: 2 0 1 2 0 of 3 cells
            positions = np.resize(rng.permutation(n_rows), n_controls)
        return positions + int(sets.pools.firsts[pool])


def _columns(name: str, value: object) -> list[str]:
    """Return names of columns as a list without repeats."""
    columns = [value] if isinstance(value, str) else value
    if not isinstance(columns, list | tuple) or not columns or not all(isinstance(column, str) for column in columns):
        raise TypeError(f"{name} must be the name of a column of obs, or a list of names, got {value!r}.")
    return list(dict.fromkeys(columns))


def _largest_divisor(size: int, most: int) -> int:
    """Return the largest divisor of ``set_size`` up to ``most``."""
    return max(number for number in range(1, min(size, most) + 1) if size % number == 0)


def _check_columns(obs: pd.DataFrame, columns: Sequence[str]) -> None:
    if several := [name for name in columns if (obs.columns == name).sum() > 1]:
        raise ValueError(
            f"obs must have a single column {several[0]}, got {(obs.columns == several[0]).sum()}. Drop or rename the "
            "others."
        )
    if missing := [name for name in columns if name not in obs]:
        raise ValueError(
            f"obs must have the column {', '.join(missing)}, got only {', '.join(map(str, obs.columns))}. Pass "
            f"collection.obs({list(dict.fromkeys(columns))})."
        )


def _used(obs: pd.DataFrame, mask: AnyMask | None, names: pd.Index[Any] | None) -> tuple[Flags, dict[str, Any]]:
    """Return the cells that a mask selects, as flags and as JSON."""
    resolved = resolve_mask(slice(None) if mask is None else mask)
    if names is not None and (mask_names := names_of("mask", mask)) is not None:
        check_names("mask", mask_names, (names,))
    flags = np.zeros(len(obs), dtype=np.bool_)
    selected = resolved.selected(len(obs))
    for start, stop in zip(selected.starts.tolist(), selected.stops.tolist(), strict=True):
        flags[start:stop] = True
    return flags, open_ended(resolved.to_json(), len(obs))


def _controls(
    obs: pd.DataFrame,
    controls: Any,  # noqa: ANN401 a dict, or booleans in any form
    names: pd.Index[Any] | None,
    is_used: Flags,
) -> tuple[Flags, Any]:
    """Return the control cells, as flags and as JSON."""
    if controls is None:
        return np.zeros(len(obs), dtype=np.bool_), None
    if not isinstance(controls, Mapping) or not controls:
        flags = as_array(controls)
        if flags.shape != (len(obs),) or flags.dtype != np.bool_:
            raise ValueError(
                f"controls must be a dict of columns and their values, or a boolean array of shape ({len(obs)},), got "
                f"{shortened(controls)}. Pass {{'drug': 'DMSO'}}, for example."
            )
        if names is not None and (control_names := names_of("controls", controls)) is not None:
            check_names("controls", control_names, (names,))
        return flags, {"digest": digest(np.packbits(flags))}
    _check_columns(obs, list(controls))
    flags, values = np.ones(len(obs), dtype=np.bool_), {}
    for name, value in controls.items():
        _check_no_missing(name, obs[name][is_used])
        own = list(value) if pd.api.types.is_list_like(value) else [value]
        if unknown := [one for one in own if not obs[name].isin([one]).any()]:
            raise ValueError(
                f"controls must name values of {name}, got {', '.join(map(repr, unknown))}, which no cell has. Check "
                f"obs[{name!r}].unique()."
            )
        flags &= obs[name].isin(own).to_numpy()
        values[name] = sorted(map(_as_json, own), key=repr)
    return flags, values


def _as_json(value: Any) -> Any:  # noqa: ANN401 a value of obs
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, str | int | float) else str(value)


def _numbered(obs: pd.DataFrame, columns: Sequence[str], rows: Int64Array) -> Int64Array:
    """Return the index of each cell's group; it is equal for cells with equal values in all columns."""
    numbers = np.zeros(len(rows), dtype=np.int64)
    for name in columns:
        _check_no_missing(name, obs[name].iloc[rows])
        try:
            values = pd.Categorical(obs[name].iloc[rows])
        except TypeError as error:
            raise TypeError(
                f"The column {name} of obs must hold hashable labels ({error}). Convert them with astype(str)."
            ) from error
        # columns of 3 and 2 values: the pairs (0, 0), (1, 0), (2, 1) are 0 2 5, which become the groups 0 1 2
        pairs = numbers * len(values.categories) + values.codes
        numbers = pd.factorize(pairs, sort=True)[0]
    return numbers


def _check_no_missing(name: str, values: pd.Series[Any]) -> None:
    if n_missing := int(values.isna().sum()):
        raise ValueError(
            f"{name} must have a value in each cell to use, but {plural(n_missing, 'cell')} have none. Exclude them "
            f"with mask=obs[{name!r}].notna()."
        )


def _labels(values: pd.DataFrame) -> npt.NDArray[Any]:
    """Return the name of each group, made from its values; no two groups have the same name."""
    lines = list(values.itertuples(index=False, name=None))
    labels = [", ".join(map(str, line)) for line in lines]
    if len(set(labels)) < len(labels):  # values with a comma, or 1 and "1"
        labels = [", ".join(map(repr, line)) for line in lines]
    return np.array(labels, dtype=object)


def _pools(
    obs: pd.DataFrame, matched: list[str], controls: Int64Array, cells: Int64Array
) -> tuple[Grouped, npt.NDArray[np.unsignedinteger[Any]]]:
    """Return controls by pool, and the pool of each cell, which has the same values as its controls."""
    if not len(controls):
        raise ValueError("controls must select at least one cell to use, got none. Widen the mask, or check controls.")
    # pools of the controls, then of the cells: of 3 controls and 2 cells, 0 1 0 and 1 0
    pools = _numbered(obs, matched, np.append(controls, cells))
    n_pools = int(pools.max()) + 1
    pool_of = pools[len(controls) :].astype(np.min_scalar_type(n_pools))
    return Grouped.of(controls, pools[: len(controls)], n_pools), pool_of
