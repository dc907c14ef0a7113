"""Options: what a user chooses, in the words of :func:`.collect`, which says what each of them is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: For each column, its labels that are replaced, and by which; None stands for a missing value.
type Spellings = Mapping[str, Mapping[str, str | None]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Arguments of :func:`.collect`; names are lists without repeats."""

    layer: Sequence[str]
    join: str | None
    feature_types: Sequence[str] | None
    obs: Sequence[str] | None
    rename: Mapping[str, str]
    labels: Spellings
    na_values: Sequence[str]
    make_unique: bool
    group_by: Sequence[str] | None
    memory: int
    """In bytes."""
    jobs: int | None
    scheduler: str | None
    dtype: str | None
    compression: str
    seed: int
    restart: bool
