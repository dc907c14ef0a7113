"""Hypothesis strategies: masks, and what a sharding is asked, small enough to enumerate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

from annbatch_distributed.sharding import Rows, resolve_mask, window
from annbatch_distributed.sharding.integers import integer
from annbatch_distributed.sharding.selection import Selected, Selection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from annbatch_distributed.sharding import AnyMask, Sharding

__all__ = ["Deal", "deals", "masks"]


@dataclass(frozen=True)
class Deal:
    """One question to a sharding: the rows of a window, and how many ranks they go to in which epoch."""

    n_obs: int
    """Rows of the collection."""
    mask: AnyMask | None
    """Which of them are the window, None for all."""
    world_size: int
    """The number of ranks."""
    epoch: int
    """Which epoch."""
    seed: int | None
    """The job's seed, None where its user gave none."""

    @property
    def rows(self) -> Rows:
        """The window."""
        return window(resolve_mask(slice(None) if self.mask is None else self.mask), self.n_obs)

    def ask(self, sharding: Sharding) -> Rows | Sequence[Rows]:
        """Return what a sharding answers."""
        return sharding.deal(self.rows, world_size=self.world_size, epoch=self.epoch, seed=self.seed)


def masks(n_obs: int) -> st.SearchStrategy[AnyMask | None]:
    """Draw a mask of a collection, of every kind that there is.

    It is None, a slice, or up to three slices in any order, open at either end at times; or it selects any rows, as a
    boolean array, an integer array in any order, or Rows.

    Parameters
    ----------
    n_obs
        Rows of the collection, at least 1.

    Raises
    ------
    TypeError, ValueError
        If ``n_obs`` is no integer of at least 1.
    """
    n_obs = integer("n_obs", n_obs, least=1)
    return _slices(n_obs) | _row_masks(n_obs)


@st.composite
def _row_masks(draw: st.DrawFn, n_obs: int) -> AnyMask:
    # runs of rows, of one as well: single booleans would hardly ever make long ones
    flags = np.zeros(n_obs, dtype=np.bool_)
    start, value = 0, draw(st.booleans())
    while start < n_obs:
        stop = start + draw(st.integers(1, max(1, n_obs // draw(st.sampled_from((1, 10, 100))))))
        flags[start:stop] = value
        start, value = stop, not value
    if not flags.any():
        flags[draw(st.integers(0, n_obs - 1))] = True
    kind = draw(st.sampled_from(("boolean", "integers", "rows", "selection", "part of a selection")))
    if kind == "boolean":
        return flags
    if kind == "integers":
        order = np.random.default_rng(draw(st.integers(0, 3)))
        return order.permutation(np.flatnonzero(flags))
    if kind == "rows":
        return Rows.where(flags)
    selection = Selection.of_flags(flags)  # which Rows.where makes of very many ranges only
    first, last = 0, len(selection) - 1
    if kind == "part of a selection":
        first, last = sorted((draw(st.integers(first, last)), draw(st.integers(first, last))))
    return Rows((Selected(selection, range(first, last + 1)),))


@st.composite
def _slices(draw: st.DrawFn, n_obs: int) -> slice | list[slice] | None:
    pieces = draw(st.integers(0, min(3, n_obs // 2)))
    if pieces == 0:
        return None
    cuts = sorted(draw(st.lists(st.integers(0, n_obs), min_size=2 * pieces, max_size=2 * pieces, unique=True)))
    slices = [slice(start, stop) for start, stop in zip(cuts[::2], cuts[1::2], strict=True)]
    if slices[0].start == 0 and draw(st.booleans()):
        slices[0] = slice(None, slices[0].stop)
    if slices[-1].stop == n_obs and draw(st.booleans()):
        slices[-1] = slice(slices[-1].start, None)
    return slices[0] if pieces == 1 and draw(st.booleans()) else draw(st.permutations(slices))


def deals(n_obs: int | None = None, max_world_size: int = 6) -> st.SearchStrategy[Deal]:
    """Draw a question to a sharding.

    Parameters
    ----------
    n_obs
        Rows of the collection, for shardings that are made for one; None draws up to 300.
    max_world_size
        The largest number of ranks.

    Raises
    ------
    TypeError, ValueError
        If either is no integer of at least 1.
    """
    return _deals(
        None if n_obs is None else integer("n_obs", n_obs, least=1), integer("max_world_size", max_world_size, least=1)
    )


@st.composite
def _deals(draw: st.DrawFn, n_obs: int | None, max_world_size: int) -> Deal:
    size = draw(st.integers(1, 300)) if n_obs is None else n_obs
    return Deal(
        n_obs=size,
        mask=draw(masks(size)),
        world_size=draw(st.integers(1, max_world_size)),
        epoch=draw(st.integers(0, 5)),
        seed=draw(st.integers(0, 3) | st.none()),
    )
