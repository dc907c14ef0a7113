"""Genes: the genes of a collection, by the genes of all files."""

from __future__ import annotations

from collections.abc import Sequence

from annbatch_distributed.collect.parts import Part
from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.core.values import plural


def choose_genes(parts: Sequence[Part], join: str | None) -> tuple[set[str], list[str]]:
    """Return all genes of the files (``"outer"``) or the shared ones (``"inner"``), and lines about them.

    None means ``"outer"`` if all files share a gene, and raises otherwise.
    """
    genes = [set(part.genes) for part in parts]
    common, union = set.intersection(*genes), set.union(*genes)
    if not common and join != "outer":
        # a file that shares the fewest genes with the first file
        other = min(range(len(genes)), key=lambda number: len(genes[0] & genes[number]))
        first, second = (f"{parts[at].file.path} has {', '.join([*parts[at].genes[:3]])}" for at in (0, other))
        raise Problems(
            f"no gene is in all files: {first}, and {second}. Use the same kind of gene names in all files; or pass "
            "--join outer to keep all genes, with 0 for genes that a file lacks"
        )
    join = join or "outer"
    # annbatch fills in 0 for genes that a file lacks, unless it gets a var_subset
    zeros = "; genes that a file lacks are 0 in its cells" if join == "outer" and common < union else ""
    used = "the genes of any file" if join == "outer" else "the shared genes"
    lines = [f"genes: {len(common):,} in all files, {len(union):,} in any file; using {used}{zeros}"]
    smallest = min(range(len(genes)), key=lambda number: len(genes[number]))
    if len(common) < len(genes[smallest]) / 2:
        lines.append(
            f"WARNING: only {len(common):,} of the {plural(len(genes[smallest]), 'gene')} of "
            f"{parts[smallest].file.path} are in all files. Check that all files use the same kind of gene names."
        )
    return (union if join == "outer" else common), lines
