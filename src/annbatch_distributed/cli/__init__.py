"""The command line: commands that write collections, show plans, and check or list what a job reads.

It uses the public API where it can, and imports annbatch only when a command runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import Any, NoReturn

__all__ = ["CommandError", "main", "noted"]


class CommandError(Exception):
    """Error that ends a command with one line on stderr for each problem, and an exit code."""

    def __init__(self, *problems: str, code: int = 2) -> None:
        super().__init__(*problems)
        self.code = code


class _Output:
    """Stream that escapes characters which its encoding lacks, and prints nothing once its reader has ended.

    So a command does all of its work, whatever becomes of its output.
    """

    def __init__(self, stream: Any) -> None:  # noqa: ANN401 any text stream
        self._stream = stream

    def write(self, text: str) -> int:
        encoding = self._stream.encoding or "utf-8"
        with self._written():
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with self._written():
            self._stream.flush()

    @contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            # the rest of the output, which the stream may hold already, goes nowhere
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 of any text stream
        return getattr(self._stream, name)


@contextmanager
def _printing() -> Iterator[None]:
    """Print to stdout and stderr in this context as :class:`_Output` does."""
    before = sys.stdout, sys.stderr
    # a stream is None if its descriptor is closed
    outputs: list[Any] = [None if stream is None else _Output(stream) for stream in before]
    sys.stdout, sys.stderr = outputs
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for output in filter(None, outputs):
            output.flush()


@_printing()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; problems are lines on stderr."""
    try:
        options = _parser().parse_args(arguments)
        # imported here, as the imports of a command take seconds
        code: int = import_module(f"annbatch_distributed.cli.{options.command}").run(options)
    except CommandError as error:
        for problem in error.args:
            noted(problem)
        return error.code
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as in shells
    return code


def noted(note: str) -> None:
    """Print a line on stderr."""
    print(f"annbatch-distributed: {' '.join(note.split())}", file=sys.stderr)


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
    from annbatch_distributed.core.values import as_bytes  # not above: it imports numpy

    try:
        as_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a size above 0, such as 4GB, got {text!r}") from error
    return text


def _range(text: str) -> slice:
    # 5:10, :10, 5: and : itself
    start, colon, stop = text.partition(":")
    if not (colon and f"0{start}{stop}".isdecimal()):
        raise argparse.ArgumentTypeError(f"must be START:STOP, such as 0:16000, got {text!r}")
    if stop and int(start or 0) >= int(stop):
        raise argparse.ArgumentTypeError(f"must be START:STOP with START below STOP, got {text!r}")
    return slice(int(start or 0), int(stop) if stop else None)


def _pair(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise argparse.ArgumentTypeError(f"must be OLD=NEW, got {text!r}")
    return old, new


def _steps(text: str) -> int | slice:
    return int(text) if text.isdecimal() else _range(text)


_POSITIVE, _NATURAL = _at_least(1), _at_least(0)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="annbatch-distributed",
        description="Write annbatch collections, show how they are sharded across ranks, and check or list what a job "
        "reads.",
        epilog="Run 'annbatch-distributed COMMAND --help' for the options of a command.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"%(prog)s {version('annbatch-distributed')}",
        help="Show the version and exit",
    )
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")

    def command(name: str, about: str, example: str) -> _Parser:
        return commands.add_parser(
            name,
            help=about,
            description=f"{about}.",
            epilog=f"example:\n  annbatch-distributed {name} {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    _add_collect(command("collect", "Write one shuffled collection of h5ad files", "*.h5ad --out cells.zarr"))
    _add_plan(
        command(
            "plan",
            "Show which rows each rank will read, without reading data",
            "cells.zarr --ranks 4 --where split=train --by donor",
        )
    )
    _add_check(
        command(
            "check",
            "Read epochs in local processes, and compare the rows with the plan",
            "cells.zarr --ranks 2",
        )
    )
    _add_cells(
        command(
            "cells",
            "List the cells of some steps of a job, from its saved state",
            "cells.zarr --state state.json --steps 335:345 --obs donor",
        )
    )
    return parser


_PATH = "Path or URL of an annbatch collection, such as s3://atlas/cells.zarr"


def _add_collect(parser: _Parser) -> None:
    add = parser.add_argument_group("files").add_argument
    files = (
        "Path of an h5ad file, a zarr folder, or FILE.h5mu#MODALITY; or of one sample sheet, a .csv file with the "
        "column path, optionally counts (as --layer), and columns for all cells of a file"
    )
    add("files", nargs="+", metavar="FILE", help=files)
    add("--out", metavar="PATH", help="Path of the new collection, which must not exist; or else --add-to")
    add("--add-to", metavar="PATH", help="Path of a collection of collect, to which the cells are added")
    add = parser.add_argument_group("cells and genes").add_argument
    layer = "Places of the counts: X, raw or names of layers, of which the first that a file has is read (default: X)"
    add("--layer", nargs="+", action="extend", metavar="NAME", help=layer)
    join = (
        "Genes to keep if files have different genes: outer keeps the genes of any file and fills in 0, inner keeps "
        "the genes of all files (default: outer, if there are shared genes)"
    )
    add("--join", choices=["outer", "inner"], help=join)
    types = 'Types of features to keep, by the column feature_types of var, such as "Gene Expression" (default: all)'
    add("--feature-types", nargs="+", action="extend", metavar="TYPE", help=types)
    columns = "Columns of obs to keep (default: all); columns of a sample sheet are always kept"
    add("--obs", nargs="+", action="extend", metavar="COLUMN", help=columns)
    rename = "New names of columns of obs"
    add("--rename", nargs="+", action="extend", type=_pair, metavar="OLD=NEW", help=rename)
    labels = "File with labels to replace: a .csv file with the columns column, from and to"
    add("--labels", metavar="FILE", help=labels)
    missing = "Strings in obs to replace by missing values, such as Unknown"
    add("--na-values", nargs="+", action="extend", metavar="VALUE", help=missing)
    add("--make-unique", action="store_true", help="Rename cells to FILE-NAME, for names that repeat")
    add = parser.add_argument_group("shuffling").add_argument
    groups = "Columns of labels by which to sort the cells of each dataset, for samplers of classes and sets"
    add("--group-by", nargs="+", action="extend", metavar="COLUMN", help=groups)
    add("--seed", type=_NATURAL, metavar="N", help="Seed of the order of the cells (default: 0)")
    add = parser.add_argument_group("storage").add_argument
    dtype = "Dtype of the stored values (default: for counts, the smallest of uint8, int16 and int32 that holds them)"
    add("--dtype", choices=["uint8", "int16", "int32", "int64", "float32", "float64"], help=dtype)
    compression = "Compression: zstd needs less disk space, none is read fastest (default: lz4)"
    add("--compression", choices=["lz4", "zstd", "none"], help=compression)
    add = parser.add_argument_group("resources").add_argument
    memory = "Memory limit, such as 20GB, without names and labels of cells (default: 4GB)"
    add("--memory", type=_size, metavar="SIZE", help=memory)
    jobs = "Number of processes that read files (default: one for each core, one in all for less than 2 GB)"
    add("--jobs", type=_POSITIVE, metavar="N", help=jobs)
    scheduler = "Address of a running dask.distributed scheduler, whose workers read the files"
    add("--scheduler", metavar="ADDRESS", help=scheduler)
    add("--restart", action="store_true", help="Discard the parts of an interrupted run")


def _add_plan(parser: _Parser) -> None:
    group = parser.add_argument_group("what to plan")
    group.add_argument("path", nargs="?", help=_PATH)
    group.add_argument("--n-obs", type=_POSITIVE, metavar="N", help="Number of rows, instead of a collection")
    group.add_argument("--ranks", type=_POSITIVE, default=2, metavar="N", help="Number of ranks (default: 2)")
    group.add_argument("--epochs", type=_POSITIVE, default=1, metavar="N", help="Number of epochs (default: 1)")
    _add_rows(group.add_argument)
    _add_sampler(parser)
    add = parser.add_argument_group("output").add_argument
    add("--by", metavar="COLUMN", help="Count the cells of each rank by a column of obs")
    add("--plot", metavar="FILE", help="Draw the plans into a .png, .svg or .pdf file")
    _add_json(add)


def _add_check(parser: _Parser) -> None:
    group = parser.add_argument_group("what to read")
    group.add_argument("path", help=_PATH)
    ranks = "Number of ranks, each in its own process (default: 2)"
    group.add_argument("--ranks", type=_POSITIVE, default=2, metavar="N", help=ranks)
    group.add_argument("--epochs", type=_POSITIVE, default=1, metavar="N", help="Number of epochs (default: 1)")
    data = "Read each file once instead, and list what isn't as it was written; only --jobs and --json apply then"
    group.add_argument("--data", action="store_true", help=data)
    jobs = "Number of processes that read files under --data (default: one for each core)"
    group.add_argument("--jobs", type=_POSITIVE, metavar="N", help=jobs)
    _add_cache(group.add_argument)
    _add_rows(group.add_argument)
    _add_sampler(parser)
    _add_json(parser.add_argument_group("output").add_argument)


def _add_cells(parser: _Parser) -> None:
    group = parser.add_argument_group("what to list")
    group.add_argument("path", help=_PATH)
    state = "File with the saved state of the job, as JSON or a PyTorch checkpoint (required)"
    group.add_argument("--state", required=True, metavar="FILE", help=state)
    key = "Key of the state in the file, if it has several (the error lists them)"
    group.add_argument("--state-key", metavar="KEY", help=key)
    steps = "Step or range of steps of the epoch, such as 335 or 335:345 (required)"
    group.add_argument("--steps", type=_steps, required=True, metavar="A:B", help=steps)
    ranks = "Number of ranks of the epoch, or of a job with virtual ranks (default: from the state)"
    group.add_argument("--ranks", type=_POSITIVE, metavar="N", help=ranks)
    _add_cache(group.add_argument)
    _add_rows(group.add_argument, of_state=True)
    add = parser.add_argument_group("output").add_argument
    add("--obs", nargs="+", metavar="COLUMN", help="Columns of obs to show")
    add("--by", metavar="COLUMN", help="Count the cells of each step by a column of obs")
    _add_json(add)


def _add_json(add: Callable[..., argparse.Action]) -> None:
    add("--json", action="store_true", help="Print only JSON")


def _add_cache(add: Callable[..., argparse.Action]) -> None:
    add("--cache", metavar="DIR", help="Folder on this node with blocks of a remote collection, shared with training")
    add("--cache-limit", type=_size, metavar="SIZE", help="Largest size of the folder, at least 512 MiB, such as 500GB")


def _add_rows(add: Callable[..., argparse.Action], *, of_state: bool = False) -> None:
    """Add the options that select rows; under ``of_state``, the defaults are in a state."""
    epoch = "Epoch to list (default: from the state)" if of_state else "First epoch (default: 0)"
    add("--epoch", default=None if of_state else 0, type=_NATURAL, metavar="N", help=epoch)
    default = "(default: from the state)" if of_state else "(default: all rows)"
    where = (
        "Select rows by obs: COLUMN=VALUE, COLUMN!=VALUE, or COLUMN for any value. Repeat it for more conditions; "
        f"values of the same column are alternatives {default}"
    )
    add("--where", nargs="+", action="extend", metavar="COLUMN=VALUE", help=where)
    ranges = f"Select a range of rows. Repeat it for more ranges {default}"
    add("--rows", type=_range, action="append", metavar="START:STOP", help=ranges)


def _add_sampler(parser: _Parser) -> None:
    group = parser.add_argument_group("sampler")

    def add(name: str, about: str, default: object = None, shown: str = "", **options: Any) -> None:  # noqa: ANN401 argparse's own
        group.add_argument(name, default=default, help=f"{about} (default: {shown or default})", **options)

    batch_size = "Number of rows of a batch on each rank"
    add("--batch-size", batch_size, 256, type=_POSITIVE, metavar="N")
    by_memory = "chosen by --memory; or 64 if --preload-nchunks or --n-obs is given"
    chunk_size = "Number of consecutive rows to read together"
    add("--chunk-size", chunk_size, shown=by_memory, type=_POSITIVE, metavar="N")
    chunks = "Number of chunks of a load request"
    fewest = "chosen by --memory; or the smallest number, at least 32, that gives whole batches"
    add("--preload-nchunks", chunks, shown=fewest, type=_POSITIVE, metavar="N")
    memory = "Memory limit of each rank, such as 4GB; ignored if --chunk-size or --preload-nchunks is given"
    add("--memory", memory, "1GiB", type=_size, metavar="SIZE")
    add("--prefetch", "Number of load requests to prefetch", 1, type=_NATURAL, metavar="N")
    order = "Read the rows of each rank in order"
    add("--no-shuffle", order, False, shown="shuffle them", action="store_true")
    sharding = (
        "Assignment of rows to ranks: contiguous gives each rank one range of rows, shuffled assigns blocks of rows to "
        "the ranks again in each epoch"
    )
    add("--sharding", sharding, "contiguous", choices=["contiguous", "shuffled"])
    remainder = (
        "How to treat rows that don't fill a batch on every rank: drop them, keep them, so that some ranks may "
        "have one batch more, read each row exactly once in equally many batches, or pad with repeated rows"
    )
    add("--remainder", remainder, "exact", choices=["drop", "keep", "exact", "pad"])
    virtual = "Number of virtual ranks, a multiple of --ranks, so that steps are the same on any number of ranks"
    add("--virtual-ranks", virtual, shown="none", type=_POSITIVE, metavar="N")
    add("--seed", "Seed of the order", 0, type=_NATURAL, metavar="N")
