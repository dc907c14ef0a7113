"""Pictures of plans, whose contents are read back from the picture."""

from __future__ import annotations

import builtins
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from annbatch.samplers import RandomSampler
from matplotlib.figure import Figure

from annbatch_distributed import DistributedSampler, EpochPlan, Rank

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes


def plans(n_obs: int, world_size: int, *, n_epochs: int = 1, **kwargs: object) -> list[EpochPlan]:
    sampler = RandomSampler(chunk_size=4, preload_nchunks=2, batch_size=8)
    distributed = DistributedSampler(sampler, dist_info=Rank(0, world_size), seed=0, **kwargs)
    result = []
    for epoch in range(n_epochs):
        distributed.set_epoch(epoch)
        result.append(distributed.plan(n_obs))
    return result


def painted(axes: Axes) -> list[np.ndarray]:
    """Masks of the visible points of each image; if an image has one point for each row, a point is a row."""
    return [np.asarray(image.get_array())[..., 3] > 0 for image in axes.images]


@pytest.mark.parametrize(("sharding", "world_size"), [("contiguous", 2), ("shuffled", 5)])
def test_each_lane_shows_the_rows_of_its_rank(sharding: str, world_size: int) -> None:
    several = plans(500, world_size, n_epochs=3, sharding=sharding)
    figure = several[0].plot(*several[1:])
    assert len(figure.axes) == 3
    for plan, axes in zip(several, figure.axes, strict=True):
        lanes, dropped = painted(axes)
        for rank in range(world_size):
            assert list(np.flatnonzero(lanes[rank])) == sorted(plan.shard(rank).rows)
        assert list(np.flatnonzero(dropped[0])) == sorted(plan.dropped)


def test_masked_rows_are_painted_behind_the_lanes() -> None:
    """Rows outside the mask are painted behind the lanes, never over them."""
    (plan,) = plans(300, 2, mask=[slice(10, 100), slice(200, 290)])
    outside, lanes, _ = painted(plan.plot().axes[0])
    assert list(np.flatnonzero(outside[0])) == sorted(set(range(300)) - set(plan.selected))
    assert not (lanes & outside).any()


def test_repeated_rows_are_hatched_in_their_lane() -> None:
    """Repeated rows are hatched in the lane of the rank that repeats them."""
    (plan,) = plans(300, 2, remainder="pad")
    bars = plan.plot().axes[0].collections
    boxes = [path.get_extents().extents for bar in bars for path in bar.get_paths()]
    assert [(start, stop, round(low + 0.5)) for start, low, stop, _ in boxes] == [
        (plan.shard(rank).repeated.starts[0], plan.shard(rank).repeated.stops[0], rank) for rank in (0, 1)
    ]
    assert all(bar.get_hatch() for bar in bars)


def test_plans_of_different_sizes_share_an_axis() -> None:
    """Plans of different sizes are shown whole, and a few dropped rows of very many stay visible."""
    ((small,), (large,)) = plans(300, 2), plans(10**7 + 5, 256)
    picture = small.plot(large)
    assert [axes.get_xlim() for axes in picture.axes] == [(0, 10**7 + 5)] * 2
    dropped = np.asarray(picture.axes[1].images[-1].get_array())
    assert (dropped[..., 3] == 1).any()


def test_legend_names_only_the_signs_in_use() -> None:
    """The legend names dropped, repeated and masked rows, each only if the plan has some."""

    def names(**kwargs: Any) -> list[str]:
        (plan,) = plans(301, 2, **kwargs)
        return [text.get_text() for legend in plan.plot().legends for text in legend.get_texts()]

    assert names() == ["dropped"]
    assert names(remainder="pad", mask=slice(0, 100)) == ["repeated", "masked"]
    assert names(remainder="keep") == []


def test_picture_of_many_ranks_fits_a_page(tmp_path: Path) -> None:
    """A picture of 256 ranks is less than 9 inches high and can be saved."""
    (plan,) = plans(100_000, 256)
    figure = plan.plot()
    assert figure.get_size_inches()[1] < 9
    figure.savefig(tmp_path / "plan.svg")
    assert isinstance(figure, Figure)


def test_notebook_shows_a_picture_without_pyplot() -> None:
    """IPython displays objects with `_repr_png_`; for figures made without pyplot, it has only text."""
    figure: Any = plans(300, 2)[0].plot()
    assert figure._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("world_size", [1, 2, 20])
def test_neighboring_ranks_have_different_colors(world_size: int) -> None:
    """No rank has the color of the rank next to it, of dropped rows or of masked rows."""
    (plan,) = plans(1_000, world_size, mask=slice(100, 995))
    outside, lanes, dropped = (np.asarray(image.get_array()) for image in plan.plot().axes[0].images)
    colors = [tuple(lane[lane[:, 3] > 0][0, :3]) for lane in (*lanes, dropped[0], outside[0])]
    assert all(one != other for one, other in pairwise(colors))
    assert {*colors[-2:]}.isdisjoint(colors[:-2])


def test_error_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra to install if Matplotlib is missing."""
    import sys

    (plan,) = plans(100, 2)
    monkeypatch.delitem(sys.modules, "annbatch_distributed.reports.picture", raising=False)
    import_module = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return import_module(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=r"annbatch-distributed\[plot\]"):
        plan.plot()
