"""Command line of the demo: parse the options, check the input, run torchrun, report."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
# `python demo` puts this folder on the path, `python -m demo` its parent
sys.path.insert(0, str(ROOT))

from demo.cells import PBMC_CELLS, PBMC_LABEL, UnusableCellsError, check_collection, check_h5ad, pbmc  # noqa: E402 needs the path
from demo.job import KILLED_ON, RESUMED_ON, Job  # noqa: E402 needs the path
from demo.report import report, report_resume  # noqa: E402 needs the path


def demo(
    h5ad: Annotated[Path | None, typer.Option(help="h5ad file to train on.")] = None,
    collection: Annotated[Path | None, typer.Option(help="annbatch collection to train on.")] = None,
    cells: Annotated[
        int | None,
        typer.Option(min=1, max=10_000_000, help="Number of simulated cells to train on, to see throughput."),
    ] = None,
    label: Annotated[str, typer.Option(help="Column of obs to learn.")] = PBMC_LABEL,
    ranks: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 2,
    virtual_ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Number of virtual ranks, so that losses are the same on any --ranks."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of epochs.")] = 5,
) -> None:
    """Train a classifier of cell types on several ranks, and check every row that they read.

    Without options, it trains on the 700 blood cells (10x PBMC) that are part of scanpy.
    """
    console = Console()
    with tempfile.TemporaryDirectory(prefix="annbatch-distributed-") as folder:
        try:
            job = _job(Path(folder), h5ad=h5ad, collection=collection, cells=cells, label=label, epochs=epochs)
            job = replace(job, virtual_ranks=virtual_ranks)
            if virtual_ranks is not None and virtual_ranks % ranks:
                msg = f"--virtual-ranks must be a multiple of --ranks, {ranks}, got {virtual_ranks}"
                raise UnusableCellsError(msg)
            if (virtual_ranks or ranks) > job.most_ranks:
                msg = (
                    f"{job.n_obs:,} cells are too few for {virtual_ranks or ranks} ranks: each rank needs at least "
                    f"{job.batch_size} training cells, of four fifths of the cells, and one validation cell"
                )
                raise UnusableCellsError(msg)
        except UnusableCellsError as error:
            typer.echo(f"demo: {error}", err=True)
            raise typer.Exit(2) from error
        console.print(
            f"{job.n_obs:,} cells: {job.n_train:,} to train on, {job.n_validation:,} held out; "
            f"{ranks} Gloo rank{'s' * (ranks > 1)}" + (f" with {virtual_ranks} virtual ranks" if virtual_ranks else "")
        )
        if not (_torchrun(job, ranks) and report(job, ranks, console)):
            raise typer.Exit(1)
        if h5ad is None and collection is None and cells is None:
            console.print(
                f"\nOne more epoch: one of {KILLED_ON} ranks is killed halfway, and {RESUMED_ON} ranks resume"
            )
            _torchrun(job, KILLED_ON, "demo.resume", is_killed=True)
            if not (_torchrun(job, RESUMED_ON, "demo.resume") and report_resume(job, console)):
                raise typer.Exit(1)


def _job(
    folder: Path, *, h5ad: Path | None, collection: Path | None, cells: int | None, label: str, epochs: int
) -> Job:
    if sum(source is not None for source in (h5ad, collection, cells)) > 1:
        msg = "pass only one of --h5ad, --collection and --cells"
        raise UnusableCellsError(msg)
    if collection is not None:
        n_obs = check_collection(collection, label)
    elif cells is not None:
        n_obs = cells
    elif h5ad is None and label == PBMC_LABEL:
        h5ad, n_obs = pbmc(), PBMC_CELLS
    else:
        h5ad = h5ad or pbmc()
        n_obs = check_h5ad(h5ad, label)
    return Job(
        collection=str(collection or folder / "collection.zarr"),
        h5ad=None if h5ad is None else str(h5ad),
        n_obs=n_obs,
        label=label,
        epochs=epochs,
        results=str(folder),
    )


def _torchrun(job: Job, ranks: int, module: str = "demo.train", *, is_killed: bool = False) -> bool:
    """Run the job with torchrun, in this process, and return True if all ranks succeeded.

    If ``is_killed``, a rank is killed on purpose, and torchrun's report of it is hidden.
    """
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    path = Path(job.results) / "job.json"
    job.write(path)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    os.environ.setdefault("TQDM_DISABLE", "1")  # hides annbatch's progress bars
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

    # The standard input of the ranks, which exit when it closes: only this process holds its other end.
    reading, _ = os.pipe()
    os.dup2(reading, 0)

    # torchrun would listen on every interface, whatever its options, unless it gets an existing store
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL if is_killed else logging.NOTSET)
    options = [f"--master-addr={store.host}", f"--master-port={port}", f"--log-dir={job.results}"]
    try:
        main([*options, f"--nproc-per-node={ranks}", "-m", module, str(path)])
    except ChildFailedError:  # the rank has printed why, and torchrun which rank
        return False
    return True


if __name__ == "__main__":
    for ending in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(ending, signal.default_int_handler)  # clean up, as after Ctrl-C
    app = typer.Typer(add_completion=False, rich_markup_mode=None)  # so that --help shows no types
    app.command()(demo)
    app()
