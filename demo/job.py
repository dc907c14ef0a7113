"""A job: the settings that all ranks share."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path


#: Numbers of ranks before and after the kill.
KILLED_ON, RESUMED_ON = 2, 3


@dataclass(frozen=True)
class Job:
    """Settings of a job.

    The first four fifths of the rows are for training, the others are held out for validation.
    """

    collection: str
    """Path of the annbatch collection, which is written if it doesn't exist."""
    h5ad: str | None
    """Path of the file to write the collection from; None for simulated cells."""
    n_obs: int
    """Number of rows of the collection."""
    label: str
    """Column of `obs` to learn."""
    epochs: int
    """Number of epochs."""
    results: str
    """Folder for the results of the ranks."""
    virtual_ranks: int | None = None
    """Number of virtual ranks; None to shard across the ranks themselves."""

    @property
    def n_train(self) -> int:
        """Number of training rows: rows ``[0, n_train)``."""
        return self.n_obs * 4 // 5

    @property
    def n_validation(self) -> int:
        """Number of held-out rows: rows ``[n_train, n_obs)``."""
        return self.n_obs - self.n_train

    @property
    def batch_size(self) -> int:
        """Number of rows of a batch on one rank or virtual rank."""
        return 16 if self.n_obs < 20_000 else 256

    @property
    def most_ranks(self) -> int:
        """Largest number of ranks that each have a full training batch and a validation row."""
        return min(self.n_train // self.batch_size, self.n_validation)

    def write(self, path: Path) -> None:
        """Write the job to a file."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a job from a file."""
        return cls(**json.loads(path.read_text()))
