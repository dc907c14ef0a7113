"""One rank that prepares loaders with accelerate, in the right way and in wrong ones, and tells what came of it.

``python -m torch.distributed.run ... -m tests.frameworks.job_accelerate COLLECTION RESULTS``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from annbatch import DatasetCollection, Loader
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from annbatch_distributed import DistributedSampler, StatefulLoader
from tests.processes.configurations import GOOD

if TYPE_CHECKING:
    from collections.abc import Callable

    from annbatch_distributed.passes import Pass

    type Wrap = Callable[[StatefulLoader], object]

BEGUN: list[int] = []


class Counted(DistributedSampler):
    """A sampler that notes the passes that are begun."""

    def sample(self, n_obs: int) -> Pass:
        BEGUN.append(n_obs)
        return super().sample(n_obs)


def cells(collection: Path, loader: Loader) -> Any:
    """Give the cells to a loader."""
    return loader.use_collection(DatasetCollection(collection, mode="r"))


def sampler() -> DistributedSampler:
    """Share out the rows of a configuration."""
    return Counted(GOOD["drop"].wrapped(), dist_info="torch", seed=0)


def only_cells(batch: dict[str, Any]) -> Any:
    """Leave what accelerate can cut up."""
    return batch["X"].to_dense()


#: What looks as if it worked.
WRONG: dict[str, Wrap] = {
    "DataLoader": lambda loader: DataLoader(loader, batch_size=None),
    "DataLoader of cells only": lambda loader: DataLoader(loader, batch_size=None, collate_fn=only_cells),
    "DataLoader of batches": lambda loader: DataLoader(loader, batch_size=1, collate_fn=list),
    "StatefulDataLoader": lambda loader: StatefulDataLoader(loader, batch_size=None),
}

if __name__ == "__main__":
    collection, results = map(Path, sys.argv[1:])
    told: dict[str, Any] = {"errors": {}}
    for dispatch in (None, False):
        configuration = DataLoaderConfiguration(dispatch_batches=dispatch)
        accelerator = Accelerator(cpu=True, dataloader_config=configuration)
        for name, wrap in WRONG.items():
            loader = cells(collection, StatefulLoader(batch_sampler=sampler(), return_index=True, to="torch"))
            prepared = accelerator.prepare(wrap(loader))
            try:
                next(iter(prepared))
            except RuntimeError as error:
                told["errors"][f"{name}, dispatch_batches={dispatch}"] = str(error)
    told["passes that wrong ways began"] = len(BEGUN)

    loader = cells(collection, StatefulLoader(batch_sampler=sampler(), return_index=True, to="torch"))
    prepared = accelerator.prepare(loader)
    told["unchanged"] = prepared is loader
    told["rows"] = [row for batch in prepared for row in batch["index"].tolist()]

    # annbatch's own loader has no set_epoch by which it could tell
    plain = cells(collection, Loader(batch_sampler=sampler(), to="torch"))
    prepared = Accelerator(cpu=True).prepare(DataLoader(plain, batch_size=None, collate_fn=only_cells))
    told["rows of a plain loader"] = [int(first) - 1 for batch in prepared for first in batch[:, 0]]
    (results / f"rank{accelerator.process_index}.json").write_text(json.dumps(told))
    accelerator.end_training()
