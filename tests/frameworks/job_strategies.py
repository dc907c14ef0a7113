"""A process that starts its own ranks, as in a notebook, after it has distributed its cells.

``python -m tests.frameworks.job_strategies STRATEGY RESULTS``
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightning import Trainer

from annbatch_distributed.integrations.scvi import distribute
from tests.frameworks.test_distribute import Cells, Reader
from tests.processes.results import write_result


class Recorder(Reader):
    """A model that writes the rows of its batches to a file."""

    def on_fit_end(self) -> None:
        write_result(Path(sys.argv[2]), self.global_rank, {"train": self.read, "validation": self.validated})


if __name__ == "__main__":
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    trainer = Trainer(accelerator="cpu", devices=2, strategy=sys.argv[1], max_epochs=2, **quiet)
    trainer.fit(Recorder(), distribute(Cells()))
