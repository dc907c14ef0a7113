"""Sets: cells of one group, such as a perturbation or a donor, with matched control cells.

A set is to the sampler what a row is: the wrapped sampler samples the numbers of sets, ``[0, n_sets)``, and all that is
said of rows (shards, remainders, states, replay) is true of sets. A load request is translated to cells in its last
step, by :class:`EpochSets`.

Which cells a set has depends on (seed, epoch, group) alone, so that it is the same on every rank:

1. The cells of a group are in the order of the collection. Of ``n`` of them, ``n % size`` are left over: the tail, a
   stretch of cells, which is in the first half of the group in even epochs and in the second half in odd ones. So any
   two consecutive epochs have every cell in a set, also where the tail is dropped.
2. The others are cut into chunks of consecutive cells, which are permuted. Each ``size // chunk`` chunks are a set.
3. Control cells are chunks of the pool that matches the group, drawn without replacement for each set. Chunks are the
   same for all sets of an epoch, so that sets of one load request share them, and are counted from the front of the
   pool in even epochs and from its back in odd ones, so that each control cell can be drawn.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pandas as pd

from annbatch_distributed.masks import AnyMask, check_names, resolve_mask
from annbatch_distributed.rows import BOUND, Int64Array, Rows, integer, names_of, plural, runs

type Flags = npt.NDArray[np.bool_]

_TAILS = "drop", "short", "fill"

#: Most groups that a message names.
_MOST = 5


class Grouped(NamedTuple):
    """Cells of some groups, group by group, and in the order of the collection within each."""

    rows: Rows
    """All of them."""
    firsts: Int64Array
    """Position of the first cell of each group, and the number of cells of all."""

    @classmethod
    def of(cls, rows: Int64Array, groups: Int64Array, n_groups: int) -> Self:
        """Return ascending rows by their groups.

        >>> Grouped.of(np.array([2, 5, 6, 7]), np.array([1, 0, 1, 1]), 2).rows
        Rows(5:6, 2:3, 6:8)
        """
        order = np.argsort(groups, kind="stable")
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
        """Return what tells these cells and groups from others."""
        parts = (self.rows.starts, self.rows.stops, self.firsts)
        return blake2b(b"".join(part.tobytes() for part in parts), digest_size=16).hexdigest()


class Cells(NamedTuple):
    """Cells of one set, or of several."""

    rows: Int64Array
    """Row of each cell: those of the group, then its controls."""
    are_controls: Flags
    """For each, whether it is a control."""
    are_repeats: Flags
    """For each, whether it fills up a set, and is in a set of this epoch already."""


@dataclass(frozen=True, eq=False, repr=False)
class Sets:
    """Sets of cells of one group, with matched control cells.

    :meth:`from_obs` makes them. Pass them as ``sets=`` to :class:`DistributedSampler` or
    :meth:`StatefulLoader.from_collection`. ``batch_size`` is then a number of sets. A batch has the cells of its first
    set, then the controls of that set, then the cells of its second set, and so on; ``batch["set"]`` is the number of
    each cell's set within the batch, and ``batch["is_control"]`` is True for controls.
    """

    labels: tuple[str, ...]
    """Name of each group: its values of ``by``, joined by ``", "``."""
    n_obs: int
    """Number of cells of the collection."""
    treated: Grouped
    """Cells that are in sets, by group."""
    pools: Grouped | None
    """Controls, by pool; None without."""
    pool_of: Int64Array
    """Pool of each group."""
    size: int
    """Cells of a set, without its controls."""
    chunk: int
    """Number of consecutive cells of a group that stay together."""
    tail: str
    """What becomes of the cells of a group that are no multiple of ``size``."""
    seed: int | None
    """Seed of the sets; None takes the sampler's."""
    identity: dict[str, Any] = field(default_factory=dict)
    """The arguments that the sets follow from, as JSON."""
    names: pd.Index[Any] | None = None
    """Names of the cells of the collection, if ``obs`` has names."""

    @classmethod
    def from_obs(
        cls,
        obs: pd.DataFrame,
        *,
        by: str | Sequence[str],
        size: int,
        controls: Mapping[str, Any] | npt.ArrayLike | None = None,
        match: str | Sequence[str] | None = None,
        mask: AnyMask | None = None,
        chunk: int = 16,
        tail: Literal["drop", "short", "fill"] = "drop",
        seed: int | None = None,
    ) -> Self:
        """Make sets of the cells of a collection, by columns of its ``obs``.

        Parameters
        ----------
        obs
            Annotations of every cell, in the order of the collection: ``collection.obs([...])``.
        by
            Column or columns whose values are the same for all cells of a set.
        size
            Number of cells of a set, without its controls.
        controls
            Which cells are controls: a dict of a column and its value or values, such as ``{"drug": "DMSO"}`` (cells
            for which all columns fit), or a boolean for each cell. Each set gets as many controls as it has cells.
            None (default) makes sets without controls.
        match
            Columns, among those of ``by``, in which controls have the values of their set. None lets every control
            match.
        mask
            Cells to use, treated and controls alike, as for :class:`DistributedSampler`. None uses all.
        chunk
            Number of consecutive cells of a group that stay together (default 16), which must divide ``size``. More
            are read faster, fewer mix better.
        tail
            What becomes of the cells of a group that are left over when it is cut into sets:

            ``"drop"``
                They are in no set of this epoch (default). Others are left over in the next one: any two consecutive
                epochs have every cell in a set. Groups of fewer than ``size`` cells have no set.
            ``"short"``
                They are a smaller set.
            ``"fill"``
                They are a set, which other cells of the group fill up, marked in ``batch["repeated"]``.
        seed
            Seed of the sets, within ``[0, 2**63)``. None (default) takes the sampler's, which must have one.

        Returns
        -------
        The sets, which are drawn again in each epoch. Every cell of the groups is in at most one set of an epoch.

        Raises
        ------
        TypeError
            If an argument has the wrong type.
        ValueError
            If ``obs`` lacks a column, a cell to use has no value in one, ``chunk`` doesn't divide ``size``, no group is
            large enough, a group has no control that matches, or names differ.

        Warns
        -----
        UserWarning
            If groups of fewer than ``size`` cells are left out, under ``tail="drop"``.

        Examples
        --------
        >>> import pandas as pd
        >>> from annbatch.samplers import RandomSampler
        >>> from annbatch_distributed import DistributedSampler, Rank, Sets
        >>> obs = pd.DataFrame({"line": 12 * ["A"], "drug": 4 * ["DMSO"] + 8 * ["x"]})
        >>> sets = Sets.from_obs(
        ...     obs,
        ...     by=["line", "drug"],
        ...     size=2,
        ...     controls={"drug": "DMSO"},
        ...     match=["line"],
        ...     chunk=2,
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
        """
        if not isinstance(obs, pd.DataFrame):
            raise TypeError(f"obs must be a pandas DataFrame, got {type(obs).__name__}: pass collection.obs([...]).")
        columns, matched = _columns("by", by), [] if match is None else _columns("match", match)
        size = integer("size", size, least=1, below=BOUND)
        chunk = integer("chunk", chunk, least=1, below=BOUND)
        if size % chunk:
            fitting = max(number for number in range(1, min(chunk, size) + 1) if size % number == 0)
            raise ValueError(f"chunk must divide size, got chunk={chunk} and size={size}. Pass chunk={fitting}, say.")
        if tail not in _TAILS:
            raise ValueError(f"tail must be one of {', '.join(map(repr, _TAILS))}, got {tail!r}.")
        seed = None if seed is None else integer("seed", seed, least=0, below=BOUND)
        if match is not None and (controls is None or not set(matched) <= set(columns)):
            raise ValueError(
                f"match names columns of by in which controls have the values of their set, got match={matched} with "
                f"by={columns} and {'no ' if controls is None else ''}controls."
            )
        settings = {"by": columns, "match": matched, "size": size, "chunk": chunk, "tail": tail, "seed": seed}
        names = names_of("obs", pd.Series(0, index=obs.index))
        is_used, mask_identity = _used(obs, mask, names)
        is_control, controls_identity = _controls(obs, controls, names)

        rows = np.flatnonzero(is_used & ~is_control)
        if not len(rows):
            raise ValueError("No cells are left for sets: the mask selects none, or all of them are controls.")
        _check_columns(obs, [*columns, *matched])
        keys = _keys(obs, columns, rows)
        # of keys 5 9 5, groups 0 1 0
        present, groups = np.unique(keys, return_inverse=True)
        # the first cell of each group stands for it
        stands = rows[np.unique(groups, return_index=True)[1]]
        labels = tuple(", ".join(map(str, values)) for values in obs[columns].iloc[stands].itertuples(index=False))
        treated = Grouped.of(rows, groups, len(present))
        pools, pool_of = None, np.zeros(len(present), dtype=np.int64)
        if controls is not None:
            pools, pool_of = _pools(obs, matched, np.flatnonzero(is_used & is_control), stands, labels)
        identity = settings | {"mask": mask_identity, "controls": controls_identity, "cells": treated.digest()}
        identity["pools"] = None if pools is None else pools.digest()
        made = cls(labels, len(obs), treated, pools, pool_of, size, chunk, tail, seed, identity, names)
        made._check_sizes()
        return made

    def _check_sizes(self) -> None:
        """Warn of groups that are too small for a set, or raise if all are."""
        small = np.flatnonzero(self._n_sets == 0)
        if not len(small):
            return
        sizes = self.treated.sizes
        named = ", ".join(f"{self.labels[group]} ({plural(int(sizes[group]), 'cell')})" for group in small[:_MOST])
        few = (
            f"tail='drop' leaves out {len(small):,} of {plural(len(sizes), 'group')} in every epoch, since they have "
            f"fewer than size={self.size} cells, {int(sizes[small].sum()):,} in all: {named}"
            f"{', ...' if len(small) > _MOST else ''}. Pass a smaller size, or tail='short' or 'fill'."
        )
        if len(small) == len(sizes):
            raise ValueError(few)
        warnings.warn(few, UserWarning, stacklevel=3)

    @cached_property
    def _n_sets(self) -> Int64Array:
        """Number of sets of each group."""
        sizes = self.treated.sizes
        return sizes // self.size if self.tail == "drop" else -(-sizes // self.size)

    @cached_property
    def firsts(self) -> Int64Array:
        """Number of the first set of each group, and the number of all sets."""
        return np.cumsum([0, *self._n_sets])

    def __len__(self) -> int:
        return int(self.firsts[-1])

    @property
    def groups(self) -> pd.Categorical:
        """Name of the group of each set, by its number: for ``plan.composition``, or the labels of a class sampler."""
        return pd.Categorical.from_codes(np.repeat(np.arange(len(self.labels)), self._n_sets), list(self.labels))

    @property
    def most_cells(self) -> int:
        """Largest number of cells of a set, its controls included."""
        return self.size * (1 if self.pools is None else 2)

    def in_epoch(self, n_obs: int, epoch: int, seed: int | None) -> EpochSets:
        """Return the sets of an epoch of a collection of ``n_obs`` cells; ``seed`` is the sampler's."""
        if n_obs != self.n_obs:
            raise ValueError(
                f"The sets are of a collection of {self.n_obs:,} cells, and this one has {n_obs:,}. Make them of the "
                "obs of this collection, or check that every dataset has been added to the loader."
            )
        seed = seed if self.seed is None else self.seed
        assert seed is not None  # the sampler has refused it
        return EpochSets(self, epoch, seed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # it never changes

    def __repr__(self) -> str:
        controls = "" if self.pools is None else f" and {self.size} controls"
        return f"<Sets: {len(self):,} of {plural(len(self.labels), 'group')}, of {self.size} cells{controls} each>"


@dataclass(frozen=True, eq=False)
class EpochSets:
    """The sets of one epoch: which cells each has, by its number."""

    sets: Sets
    """How they are made."""
    epoch: int
    """The epoch."""
    seed: int
    """Seed of the sets."""
    _chunks: dict[int, tuple[int, Int64Array]] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.sets)

    def _generator(self, kind: int, number: int) -> np.random.Generator:
        # Philox has a stream for each counter, of which the first of four words counts what is drawn
        return np.random.Generator(np.random.Philox(key=self.seed, counter=[0, number, kind, self.epoch]))

    def cells(self, number: int) -> Cells:
        """Return the cells of a set."""
        return self.cells_of(np.array([number]))[0]

    def cells_of(self, numbers: Int64Array) -> tuple[Cells, Int64Array]:
        """Return the cells of some sets, one set after the other, and for each cell which of these sets it is of."""
        sets = self.sets
        groups = (np.searchsorted(sets.firsts, numbers, side="right") - 1).tolist()
        places = [self._places(group, number) for group, number in zip(groups, numbers.tolist(), strict=True)]
        rows = sets.treated.rows.to_global(np.concatenate([own for own, _ in places]))
        lengths, n_own = [len(own) for own, _ in places], [number for _, number in places]
        # sets of 3 and 2 cells, of which 2 and 2 are no repeats: 0 0 0 1 1, and 0 0 1 0 0
        which = np.repeat(np.arange(len(places)), lengths)
        are_repeats = np.arange(len(rows)) - np.repeat(np.cumsum([0, *lengths[:-1]]), lengths) >= np.repeat(
            n_own, lengths
        )
        if sets.pools is None:
            return Cells(rows, np.zeros(len(rows), dtype=np.bool_), are_repeats), which
        drawn = [
            self._control_places(number, int(sets.pool_of[group]), length)
            for number, group, length in zip(numbers.tolist(), groups, lengths, strict=True)
        ]
        rows = np.append(rows, sets.pools.rows.to_global(np.concatenate(drawn)))
        # controls after their set: of 0 0 0 1 1, and the same of controls, the order is 0 1 2 5 6 7 3 4 8 9
        order = np.argsort(np.append(2 * which, 2 * which + 1), kind="stable")
        are_controls = order >= len(which)
        return Cells(rows[order], are_controls, np.tile(are_repeats, 2)[order] & ~are_controls), np.tile(which, 2)[
            order
        ]

    def _places(self, group: int, number: int) -> tuple[Int64Array, int]:
        """Return the positions of the cells of a set, and how many of them are no repeats."""
        sets, n_rows = self.sets, self.sets.treated.size_of(group)
        if group not in self._chunks:
            self._chunks[group] = self._permuted(group, n_rows)
        tail, chunks = self._chunks[group]
        first, place = sets.treated.firsts[group], number - int(sets.firsts[group])
        n_chunks = sets.size // sets.chunk
        if place < n_rows // sets.size:
            own = chunks[place * n_chunks : (place + 1) * n_chunks]
            return (first + own[:, np.newaxis] + np.arange(sets.chunk)).ravel(), sets.size
        # the last set is the tail; cells that follow it, from the front again behind the end, fill it up
        n_left = n_rows % sets.size
        return first + (tail + np.arange(n_left if sets.tail == "short" else sets.size)) % n_rows, n_left

    def _permuted(self, group: int, n_rows: int) -> tuple[int, Int64Array]:
        """Return the position of the tail of a group, and those of its chunks in the order of this epoch."""
        size, chunk = self.sets.size, self.sets.chunk
        n_left = n_rows % size
        n_chunks = (n_rows - n_left) // chunk
        rng = self._generator(0, group)
        # Tails begin at a multiple of chunk. Of 10 cells in sets of 4 and chunks of 2, 2 are left over: the tail begins
        # at 0 or 2 in even epochs, as it ends in the first half, and at 6 or 8 in odd ones.
        most = max(0, (n_rows // 2 - n_left) // chunk)
        bounds = (0, most) if self.epoch % 2 == 0 else (min(n_chunks, -(-(n_rows - n_rows // 2) // chunk)), n_chunks)
        tail = int(rng.integers(*bounds, endpoint=True)) * chunk if n_left else n_rows
        starts = rng.permutation(n_chunks) * chunk
        # chunks after the tail: with a tail 2:4, chunks begin at 0 4 6 8 and not at 0 2 4 6
        return tail, starts + np.where(starts < tail, 0, n_left)

    def _control_places(self, number: int, pool: int, n_controls: int) -> Int64Array:
        """Return the positions of the controls of a set."""
        sets, chunk = self.sets, self.sets.chunk
        assert sets.pools is not None
        n_rows, n_chunks = sets.pools.size_of(pool), -(-n_controls // chunk)
        rng = self._generator(1, number)
        if n_rows // chunk >= n_chunks:
            # 11 cells in chunks of 4 begin at 0 4 in even epochs, and at 3 7 in odd ones
            first = n_rows % chunk if self.epoch % 2 else 0
            starts = first + chunk * rng.choice(n_rows // chunk, n_chunks, replace=False)
            positions = (starts[:, np.newaxis] + np.arange(chunk)).ravel()[:n_controls]
        else:  # too few for whole chunks; each comes equally often, or once more
            positions = np.resize(rng.permutation(n_rows), n_controls)
        return positions + int(sets.pools.firsts[pool])


def _columns(name: str, given: object) -> list[str]:
    """Return names of columns as a list without repeats."""
    columns = [given] if isinstance(given, str) else given
    if not isinstance(columns, list | tuple) or not columns or not all(isinstance(column, str) for column in columns):
        raise TypeError(f"{name} must be the name of a column of obs, or a list of names, got {given!r}.")
    return list(dict.fromkeys(columns))


def _check_columns(obs: pd.DataFrame, columns: Sequence[str]) -> None:
    if missing := [name for name in columns if name not in obs]:
        raise ValueError(
            f"obs has no column {', '.join(missing)}, only {', '.join(map(str, obs.columns))}. Ask for it: "
            f"collection.obs({list(dict.fromkeys(columns))})."
        )


def _flags(name: str, given: Any, n_obs: int) -> Flags:  # noqa: ANN401 whatever a user passes
    flags = np.asarray(given)
    if flags.shape != (n_obs,) or flags.dtype != np.bool_:
        raise ValueError(
            f"{name} must have a boolean for each of the {n_obs:,} cells, got {flags.dtype} of shape {flags.shape}."
        )
    return flags


def _used(obs: pd.DataFrame, mask: AnyMask | None, names: pd.Index[Any] | None) -> tuple[Flags, dict[str, Any]]:
    """Return which cells a mask selects, as flags and as JSON."""
    resolved = resolve_mask(slice(None) if mask is None else mask)
    if names is not None and (given := names_of("mask", mask)) is not None:
        check_names("mask", given, (names,))
    flags = np.zeros(len(obs), dtype=np.bool_)
    window = resolved.window(len(obs))
    for start, stop in zip(window.starts.tolist(), window.stops.tolist(), strict=True):
        flags[start:stop] = True
    return flags, resolved.to_json()


def _controls(obs: pd.DataFrame, controls: Any, names: pd.Index[Any] | None) -> tuple[Flags, Any]:  # noqa: ANN401
    """Return which cells are controls, as flags and as JSON."""
    if controls is None:
        return np.zeros(len(obs), dtype=np.bool_), None
    if not isinstance(controls, Mapping):
        if names is not None and (given := names_of("controls", controls)) is not None:
            check_names("controls", given, (names,))
        flags = _flags("controls", controls, len(obs))
        return flags, {"digest": blake2b(np.packbits(flags).tobytes(), digest_size=16).hexdigest()}
    _check_columns(obs, list(controls))
    flags, values = np.ones(len(obs), dtype=np.bool_), {}
    for name, value in controls.items():
        values[str(name)] = list(value) if isinstance(value, list | tuple | set | frozenset) else [value]
        flags &= obs[name].isin(values[name]).to_numpy()
    if not flags.any():
        raise ValueError(f"No cell is a control: none has {dict(controls)!r}.")
    return flags, {name: [_as_json(value) for value in own] for name, own in values.items()}


def _as_json(value: Any) -> Any:  # noqa: ANN401 a value of obs
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, str | int | float) else str(value)


def _keys(obs: pd.DataFrame, columns: Sequence[str], rows: Int64Array) -> Int64Array:
    """Return for each of some cells a number that is equal for equal values of all columns."""
    keys = np.zeros(len(rows), dtype=np.int64)
    for name in columns:
        values = pd.Categorical(obs[name].iloc[rows])
        if lacking := int((values.codes < 0).sum()):
            raise ValueError(
                f"{name} is missing in {plural(lacking, 'cell')} to use. Leave them out: mask=obs[{name!r}].notna()."
            )
        # of 3 and 2 values: 0 to 5, in the order of the first column's values, then of the second's
        keys = keys * len(values.categories) + values.codes
    return keys


def _pools(
    obs: pd.DataFrame, matched: list[str], controls: Int64Array, stands: Int64Array, labels: Sequence[str]
) -> tuple[Grouped, Int64Array]:
    """Return controls by pool, and the pool of each group, for which one of its cells stands."""
    if not len(controls):
        raise ValueError("No control is left: the mask selects none.")
    # cells that stand for the groups, behind the controls, have the key of their pool
    keys = _keys(obs, matched, np.append(controls, stands))
    present, pools = np.unique(keys, return_inverse=True)
    made = Grouped.of(controls, pools[: len(controls)], len(present))
    pool_of = pools[len(controls) :]
    if empty := [labels[group] for group in np.flatnonzero(made.sizes[pool_of] == 0).tolist()]:
        raise ValueError(
            f"No control has the {', '.join(matched)} of {plural(len(empty), 'group')}: {'; '.join(empty[:_MOST])}"
            f"{'; ...' if len(empty) > _MOST else ''}. Leave these groups out by mask, or match fewer columns."
        )
    return made, pool_of
