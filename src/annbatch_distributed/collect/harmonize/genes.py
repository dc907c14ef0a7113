"""Genes: the genes of a collection, by the genes of all files.

A gene is its name. Genes of a file that have the same name are told apart by their ``gene_ids``, in all files that have
this name, because their order may differ between files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from annbatch_distributed.collect.harmonize.entries import unique
from annbatch_distributed.collect.harmonize.files import File
from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.core.values import few, plural

#: Column of ``var`` with the ids of genes, as scanpy writes it.
_IDS = "gene_ids"
#: Column of ``var`` with the types of features, such as "Gene Expression" and "Antibody Capture".
_TYPES = "feature_types"
#: Column of ``var`` with the genome of each gene.
_GENOMES = "genome"
#: Largest number of examples in a line.
_MOST_EXAMPLES = 3


def named(files: Sequence[File], feature_types: Sequence[str] | None) -> tuple[list[pd.Index[Any]], list[str]]:
    """Return a unique name for each gene of each file, None for those that are left out, and lines about them."""
    lines = [*_about_types(files, feature_types)]
    names = [_chosen(file.var, feature_types) for file in files]
    repeated = {*chain.from_iterable(own[own.notna() & own.duplicated()] for own in names)}
    n_files = Counter(chain.from_iterable(repeated & {*own} for own in names))
    keys, problems = list[Any](), list[str]()
    for file, own in zip(files, names, strict=True):
        own_keys, unclear = _keys(own, file.var.get(_IDS), n_files)
        keys.append(own_keys)
        if unclear:
            problems.append(
                f"{file.source}: {plural(len(unclear), 'gene name')} of several genes, such as "
                f"{few(unclear, _MOST_EXAMPLES)}, and nothing in var tells these apart. Add a column {_IDS} to var of "
                "all files; or, if all files have these genes in the same order, run var_names_make_unique() on each"
            )
    if problems:
        raise Problems(*problems)
    if repeated:
        lines.append(
            f"WARNING: {plural(len(repeated), 'gene name')} of several genes "
            f"({few(sorted(repeated), _MOST_EXAMPLES)}), which are numbered, such as {min(repeated)} and "
            f"{min(repeated)}-1"
        )
    # in the order of the files, where each gene is first
    every = [*dict.fromkeys(chain.from_iterable(own.dropna() for own in keys))]
    name_of = dict(zip(every, unique(pd.Index([key.split("\t")[0] for key in every], dtype=object)), strict=True))
    return [pd.Index(own.map(name_of), dtype=object) for own in keys], lines


def _chosen(var: pd.DataFrame, feature_types: Sequence[str] | None) -> pd.Series[Any]:
    """Return the names of the genes of a file, missing for those that are left out."""
    names = pd.Series(var.index, dtype=object)
    if feature_types is None or _TYPES not in var:
        return names
    return names.where(var[_TYPES].isin([*feature_types]).to_numpy())


def _keys(names: pd.Series[Any], ids: pd.Series[Any] | None, n_files: Counter[str]) -> tuple[pd.Series[Any], list[str]]:
    """Return what tells each gene apart in all files, and the names of genes for which there is nothing.

    ``n_files`` is the number of files that have each repeated name.
    """
    is_repeated = names.isin([*n_files])
    ids = pd.Series(None, names.index, dtype=object) if ids is None else ids.reset_index(drop=True)
    # TBCE, ENSG1 is TBCE\tENSG1 if a file has TBCE twice
    keys = names.where(~is_repeated, names + "\t" + ids)
    is_unclear = is_repeated & (keys.isna() | keys.duplicated(keep=False))
    # their places tell genes apart whose name no other file has
    is_own = is_unclear & (names.map(n_files) == 1)
    places = "\t\t" + pd.Series(range(len(names)), names.index).astype(str)
    return keys.where(~is_own, names + places), sorted({*names[is_unclear & ~is_own]})


def _about_types(files: Sequence[File], feature_types: Sequence[str] | None) -> Iterator[str]:
    """Yield lines about features that aren't genes, and genes of several genomes; raises Problems if none is left."""
    types, genomes = (_counts(files, column) for column in (_TYPES, _GENOMES))
    if feature_types is None and len(types) > 1:
        yield (
            f"WARNING: the files have features of several types, {_listed(types)}, and all are collected as genes. To "
            f"choose, pass feature_types={[max(types, key=lambda name: types[name])]}"
        )
    elif feature_types is not None:
        if missing := [name for name in feature_types if name not in types]:
            known = _listed(types) or f"no column {_TYPES} in var"
            raise Problems(f"feature_types: no file has {few(missing, _MOST_EXAMPLES)}. They have {known}")
        yield f"feature types: using {few([*feature_types], _MOST_EXAMPLES)} of {_listed(types)}"
        if lacking := [str(file.source) for file in files if _TYPES not in file.var]:
            yield f"WARNING: no column {_TYPES} in var of {few(lacking, 5)}: all features of these files are kept"
    if len(genomes) > 1:
        yield f"WARNING: the files have genes of several genomes, {_listed(genomes)}, and all are collected"


def _counts(files: Sequence[File], column: str) -> dict[str, int]:
    """Return the number of genes with each value of a column of ``var``, in the file that has most of them."""
    most = dict[str, int]()
    for file in files:
        for value, n_genes in Counter(file.var.get(column, pd.Series(dtype=object)).dropna()).items():
            most[value] = max(most.get(value, 0), n_genes)
    return most


def _listed(counts: dict[str, int]) -> str:
    return few([f"{name} ({n_genes:,})" for name, n_genes in sorted(counts.items())], 10)


def choose_genes(
    files: Sequence[File], genes_of: Sequence[pd.Index[Any]], join: str | None
) -> tuple[list[str], list[str]]:
    """Return all genes of the files (``"outer"``) or the shared ones (``"inner"``), and lines about them.

    None means ``"outer"`` if all files share a gene, and raises otherwise.
    """
    genes = [set(own.dropna()) for own in genes_of]
    common, union = set.intersection(*genes), set.union(*genes)
    if not common and join != "outer":
        if len(genes) == 1:
            raise Problems(f"{files[0].source}: has no genes. Leave it out")
        # a file that shares the fewest genes with the first file
        other = min(range(1, len(genes)), key=lambda number: len(genes[0] & genes[number]))
        first, second = (f"{files[at].source} has {few([*genes_of[at].dropna()], 3) or 'none'}" for at in (0, other))
        raise Problems(
            f"no gene is in all files: {first}, and {second}. Use the same kind of gene names in all files; or pass "
            "join='outer' to keep all genes, with 0 for genes that a file lacks"
        )
    join = join or "outer"
    zeros = "; genes that a file lacks are 0 in its cells" if join == "outer" and common < union else ""
    used = "the genes of any file" if join == "outer" else "the shared genes"
    lines = [f"genes: {len(common):,} in all files, {len(union):,} in any file; using {used}{zeros}"]
    smallest = min(range(len(genes)), key=lambda number: len(genes[number]))
    if len(common) < len(genes[smallest]) / 2:
        lines.append(
            f"WARNING: only {len(common):,} of the {plural(len(genes[smallest]), 'gene')} of "
            f"{files[smallest].source} are in all files. Check that all files use the same kind of gene names."
        )
    kept = union if join == "outer" else common
    # in the order of the files, where each gene is first
    return [gene for gene in dict.fromkeys(chain(*genes_of)) if gene in kept], lines


def var_of(
    files: Sequence[File], genes_of: Sequence[pd.Index[Any]], kept: Sequence[str]
) -> tuple[pd.DataFrame, list[str]]:
    """Return ``var`` of the kept genes, with the columns that agree in all files, and lines about gene ids."""
    # files that share var have the same genes
    tables = {id(file.var): (file.var, genes) for file, genes in zip(files, genes_of, strict=True)}.values()
    columns, lines = dict[str, Any](), list[str]()
    for name in dict.fromkeys(chain.from_iterable(var for var, _ in tables)):
        values, different = pd.Series(dtype=object), dict[str, str]()
        for var, genes in tables:
            if name in var:
                own = pd.Series(var[name].to_numpy(), genes)[genes.notna()].dropna()
                known = values.reindex(own.index)
                others = own.index[known.notna() & (known != own)]
                different |= {gene: f"{gene} ({known[gene]}, {own[gene]})" for gene in others}
                values = pd.concat([values, own[known.isna()]])
        if different and name == _IDS:
            lines.append(
                f"WARNING: {plural(len(different), 'gene name')} with different {_IDS} in different files, and one "
                f"column in the collection: {few([*different.values()], _MOST_EXAMPLES)}. If these are different "
                "genes, rename them in one of the files"
            )
        own = values.reindex(kept).dropna()
        if name == _IDS and (several := own[own.duplicated(keep=False)]).size:
            names = few([f"{gene} ({one})" for gene, one in several.items()], 2 * _MOST_EXAMPLES)
            lines.append(
                f"WARNING: genes with the same {_IDS} and different names, which have columns of their own: {names}"
            )
        if not different and all(name in var for var, _ in tables):
            columns[name] = values.reindex(kept).to_numpy()
    return pd.DataFrame(columns, index=pd.Index(kept, dtype=object)), lines


def selections_of(genes_of: Sequence[pd.Index[Any]], kept: pd.Index[Any]) -> list[sp.csr_matrix]:
    """Return, for each file, the matrix by which its rows are multiplied to have the kept genes.

    >>> selections_of([pd.Index(["b", None, "a"])], pd.Index(["a", "b"]))[
    ...     0
    ... ].toarray().astype(int).tolist()
    [[0, 1], [0, 0], [1, 0]]
    """
    # files with the same genes share one
    selections: dict[tuple[str, ...], sp.csr_matrix] = {}
    for genes in {tuple(own) for own in genes_of}:
        places = kept.get_indexer(pd.Index(genes, dtype=object))
        own = np.flatnonzero(places >= 0)
        shape = len(genes), len(kept)
        selections[genes] = sp.csr_matrix((np.ones(len(own), np.bool_), (own, places[own])), shape=shape)
    return [selections[tuple(own)] for own in genes_of]
