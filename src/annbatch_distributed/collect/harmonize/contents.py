"""Contents: the cells, genes and labels of all files, as they will be in the collection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from annbatch_distributed.collect.harmonize.base import Base, check_genes, in_dtypes_of
from annbatch_distributed.collect.harmonize.entries import Entry, short_names, unique
from annbatch_distributed.collect.harmonize.files import File, inspected
from annbatch_distributed.collect.harmonize.genes import choose_genes, named, selections_of, var_of
from annbatch_distributed.collect.harmonize.labels import check_groups, replace_labels, unite
from annbatch_distributed.collect.matrices import Cells, Kind, Matrix
from annbatch_distributed.collect.options import Options
from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.core.values import digest, few, plural


class Contents(NamedTuple):
    """Files, and their cells, labels and genes as they will be in the collection."""

    files: list[File]
    cells: Cells
    lines: list[str]
    """Lines about genes and columns."""


def harmonized(entries: Sequence[Entry], options: Options, base: Base | None = None) -> Contents:
    """Return the contents of all files; raises one error with all problems of all files.

    ``base`` is a collection to which the files are added: they get its genes, and its columns of ``obs``.
    """
    problems = list[str]()
    if base is not None:
        options = replace(options, obs=[*base.labels])
        twice = [str(entry) for entry in entries if str(entry) in base.files]
        problems += [f"{file}: is in {base.file.source} already. Leave it out" for file in twice]
    files = _inspected(entries, options, problems, base)
    if not files:
        raise Problems(*problems)
    # the collection is the first of the files
    every = files if base is None else [base.file, *files]
    problems += _problems_of(files, every, options)
    with _noted(problems):
        check_kinds(every, [file.kind for file in every])
    genes, var, lines = _genes(files, base, options, problems)
    tables, about_labels = _labels(files, base, options, problems)
    if problems:
        raise Problems(*problems)
    lines += [*about_labels, *_about_files(files, options)]
    if options.make_unique:
        _rename(tables, short_names([file.source for file in files]), [] if base is None else base.file.obs.index)
    matrices = [
        Matrix(file.source, file.place, (len(file.obs), len(own)), file.dtype, file.is_dense, selection)
        for file, own, selection in zip(files, genes, selections_of(genes, var.index), strict=True)
    ]
    measured = pd.DataFrame({str(file.source): var.index.isin(own) for file, own in zip(files, genes, strict=True)})
    obs = _together(tables, [*measured], [] if base is None else base.files)
    return Contents(every, Cells(matrices, obs, var, measured), lines)


def _genes(
    files: Sequence[File], base: Base | None, options: Options, problems: list[str]
) -> tuple[list[pd.Index[Any]], pd.DataFrame, list[str]]:
    """Return the names of the genes of each file, ``var`` of the collection, and lines; add problems to a list."""
    genes: list[pd.Index[Any]] = []
    var, lines = pd.DataFrame(), list[str]()
    with _noted(problems):
        if base is not None:
            (_, *genes), lines = named([base.file, *files], options.feature_types)
            var = base.var
            lines.append(check_genes(base, files, genes, options.join))
        else:
            genes, lines = named(files, options.feature_types)
            kept, about_genes = choose_genes(files, genes, options.join)
            var, about_ids = var_of(files, genes, kept)
            lines += [*about_genes, *about_ids]
    return genes, var, lines


def _labels(
    files: Sequence[File], base: Base | None, options: Options, problems: list[str]
) -> tuple[list[pd.DataFrame], list[str]]:
    """Return ``obs`` of each file in the dtypes of the collection, and lines; add problems to a list."""
    tables, lines = [file.obs for file in files], list[str]()
    replaced = [replace_labels(table, options.labels, options.na_values) for table in tables]
    with _noted(problems):
        names = [str(file.source) for file in files]
        if base is not None:
            tables, lines = unite([base.labels, *tables], [str(base.file.source), *names], is_fixed=True)
            _, *tables = in_dtypes_of(base, tables)
        else:
            tables, lines = unite(tables, names)
        check_groups(options.group_by, tables[0])
        lines += _unused({*chain(*replaced)}, options)
    return tables, lines


def _inspected(entries: Sequence[Entry], options: Options, problems: list[str], base: Base | None) -> list[File]:
    """Return the contents of the files that can be read, and add problems to a list."""
    files, tables_of_genes = list[File](), dict[str, pd.DataFrame]()
    kept = None
    if options.obs is not None:
        # obs chooses columns of the files; what a user has written into a sample sheet is kept
        kept = [*options.obs, *chain.from_iterable(entry.labels for entry in entries)]
    for entry in entries:
        with _noted(problems):
            file = inspected(entry, columns=kept, rename=options.rename)
            # thousands of files have the same genes, and share one table of them
            files.append(file._replace(var=tables_of_genes.setdefault(_digest_of(file.var), file.var)))
    for argument, columns in (("group_by", options.group_by or ()), ("labels", options.labels)):
        if kept is not None and (others := [name for name in columns if name not in kept]):
            hint = f"Pass obs={[*(options.obs or ()), *others]}"
            if base is not None:  # obs can't be chosen then
                hint = f"{base.file.source} has {few([*base.labels], 20) or 'none'}"
            problems.append(f"{argument}: columns must be kept, got {', '.join(others)}. {hint}")
    return files


def _digest_of(var: pd.DataFrame) -> str:
    """Return a digest of the names and labels of genes."""
    return digest(repr([*var]), pd.util.hash_pandas_object(var, categorize=False).to_numpy())


@contextmanager
def _noted(problems: list[str]) -> Iterator[None]:
    """Add raised problems to a list."""
    try:
        yield
    except Problems as error:
        problems += error.args


def _problems_of(files: Sequence[File], every: Sequence[File], options: Options) -> Iterator[str]:
    """Yield problems of files; ``every`` also has the collection to which they are added."""
    known = {name for file in every for name in file.columns}
    renamed = {name for file in files for name in file.renamed}
    for argument, missing in (
        ("obs", [name for name in options.obs or () if name not in known]),
        ("labels", [name for name in options.labels if name not in known and not options.obs]),
        ("rename", [name for name in options.rename if name not in renamed]),
    ):
        if missing:
            yield f"{argument}: no file has columns {', '.join(missing)}. They have {few(sorted(known), 20)}"
    if not sum(len(file.obs) for file in files):
        yield "the files have no cells"
    names = pd.Index([]).append([file.obs.index for file in every])
    repeated = names[names.duplicated()].unique().tolist()
    if repeated and not options.make_unique:
        where = ", ".join(str(file.source) for file in every if repeated[0] in file.obs.index)
        yield (
            f"{plural(len(repeated), 'cell name')} repeated, such as {repeated[0]} in {where}. If these are "
            "different cells, pass make_unique=True; otherwise remove the duplicates"
        )


def check_kinds(files: Sequence[File], kinds: Sequence[Kind | None]) -> None:
    """Raise if files have different kinds of values, as a model would train on normalized values as counts."""
    texts = list[str]()
    for kind in Kind:
        of_kind = [f"{file.source} ({file.place})" for file, own in zip(files, kinds, strict=True) if own is kind]
        texts += [f"{kind.described} in {few(of_kind, 5)}"] if of_kind else []
    if len(texts) > 1:
        others = sorted({one.removeprefix("layer ") for file in files for one in file.others if "obsm " not in one})
        hint = f" The files also have {few(others, 10)}." if others else ""
        raise Problems(
            f"all files must have the same kind of values, got {'; '.join(texts)}.{hint} Pass the places of the "
            "counts, in order, as in layer=['counts', 'raw', 'X']; name the place of each file in a sample sheet; or "
            "leave files out"
        )


def _about_files(files: Sequence[File], options: Options) -> Iterator[str]:
    """Yield lines about columns that files lack or a sheet replaces, and about what isn't collected."""
    for name in options.obs or ():
        # all cells of these files lose it
        if lacking := [str(file.source) for file in files if name not in file.columns]:
            yield (
                f"WARNING: no column {name} in {few(lacking, 5)}. If it has a different name there, pass "
                f"rename={ {'NAME': name} }"
            )
    for name, n_files in Counter(chain.from_iterable(file.replaced for file in files)).items():
        yield f"{name}: from the sample sheet, not from obs, in {plural(n_files, 'file')}"
    if others := Counter(chain.from_iterable(file.others for file in files)):
        texts = (f"{name} ({plural(n_files, 'file')})" for name, n_files in sorted(others.items()))
        yield f"not collected: {', '.join(texts)}"


def _unused(replaced: set[tuple[str, str]], options: Options) -> Iterator[str]:
    """Yield a warning for each label to replace that no cell has, as it may be misspelled."""
    for value in options.na_values:
        if ("", value) not in replaced:
            yield f"WARNING: na_values: no cell has {value!r}"
    for column, spellings in options.labels.items():
        unused = [old for old in spellings if (column, old) not in replaced]
        yield from (f"WARNING: labels: no cell has {old!r} in {column}" for old in unused)


def _rename(tables: Sequence[pd.DataFrame], names: Sequence[str], taken: Sequence[str]) -> None:
    """Rename the cells of all files to ``FILE-NAME``, in place, and number names that still repeat, or are taken."""
    of_files = [f"{name}-{cell}" for table, name in zip(tables, names, strict=True) for cell in table.index]
    renamed, first = unique(pd.Index([*taken, *of_files], dtype=object)), len(taken)
    for table in tables:
        table.index = renamed[first : first + len(table)]
        first += len(table)


def _together(tables: Sequence[pd.DataFrame], files: Sequence[str], before: Sequence[str]) -> pd.DataFrame:
    """Return one table of the cells of all files, with the file of each, after files of cells that it doesn't have."""
    obs = pd.concat(tables)
    number = np.repeat(np.arange(len(files)), [len(table) for table in tables])
    obs["src_path"] = pd.Categorical.from_codes(len(before) + number, [*before, *files])
    return obs
