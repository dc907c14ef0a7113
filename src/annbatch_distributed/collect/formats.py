"""Formats: what a file is that anndata has not written, and what to do about it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

#: A group of h5py or zarr.
type Node = Any

_NOT_THE_DATA = "not the data. Download the file again"
#: First bytes of files that aren't HDF5, in lower case, and what to do about them.
_STARTS = {
    b"\x1f\x8b": "it is compressed as a whole. Run gunzip {}",
    b"pk\x03\x04": "it is a zip archive. Run unzip {}, and pass the file or folder in it",
    b"version https://git-lfs": "it is a pointer of Git LFS, not the data. Run git lfs pull",
    b"<": f"it is a web page or XML, {_NOT_THE_DATA}",
    b"{": f"it is JSON, such as an error of a server, {_NOT_THE_DATA}",
}
_WRITE = "and pass what write_h5ad() writes"


def hint_of_path(path: Path) -> str:
    """Return what a file or folder is that can't be opened, and what to do about it; an empty string if unknown."""
    if path.is_dir():
        is_10x = any((path / f"matrix.mtx{suffix}").exists() for suffix in ("", ".gz"))
        return f"it is a folder of 10x. Read it with scanpy.read_10x_mtx(), {_WRITE}" if is_10x else ""
    with path.open("rb") as file:
        start = file.read(64).lstrip().lower()
    if not start:
        return f"it is empty, {_NOT_THE_DATA}"
    return next((hint for first, hint in _STARTS.items() if start.startswith(first)), "").format(shlex.quote(str(path)))


def hint_of_keys(group: Node) -> str:
    """Return what an HDF5 file or zarr folder without ``obs`` and ``var`` is, and what to do about it."""
    keys = {*group}
    if keys >= {"row_attrs", "col_attrs"}:
        return f"It is a loom file: read it with anndata.io.read_loom(), {_WRITE}"
    if keys & {"assays", "cell.names"}:
        return "It is an h5Seurat file: convert it in R with SeuratDisk::Convert(FILE, dest = 'h5ad')"
    # before Cell Ranger 3, one group of each genome
    if "matrix" in keys or any("barcodes" in group[key] for key in keys if hasattr(group[key], "keys")):
        return f"It is a 10x file: read it with scanpy.read_10x_h5(), {_WRITE}"
    return "Write it with anndata"
