"""Run a script as ``python`` does, and log the rows that its loaders yield.

``python -m tests.processes.logging_rows FOLDER SCRIPT [ARGUMENT...]``. In the folder, `train-EPOCH-rankRANK.txt` has a
line for each batch of the first :class:`StatefulLoader` that the script makes, and `validation-...` of the second.
"""

from __future__ import annotations

import runpy
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from annbatch_distributed import StatefulLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

NAMES = "train", "validation"


def logging(folder: Path) -> Any:
    """Return a context in which each batch is logged before it is yielded."""
    init, iterate = StatefulLoader.__init__, StatefulLoader._iterate
    loaders: list[StatefulLoader] = []

    def init_with_index(self: StatefulLoader, **options: Any) -> None:
        init(self, **options | {"return_index": True})
        loaders.append(self)

    def iterate_logged(self: StatefulLoader, *readers: Any) -> Generator[Any]:
        name = next(name for name, loader in zip(NAMES, loaders, strict=False) if loader is self)
        return log(iterate(self, *readers), lambda: folder / f"{name}-{self.sampler.epoch}-rank{self.sampler.rank}.txt")

    return mock.patch.multiple(StatefulLoader, __init__=init_with_index, _iterate=iterate_logged)


def log(batches: Generator[Any], path: Callable[[], Path]) -> Generator[Any]:
    """Log the batches of an iteration, to a path that is only known during the iteration."""
    with closing(batches):
        for batch in batches:
            with path().open("a") as file:
                file.write(f"{batch['index'].tolist()}\n")
            yield batch


if __name__ == "__main__":
    _, folder, *sys.argv = sys.argv
    with logging(Path(folder)):
        runpy.run_path(sys.argv[0], run_name="__main__")
