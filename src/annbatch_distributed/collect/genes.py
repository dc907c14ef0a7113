"""Genes: the genes of a collection, by the genes of all files."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pandas as pd

from annbatch_distributed.collect.entries import unique
from annbatch_distributed.collect.files import File
from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.core.values import few, plural


def numbered(files: Sequence[File]) -> tuple[list[pd.Index[Any]], list[str]]:
    """Return the genes of each file, of which repeated ones are numbered as by anndata, and lines about these."""
    genes: list[pd.Index[Any]] = []
    lines: list[str] = []
    for file in files:
        repeated = [*file.genes[file.genes.duplicated()].unique()]
        if repeated:
            lines.append(
                f"WARNING: {file.entry}: {plural(len(repeated), 'gene name')} repeated ({few(repeated, 3)}), and are "
                f"numbered, such as {repeated[0]} and {repeated[0]}-1"
            )
        genes.append(unique(file.genes))
    return genes, lines


def choose_genes(
    files: Sequence[File], genes_of: Sequence[pd.Index[Any]], join: str | None
) -> tuple[list[str], list[str]]:
    """Return all genes of the files (``"outer"``) or the shared ones (``"inner"``), and lines about them.

    None means ``"outer"`` if all files share a gene, and raises otherwise.
    """
    genes = [set(own) for own in genes_of]
    common, union = set.intersection(*genes), set.union(*genes)
    if not common and join != "outer":
        if len(genes) == 1:
            raise Problems(f"{files[0].entry}: has no genes. Leave it out")
        # a file that shares the fewest genes with the first file
        other = min(range(1, len(genes)), key=lambda number: len(genes[0] & genes[number]))
        first, second = (f"{files[at].entry} has {few([*genes_of[at]], 3) or 'none'}" for at in (0, other))
        raise Problems(
            f"no gene is in all files: {first}, and {second}. Use the same kind of gene names in all files; or pass "
            "--join outer to keep all genes, with 0 for genes that a file lacks"
        )
    join = join or "outer"
    zeros = "; genes that a file lacks are 0 in its cells" if join == "outer" and common < union else ""
    used = "the genes of any file" if join == "outer" else "the shared genes"
    lines = [f"genes: {len(common):,} in all files, {len(union):,} in any file; using {used}{zeros}"]
    smallest = min(range(len(genes)), key=lambda number: len(genes[number]))
    if len(common) < len(genes[smallest]) / 2:
        lines.append(
            f"WARNING: only {len(common):,} of the {plural(len(genes[smallest]), 'gene')} of "
            f"{files[smallest].entry} are in all files. Check that all files use the same kind of gene names."
        )
    kept = union if join == "outer" else common
    # in the order of the files, where each gene is first
    return [gene for gene in dict.fromkeys(chain(*genes_of)) if gene in kept], lines
