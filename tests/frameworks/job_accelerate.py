"""One of two ranks that prepare loaders with accelerate, rightly and wrongly, and tell what came of it.

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
from tests.processes.told import tell

if TYPE_CHECKING:
    from annbatch_distributed.stream import Pass

BEGUN: list[int] = []


class Counted(DistributedSampler):
    """A sampler that notes the passes that are begun."""

    def sample(self, n_obs: int) -> Pass:
        BEGUN.append(n_obs)
        return super().sample(n_obs)


def load(collection: Path) -> StatefulLoader:
    """Share out the rows of a configuration."""
    sampler = Counted(GOOD["drop"].wrapped(), dist_info="torch", seed=0)
    loader = StatefulLoader(batch_sampler=sampler, return_index=True, to="torch")
    return loader.use_collection(DatasetCollection(collection, mode="r"))


def main(collection: Path, results: Path) -> None:
    """Prepare what looks as if it worked, and then what does."""
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
    told: dict[str, Any] = {"errors": errors, "passes that wrong ways began": len(BEGUN)}

    loader = load(collection)
    prepared = accelerator.prepare(loader)
    told["unchanged"] = prepared is loader
    told["rows"] = [row for batch in prepared for row in batch["index"].tolist()]
    tell(results, accelerator.process_index, told)
    accelerator.end_training()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
