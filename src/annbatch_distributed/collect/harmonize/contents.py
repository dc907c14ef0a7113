"""Contents: the cells, genes and labels of all files, as they will be in the collection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import numpy as np
import pandas as pd

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


def harmonized(entries: Sequence[Entry], options: Options) -> Contents:
    """Return the contents of all files; raises one error with all problems of all files."""
    problems = list[str]()
    files = _inspected(entries, options, problems)
    if not files:
        raise Problems(*problems)
    problems += _problems_of(files, options)
    with _noted(problems):
        check_kinds(files, [file.kind for file in files])
    genes, var, lines = list[pd.Index](), pd.DataFrame(), list[str]()
    with _noted(problems):
        genes, lines = named(files, options.feature_types)
        kept, about_genes = choose_genes(files, genes, options.join)
        var, about_ids = var_of(files, genes, kept)
        lines += [*about_genes, *about_ids]
    tables = [file.obs for file in files]
    replaced = [replace_labels(table, options.labels, options.na_values) for table in tables]
    with _noted(problems):
        tables, about_columns = unite(tables, [str(file.source) for file in files])
        check_groups(options.group_by, tables[0])
        lines += [*about_columns, *_unused({*chain(*replaced)}, options)]
    if problems:
        raise Problems(*problems)
    lines += _about_files(files, options)
    if options.make_unique:
        _rename(tables, short_names([file.source for file in files]))
    selections = selections_of(genes, var.index)
    matrices = [
        Matrix(file.source, file.place, (len(file.obs), len(own)), file.dtype, file.is_dense, selection)
        for file, own, selection in zip(files, genes, selections, strict=True)
    ]
    measured = pd.DataFrame({str(file.source): var.index.isin(own) for file, own in zip(files, genes, strict=True)})
    return Contents(files, Cells(matrices, _together(tables, [*measured]), var, measured), lines)


def _inspected(entries: Sequence[Entry], options: Options, problems: list[str]) -> list[File]:
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
            every = [*(options.obs or ()), *others]
            problems.append(f"{argument}: columns must be kept, got {', '.join(others)}. Pass obs={every}")
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


def _problems_of(files: Sequence[File], options: Options) -> Iterator[str]:
    known = {name for file in files for name in file.columns}
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
    names = pd.Index([]).append([file.obs.index for file in files])
    repeated = names[names.duplicated()].unique().tolist()
    if repeated and not options.make_unique:
        where = ", ".join(str(file.source) for file in files if repeated[0] in file.obs.index)
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


def _rename(tables: Sequence[pd.DataFrame], names: Sequence[str]) -> None:
    """Rename the cells of all files to ``FILE-NAME``, in place, and number names that still repeat."""
    of_files = [f"{name}-{cell}" for table, name in zip(tables, names, strict=True) for cell in table.index]
    renamed, first = unique(pd.Index(of_files, dtype=object)), 0
    for table in tables:
        table.index = renamed[first : first + len(table)]
        first += len(table)


def _together(tables: Sequence[pd.DataFrame], files: Sequence[str]) -> pd.DataFrame:
    """Return one table of the cells of all files, with the file of each."""
    obs = pd.concat(tables)
    number = np.repeat(np.arange(len(files)), [len(table) for table in tables])
    obs["src_path"] = pd.Categorical.from_codes(number, files)
    return obs
