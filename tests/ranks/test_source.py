"""The rank of this process from every source, and errors of sources without a rank."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch.distributed

from annbatch_distributed import Rank
from annbatch_distributed.ranks import RankSource


@pytest.mark.parametrize("pair", [(1, 4), [1, 4], (np.int64(1), np.int32(4)), Rank(1, 4)])
def test_callable_gives_rank(pair: Any) -> None:
    assert RankSource.of(lambda: pair).placement == Rank(1, 4)
    assert type(RankSource.of(lambda: pair).placement.rank) is int


def test_torch_without_distributed_is_not_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialized"):
        RankSource.of("torch")


def test_rank_takes_the_largest_world_size() -> None:
    """A job can have up to 2**20 ranks."""
    assert Rank(2**20 - 1, 2**20).world_size == 2**20


def test_torch_gives_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    assert RankSource.of("torch").placement == Rank(2, 3)


def test_jax_gives_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "distributed", SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert RankSource.of("jax").placement == Rank(1, 2)


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_missing_framework_raises_import_error(monkeypatch: pytest.MonkeyPatch, name: Any) -> None:
    """A missing framework raises ImportError, which names the package to install."""
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, f"{name}.distributed", None)
    with pytest.raises(ImportError, match=rf"install annbatch-distributed\[{name}\]"):
        RankSource.of(name)
