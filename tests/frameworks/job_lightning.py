"""One of two ranks of a training that saves within a step: ``-m tests.frameworks.job_lightning FOLDER CHECKPOINT``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from tests.frameworks.test_lightning_options import Module, loader_of, saved, trainer_of


def main(folder: Path, checkpoint: str | None) -> None:
    """Train for three epochs, or what is left of them, and write down the rows of the steps that were completed."""
    trainer = trainer_of(folder, strategy="ddp", devices=2)
    module = Module(saved(folder) if checkpoint is None else None)
    trainer.fit(module, loader_of(trainer), ckpt_path=checkpoint)
    name = f"{'whole' if checkpoint is None else 'rest'}-rank{dist.get_rank()}.json"
    (folder / name).write_text(json.dumps(module.read))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
