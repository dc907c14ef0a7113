"""Commands: their arguments, what they print, and their exit codes."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from annbatch_distributed.cli import output
from annbatch_distributed.cli.cells import Cells, InputError, masked
from annbatch_distributed.cli.settings import Settings

if TYPE_CHECKING:
    from annbatch_distributed import EpochPlan

__all__ = ["app"]

#: A column of more values is one of measurements, or names each cell.
_MOST_LABELS = 1000
#: What follows the arrays that have lost chunks.
_IF_LOST = (
    "zarr would read fill values, mostly 0, for what is lost, so no epoch was read: copy or write the collection again"
)

app = typer.Typer(
    add_completion=False,
    help="Who reads what of a collection of cells: planned, and read by processes of this machine.",
)

Collection = Annotated[str | None, typer.Argument(metavar="[PATH]", help="An annbatch collection.")]
Rows = Annotated[int | None, typer.Option(min=1, help="So many rows, instead of a collection.")]
ChunkSize = Annotated[int, typer.Option(min=1, help="Consecutive rows that are read at a time.")]
Chunks = Annotated[
    int | None,
    typer.Option(min=1, help="Chunks of a load request.", show_default="32, or as many more as make whole batches"),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows of a batch on each rank.")]
SamplerName = Annotated[Literal["random", "sequential"], typer.Option(help="Whose order the batches have.")]
Policy = Annotated[
    Literal["drop", "keep", "exact", "pad"], typer.Option(help="What becomes of rows that don't divide evenly.")
]
Sharding = Annotated[Literal["contiguous", "shuffled"], typer.Option(help="Which rank has which rows.")]
Seed = Annotated[int, typer.Option(min=0, help="What all randomness begins from.")]
Epoch = Annotated[int, typer.Option(min=0, help="The epoch, or the first of them.")]
Epochs = Annotated[int, typer.Option(min=1, max=100_000, help="How many epochs.")]
VirtualRanks = Annotated[int | None, typer.Option(min=1, help="Deal the rows to so many, a multiple of --ranks.")]
Mask = Annotated[
    list[str] | None, typer.Option(metavar="START:STOP", help="Only rows from START to before STOP; can be repeated.")
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN=VALUE",
        help="Only rows with this value in a column of obs; another value of the same column adds its rows.",
    ),
]
ReadAhead = Annotated[int, typer.Option(min=0, help="How many load requests are read ahead.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")]


@app.command()
def plan(
    path: Collection = None,
    n_obs: Rows = None,
    ranks: Annotated[int, typer.Option(min=1, max=1 << 20, help="How many ranks there are.")] = 8,
    chunk_size: ChunkSize = 64,
    preload_nchunks: Chunks = None,
    batch_size: BatchSize = 256,
    sampler: SamplerName = "random",
    remainder: Policy = "drop",
    sharding: Sharding = "contiguous",
    seed: Seed = 0,
    epoch: Epoch = 0,
    epochs: Epochs = 1,
    virtual_ranks: VirtualRanks = None,
    mask: Mask = None,
    where: Where = None,
    by: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Count each rank's cells by a column of obs.")
    ] = None,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw the plans into a .png, .svg or .pdf.")] = None,
    as_json: Json = False,
) -> None:
    """Say which rank reads which rows, and which are lost or repeated. No row is read."""
    if (path is None) == (n_obs is None):
        raise InputError("plan takes the PATH of a collection, or --n-obs, the number of its rows: one of them")
    if path is None and (where or by):
        raise InputError(f"{'--where' if where else '--by'} needs the PATH of a collection, whose obs has the column")
    cells = None if path is None else Cells(path)
    n_rows = n_obs if cells is None else cells.n_obs
    assert n_rows is not None
    labels = None if cells is None or by is None else cells.labels(by)
    if labels is not None and len(labels.categories) > _MOST_LABELS:
        raise InputError(f"--by {by}: the column has {len(labels.categories)} values, too many to count each rank's")
    settings = Settings(
        world_size=ranks,
        chunk_size=chunk_size,
        preload_nchunks=preload_nchunks,
        batch_size=batch_size,
        is_random=sampler == "random",
        remainder=remainder,
        sharding=sharding,
        seed=seed,
        virtual_ranks=virtual_ranks,
        mask=masked(mask or [], n_rows, None if cells is None or not where else cells.where(where)),
        epochs=range(epoch, epoch + epochs),
    )
    plans = settings.plans(n_rows)
    compositions = [None if labels is None else one.composition(labels) for one in plans]
    if plot is not None:
        _draw(plot, plans)
    if as_json:
        _print_json(
            output.settings_of(settings, n_rows)
            | {
                "epochs": [
                    output.plan_of(one) | ({} if mix is None else {"composition": output.composition_of(mix)})
                    for one, mix in zip(plans, compositions, strict=True)
                ]
            }
        )
        return
    console = _stdout()
    for number, (one, mix) in enumerate(zip(plans, compositions, strict=True)):
        if number:
            console.print()
        console.print(str(one))
        if mix is not None:
            console.print(f"\nrows of each {by}, and how far their mix is from that of all selected rows, 0 to 1")
            console.print(output.composition_table(mix))


@app.command()
def check(
    path: Annotated[str, typer.Argument(help="An annbatch collection.")],
    ranks: Annotated[int, typer.Option(min=1, max=1024, help="How many processes to start, one for each rank.")] = 2,
    chunk_size: ChunkSize = 64,
    preload_nchunks: Chunks = None,
    batch_size: BatchSize = 256,
    sampler: SamplerName = "random",
    remainder: Policy = "drop",
    sharding: Sharding = "contiguous",
    seed: Seed = 0,
    epoch: Epoch = 0,
    epochs: Epochs = 1,
    virtual_ranks: VirtualRanks = None,
    mask: Mask = None,
    where: Where = None,
    read_ahead: ReadAhead = 0,
    as_json: Json = False,
) -> None:
    """Stream epochs in processes of this machine, and compare what they read with the plan.

    The exit code is 0 if all of it is as planned, 1 if something isn't, chunks are lost or a process didn't come to its
    end, and 2 if an argument is wrong.
    """
    from annbatch_distributed.cli.job import Job

    cells = Cells(path)
    if lost := cells.lost():
        if as_json:
            _print_json({"n_obs": cells.n_obs, "ok": False, "problems": lost, "epochs": []})
        else:
            _stdout().print("\n".join([*lost, _IF_LOST]))
        raise typer.Exit(1)
    settings = Settings(
        world_size=ranks,
        chunk_size=chunk_size,
        preload_nchunks=preload_nchunks,
        batch_size=batch_size,
        is_random=sampler == "random",
        remainder=remainder,
        sharding=sharding,
        seed=seed,
        virtual_ranks=virtual_ranks,
        mask=masked(mask or [], cells.n_obs, cells.where(where) if where else None),
        epochs=range(epoch, epoch + epochs),
        read_ahead=read_ahead,
    )
    plans = settings.plans(cells.n_obs)
    progress = Progress(
        TextColumn(f"{ranks} ranks"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} rows"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with progress:
        task = progress.add_task("", total=sum(sum(one.sizes) for one in plans))
        read = Job(path, settings).run(lambda n_rows: progress.advance(task, n_rows))
    of_epochs = [sorted((its for its in read if its.epoch == one.epoch), key=lambda its: its.rank) for one in plans]
    n_fine = sum(not output.problems_of(ranks_read) for ranks_read in of_epochs)
    if as_json:
        found = {"ok": n_fine == epochs, "problems": [], "epochs": list(map(output.read_of, of_epochs))}
        _print_json(output.settings_of(settings, cells.n_obs) | found)
    else:
        console = _stdout()
        for number, ranks_read in enumerate(of_epochs):
            if number:
                console.print()
            console.print(output.read_table(ranks_read))
            n_compared = sum(its.n_compared for its in ranks_read)
            compared = f"{n_compared} cells were compared with what the store has for their rows"
            console.print("\n".join(output.problems_of(ranks_read) or [compared, ranks_read[0].verdict]))
        if epochs > 1:
            console.print(f"\n{n_fine} of {epochs} epochs were read as planned")
    raise typer.Exit(0 if n_fine == epochs else 1)


def _stdout() -> Console:
    # a pipe has no width, and a file keeps its lines
    return Console(
        width=None if sys.stdout.isatty() else 10_000, soft_wrap=True, markup=False, highlight=False, emoji=False
    )


def _print_json(content: dict[str, Any]) -> None:
    typer.echo(json.dumps(content))


def _draw(file: str, plans: list[EpochPlan]) -> None:
    try:
        plans[0].plot(*plans[1:]).savefig(file)
    except ModuleNotFoundError as error:
        raise InputError(f"--plot: {error}") from error
    except (OSError, ValueError) as error:
        raise InputError(f"--plot {file}: {error}") from error
