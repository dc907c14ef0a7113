"""Contents: the cells, genes and labels of all files, as they will be in the collection."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import pandas as pd

from annbatch_distributed.collect.entries import Entry, short_names, unique
from annbatch_distributed.collect.files import File, inspected
from annbatch_distributed.collect.genes import choose_genes, named, var_of
from annbatch_distributed.collect.labels import Spellings, check_groups, replace_labels, unite
from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.collect.values import Kind
from annbatch_distributed.core.values import digest, few, plural


class Options(NamedTuple):
    """Arguments of :func:`.collect` about names and labels."""

    obs: Sequence[str] | None
    rename: Mapping[str, str]
    labels: Spellings
    na_values: Sequence[str]
    make_unique: bool
    group_by: Sequence[str] | None
    join: str | None
    feature_types: Sequence[str] | None


class Contents(NamedTuple):
    """Files, with their cells, labels and genes as they will be in the collection."""

    files: list[File]
    obs: list[pd.DataFrame]
    """Names and labels of the cells of each file."""
    genes: list[pd.Index[Any]]
    """Names of the genes of each file, as in ``var``; None for genes that are left out."""
    var: pd.DataFrame
    """Names and labels of the genes of the collection."""
    lines: list[str]
    """Lines about genes and columns."""


def inspect(entries: Sequence[Entry], options: Options) -> Contents:
    """Return the contents of all files; raises one error with all problems of all files."""
    files, problems = list[File](), list[str]()
    tables_of_genes = dict[str, pd.DataFrame]()
    # --obs chooses columns of the files; what a user has written into a sample sheet is kept
    of_sheet = [*chain.from_iterable(entry.labels for entry in entries)]
    kept = None if options.obs is None else [*options.obs, *of_sheet]
    for entry in entries:
        with _noted(problems):
            file = inspected(entry, columns=kept, rename=options.rename)
            # thousands of files have the same genes, and share one table of them
            files.append(file._replace(var=tables_of_genes.setdefault(_digest_of(file.var), file.var)))
    for option, columns in (("--group-by", options.group_by or ()), ("--labels", options.labels)):
        if kept is not None and (not_kept := [name for name in columns if name not in kept]):
            problems.append(f"{option}: columns must be kept, got {', '.join(not_kept)}. Add them to --obs")
    if not files:
        raise Problems(*problems)
    problems += _problems_of(files, options)
    with _noted(problems):
        check_kinds(files, [file.kind for file in files])
    genes: list[pd.Index[Any]] = []
    var, lines, tables = pd.DataFrame(), list[str](), [file.obs for file in files]
    with _noted(problems):
        genes, lines = named(files, options.feature_types)
        kept_genes, about_genes = choose_genes(files, genes, options.join)
        var, about_ids = var_of(files, genes, kept_genes)
        lines += [*about_genes, *about_ids]
    replaced = [replace_labels(table, options.labels, options.na_values) for table in tables]
    with _noted(problems):
        tables, about_columns = unite(tables, [str(file.entry) for file in files])
        check_groups(options.group_by, tables[0])
        lines += [*about_columns, *_unused({*chain(*replaced)}, options)]
    if problems:
        raise Problems(*problems)
    lines += _lacking(files, options)
    replacing = Counter(chain.from_iterable(file.replaced for file in files))
    lines += [f"{name}: from the sample sheet, not from obs, in {plural(n, 'file')}" for name, n in replacing.items()]
    if others := Counter(chain.from_iterable(file.others for file in files)):
        texts = (f"{name} ({plural(n_files, 'file')})" for name, n_files in sorted(others.items()))
        lines.append(f"not collected: {', '.join(texts)}")
    if options.make_unique:
        _renamed(tables, short_names(entries))
    return Contents(files, tables, genes, var, lines)


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
    for option, columns in (
        ("--obs", options.obs or ()),
        ("--labels", () if options.obs else options.labels),
        ("--rename", [old for old in options.rename if not any(old in file.renamed for file in files)]),
    ):
        if missing := [name for name in columns if name not in known or option == "--rename"]:
            yield f"{option}: no file has columns {', '.join(missing)}. They have {few(sorted(known), 20)}"
    if not sum(len(file.obs) for file in files):
        yield "the files have no cells"
    names = pd.Index([]).append([file.obs.index for file in files])
    repeated = names[names.duplicated()].unique().tolist()
    if repeated and not options.make_unique:
        where = ", ".join(str(file.entry) for file in files if repeated[0] in file.obs.index)
        yield (
            f"{plural(len(repeated), 'cell name')} repeated, such as {repeated[0]} in {where}. If these are "
            "different cells, pass --make-unique; otherwise remove the duplicates"
        )


def check_kinds(files: Sequence[File], kinds: Sequence[Kind | None]) -> None:
    """Raise if files have different kinds of values, as a model would train on normalized values as counts."""
    texts = list[str]()
    for kind in Kind:
        of_kind = [f"{file.entry} ({file.place})" for file, own in zip(files, kinds, strict=True) if own is kind]
        texts += [f"{kind.described} in {few(of_kind, 5)}"] if of_kind else []
    if len(texts) > 1:
        others = sorted({one.removeprefix("layer ") for file in files for one in file.others if "obsm " not in one})
        hint = f" The files also have {few(others, 10)}." if others else ""
        raise Problems(
            f"all files must have the same kind of values, got {'; '.join(texts)}.{hint} Pass --layer with the places "
            "of the counts, in order, as in --layer counts raw X; name the place of each file in a sample sheet; or "
            "leave files out"
        )


def _lacking(files: Sequence[File], options: Options) -> Iterator[str]:
    """Yield a warning for each column that was asked for and that some files lack, as all their cells lose it."""
    for name in options.obs or ():
        if lacking := [str(file.entry) for file in files if name not in file.columns]:
            yield (
                f"WARNING: no column {name} in {few(lacking, 5)}. If it has a different name there, pass --rename "
                f"NAME={shlex.quote(name)}"
            )


def _unused(replaced: set[tuple[str, str]], options: Options) -> Iterator[str]:
    """Yield a warning for each label to replace that no cell has, as it may be misspelled."""
    for value in options.na_values:
        if ("", value) not in replaced:
            yield f"WARNING: --na-values: no cell has {value!r}"
    for column, spellings in options.labels.items():
        unused = [old for old in spellings if (column, old) not in replaced]
        yield from (f"WARNING: --labels: no cell has {old!r} in {column}" for old in unused)


def _renamed(tables: Sequence[pd.DataFrame], names: Sequence[str]) -> None:
    """Rename the cells of all files to ``FILE-NAME``, in place, and number names that still repeat."""
    of_files = [f"{name}-{cell}" for table, name in zip(tables, names, strict=True) for cell in table.index]
    renamed, first = unique(pd.Index(of_files, dtype=object)), 0
    for table in tables:
        table.index = renamed[first : first + len(table)]
        first += len(table)
