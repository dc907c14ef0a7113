"""The command line: read the options, check what they name, start torchrun, report."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
# `python demo` puts this folder on the path, `python -m demo` the one that it is in
sys.path.insert(0, str(ROOT))

from demo.cells import PBMC_CELLS, PBMC_LABEL, UnusableCellsError, check_collection, check_h5ad, pbmc  # noqa: E402
from demo.job import Job  # noqa: E402
from demo.report import report  # noqa: E402


def demo(
    h5ad: Annotated[Path | None, typer.Option(help="Train on this file.")] = None,
    collection: Annotated[Path | None, typer.Option(help="Train on this annbatch collection.")] = None,
    cells: Annotated[int | None, typer.Option(min=1, help="Train on so many made-up cells, to see throughput.")] = None,
    label: Annotated[str, typer.Option(help="The column of obs to learn.")] = PBMC_LABEL,
    ranks: Annotated[int, typer.Option(min=1, help="How many processes to train in.")] = 2,
    epochs: Annotated[int, typer.Option(min=1, help="How many passes over the training rows.")] = 5,
) -> None:
    """Train a model that tells cell types apart on several ranks, and check every row that they read.

    Without further options it trains on 700 blood cells (10x PBMC) that come with scanpy.
    """
    console = Console()
    with tempfile.TemporaryDirectory(prefix="annbatch-distributed-") as folder:
        try:
            job = _job(Path(folder), h5ad=h5ad, collection=collection, cells=cells, label=label, epochs=epochs)
            if ranks > job.most_ranks:
                msg = (
                    f"{job.n_obs:,} cells are too few for {ranks} ranks: four fifths of them are trained on, "
                    f"at least {job.batch_size} by each rank, and each validates on at least one"
                )
                raise UnusableCellsError(msg)
        except UnusableCellsError as error:
            typer.echo(f"demo: {error}", err=True)
            raise typer.Exit(2) from error
        console.print(
            f"{job.n_obs:,} cells: {job.n_train:,} to train on, {job.n_validation:,} held out; {ranks} gloo ranks"
        )
        if code := _torchrun(job, ranks):
            raise typer.Exit(code)
        if not report(job, ranks, console):
            raise typer.Exit(1)


def _job(
    folder: Path, *, h5ad: Path | None, collection: Path | None, cells: int | None, label: str, epochs: int
) -> Job:
    if sum(source is not None for source in (h5ad, collection, cells)) > 1:
        msg = "--h5ad, --collection and --cells exclude each other: pass one of them"
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


def _torchrun(job: Job, ranks: int) -> int:
    """Run the job with torch's own launcher, and return its exit code."""
    path = Path(job.results) / "job.json"
    job.write(path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={ranks}", "-m", "demo.train", str(path)]
    threads = max(1, (os.cpu_count() or 1) // ranks)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "TQDM_DISABLE": "1",  # annbatch's writer has bars of its own
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whatever ends this ends torchrun too
    with subprocess.Popen(command, env=environment) as torchrun:
        try:
            return torchrun.wait()
        except KeyboardInterrupt:
            torchrun.terminate()  # and that ends the ranks
            torchrun.wait()
            raise


if __name__ == "__main__":
    typer.run(demo)
