"""The command ``collect``: writes one annbatch collection of files with different layouts, genes and columns."""

from __future__ import annotations

import sys
import warnings
from argparse import Namespace
from inspect import signature
from pathlib import Path
from typing import Any

from annbatch_distributed.cli import CommandError
from annbatch_distributed.cli.collection import in_options
from annbatch_distributed.collect import Problems, collect


def run(options: Namespace) -> int:
    """Write the collection, and print its contents."""
    names = [*signature(collect).parameters]
    # what isn't given has the default of the function
    given: dict[str, Any] = {name: one for name, one in vars(options).items() if name in names and one is not None}
    out, pairs = options.out or options.add_to, given.pop("rename", [])
    rename = given["rename"] = dict(pairs)
    if several := sorted({f"{old}={new}" for old, new in pairs if rename[old] != new}):
        raise CommandError(f"--rename: a column must have one new name, got another one in {', '.join(several)}")
    try:
        with warnings.catch_warnings(action="ignore"):  # of anndata and zarr; the command prints its own
            collect(**given, tell=lambda line: print(in_options(line, names), flush=True))
    except KeyboardInterrupt:
        for line in _kept(out):
            print(f"annbatch-distributed: {line}", file=sys.stderr)
        raise
    except Problems as problems:
        raise CommandError(*(in_options(one, names) for one in problems.args), *_kept(out)) from problems
    except OSError as error:  # a full disk, for one
        raise CommandError(f"{error}; nothing was written to {out}", *_kept(out)) from error
    print(f"preview two ranks: annbatch-distributed plan {out} --ranks 2 --by src_path")
    return 0


def _kept(out: str) -> list[str]:
    """Return a line about the parts that a later run may use, if there are any."""
    folder = Path(f"{out}.parts")
    return [f"the next run continues with the parts in {folder}; or remove it"] if folder.exists() else []
