"""The command ``collect``: writes one annbatch collection of files with different layouts, genes and columns."""

from __future__ import annotations

import sys
import warnings
from argparse import Namespace
from functools import partial
from pathlib import Path

from annbatch_distributed.cli import CommandError
from annbatch_distributed.collect.collection import spellings_of
from annbatch_distributed.collect.contents import Options
from annbatch_distributed.collect.problems import Problems
from annbatch_distributed.collect.writing import write_collection


def _kept(out: Path) -> list[str]:
    """Return a line about the parts that a later run may use, if there are any."""
    folder = Path(f"{out}.parts")
    return [f"the next run continues with the parts in {folder}; or remove it"] if folder.exists() else []


def run(options: Namespace) -> int:
    """Write the collection, and print its contents."""
    if "://" in options.out:
        raise CommandError(f"--out {options.out}: must be a local folder. Copy the collection to the store afterwards")
    out, rename = Path(options.out), dict(options.rename)
    if several := sorted({f"{old}={new}" for old, new in options.rename if rename[old] != new}):
        raise CommandError(f"--rename: a column must have one new name, got another one in {', '.join(several)}")
    try:
        with warnings.catch_warnings(action="ignore"):  # of anndata and zarr; the command prints its own
            write_collection(
                options.files,
                out,
                options=Options(
                    obs=options.obs,
                    rename=rename,
                    labels=spellings_of(options.labels),
                    na_values=options.na_values,
                    make_unique=options.make_unique,
                    group_by=options.group_by and [*dict.fromkeys(options.group_by)],
                    join=options.join,
                    feature_types=options.feature_types,
                ),
                layer=options.layer or ("X",),
                memory=options.memory,
                jobs=options.jobs,
                scheduler=options.scheduler,
                dtype=options.dtype,
                compression=options.compression,
                seed=options.seed,
                restart=options.restart,
                tell=partial(print, flush=True),
            )
    except KeyboardInterrupt:
        for line in _kept(out):
            print(f"annbatch-distributed: {line}", file=sys.stderr)
        raise
    except Problems as problems:
        raise CommandError(*problems.args, *_kept(out)) from problems
    except OSError as error:  # a full disk, for one
        raise CommandError(f"{error}; nothing was written to {out}", *_kept(out)) from error
    print(f"preview two ranks: annbatch-distributed plan {out} --ranks 2 --by src_path")
    return 0
