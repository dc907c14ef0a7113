"""Sharding of annbatch collections across the ranks of a distributed job.

Wrap any annbatch sampler in a :class:`DistributedSampler`, and pass it to a :class:`StatefulLoader` or to annbatch's
``Loader``.

Public names are imported on first use, so that a module of plain arithmetic can be imported without annbatch, PyTorch,
JAX and their dependencies.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from annbatch_distributed.core.rows import Rows
    from annbatch_distributed.core.sharding import Shuffled
    from annbatch_distributed.loader import StatefulLoader, suggest_sizes
    from annbatch_distributed.mixtures import AlignedLoader, MixedLoader
    from annbatch_distributed.ranks import Rank, deferred
    from annbatch_distributed.reports import EpochPlan
    from annbatch_distributed.sampler import DistributedSampler
    from annbatch_distributed.sets import CellSets

__all__ = [
    "AlignedLoader",
    "CellSets",
    "DistributedSampler",
    "EpochPlan",
    "MixedLoader",
    "Rank",
    "Rows",
    "Shuffled",
    "StatefulLoader",
    "deferred",
    "suggest_sizes",
]

_HOMES = {
    **dict.fromkeys(("AlignedLoader", "MixedLoader"), "mixtures"),
    **dict.fromkeys(("StatefulLoader", "suggest_sizes"), "loader"),
    **dict.fromkeys(("Rank", "deferred"), "ranks"),
    "Shuffled": "core.sharding",
    "DistributedSampler": "sampler",
    "EpochPlan": "reports",
    "Rows": "core.rows",
    "CellSets": "sets",
}


if not TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> object:
        if name in __all__:
            value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
            return value
        if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
