"""Running any base sampler on one shard's rows.

Almost every sampler runs on *local* rows ``[0, len(rows))`` as it runs on a collection of that many rows: it is told
``n_obs=len(rows)`` and an open mask, and never learns which rows of the collection they are.

A sampler that holds something for each row of the collection, such as a label, is tied to absolute rows. What it holds
must be narrowed down to the shard's rows first. How is said by a function registered for its type: the types are an
open set that we don't own, which is what ``functools.singledispatch`` is for.
"""

from __future__ import annotations

from functools import singledispatch
from typing import TYPE_CHECKING

import pandas as pd
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler, WeightedClassSampler

if TYPE_CHECKING:
    from annbatch.abc import Sampler

    from annbatch_distributed.sharding import Rows


@singledispatch
def localize(sampler: Sampler, rows: Rows, n_obs: int) -> Sampler:
    """Make a sampler run on the local rows of a shard.

    Register a function of the same signature for the type of a sampler that is tied to absolute rows.

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
    >>> from annbatch_distributed.sharding import Rows
    >>> local = localize(SequentialSampler(2, 1, 2, mask=slice(4, 8)), Rows((range(6, 8),)), 100)
    >>> [request["requests"].tolist() for request in local.sample(2)]
    [[slice(0, 2, None)]]
    """
    del rows, n_obs  # only samplers tied to absolute rows have to know more than how many local rows there are
    mask: object = sampler.mask  # which a user's sampler may have of any type
    if not (mask is None or (isinstance(mask, slice) and mask == slice(0, None))):
        try:
            sampler.mask = slice(0, None)
        except AttributeError as error:
            msg = (
                f"{type(sampler).__name__} has the mask {sampler.mask}, which can't be assigned. To run on a rank's "
                "rows it must take another one; give it a setter for mask."
            )
            raise TypeError(msg) from error
    return sampler


@localize.register(ClassSampler)
def _localize_class_sampler(sampler: ClassSampler, rows: Rows, n_obs: int) -> ClassSampler:
    sampler.validate(n_obs)  # one label per row of the collection
    _close_passes(sampler)
    _set_classes(sampler, _take(_classes(sampler), rows))
    return sampler


def is_annbatchs_own(sampler: Sampler) -> bool:
    """Whether a sampler is one of annbatch's own, which stay within their mask and never write into what they yielded.

    Their subclasses may not.
    """
    return type(sampler) in (RandomSampler, SequentialSampler, ClassSampler, WeightedClassSampler)


def confine(sampler: Sampler, rows: Rows) -> bool:
    """Make a sampler run on the shard's rows where they are, if it can be trusted to.

    A shortcut: if a sampler stays within its mask and the shard is one stretch, a mask gives bit for bit the requests
    that local rows and their translation give, without the time that goes into translating every slice.

    Parameters
    ----------
    sampler
        A private copy of any sampler; it is changed only if that is enough.
    rows
        The shard, as global rows.

    Returns
    -------
    Whether it now runs on these rows: its ``sample`` then takes the collection's ``n_obs``, and gives global rows.
    """
    match rows.pieces:
        case (range() as stretch,) if is_annbatchs_own(sampler):
            if isinstance(sampler, ClassSampler):
                _close_passes(sampler)
            sampler.mask = slice(stretch.start, stretch.stop)
            return True
    return False


@singledispatch
def is_tied(sampler: Sampler) -> bool:
    """Whether a sampler is tied to absolute rows: a function is registered with ``localize`` for its type.

    Which rows a shard has then decides whether the sampler can run on it, not only how many.
    """
    return localize.dispatch(type(sampler)) is not localize.dispatch(object)


def _take(classes: pd.Categorical, rows: Rows) -> pd.Categorical:
    """Return the labels of some rows: a view if they are one stretch."""
    match rows.pieces:
        case (range() as stretch,):
            codes = classes.codes[stretch.start : stretch.stop]
        case _:
            codes = classes.codes[rows.to_array()]
    return pd.Categorical.from_codes(codes, dtype=classes.dtype)


# annbatch has no public way to read or replace a class sampler's labels, or to say that a copy has no pass open. The
# private names that stand in for it are used here and nowhere else; tests/passes/test_shard.py fails if one is renamed.


def _classes(sampler: ClassSampler) -> pd.Categorical:
    classes: pd.Categorical = sampler._rle_manager._classes
    return classes


def _close_passes(sampler: ClassSampler) -> None:
    sampler._num_open_passes = 0  # the original may have been copied with one open


def _set_classes(sampler: ClassSampler, classes: pd.Categorical) -> None:
    sampler._n_obs = len(classes)
    sampler._rle_manager._classes = classes
    sampler.mask = slice(0, len(classes))  # looks for the runs of each class again
