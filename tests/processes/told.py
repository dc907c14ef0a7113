"""What each rank of a job writes down, and the test that has started it reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def tell(folder: Path, rank: int, told: Any) -> None:
    """Write down what a rank has to tell."""
    (folder / f"rank{rank}.json").write_text(json.dumps(told))


def told_by(folder: Path) -> list[Any]:
    """What each rank has told."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
