"""Collections, and what goes wrong when ranks read them."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
from annbatch import DatasetCollection
from annbatch.samplers import SequentialSampler

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from annbatch_distributed.collect import collect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch_distributed.core.request import Request

#: Cells of a collection in files.
N_STORED = 120


class Away(OSError):
    """A read that failed."""


class Fast(StatefulLoader):
    """A loader whose rows are made instead of read, for jobs of many ranks."""


class Disk:
    """A collection whose cells are known: the first value of row r is r, or a multiple of it."""

    def __init__(self, kind: str, n_obs: int, obs: pd.DataFrame, factor: int = 1) -> None:
        self.kind, self.n_obs, self.obs, self.factor = kind, n_obs, obs, factor

    @cached_property
    def other(self) -> Disk:
        """Another store of the same cells."""
        return Disk(self.kind, self.n_obs, self.obs, factor=3)

    @classmethod
    def of(cls, kind: str, n_obs: int, name: str) -> Disk:
        """Make a collection of a kind."""
        if kind == "files":
            return Files()
        index = pd.Index([f"{name} {row}" for row in range(n_obs)])
        obs = pd.DataFrame(index=index)
        # joining labels takes most of the time of reading
        return cls(kind, n_obs, obs.assign(label=np.arange(n_obs) % 7) if n_obs % 4 == 0 else obs)

    @cached_property
    def data(self) -> ad.AnnData:
        return ad.AnnData(self.factor * np.arange(self.n_obs, dtype=np.float32)[:, None], obs=self.obs)

    def loader(self, sampler: DistributedSampler, prefetch: int) -> StatefulLoader:
        """The loader of a rank."""
        kind = Fast if self.kind == "fast" else StatefulLoader
        loader = kind(batch_sampler=sampler, return_index=True, preload_to_gpu=False, prefetch=prefetch)
        return loader.add_adata(self.data)

    def check(self, batch: Any) -> None:
        """Check that a batch has the values and labels of its rows."""
        rows = batch["index"]
        assert batch["X"][:, 0].tolist() == (self.factor * rows).tolist(), "values of other rows"
        if "label" in self.obs and self.kind != "fast":
            assert batch["obs"]["label"].tolist() == (rows % 7).tolist(), "labels of other rows"

    def __str__(self) -> str:
        return self.kind


class Files(Disk):
    """A collection of files on a local disk, which can be damaged; a job has its own copy."""

    def __init__(self) -> None:
        self.cells, source = _stored()
        super().__init__("files", N_STORED, pd.DataFrame(index=[f"cell {cell}" for cell in self.cells]))
        self._folder = tempfile.TemporaryDirectory(prefix="simulated-")
        self.path = Path(self._folder.name) / "cells.zarr"
        shutil.copytree(source, self.path)
        self._sound: tuple[Path, bytes] | None = None

    @cached_property
    def _opened(self) -> StatefulLoader:
        """The loader whose datasets all others take, since opening takes long."""
        sampler = DistributedSampler(SequentialSampler(1, 1, 1), dist_info=Rank(0, 1))
        empty = StatefulLoader(batch_sampler=sampler, return_index=True, preload_to_gpu=False)
        return empty.use_collection(DatasetCollection(self.path))

    def loader(self, sampler: DistributedSampler, prefetch: int) -> StatefulLoader:
        return StatefulLoader.from_loader(self._opened, batch_sampler=sampler, prefetch=prefetch)

    def check(self, batch: Any) -> None:
        cells = self.cells[batch["index"]]
        assert batch["X"].toarray().tolist() == np.stack([cells + 1, 255 - cells], axis=1).tolist(), "other values"
        assert batch["obs"]["label"].tolist() == [f"label {cell % 7}" for cell in cells], "labels of other rows"

    def damage(self, how: str, which: int) -> str:
        """Damage a chunk; return what was done."""
        self.repair()
        files = sorted(path for path in self.path.glob("dataset_*/X/*/c/*") if path.parts[-3] != "indptr")
        path = files[which % len(files)]
        content = path.read_bytes()
        self._sound = path, content
        match how:
            case "flipped":
                place = which // len(files) % len(content)
                path.write_bytes(content[:place] + bytes([content[place] ^ 1 << which % 8]) + content[place + 1 :])
            case "shortened":
                path.write_bytes(content[: which % len(content)])
            case _:
                path.unlink()
        return str(path.relative_to(self.path))

    def repair(self) -> bool:
        """Undo the damage; return False if there is none."""
        if self._sound is None:
            return False
        path, content = self._sound
        path.write_bytes(content)
        self._sound = None
        return True


@cache
def _stored() -> tuple[np.ndarray, Path]:
    """The number of the cell in each row of a collection, and its path."""
    folder = tempfile.TemporaryDirectory(prefix="simulated-")
    path, cells = Path(folder.name), np.arange(N_STORED)
    # no value is 0, so that a missing chunk isn't right by chance, and none is that of another cell
    counts = sp.csr_matrix(np.stack([cells + 1, 255 - cells], axis=1).astype(np.float32))
    obs = pd.DataFrame({"label": [f"label {cell % 7}" for cell in cells]}, index=[f"cell {cell}" for cell in cells])
    ad.AnnData(counts, obs=obs).write_h5ad(path / "cells.h5ad")
    collection = collect([path / "cells.h5ad"], path / "cells.zarr", tell=lambda _: None)
    _FOLDERS.append(folder)
    names = [name for group in collection for name in ad.io.read_elem(group["obs"]).index]
    return np.array([int(name.split()[-1]) for name in names]), path / "cells.zarr"


#: Folders that exist as long as this process.
_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


class Faults:
    """Reads that fail."""

    def __init__(self) -> None:
        #: By rank: the number of next reads that fail.
        self.left: Counter[int] = Counter()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let reads fail in a context."""
        read = StatefulLoader._read_request

        def reading(loader: StatefulLoader, request: Request) -> Any:
            rank = loader.sampler.rank
            if self.left[rank] > 0:
                self.left[rank] -= 1
                raise Away("the server closed the connection")
            yield from (_made(request) if isinstance(loader, Fast) else read(loader, request))

        with patch.object(StatefulLoader, "_read_request", reading):
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let no read fail in a context."""
        before, self.left = self.left, Counter()
        try:
            yield
        finally:
            self.left = before


def _made(request: Request) -> Iterator[dict[str, Any]]:
    for split in request.splits:
        rows = request.rows_at(split)
        yield {"X": rows[:, None], "index": rows}
