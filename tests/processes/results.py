"""Results that the ranks of a job write, and that the test of the job reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def write_result(folder: Path, rank: int, result: Any) -> None:
    """Write the result of a rank."""
    (folder / f"rank{rank}.json").write_text(json.dumps(result))


def read_results(folder: Path) -> list[Any]:
    """Return the result of each rank."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
