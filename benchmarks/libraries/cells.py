"""Simulated cells, as the benchmarks write them for all libraries to write in their formats.

Real cells differ in their number of genes, so the chunks of a sparse matrix, which hold equally many values, have
different numbers of rows. Simulated ones do, too. Genes 0, 1 and 2 of a cell say its number, by which batches are
checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

#: Genes of sparse cells, of which a cell expresses about 1,000, as cells of 10x do; and columns of dense cells.
N_GENES, N_DENSE = 20_000, 2_000
#: Median and spread of the number of genes that a cell expresses, whose logarithm is normal; and its limits.
_MEDIAN, _SPREAD, _LIMITS = 900, 0.5, (50, 8_000)
#: Digits of a cell's number, in genes 0, 1 and 2, are counts from 1 to this.
_BASE = 250
_DIGITS = 3


def make(kind: str, n_obs: int, path: Path) -> None:
    """Simulate counts of cells, sparse or dense, and write them for :func:`matrix`."""
    rng = np.random.default_rng(0)
    # cell 251 has the digits 1 1 0, and the counts 2 2 1
    digits = (1 + np.arange(n_obs)[:, None] // _BASE ** np.arange(_DIGITS) % _BASE).astype(np.uint8)
    if kind == "dense":
        means = rng.gamma(0.5, 2, N_DENSE)
        counts = np.stack([np.minimum(rng.poisson(means), 255).astype(np.uint8) for _ in range(n_obs)])
        counts[:, :_DIGITS] = digits
        np.savez(path, counts=counts)
        return
    n_expressed = np.clip(_MEDIAN * np.exp(_SPREAD * rng.standard_normal(n_obs)), *_LIMITS).astype(np.int64)
    bounds = np.append(0, np.cumsum(n_expressed))
    number = np.arange(bounds[-1]) - np.repeat(bounds[:-1], n_expressed)  # of a gene within its cell
    # gene j of n is in the j-th of n equal parts of all genes, and at least one gene below the next part
    part = np.repeat((N_GENES - _DIGITS) / n_expressed, n_expressed)
    indices = (_DIGITS + (number + rng.random(len(number)) * (1 - 1 / part)) * part).astype(np.int32)
    data = (1 + rng.poisson(1, len(number))).astype(np.uint8)
    first = bounds[:-1, None] + np.arange(_DIGITS)
    indices[first], data[first] = np.arange(_DIGITS), digits
    np.savez(path, data=data, indices=indices, indptr=bounds, shape=np.array((n_obs, N_GENES)))


def matrix(source: Path) -> Any:  # noqa: ANN401 an array, or a sparse matrix
    """Read the counts that a library is to write, as float32, in which files of users have them."""
    import scipy.sparse as sp  # which not every library has

    with np.load(source) as parts:
        if "counts" in parts:
            return parts["counts"].astype(np.float32)
        arrays = parts["data"].astype(np.float32), parts["indices"], parts["indptr"]
        return sp.csr_matrix(arrays, shape=tuple(parts["shape"]))


def anndata_of(source: Path) -> Any:  # noqa: ANN401 an AnnData, which not every library has
    """Return the cells with two columns of labels."""
    import anndata as ad
    import pandas as pd

    counts, rng = matrix(source), np.random.default_rng(0)
    names = [f"cell {number}" for number in range(counts.shape[0])]
    labels = {"cell_type": 10, "donor": 20}
    columns = {name: pd.Categorical(rng.integers(n, size=len(names)).astype(str)) for name, n in labels.items()}
    return ad.AnnData(counts, obs=pd.DataFrame(columns, index=pd.Index(names, dtype=object)))


def numbers_of(cells: Any) -> list[int]:  # noqa: ANN401 whatever a library yields
    """Return the numbers of the cells of a batch."""
    if str(getattr(cells, "layout", "")) == "torch.sparse_csr":
        rows = cells.crow_indices().numpy()[:-1, None] + np.arange(_DIGITS)
        digits = cells.values().numpy()[rows]
    elif type(cells).__name__ == "CSRRows":
        digits = cells.data[cells.indptr[:-1, None] + np.arange(_DIGITS)]
    elif hasattr(cells, "tocsr"):
        digits = cells.tocsr()[:, :_DIGITS].toarray()
    else:
        digits = np.asarray(cells)[:, :_DIGITS]
    numbers: list[int] = ((digits.astype(np.int64) - 1) @ _BASE ** np.arange(_DIGITS)).tolist()
    return numbers
