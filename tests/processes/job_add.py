"""Add a file to a collection, and end as if killed at one of the moments at which its datasets are moved."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from annbatch_distributed.collect import collect, steps
from annbatch_distributed.collect.write import datasets, folders

#: Number of cells that stay in one dataset, so that a small file has several datasets.
SLICE = 5


def main(file: str, out: str, moment: int) -> None:
    datasets._SLICE = SLICE
    add = folders.add_datasets
    n_moves = 0

    def counted(move: Any) -> Any:
        def moved(path: Path, target: Path) -> Any:
            nonlocal n_moves
            if Path(target).is_relative_to(out):
                if n_moves == moment:
                    os._exit(9)
                n_moves += 1
            return move(path, target)

        return moved

    def killed(unfinished: Path, collection: Path) -> None:
        Path.rename, Path.replace = counted(Path.rename), counted(Path.replace)  # type: ignore[method-assign]  # in this process
        add(unfinished, collection)

    vars(steps)["add_datasets"] = killed
    collect(file, add_to=out, memory="5kB", jobs=1, tell=str)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
