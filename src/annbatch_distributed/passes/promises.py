"""Promises: what a policy promises of a rank's batches, as far as the wrapped sampler has to keep it.

What annbatch's own samplers yield follows from their settings. Of any other sampler, what each of its passes yields is
held to the promise:

1. Batches have rows, and no more than ``batch_size``. Under ``drop`` and ``pad`` all of them are full.
2. Under ``exact`` and ``pad`` every row is read, and read once.

A sampler that was given the number of rows to draw (``num_samples``, or a function registered with
:func:`~annbatch_distributed.passes.n_draws`) keeps to that under every policy. Where the ranks share out draws, it
makes all of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from annbatch_distributed.passes.annbatch_samplers import has_fixed_n_samples
from annbatch_distributed.passes.requests import rows_of
from annbatch_distributed.passes.traits import n_draws

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from annbatch.abc import Sampler
    from annbatch.types import LoadRequest

    from annbatch_distributed.sharding import Remainder

__all__ = ["Promise", "enforce_promise", "promised", "reads_every_row", "refuse_impossible"]


class Promise(NamedTuple):
    """What a policy promises of a rank's batches, as far as the sampler has to keep it."""

    batch_size: int | None
    """The most rows of a batch; None if that isn't known."""
    policy: str
    """What becomes of the remainder."""
    full: bool = False
    """Whether every batch has ``batch_size`` rows."""
    n_rows: int | None = None
    """The rows of all batches together; None if nothing is promised."""
    once: bool = False
    """Whether these are the local rows ``[0, n_rows)``, each once."""


def promised(sampler: Sampler, remainder: Remainder, n_rows: int, *, is_drawn: bool) -> Promise:
    """Return what a policy promises of the batches of a rank.

    ``n_rows`` is how many rows the rank's shard has; or how many samples the rank draws, if the ranks share out draws.
    """
    batch_size, full = None if sampler.batch_size is None else int(sampler.batch_size), remainder in ("drop", "pad")
    if is_drawn:
        return Promise(batch_size, remainder, full=full, n_rows=n_rows)
    if not reads_every_row(sampler):
        return Promise(batch_size, remainder)
    once = remainder in ("exact", "pad")
    return Promise(batch_size, remainder, full=full, n_rows=n_rows if once else None, once=once)


def reads_every_row(sampler: Sampler) -> bool:
    """Whether a sampler is one that is meant to read all of its rows once, rather than to draw some of them."""
    return not has_fixed_n_samples(sampler) and n_draws(sampler, 1) is None


def refuse_impossible(n_batches: int, promise: Promise, what: str) -> None:
    """Raise a ValueError if ``n_batches`` batches can't keep a promise. ``what`` they hold is the plural of a noun."""
    n_rows, size = promise.n_rows, promise.batch_size
    if n_rows is None or size is None:
        return
    if n_batches * size < n_rows:
        raise ValueError(
            f"it makes {n_batches} batches of {size} rows at most, and so leaves out some of its {n_rows} "
            f"{what}, but remainder={promise.policy!r} promises every {what[:-1]}. Use drop_last=False, or "
            "remainder='drop'."
        )
    if n_batches > (n_rows // size if promise.full else n_rows):
        kind = f"full batches of {size} rows" if promise.full else "batches"
        raise ValueError(
            f"it makes {n_batches} batches, and its {n_rows} {what} are too few for that many {kind}, which "
            f"remainder={promise.policy!r} promises. Mend its n_batches, or use remainder='keep'."
        )


def enforce_promise(requests: Iterable[LoadRequest], promise: Promise, *, name: str) -> Iterator[LoadRequest]:
    """Raise a RuntimeError where the batches of load requests with splits break a promise.

    It is raised as soon as a batch is too large, or not full where it is to be, or a later load request reads a row
    again; and at the end if rows are missing. Where each row is promised, it takes a byte for each of them: less than a
    sampler that permutes them holds itself. ``name`` is the sampler's, for messages.
    """
    size, by = promise.batch_size, f"remainder={promise.policy!r}"
    read = np.zeros(promise.n_rows if promise.once and promise.n_rows is not None else 0, dtype=np.bool_)
    n_read = 0
    for request in requests:
        splits = request["splits"]
        lengths = [len(split) for split in splits]
        n_read += sum(lengths)
        if size is not None and max(lengths, default=0) > size:
            raise RuntimeError(f"{name} yielded a batch of {max(lengths)} rows, and its batch_size is {size}. {_MEND}.")
        if promise.full and size is not None and min(lengths, default=size) < size:
            fewest = f"{min(lengths)} row{'s' * (min(lengths) > 1)}"
            raise RuntimeError(
                f"{name} yielded a batch of {fewest}, but all are to be full, of {size} rows ({by}). {_MEND}, or use "
                "remainder='keep' or 'exact'."
            )
        if promise.once and splits:
            rows = rows_of(request["requests"])[np.concatenate(splits)]
            again = read[rows]
            if again.any():
                raise RuntimeError(
                    f"{name} read rows more than once, row {rows[again][0]} for one, of the {promise.n_rows} rows that "
                    f"it was given, but {by} promises each of them once. {_MEND}; {_REGISTER}"
                )
            read[rows] = True
        yield request
    if promise.once and not read.all():
        missing = np.flatnonzero(~read)
        raise RuntimeError(
            f"{name} never read {len(missing)} of its {promise.n_rows} rows, row {missing[0]} for one, but {by} "
            f"promises each of them once. {_MEND}; {_REGISTER}"
        )
    if promise.n_rows is not None and n_read != promise.n_rows:
        what = "more than once" if promise.once else "in all"
        raise RuntimeError(f"{name} read {n_read} rows {what}, not {promise.n_rows}, which {by} promises. {_MEND}.")


_MEND = "Mend the sampler"
_REGISTER = (
    "or if it is meant to draw rows, register how many for its type with annbatch_distributed.passes.n_draws, or use "
    "remainder='drop', which promises full batches only."
)
