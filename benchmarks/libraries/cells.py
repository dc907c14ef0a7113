"""Made-up cells, as the benchmarks write them for all libraries to write in their formats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

#: The largest value of the first cell, by which it is known; the other ones have the next.
FIRST = 1_000


def matrix(source: Path) -> Any:  # noqa: ANN401 an array, or a sparse matrix
    """Read the cells that a library is to write."""
    import scipy.sparse as sp  # which not every library has

    with np.load(source) as parts:
        if "cells" in parts:
            return parts["cells"]
        return sp.csr_matrix((parts["data"], parts["indices"], parts["indptr"]), shape=tuple(parts["shape"]))
