"""One of two ranks that prepare loaders with Accelerate, rightly and wrongly, and write the results.

``-m tests.frameworks.job_accelerate COLLECTION RESULTS``
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from annbatch import DatasetCollection
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from annbatch_distributed import DistributedSampler, StatefulLoader
from tests.processes.configurations import GOOD
from tests.processes.results import write_result

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch.types import LoadRequest

ITERATIONS: list[int] = []


class Counted(DistributedSampler):
    """A sampler that counts its iterations."""

    def sample(self, n_obs: int) -> Iterator[LoadRequest]:
        ITERATIONS.append(n_obs)
        return super().sample(n_obs)


def load(collection: Path) -> StatefulLoader:
    """Make a loader with the sampler of a configuration."""
    sampler = Counted(GOOD["drop"].wrapped(), dist_info="torch", seed=0)
    loader = StatefulLoader(batch_sampler=sampler, return_index=True, to="torch")
    return loader.use_collection(DatasetCollection(collection, mode="r"))


def main(collection: Path, results: Path) -> None:
    """Prepare loaders in the wrong ways, and then in the right way."""
    errors = {}
    for dispatch in (None, False):
        configuration = DataLoaderConfiguration(dispatch_batches=dispatch)
        accelerator = Accelerator(cpu=True, dataloader_config=configuration)
        for wrap in (DataLoader, StatefulDataLoader):
            prepared = accelerator.prepare(wrap(load(collection), batch_size=None))
            try:
                next(iter(prepared))
            except RuntimeError as error:
                errors[f"{wrap.__name__}, dispatch_batches={dispatch}"] = str(error)
    result: dict[str, Any] = {"errors": errors, "iterations of wrong ways": len(ITERATIONS)}

    loader = load(collection)
    prepared = accelerator.prepare(loader)
    result["unchanged"] = prepared is loader
    result["rows"] = [row for batch in prepared for row in batch["index"].tolist()]
    write_result(results, accelerator.process_index, result)
    accelerator.end_training()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
