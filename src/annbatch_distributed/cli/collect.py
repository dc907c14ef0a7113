"""The command ``collect``: writes one annbatch collection of h5ad files with different layouts, genes and columns."""

from __future__ import annotations

import warnings
from argparse import Namespace
from pathlib import Path

from annbatch_distributed.cli import CommandError
from annbatch_distributed.collect import Problems, write_collection


def run(options: Namespace) -> int:
    """Write the collection, and print its contents."""
    if "://" in options.out:
        raise CommandError(f"--out {options.out}: must be a local folder. Copy the collection to the store afterwards")
    out = Path(options.out)
    try:
        with warnings.catch_warnings(action="ignore"):  # of anndata and zarr; the command prints its own
            write_collection(
                list(map(Path, options.files)),
                out,
                layer=options.layer,
                join=options.join,
                columns=options.obs,
                na_values=options.na_values,
                make_unique=options.make_unique,
                group_by=options.group_by,
                memory=options.memory,
                seed=options.seed or 0,
                tell=print,
            )
    except Problems as problems:
        raise CommandError(*problems.args) from problems
    except OSError as error:  # a full disk, for one
        raise CommandError(f"{error}; nothing was written to {out}") from error
    print(f"preview two ranks: annbatch-distributed plan {out} --ranks 2 --by src_path")
    return 0
