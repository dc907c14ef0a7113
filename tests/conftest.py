"""How Hypothesis runs here, and the collection that real processes read."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# no deadline: tests never judge times, and a class sampler's tables take pandas a while
settings.register_profile("default", deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
# where what is covered is measured, which takes as long again
settings.register_profile("brief", settings.get_profile("default"), max_examples=10)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=1000)
# where the code is changed again and again: the same examples each time, and one that fails is enough
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
    """Let SIGINT interrupt this process and those that it starts.

    A shell starts jobs in the background with SIGINT ignored, and children inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path to a collection of three data sets; the first column of each row is one more than the row's number.

    Beside it, with the suffix ``.h5ad``, is the file that it was written from.
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
