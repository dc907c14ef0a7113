"""Promises: what a policy promises of a rank's batches, as far as the wrapped sampler has to keep it.

What annbatch's own samplers yield follows from their settings, and a wrapper that is wrapped again holds its sampler to
its own policy. Of any other sampler, what each of its passes yields is held to the promise:

1. Batches have rows, and no more than ``batch_size``. Under ``drop`` and ``pad`` all of them are full.
2. Under ``exact`` and ``pad`` every row is read, and read once.

A sampler that was told how many rows to draw (``num_samples``, or a function registered with
:func:`~annbatch_distributed.passes.n_draws`) keeps to that under every policy. Where the ranks share out draws, it
makes all of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from annbatch.samplers import RandomSampler

from annbatch_distributed.passes.requests import Promise
from annbatch_distributed.passes.traits import is_wrapper, n_draws

if TYPE_CHECKING:
    from annbatch.abc import Sampler

    from annbatch_distributed.sharding import Remainder


def promised(sampler: Sampler, remainder: Remainder, n_rows: int, *, is_drawn: bool) -> Promise:
    """Return what a policy promises of the batches of a rank.

    ``n_rows`` is how many rows the rank's shard has; or how many samples the rank draws, if the ranks share out draws.
    """
    batch_size, full = None if sampler.batch_size is None else int(sampler.batch_size), remainder in ("drop", "pad")
    if is_drawn and not is_wrapper(sampler):
        return Promise(batch_size, remainder, full=full, n_rows=n_rows)
    if not reads_every_row(sampler):
        return Promise(batch_size, remainder)
    once = remainder in ("exact", "pad")
    return Promise(batch_size, remainder, full=full, n_rows=n_rows if once else None, once=once)


def reads_every_row(sampler: Sampler) -> bool:
    """Whether a sampler is one that is meant to read all of its rows once, rather than to draw some of them."""
    # annbatch doesn't make num_samples public; tests/passes/test_traits.py fails if it is renamed
    was_told = isinstance(sampler, RandomSampler) and sampler._num_samples is not None
    return not (was_told or is_wrapper(sampler)) and n_draws(sampler, 1) is None


def refuse_impossible(n_batches: int, promise: Promise, what: str) -> None:
    """Raise a ValueError if so many batches can't keep a promise, whatever is in them.

    Parameters
    ----------
    n_batches
        How many batches the sampler gives.
    promise
        What is promised of them.
    what
        What they hold, as the plural of a noun.
    """
    n_rows, size = promise.n_rows, promise.batch_size
    if n_rows is None or size is None:
        return
    if n_batches * size < n_rows:
        msg = (
            f"it makes {n_batches} batches of {size} rows at most, and so leaves out some of its {n_rows} "
            f"{what}, but remainder={promise.policy!r} promises every {what[:-1]}. Use drop_last=False, or "
            "remainder='drop'."
        )
        raise ValueError(msg)
    if n_batches > (n_rows // size if promise.full else n_rows):
        kind = f"full batches of {size} rows" if promise.full else "batches"
        msg = (
            f"it makes {n_batches} batches, and its {n_rows} {what} are too few for so many {kind}, which "
            f"remainder={promise.policy!r} promises. Mend its n_batches, or use remainder='keep'."
        )
        raise ValueError(msg)
