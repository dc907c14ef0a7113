"""One rank of the example of Hugging Face's Trainer: ``job_transformers SCRIPT EVALUATION COLLECTION FOLDER``.

It trains, trains again from a checkpoint, and runs another script, which evaluates. `whole` and `rest` of the folder
have checkpoints, and the files that `logging_rows` writes.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from annbatch import DatasetCollection

from tests.processes.logging_rows import logging

if __name__ == "__main__":
    script, evaluation, cells, folder = sys.argv[1:]
    collection = DatasetCollection(cells, mode="r")
    options: dict[str, Any] = {"num_train_epochs": 3, "gradient_accumulation_steps": 2, "save_steps": 25}
    options |= {"use_cpu": True, "ddp_backend": "gloo", "disable_tqdm": True}
    train, types = runpy.run_path(script)["train"], collection.obs(["cell_type"])["cell_type"]
    whole, rest = Path(folder, "whole"), Path(folder, "rest")
    for own, checkpoint in ((whole, ()), (rest, (whole / "checkpoint-25",))):
        own.mkdir(exist_ok=True)
        with logging(own):
            train(collection, types, *checkpoint, output_dir=own, **options)
    runpy.run_path(evaluation, run_name="__main__")
