"""Profiles of Hypothesis, and the collection that real processes read."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# no deadline: tests never check durations, and the tables of a class sampler take pandas a while
settings.register_profile("default", deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
# for measuring coverage, which doubles the time
settings.register_profile("brief", settings.get_profile("default"), max_examples=10)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=1000)
# for mutation tests: the same examples each time, and the first failure is enough
settings.register_profile(
    "mutation",
    settings.get_profile("default"),
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT interrupt this process and its children.

    A shell starts background jobs with SIGINT ignored, and children inherit this setting.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path to a collection of three datasets; the first column of each row is one more than the row's number.

    The source file is next to the collection, with the suffix ``.h5ad``.
    """
    import anndata as ad
    import numpy as np
    import pandas as pd
    import scipy.sparse as sp
    from annbatch import DatasetCollection

    from tests.processes.configurations import CLASSES, DONORS, LABELS, N_OBS

    matrix = np.zeros((N_OBS, 4), dtype=np.float32)
    matrix[:, 0] = np.arange(1, N_OBS + 1)
    folder = tmp_path_factory.mktemp("processes")
    obs = pd.DataFrame({"cell_type": CLASSES.astype(str), "donor": DONORS, "label": LABELS})
    obs.index = obs.index.astype(str)
    ad.AnnData(sp.csr_matrix(matrix), obs=obs).write_h5ad(folder / "cells.h5ad")
    path = folder / "cells.zarr"
    written = DatasetCollection(path).add_adatas(
        [folder / "cells.h5ad"], shuffle=False, shuffle_chunk_size=10, dataset_size=120
    )
    assert len(list(written)) == 3
    return path
