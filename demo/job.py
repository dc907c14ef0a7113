"""A job: what every rank has to know, the same on all of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path


#: Ranks of the job that is killed in the middle of an epoch, and of the one that resumes it.
KILLED_ON, RESUMED_ON = 2, 3


@dataclass(frozen=True)
class Job:
    """What to train on, how, and where the ranks leave what they read.

    The first four fifths of the rows are for training, the rest is held out for validation.
    """

    collection: str
    """The annbatch collection to read, written first if it is not there."""
    h5ad: str | None
    """The file to write the collection from; without one, made-up cells are written."""
    n_obs: int
    """How many rows the collection has."""
    label: str
    """The column of `obs` to learn."""
    epochs: int
    """How many passes over the training rows, one or more."""
    results: str
    """The folder for what the ranks leave."""
    virtual_ranks: int | None = None
    """How many virtual ranks the training rows are dealt to; None deals them to the ranks."""

    @property
    def n_train(self) -> int:
        """How many rows are trained on: rows ``[0, n_train)``."""
        return self.n_obs * 4 // 5

    @property
    def n_validation(self) -> int:
        """How many rows are held out: rows ``[n_train, n_obs)``."""
        return self.n_obs - self.n_train

    @property
    def batch_size(self) -> int:
        """Rows of a batch on one rank, or one virtual rank."""
        return 16 if self.n_obs < 20_000 else 256

    @property
    def most_ranks(self) -> int:
        """On how many ranks, virtual or not, there is a full batch to train on and a row to validate on for each."""
        return min(self.n_train // self.batch_size, self.n_validation)

    def write(self, path: Path) -> None:
        """Write the job to a file."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a job from a file."""
        return cls(**json.loads(path.read_text()))
