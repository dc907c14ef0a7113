"""The laws that a sharding keeps, as one check.

1. A sharding is frozen: equal to its copy, with the same hash, and asking it changes nothing.
2. What it answers depends on what it is asked alone.
3. Every row is dealt once. (Under ``Independent``, what a rank draws from lies inside the window.)
4. The rows that it returns are the same by any way of reading them.
5. With any remainder, the ranks of a job share out the window: what is dealt, repeated and lost adds up, every rank has
   the batches that were promised, and reads what was planned.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from annbatch.samplers import RandomSampler, SequentialSampler
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st

from annbatch_distributed.ranks import Rank
from annbatch_distributed.sampler import DistributedSampler
from annbatch_distributed.sharding import Independent, Rows
from annbatch_distributed.sharding.remainder import POLICIES
from annbatch_distributed.testing.strategies import deals

if TYPE_CHECKING:
    from collections.abc import Iterable

    from annbatch.types import LoadRequest

    from annbatch_distributed.sharding import Remainder, Sharding
    from annbatch_distributed.testing.strategies import Deal


def check_sharding(sharding: Sharding, *, n_obs: int | None = None, max_world_size: int = 6) -> None:
    """Check that a sharding keeps the laws, on small windows of all shapes.

    Parameters
    ----------
    sharding
        Any object of the contract, see :class:`~annbatch_distributed.sharding.Sharding`.
    n_obs
        Rows of the collection, for a sharding that is made for one; None tries many.
    max_world_size
        The largest number of ranks to try.

    Raises
    ------
    AssertionError
        If a law is broken, with the law and the smallest example that hypothesis finds.

    Notes
    -----
    Questions that the sharding answers with a ValueError are passed over, but most must have an answer. Settings of
    hypothesis, such as the number of examples, are those of the profile that is loaded.

    Examples
    --------
    >>> from annbatch_distributed import Contiguous
    >>> check_sharding(Contiguous(), n_obs=20)
    """

    # the first examples are slow while modules load; and examples that are kept would be taken for another sharding's
    @settings(deadline=None, database=None)
    @given(deals(n_obs, max_world_size), st.sampled_from(POLICIES), st.integers(1, 12))
    def keeps_the_laws(asked: Deal, remainder: Remainder, batch_size: int) -> None:
        note(f"rows: {asked.rows}")
        try:
            asked.ask(sharding)
        except ValueError:
            assume(False)
        _is_frozen(sharding, asked)
        _depends_on_the_question_alone(sharding, asked)
        _deals_every_row_once(sharding, asked)
        _rows_are_the_same_by_any_way(sharding, asked)
        _ranks_share_out_the_window(sharding, asked, remainder, batch_size)

    keeps_the_laws()


def _enumerated(sharding: Sharding, asked: Deal) -> list[list[int]]:
    """What a sharding answers, as lists: one of all rows, or one for each rank."""
    return [list(rows) for rows in _answer(sharding, asked)]


def _answer(sharding: Sharding, asked: Deal) -> list[Rows]:
    dealt = asked.ask(sharding)
    return [dealt] if isinstance(dealt, Rows) else list(dealt)


def _is_frozen(sharding: Sharding, asked: Deal) -> None:
    before = copy.deepcopy(sharding)
    asked.ask(sharding)
    assert before == sharding, f"Asking a sharding leaves it equal to its copy, but {before} is not {sharding}."
    assert hash(before) == hash(sharding), "A sharding has the hash of its copy."


def _depends_on_the_question_alone(sharding: Sharding, asked: Deal) -> None:
    first = _enumerated(sharding, asked)
    duplicate = copy.deepcopy(sharding)
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 it is what must not matter
    try:
        for global_seed in (1, 2):
            random.seed(global_seed)
            np.random.seed(global_seed)  # noqa: NPY002 see above
            for asking in (sharding, duplicate):
                again = _enumerated(asking, asked)
                assert again == first, f"The same question has the same answer, but {again} is not {first}."
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002 see above


def _deals_every_row_once(sharding: Sharding, asked: Deal) -> None:
    shares = _enumerated(sharding, asked)
    assert asked.ask(sharding).__class__ is Rows or len(shares) == asked.world_size, (
        f"There are Rows for each of {asked.world_size} ranks, or one for all, but there are {len(shares)}."
    )
    window = set(asked.rows)
    if isinstance(sharding, Independent):
        assert window >= set(chain(*shares)), "A rank draws from rows of the window."
        return
    times = Counter(chain.from_iterable(shares))
    wrong = {row: times[row] for row in sorted(window | set(times)) if times[row] != (row in window)}
    assert not wrong, f"Every row of the window is dealt once and no other, but dealt how often: {wrong}."


def _rows_are_the_same_by_any_way(sharding: Sharding, asked: Deal) -> None:
    for rows in _answer(sharding, asked):
        listed = list(rows)
        assert rows.to_array().tolist() == listed, "to_array gives the rows in order."
        assert len(rows) == len(listed), "len gives the number of rows."
        if not listed:
            continue
        for start, length in ((len(listed) // 3, len(listed) // 2), (len(listed) - 1, 3)):
            expected = [listed[(start + step) % len(listed)] for step in range(length)]
            assert list(rows.cyclic(start, length)) == expected, f"cyclic({start}, {length}) goes on at the front."
        bounds = np.linspace(0, len(listed), num=4, dtype=np.int64)
        starts, stops, _ = rows.slices_to_global(bounds[:-1], bounds[1:])
        read = [row for start, stop in zip(starts.tolist(), stops.tolist(), strict=True) for row in range(start, stop)]
        assert read == listed, "slices_to_global gives the rows in order."


def _ranks_share_out_the_window(sharding: Sharding, asked: Deal, remainder: Remainder, batch_size: int) -> None:
    independent = isinstance(sharding, Independent)
    wrapped = (
        RandomSampler(1, batch_size, batch_size, replacement=True)
        if independent
        else SequentialSampler(1, batch_size, batch_size)
    )
    ranks = [
        DistributedSampler(
            wrapped,
            dist_info=Rank(rank, asked.world_size),
            remainder=remainder,
            sharding=sharding,
            mask=asked.mask,
            seed=asked.seed,
        )
        for rank in range(asked.world_size)
    ]
    outcomes = set()
    for sampler in ranks:
        sampler.set_epoch(asked.epoch)
        try:
            sampler.validate(asked.n_obs)
        except ValueError as error:
            outcomes.add(str(error))
        else:
            outcomes.add("")
    assert len(outcomes) == 1, f"What is wrong for one rank is the same error on all of them, but there are {outcomes}."
    if outcomes != {""}:
        return  # too few rows for so many ranks, or shares too uneven for the policy

    plan, window = ranks[0].plan(asked.n_obs), list(asked.rows)
    shards = [plan.shard(rank) for rank in range(asked.world_size)]
    requests = [list(rank.sample(asked.n_obs)) for rank in ranks]
    for rank, sampler in enumerate(ranks):
        n_yielded = sum(len(request["splits"]) for request in requests[rank])
        assert sampler.n_batches(asked.n_obs) == plan.n_batches(rank) == n_yielded, "n_batches is what is yielded."
    if remainder != "keep":
        n_batches = {plan.n_batches(rank) for rank in range(asked.world_size)}
        assert len(n_batches) == 1, f"Every rank has the same number of batches, but they have {n_batches}."
    read = [list(_rows_read(its)) for its in requests]
    if independent:
        assert set(window) >= set(chain(*read)), "A rank draws from rows of the window."
        return
    for rows, shard in zip(read, shards, strict=True):
        assert sorted(rows) == sorted(shard.rows), "What is read is what was planned."
    own = chain.from_iterable(list(shard.rows)[: shard.n_own] for shard in shards)
    assert sorted(chain(own, plan.lost)) == window, "What the ranks own and what is lost is the window, each row once."
    repeated = list(chain.from_iterable(shard.repeated for shard in shards))
    assert set(repeated) <= set(window), "What is repeated is of the window."
    assert len(repeated) == plan.n_repeated, "As many rows are repeated as the plan says."
    assert len(plan.lost) == plan.n_lost, "As many rows are lost as the plan says."


def _rows_read(requests: Iterable[LoadRequest]) -> Iterable[int]:
    """The rows of a pass, as its splits index them."""
    for request in requests:
        rows = [row for part in request["requests"] for row in range(part.start, part.stop)]
        for split in request["splits"]:
            for position in split:
                yield rows[position]
