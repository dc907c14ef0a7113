"""Writing: the steps from h5ad files to a collection of shuffled cells with the file of each cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

import anndata as ad
import numpy as np
import pandas as pd
import zarr
from annbatch import DatasetCollection

from annbatch_distributed.collect.files import File, inspect_files
from annbatch_distributed.collect.folders import reserved, temporary_folder
from annbatch_distributed.collect.genes import choose_genes
from annbatch_distributed.collect.labels import check_groups, unite
from annbatch_distributed.collect.parts import Part, check_counts, write_part
from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.core.values import plural


def write_collection(
    paths: Sequence[Path],
    out: Path,
    *,
    layer: str | None = None,
    join: str | None = None,
    columns: Sequence[str] | None = None,
    na_values: Sequence[str] = (),
    make_unique: bool = False,
    group_by: Sequence[str] | None = None,
    memory: str = "4GB",
    seed: int = 0,
    tell: Callable[..., object],
) -> None:
    """Write one shuffled collection of h5ad files.

    Parameters
    ----------
    paths
        Paths of the files.
    out
        Local path of the new collection, which must not exist.
    layer
        Layer with the counts, or ``"raw"`` for ``.raw``. Files without it use ``X``, the default.
    join
        ``"outer"`` to keep the genes of any file, ``"inner"`` to keep the shared genes (default: ``"outer"``, if all
        files share a gene).
    columns
        Columns of ``obs`` to keep (default: all).
    na_values
        Strings in ``obs`` to replace by missing values.
    make_unique
        Rename cells to ``FILE-NAME``, and number repeated names of genes.
    group_by
        Columns of labels by which annbatch sorts the cells of each dataset.
    memory
        Memory limit for the cells that are shuffled at a time, such as ``"20GB"``.
    seed
        Seed of the order of the cells.
    tell
        Function like ``print`` that gets each line about the files, genes and columns.

    Raises
    ------
    Problems
        If the files or arguments can't be collected. Nothing was written to ``out``.
    OSError
        If a file can't be written, as on a full disk. Nothing was written to ``out``.
    """
    with reserved(out):
        files = inspect_files(paths, layer=layer, columns=columns, make_unique=make_unique, group_by=group_by)
        with temporary_folder(out) as folder:
            parts = list[Part]()
            # one by one, so that a single file is in memory
            for number, file in enumerate(files):
                path = folder / f"{number}.zarr"
                part = write_part(
                    path, file, layer=layer, columns=columns, na_values=na_values, make_unique=make_unique
                )
                tell(part.summary, flush=True)
                parts.append(part)
            check_counts(parts)
            kept_genes, about_genes = choose_genes(parts, join)
            for line in [*about_genes, *_not_collected(files)]:
                tell(line)
            tables, about_columns = unite([part.obs for part in parts])
            unused = {*na_values}.difference(*(part.no_labels for part in parts))
            about_missing = [f"--na-values: no cell has {value!r}" for value in sorted(unused)]
            for line in [*about_columns, *about_missing]:
                tell(line)
            check_groups(group_by, tables[0])

            unfinished = folder / "cells.zarr"
            collection = _shuffled(
                unfinished,
                {str(part.path): table for part, table in zip(parts, tables, strict=True)},
                genes=sorted(kept_genes) if join == "inner" else None,
                group_by=group_by,
                memory=memory,
                seed=seed,
            )
            _write_sources(collection, parts)
            unfinished.rename(out)  # replaces the empty folder
    n_cells = sum(map(len, tables))
    tell(f"{out}: {plural(n_cells, 'cell')} of {plural(len(files), 'file')}, {plural(len(kept_genes), 'gene')}")


def _not_collected(files: Sequence[File]) -> Iterator[str]:
    """Yield a line about the parts of files that are not collected, if there are any."""
    if others := Counter(chain.from_iterable(file.others for file in files)):
        parts = (f"{name} ({plural(n_files, 'file')})" for name, n_files in sorted(others.items()))
        yield f"not collected: {', '.join(parts)}"


def _shuffled(
    path: Path,
    obs: Mapping[str, pd.DataFrame],
    *,
    genes: Sequence[str] | None,
    group_by: Sequence[str] | None,
    memory: str,
    seed: int,
) -> DatasetCollection:
    """Return a new collection of the cells of all parts, in random order; ``obs`` maps paths of parts to tables."""

    def load(path: Any) -> ad.AnnData:  # noqa: ANN401 a path
        # values stay on disk
        lazy = ad.experimental.read_lazy(path)
        return ad.AnnData(lazy.X, obs=obs[str(path)], var=lazy.var.to_memory()[[]])

    collection = DatasetCollection(path)
    try:
        collection.add_adatas(
            [*obs],
            load_adata=load,
            var_subset=genes,
            groupby=group_by,
            dataset_size=memory,
            rng=np.random.default_rng(seed),
        )
    except ValueError as error:
        raise Problems(f"annbatch can't write the cells under --memory {memory}: {error}") from error
    return collection


def _write_sources(collection: DatasetCollection, parts: Sequence[Part]) -> None:
    """Write the file of each cell, and the genes of each file.

    ``obs["src_path"]``, where annbatch writes the path of a part, gets the path of the h5ad file. ``varm["measured"]``
    has shape ``(n_genes, n_files)``.
    """
    files = [str(part.file.path) for part in parts]
    for group in collection:
        var: Any = ad.io.read_elem(cast("Any", group["var"]))
        varm: Any = group.require_group("varm")
        ad.io.write_elem(varm, "measured", np.stack([var.index.isin(part.genes) for part in parts], axis=1))
        varm["measured"].attrs["files"] = files
        # annbatch has written the path of the part, .../cells.zarr.x1y2/3.zarr; file 3 is /data/pbmc.h5ad, say
        column: Any = group["obs/src_path"]
        part_paths: Any = ad.io.read_elem(column["categories"])
        file_paths = [files[int(Path(path).stem)] for path in part_paths]
        ad.io.write_elem(column, "categories", np.array(file_paths, dtype=object))
        zarr.consolidate_metadata(group.store, path=group.path)
