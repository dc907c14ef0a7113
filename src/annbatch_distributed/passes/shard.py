"""Running any base sampler on one shard's rows.

Almost every sampler runs on *local* rows ``[0, len(rows))`` as it runs on a collection of that many rows: it is told
``n_obs=len(rows)`` and an open mask, and never learns which rows of the collection they are.

A sampler that holds something for each row of the collection, such as a label, needs global rows. What it holds
must be narrowed down to the shard's rows first. How is said by a function registered for its type: the types are an
open set that we don't own, which is what ``functools.singledispatch`` is for.
"""

from __future__ import annotations

import weakref
from functools import partial, singledispatch
from typing import TYPE_CHECKING

from annbatch_distributed.passes.private_copy import private_copy

if TYPE_CHECKING:
    import numpy as np
    from annbatch.abc import Sampler

    from annbatch_distributed.rows import Rows

__all__ = ["localize", "localized", "needs_global_rows"]


@singledispatch
def localize(sampler: Sampler, rows: Rows, n_obs: int) -> Sampler:
    """Make a sampler run on the local rows of a shard.

    Register a function of the same signature for the type of a sampler that needs global rows.

    Parameters
    ----------
    sampler
        A private copy of any sampler, which may be changed.
    rows
        The shard, as global rows; local row ``p`` is the ``p``-th of them.
    n_obs
        The number of rows of the collection.

    Returns
    -------
    The sampler, or another one, whose ``validate``, ``n_batches`` and ``sample`` take ``len(rows)`` for ``n_obs``, and
    whose requests are local rows.

    Raises
    ------
    ValueError
        If the sampler can't run on these rows.

    Examples
    --------
    >>> from annbatch.samplers import SequentialSampler
    >>> from annbatch_distributed import Rows
    >>> local = localize(
    ...     SequentialSampler(2, 1, 2, mask=slice(4, 8)), Rows((range(6, 8),)), 100
    ... )
    >>> [request["requests"].tolist() for request in local.sample(2)]
    [[slice(0, 2, None)]]
    """
    del rows, n_obs  # only samplers that need global rows have to know more than how many local rows there are
    mask: object = sampler.mask  # which a user's sampler may have of any type
    if not (mask is None or (isinstance(mask, slice) and mask == slice(0, None))):
        try:
            sampler.mask = slice(0, None)
        except AttributeError as error:
            raise TypeError(
                f"{type(sampler).__name__} has the mask {sampler.mask}, which can't be assigned. To run on a rank's "
                "rows it must take another one; give it a setter for mask."
            ) from error
    return sampler


@singledispatch
def needs_global_rows(sampler: Sampler) -> bool:
    """Return whether a sampler holds something for each row of the collection: localize has a function for its type.

    Which rows a shard has then decides whether the sampler can run on it, not only how many.
    """
    return localize.dispatch(type(sampler)) is not localize.dispatch(object)


#: For samplers that need global rows, by their ids: the rows that they were made to run on last, and the result.
_last: dict[int, tuple[weakref.ref[Sampler], Rows, int, Sampler]] = {}


def localized(sampler: Sampler, rows: Rows, n_obs: int, rng: np.random.Generator) -> Sampler:
    """Return a private copy of a sampler that runs on the local rows of a shard, with a generator.

    What takes long is not done again in every pass: a sampler that holds something for each row goes through all rows.
    """
    if not needs_global_rows(sampler):
        return localize(private_copy(sampler, rng), rows, n_obs)
    known, its_rows, its_n_obs, local = _last.get(id(sampler), (None, None, None, sampler))
    if known is None or known() is not sampler or (its_rows, its_n_obs) != (rows, n_obs):
        local = localize(private_copy(sampler), rows, n_obs)
        gone = partial(_last.pop, id(sampler))  # called with the reference, which is what it returns if there is none
        _last[id(sampler)] = weakref.ref(sampler, gone), rows, n_obs, local
    return private_copy(local, rng)
