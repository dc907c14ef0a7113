"""What ranks on a mesh of 2 x 2 tell."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path

N_OBS = 203


@dataclass(frozen=True)
class OnMesh:
    """What one rank tells."""

    process: int
    ranks: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Rank and world size, by the ``dist_info``."""
    batches: dict[str, list[list[int]]] = field(default_factory=dict)
    """The rows of each batch that it read."""
    said: dict[str, str] = field(default_factory=dict)
    """What was said of all that was read."""
    errors: dict[str, str] = field(default_factory=dict)
    """What was wrong, by what was tried; empty if nothing was."""

    def write(self, folder: Path) -> None:
        """Write it to a file of this rank."""
        (folder / f"process{self.process}.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read such a file."""
        return cls(**json.loads(path.read_text()))
