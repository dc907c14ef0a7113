"""Genes: the genes of a collection, by the genes of all files."""

from __future__ import annotations

from collections.abc import Sequence

from annbatch_distributed.collect.parts import Part
from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.core.values import plural


def choose_genes(parts: Sequence[Part], choice: str | None) -> tuple[set[str], list[str]]:
    """Return the union or the intersection of the genes of all files, and lines about them.

    By default (None) it is the union, which must have a gene that is in all files.
    """
    genes = [set(part.genes) for part in parts]
    common, union = set.intersection(*genes), set.union(*genes)
    if not common and choice != "union":
        # a file that shares the fewest genes with the first file
        other = min(range(len(genes)), key=lambda number: len(genes[0] & genes[number]))
        first, second = (f"{parts[at].file.path} has {', '.join([*parts[at].genes[:3]])}" for at in (0, other))
        raise Problems(
            f"no gene is in all files: {first}, and {second}. Use the same kind of gene names in all files; or pass "
            "--genes union to keep all genes, with 0 for genes that a file lacks"
        )
    choice = choice or "union"
    # annbatch fills in 0 for genes that a file lacks, unless it gets a var_subset
    zeros = "; genes that a file lacks are 0 in its cells" if choice == "union" and common < union else ""
    lines = [f"genes: {len(common):,} in all files, {len(union):,} in any file; using their {choice}{zeros}"]
    smallest = min(range(len(genes)), key=lambda number: len(genes[number]))
    if len(common) < len(genes[smallest]) / 2:
        lines.append(
            f"WARNING: only {len(common):,} of the {plural(len(genes[smallest]), 'gene')} of "
            f"{parts[smallest].file.path} are in all files. Check that all files use the same kind of gene names."
        )
    return (union if choice == "union" else common), lines
