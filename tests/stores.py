"""Stores of zarr that keep what is asked of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from zarr.storage import MemoryStore, WrapperStore


class Counting(WrapperStore[MemoryStore]):
    """Counts how often each chunk is read."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.n_read: Counter[str] = Counter()

    async def get(self, key: str, *arguments: Any, **options: Any) -> Any:
        if "c/" in key:
            self.n_read[key] += 1
        return await super().get(key, *arguments, **options)
