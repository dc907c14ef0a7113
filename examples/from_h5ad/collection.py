"""Make one collection of h5ad files, with their cells shuffled.

::

    python examples/from_h5ad/collection.py FILE.h5ad [FILE.h5ad ...] --to cells.zarr
"""

from __future__ import annotations

import argparse
from pathlib import Path

import anndata as ad
import numpy as np
from annbatch import DatasetCollection


def main(files: list[Path], collection: Path, columns: list[str]) -> None:
    """Write the collection."""

    def load(file: object) -> ad.AnnData:
        cells = ad.experimental.read_lazy(file)  # the counts stay on disk
        return ad.AnnData(
            X=cells.X,  # where raw counts are; elsewhere, cells.layers["counts"]
            obs=cells.obs.to_memory()[columns],
            var=cells.var.to_memory()[[]],
        )

    # reads the files, shuffles the cells, and writes them in chunks of 64
    rng = np.random.default_rng(0)
    DatasetCollection(collection).add_adatas(files, load_adata=load, rng=rng)

    obs = DatasetCollection(collection, mode="r").obs(columns)
    print(
        f"{collection}: {len(obs):,} cells of {len(files)} files", obs.head(3), sep="\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument(
        "--to",
        type=Path,
        dest="collection",
        required=True,
        help="must not be there yet",
    )
    parser.add_argument(
        "--columns",
        nargs="+",
        default=["cell_type", "donor"],
        help="the columns of obs to keep",
    )
    arguments = parser.parse_args()
    if arguments.collection.exists():
        parser.error(f"argument --to: '{arguments.collection}' is there already")
    main(**vars(arguments))
