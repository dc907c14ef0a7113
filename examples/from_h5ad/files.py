"""Simulate data: an h5ad file of sparse raw counts for each donor, with the type of each cell.

::

    python examples/from_h5ad/files.py FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp

TYPES = np.array(["B cell", "CD4 T cell", "CD8 T cell", "NK cell", "monocyte"])
GENES = [f"gene{number}" for number in range(200)]


def main(folder: Path) -> None:
    """Write a file for each of ten donors."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    # expected count of each gene, for each cell type
    profiles = rng.gamma(0.5, size=len(GENES)) * rng.lognormal(
        0, 0.5, size=(len(TYPES), len(GENES))
    )
    for number in range(1, 11):
        donor, n_cells = f"d{number:02}", 500 + 40 * number
        types = rng.choice(len(TYPES), size=n_cells, p=rng.dirichlet([5] * len(TYPES)))
        of_donor = profiles * rng.lognormal(0, 0.2, size=len(GENES))
        depth = (
            rng.lognormal(0, 0.4, size=(n_cells, 1)) * 100 / of_donor.sum(axis=1).mean()
        )
        counts = rng.poisson(of_donor[types] * depth).astype(np.float32)
        obs = pd.DataFrame(
            {
                "cell_type": pd.Categorical(TYPES[types]),
                "donor": pd.Categorical([donor] * n_cells),
            },
            index=[f"{donor}-{cell}" for cell in range(n_cells)],
        )
        cells = ad.AnnData(
            sp.csr_matrix(counts), obs=obs, var=pd.DataFrame(index=GENES)
        )
        cells.write_h5ad(folder / f"{donor}.h5ad")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
