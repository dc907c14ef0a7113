"""The command ``check``: processes of this machine, one for each rank, stream a collection and check what they read.

1. Each rank streams an epoch as a user's loop would, counts its rows, and keeps a few cells.
2. All ranks call ``check_epoch_read``; what they say meets in the process that has started them.
3. The cells that were kept are compared with what the store has for their rows.

No rank outlives the process that started it: each notices when that is no more, and ends.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import warnings
from contextlib import contextmanager, suppress
from multiprocessing import connection
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from annbatch_distributed import StatefulLoader, Tally
from annbatch_distributed.cli import CommandError
from annbatch_distributed.cli.cells import Cells, plans_of, sampler_of, settings_of

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    #: Says something to all ranks, and returns what each of them has said.
    type Meet = Callable[[Any], list[Any]]
    #: What JSON has of a rank; whether all ranks together have read what was planned, and what is said of that.
    type Read = tuple[dict[str, Any], bool, str]

__all__ = ["as_rank", "run"]

#: How many cells of a rank are compared with the store in an epoch.
_COMPARED = 64


def run(options: Namespace) -> int:
    """Print what the ranks have read in each epoch, and what is not as planned."""
    cells = Cells(options.path)
    if lost := cells.lost():
        if options.json:
            print(json.dumps({"n_obs": cells.n_obs, "ok": False, "problems": lost, "epochs": []}))
        else:
            what = "zarr would read fill values, mostly 0, for what is lost, so no epoch was read"
            print("\n".join([*lost, f"{what}: copy or write the collection again"]))
        return 1
    mask = cells.mask(options.mask, options.where)
    plans_of(options, mask, cells.n_obs)  # what can't be is said before a rank is started
    epochs: list[dict[str, Any]] = []
    for read in _streamed(options, mask):
        ranks, (_, is_planned, verdict) = [found for found, *_ in read], read[0]
        problems = [] if is_planned else verdict.splitlines()
        for rank in ranks:
            if others := ", ".join(map(str, rank["other_cells"])):
                problems.append(f"rank {rank['rank']} has read other cells than the store has for rows {others}")
        epochs.append({"epoch": options.epoch + len(epochs), "ok": not problems, "problems": problems, "ranks": ranks})
        if not options.json:
            table = pd.DataFrame(ranks).drop(columns=["cells_compared", "other_cells"])
            n_compared = sum(rank["cells_compared"] for rank in ranks)
            fine = [f"{n_compared} cells were compared with what the store has for their rows", verdict]
            print("\n" * (len(epochs) > 1) + table.to_string(index=False), *(problems or fine), sep="\n", flush=True)
    n_fine = sum(epoch["ok"] for epoch in epochs)
    if options.json:
        found = {"ok": n_fine == len(epochs), "problems": [], "epochs": epochs}
        print(json.dumps(settings_of(options, cells.n_obs) | found))
    elif len(epochs) > 1:
        print(f"\n{n_fine} of {len(epochs)} epochs were read as planned")
    return int(n_fine < len(epochs))


def _streamed(options: Namespace, mask: Any) -> Iterator[list[Read]]:  # noqa: ANN401 any mask
    """Start the ranks, and yield what all of them have read in each epoch; a CommandError if one raises or dies."""
    context = multiprocessing.get_context("spawn")
    ranks: dict[Any, BaseProcess] = {}
    try:
        for rank in range(options.ranks):
            here, there = context.Pipe()
            process = context.Process(target=_rank, args=(options, mask, rank, there), name=f"rank {rank}", daemon=True)
            with _interrupts_held():  # else a rank could be left with half of what it is told
                process.start()
            there.close()
            ranks[here] = process
        n_read = 0
        while n_read < options.epochs:
            said = _said(ranks)
            if isinstance(said[0], tuple):
                n_read += 1
                yield said
            for pipe in ranks:
                with suppress(OSError):  # of a rank that is no more, which is noticed next
                    pipe.send(said)
    finally:
        for rank_process in ranks.values():
            rank_process.kill()
            rank_process.join()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Have an interrupt wait until a context is left, where the system can."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _said(ranks: dict[Any, BaseProcess]) -> list[Any]:
    """Return what each rank says next, through its pipe."""
    said: dict[Any, Any] = {}
    while len(said) < len(ranks):
        pipe: Any
        for pipe in connection.wait([pipe for pipe in ranks if pipe not in said]):
            try:
                said[pipe] = pipe.recv()
            except (EOFError, OSError):
                ranks[pipe].join()
                code = ranks[pipe].exitcode or 0
                how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
                raise CommandError(f"{ranks[pipe].name} ended with {how}; the other ranks were ended", 1) from None
            if isinstance(said[pipe], CommandError):
                raise said[pipe]
    return [said[pipe] for pipe in ranks]


def _rank(options: Namespace, mask: Any, rank: int, pipe: Connection[Any, Any]) -> None:  # noqa: ANN401 any mask
    """Stream the epochs in a process of a rank's own."""
    threading.Thread(target=_end_with, args=[multiprocessing.parent_process()], daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a terminal sends to all; the parent ends this process
    warnings.simplefilter("ignore")  # the parent has had those that matter

    def meet(said: Any) -> list[Any]:  # noqa: ANN401 anything
        pipe.send(said)
        heard: list[Any] = pipe.recv()
        return heard

    try:
        as_rank(options, mask, rank, meet)
    except Exception as error:  # noqa: BLE001 the parent says it
        with suppress(OSError):  # of a parent that is no more
            pipe.send(CommandError(f"rank {rank}: {type(error).__name__}: {error}", 1))


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def as_rank(options: Namespace, mask: Any, rank: int, meet: Meet) -> None:  # noqa: ANN401 any mask
    """Stream each epoch as a rank, and say what was read in it."""
    cells = Cells(options.path)
    loader = StatefulLoader(
        batch_sampler=sampler_of(options, mask, rank),
        return_index=True,
        preload_to_gpu=False,
        read_ahead=options.read_ahead,
    ).use_collection(cells.collection)
    for epoch in range(options.epoch, options.epoch + options.epochs):
        loader.set_epoch(epoch)
        meet("")  # so that all ranks read at the same time
        meet(_read(loader, cells, rank, meet))


def _read(loader: StatefulLoader, cells: Cells, rank: int, meet: Meet) -> Read:
    """Stream an epoch: count all rows, and keep a cell of every so many batches."""
    tally, kept = Tally(), dict[int, tuple[Any, Any]]()
    every = -(-len(loader) // _COMPARED)
    began = asked = perf_counter()
    longest_wait = 0.0
    for batch in loader:
        longest_wait = max(longest_wait, perf_counter() - asked)
        rows = np.asarray(batch["index"])
        if not tally.n_batches % every:
            place, obs = tally.n_batches % len(rows), batch.get("obs")
            kept[int(rows[place])] = batch["X"][[place]], None if obs is None else obs.iloc[place]
        tally.add(rows)
        asked = perf_counter()
    seconds = perf_counter() - began
    try:
        is_planned, verdict = True, loader.check_epoch_read(tally, gather=meet)
    except ValueError as error:
        is_planned, verdict = False, str(error)
    stored = cells.stored(list(kept))
    found = {
        "rank": rank,
        "rows": tally.n_rows,
        "batches": tally.n_batches,
        "rows_per_second": round(tally.n_rows / seconds),
        "longest_wait": round(longest_wait, 3),
        "cells_compared": len(kept),
        "other_cells": sorted(row for row, values, obs in stored if not _is_same(*kept[row], values, obs)),
    }
    return found, is_planned, verdict


def _is_same(values: Any, obs: Any, stored_values: Any, stored_obs: Any) -> bool:  # noqa: ANN401 what batches hold
    """Whether a cell of a batch is the one of the store."""
    values, stored_values = (one.toarray() if hasattr(one, "toarray") else one for one in (values, stored_values))
    if not np.array_equal(values, stored_values, equal_nan=True):
        return False
    # pandas' NA equals nothing, and is no answer either
    return obs is None or obs.where(obs.notna(), None).equals(stored_obs[obs.index].where(stored_obs.notna(), None))
