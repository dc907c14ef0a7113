"""Values of files, read in blocks of rows."""

from __future__ import annotations

from collections import Counter
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed.collect import matrices
from annbatch_distributed.collect.matrices import Kind, dtype_of, kind_of, sampled, values_at
from annbatch_distributed.collect.write import blocks as module
from annbatch_distributed.collect.write.blocks import blocks_of, read_blocks

FORMS: dict[str, Any] = {"csr": sp.csr_matrix, "csc": sp.csc_matrix, "dense": lambda matrix: matrix}


def matrix(n_rows: int, n_columns: int, share: float, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return (rng.random((n_rows, n_columns)) < share) * rng.integers(1, 9, (n_rows, n_columns)).astype(np.float32)


@given(
    form=st.sampled_from([*FORMS]),
    n_rows=st.integers(1, 30),
    n_columns=st.integers(1, 8),
    share=st.sampled_from([0, 0.1, 0.6, 1]),
    n_bytes=st.integers(1, 400),
    seed=st.integers(0, 3),
)
def test_blocks_have_every_row_once(
    form: str, n_rows: int, n_columns: int, share: float, n_bytes: int, seed: int
) -> None:
    """The blocks of a matrix in any layout are the matrix, and a block of several rows keeps to its size."""
    whole = matrix(n_rows, n_columns, share, seed)
    group = zarr.open_group({}, mode="w")
    ad.io.write_elem(group, "X", FORMS[form](whole))
    values = values_at(group, "X")
    blocks = blocks_of(values, n_bytes)
    assert [stop for _, stop in blocks[:-1]] == [start for start, _ in blocks[1:]]
    assert (blocks[0][0], blocks[-1][1]) == (0, n_rows)
    with TemporaryDirectory() as folder:
        parts = [*read_blocks(values, blocks, Path(folder) / "scratch")]
    np.testing.assert_array_equal(np.vstack([part.toarray() for part in parts]), whole)
    assert all(part.has_canonical_format for part in parts)
    if form != "dense":  # values and indices of 4 bytes, at least one of each, and entries of columns are held twice
        assert all(
            stop == start + 1 or part.nnz <= max(1, n_bytes // (8 if form == "csr" else 16))
            for (start, stop), part in zip(blocks, parts, strict=True)
        )
    else:
        assert all(stop - start <= max(1, n_bytes // (4 * n_columns)) for start, stop in blocks)


@pytest.mark.parametrize(
    ("stored", "dtype"), [(">f4", "f4"), (">f8", "f8"), (">i2", "i2"), (">u4", "u4"), (">f2", "f4"), ("f2", "f4")]
)
def test_values_of_any_byte_order_are_read(stored: str, dtype: str, tmp_path: Path) -> None:
    """Values of each dtype that files have are read in one that SciPy and PyTorch have sparse matrices of."""
    whole = matrix(9, 5, 0.5, 0)
    with h5py.File(BytesIO(), "w") as file:
        for form, of_form in FORMS.items():
            ad.io.write_elem(file, form, of_form(whole))
            place = form if form == "dense" else f"{form}/data"
            values, attributes = file[place][:].astype(stored), dict(file[place].attrs)
            del file[place]
            file.create_dataset(place, data=values).attrs.update(attributes)
            file["X"] = file[form]
            values = values_at(file, "X")
            (block,) = read_blocks(values, [(0, 9)], tmp_path)
            del file["X"]
            assert block.dtype.str == np.dtype(dtype).str
            assert dtype_of(sampled(values).dtype) == block.dtype
            np.testing.assert_array_equal(block.toarray(), whole)


def test_columns_are_read_twice_whatever_the_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows of a matrix in columns are the same however many entries are read at a time, and for however many blocks.

    Its rows are read to find the blocks, and its entries to fill them.
    """
    whole = matrix(20, 7, 0.5, 0)
    group = zarr.open_group({}, mode="w")
    ad.io.write_elem(group, "X", sp.csc_matrix(whole))
    values = values_at(group, "X")
    read: Counter[str] = Counter()
    pieces, of_data = module._pieces, module._read
    monkeypatch.setattr(module, "_pieces", lambda *own: [(read.update(["rows"]), piece)[1] for piece in pieces(*own)])
    monkeypatch.setattr(module, "_read", lambda *own: (read.update(["data"]), of_data(*own))[1])
    for n_entries, n_bytes in ((1, 40), (3, 200), (1_000, 600)):
        monkeypatch.setattr(module, "_N_ENTRIES", n_entries)
        read.clear()
        blocks = blocks_of(values, n_bytes)
        assert len(blocks) > 1
        rows = [block.toarray() for block in read_blocks(values, blocks, tmp_path / "scratch")]
        np.testing.assert_array_equal(np.vstack(rows), whole)
        n_pieces = -(-np.count_nonzero(whole) // n_entries)
        assert read == {"rows": 2 * n_pieces, "data": n_pieces}
    assert not [*tmp_path.iterdir()]
    # some blocks, as after an interruption, which has left a file
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "0").write_bytes(bytes(12))
    monkeypatch.setattr(module, "_N_ENTRIES", 7)
    rows = [block.toarray() for block in read_blocks(values, [(2, 5), (5, 6), (11, 14)], tmp_path / "scratch")]
    np.testing.assert_array_equal(np.vstack(rows), whole[[2, 3, 4, 5, 11, 12, 13]])


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0, 0], None),
        ([0, 3], Kind.COUNTS),
        ([0.0, 3.0], Kind.COUNTS),
        ([True, False], Kind.COUNTS),
        ([0.5, 3], Kind.NONNEGATIVE),
        ([np.nan, 3], Kind.NONNEGATIVE),
        ([np.inf, 3], Kind.NONNEGATIVE),
        ([-1, 3], Kind.NEGATIVE),
        ([-0.5, np.nan], Kind.NEGATIVE),
    ],
)
def test_kind_of_values(values: list[Any], kind: Kind | None) -> None:
    """Counts are integers from 0; a negative value is no count, even if it is an integer."""
    assert kind_of(np.array(values)) == kind


def test_values_are_sampled_from_the_whole_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "_N_SAMPLED", 10)
    group = zarr.open_group({}, mode="w")
    for name in ("csr", "dense"):
        for place in (0, 50, 99):
            whole = np.ones((100, 2), dtype=np.float32)
            whole[place] = -1
            ad.io.write_elem(group, "X", FORMS[name](whole))
            some = sampled(values_at(group, "X"))
            assert (some < 0).any()
            assert len(some) <= 30


def test_damaged_matrix_is_refused(tmp_path: Path) -> None:
    """A matrix whose indices are beyond its genes is an error, not other values."""
    with h5py.File(tmp_path / "cells.h5", "w") as file:
        ad.io.write_elem(file, "X", sp.csr_matrix(matrix(4, 5, 1, 0)))
        file["X/indices"][2] = 7
        with pytest.raises(ValueError, match="indices"):
            list(read_blocks(values_at(file, "X"), [(0, 4)], tmp_path))
