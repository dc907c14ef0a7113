"""The command line: collections, plans, and epochs that processes of this machine stream and compare with them.

It knows what users know, and imports annbatch when a command is run.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from math import gcd
from typing import NoReturn

__all__ = ["CommandError", "main"]


class CommandError(Exception):
    """Ends a command with a line on stderr for each problem, and an exit code."""

    def __init__(self, *problems: str, code: int = 2) -> None:
        super().__init__(*problems)
        self.code = code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit code; whatever is wrong is one line on stderr."""
    try:
        options = _parser().parse_args(arguments)
        if options.command in {"plan", "check"} and options.preload_nchunks is None:
            # the fewest chunks from 32 on that make whole batches: 33 for chunks of 64 and batches of 192
            step = options.batch_size // gcd(options.batch_size, options.chunk_size)
            options.preload_nchunks = -(-32 // step) * step
        # each command imports what it needs, which takes seconds
        code: int = import_module(f"annbatch_distributed.cli.{options.command}").run(options)
    except CommandError as error:
        for problem in error.args:
            print(f"annbatch-distributed: {' '.join(problem.split())}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return 130  # as shells have it: 128 + SIGINT
    return code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message}. See --help.")


def _at_least(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isdecimal() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"must be an integer of at least {least}, got {text!r}")
        return int(text)

    return read


def _size(text: str) -> str:
    if not re.fullmatch(r"0*[1-9]\d*(\.\d+)? ?([KMGT]i?)?B?", text, re.IGNORECASE):
        raise argparse.ArgumentTypeError(f"must be a size above 0, such as 4GB, got {text!r}")
    return text


def _stretch(text: str) -> slice:
    # 5:10, :10, 5: and : itself
    start, colon, stop = text.partition(":")
    if not (colon and f"0{start}{stop}".isdecimal()):
        raise argparse.ArgumentTypeError(f"must be START:STOP, such as 0:16000, got {text!r}")
    return slice(int(start or 0), int(stop) if stop else None)


def _steps(text: str) -> int | slice:
    return int(text) if text.isdecimal() else _stretch(text)


def _source(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not (name and path):
        raise argparse.ArgumentTypeError(f"must be NAME=PATH, such as tahoe=tahoe.zarr, got {text!r}")
    return name, path


_POSITIVE, _NATURAL = _at_least(1), _at_least(0)


def _planning(**defaults: object) -> _Parser:
    """Return the options that a plan follows from; one that is left out is None, if it has no default."""
    shared = _Parser(add_help=False)
    add = shared.add_argument
    add("--chunk-size", type=_POSITIVE, metavar="N", help="consecutive rows that are read at a time (64)")
    add(
        "--preload-nchunks", type=_POSITIVE, metavar="N", help="chunks of a load request (32 or more, in whole batches)"
    )
    add("--batch-size", type=_POSITIVE, metavar="N", help="rows of a batch on each rank (256)")
    add("--sampler", choices=["random", "sequential"], help="the order of the batches (random)")
    add("--remainder", choices=["drop", "keep", "exact", "pad"], help="rows that don't divide (drop)")
    add("--sharding", choices=["contiguous", "shuffled"], help="whose rows (contiguous)")
    add("--seed", type=_NATURAL, metavar="N", help="what all randomness begins from (0)")
    add("--epoch", type=_NATURAL, metavar="N", help="the epoch, or the first of them (0)")
    add("--virtual-ranks", type=_POSITIVE, metavar="N", help="deal the rows to so many, a multiple of --ranks")
    add("--mask", type=_stretch, action="append", metavar="START:STOP", help="only these rows; can be repeated")
    where = "only rows with this value in obs; COLUMN!=VALUE, without it; COLUMN, with any"
    add("--where", nargs="+", action="extend", metavar="COLUMN=VALUE", help=where)
    add("--json", action="store_true", help="print JSON, and nothing else")
    shared.set_defaults(**defaults)
    return shared


def _parser() -> argparse.ArgumentParser:
    path = "an annbatch collection: a folder, or a URL such as s3://atlas/cells.zarr"
    about = "Who reads what of a collection of cells: planned, and read by processes of this machine."
    parser = _Parser(prog="annbatch-distributed", description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('annbatch-distributed')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, about: str, *parents: _Parser) -> _Parser:
        return commands.add_parser(name, parents=parents, allow_abbrev=False, help=about, description=about)

    # the texts of --help name these, too
    planned = _planning(
        chunk_size=64,
        batch_size=256,
        sampler="random",
        remainder="drop",
        sharding="contiguous",
        seed=0,
        epoch=0,
    )
    plan = command(
        "plan", "say which rank reads which rows, and which are dropped or repeated; no row is read", planned
    )
    plan.add_argument("path", nargs="?", help=path)
    plan.add_argument("--n-obs", type=_POSITIVE, metavar="N", help="so many rows, instead of a collection")
    plan.add_argument("--ranks", type=_POSITIVE, default=8, metavar="N", help="how many ranks there are (8)")
    plan.add_argument("--epochs", type=_POSITIVE, default=1, metavar="N", help="how many epochs (1)")
    plan.add_argument("--by", metavar="COLUMN", help="count each rank's cells by a column of obs")
    plan.add_argument("--plot", metavar="FILE", help="draw the plans into a .png, .svg or .pdf")

    about = "stream epochs in processes of this machine, and compare what they read with the plan"
    check = command("check", about, planned)
    check.add_argument("path", help=path)
    check.add_argument("--ranks", type=_POSITIVE, default=2, metavar="N", help="how many processes, one a rank (2)")
    check.add_argument("--epochs", type=_POSITIVE, default=1, metavar="N", help="how many epochs (1)")
    check.add_argument("--read-ahead", type=_NATURAL, default=0, metavar="N", help="load requests read ahead (0)")

    _add_options_of_collect(command("collect", "write one shuffled collection of h5ad files, and say what is in it"))

    # without defaults: options that are left out are as the state has them
    about = "say which cells were in which step of a job, or will be, from its state; no cell is read"
    replay = command("replay", about, _planning())
    replay.add_argument("path", nargs="?", help=path)
    source = "collection of a source, if the state is of a mixture; once for each source, in place of the path"
    replay.add_argument("--source", type=_source, action="append", metavar="NAME=PATH", help=source)
    past = "a file with the state of a job, JSON or torch's; options that are left out are as it has them"
    replay.add_argument("--state", required=True, metavar="FILE", help=past)
    replay.add_argument("--steps", type=_steps, required=True, metavar="A:B", help="these steps, or a single one")
    replay.add_argument("--ranks", type=_POSITIVE, metavar="N", help="how many ranks there were (as the state has it)")
    replay.add_argument("--obs", nargs="+", metavar="COLUMN", help="columns of obs to show")
    replay.add_argument("--by", metavar="COLUMN", help="count the cells of each step by a column of obs")
    return parser


def _add_options_of_collect(collect: _Parser) -> None:
    add = collect.add_argument
    add("files", nargs="+", metavar="FILE", help="an h5ad file")
    add("--out", required=True, metavar="PATH", help="the collection, which must not be there yet")
    layer = "the layer that has the counts, in files that have it; raw takes .raw, too (X)"
    add("--layer", metavar="NAME", help=layer)
    genes = "of files with other genes, all or those that each has (union)"
    add("--genes", choices=["union", "intersection"], help=genes)
    add("--obs", nargs="+", metavar="COLUMN", help="the columns of obs to keep (all)")
    missing = "texts of obs that are no labels, such as Unknown"
    add("--missing", nargs="+", default=[], metavar="VALUE", help=missing)
    add("--make-unique", action="store_true", help="name cells FILE-NAME, and number genes of one name")
    memory = "the most that cells take in memory while they are shuffled, such as 20GB (4GB)"
    add("--memory", type=_size, default="4GB", metavar="SIZE", help=memory)
    groups = "sort cells by these columns of labels within each dataset, as class samplers need them"
    add("--group-by", nargs="+", metavar="COLUMN", help=groups)
    add("--seed", type=_NATURAL, metavar="N", help="what the order of the cells follows from (0)")
