"""The collection that real processes read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


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

    from tests.processes.configurations import CLASSES, N_OBS

    matrix = np.zeros((N_OBS, 4), dtype=np.float32)
    matrix[:, 0] = np.arange(1, N_OBS + 1)
    folder = tmp_path_factory.mktemp("processes")
    obs = pd.DataFrame({"cell_type": CLASSES.astype(str)}, index=np.arange(N_OBS).astype(str))
    ad.AnnData(sp.csr_matrix(matrix), obs=obs).write_h5ad(folder / "cells.h5ad")
    path = folder / "cells.zarr"
    written = DatasetCollection(path).add_adatas(
        [folder / "cells.h5ad"], shuffle=False, shuffle_chunk_size=10, dataset_size=120
    )
    assert len(list(written)) == 3
    return path
