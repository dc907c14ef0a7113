"""One rank of the example of Hugging Face's Trainer: ``job_transformers SCRIPT COLLECTION FOLDER [CHECKPOINT]``.

In the folder are checkpoints, and the files that `logging_rows` writes.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from annbatch import DatasetCollection

from tests.processes.logging_rows import logging

if __name__ == "__main__":
    script, cells, folder, *checkpoint = sys.argv[1:]
    collection = DatasetCollection(cells, mode="r")
    options = {"num_train_epochs": 3, "gradient_accumulation_steps": 2, "save_steps": 25}
    on_cpus = {"use_cpu": True, "ddp_backend": "gloo", "disable_tqdm": True}
    with logging(Path(folder)):
        train = runpy.run_path(script)["train"]
        train(
            collection, collection.obs(["cell_type"])["cell_type"], *checkpoint, output_dir=folder, **options, **on_cpus
        )
