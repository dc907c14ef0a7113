"""Stores of zarr that record the requests they receive."""

from __future__ import annotations

from collections import Counter
from typing import Any

from zarr.storage import MemoryStore, WrapperStore


class Counting(WrapperStore[MemoryStore]):
    """A store that counts the reads of each chunk."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.n_read: Counter[str] = Counter()

    async def get(self, key: str, *arguments: Any, **options: Any) -> Any:
        if "c/" in key:
            self.n_read[key] += 1
        return await super().get(key, *arguments, **options)
