"""The laws that a sharding keeps, as one check.

1. A sharding is frozen: its attributes can't be set.
2. What it answers depends on what it is asked alone, and is the same in another process and on another rank.
3. Every row is dealt once. (Where ranks draw from what they are dealt, it lies inside the window.)
4. The rows that it returns are the same by any way of reading them.
5. With any remainder, the ranks of a job share out the window: what is dealt, repeated and lost adds up, every rank has
   the batches that were promised, and reads what was planned.
"""

from __future__ import annotations

import copy
import os
import pickle
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
from annbatch.samplers import RandomSampler, SequentialSampler
from hypothesis import example, given, note, settings
from hypothesis import strategies as st

from annbatch_distributed import DistributedSampler, Rank
from annbatch_distributed.sharding import Rows
from annbatch_distributed.sharding.contract import checked_sharding, draws
from annbatch_distributed.sharding.integers import integer
from annbatch_distributed.sharding.remainder import POLICIES
from annbatch_distributed.testing.strategies import Deal, deals

if TYPE_CHECKING:
    from collections.abc import Iterable

    from annbatch.abc import Sampler
    from annbatch.types import LoadRequest

    from annbatch_distributed.sharding import Remainder, Sharding

__all__ = ["check_sharding"]


def check_sharding(sharding: Sharding, *, n_obs: int | None = None, max_world_size: int = 6) -> None:
    """Check that a sharding keeps the laws, on small windows of all shapes.

    Parameters
    ----------
    sharding
        Any object of the contract, see :class:`~annbatch_distributed.sharding.Sharding`.
    n_obs
        Rows of the collection, for a sharding that is made for one, at most 100,000: each of them is looked at in turn,
        many times. None tries many small numbers.
    max_world_size
        The largest number of ranks to try, at most 1,000: each of them is run.

    Raises
    ------
    TypeError, ValueError
        If an argument is not what it can be: nothing was checked then.
    AssertionError
        If a law is broken, with the law and the smallest example that hypothesis finds.

    Notes
    -----
    Questions that the sharding answers with a ValueError are passed over. Settings of hypothesis, such as the number of
    examples, are those of the profile that is loaded. A few questions are asked in another process as well, if the
    sharding's type can be imported there.

    Examples
    --------
    >>> from annbatch_distributed import Contiguous
    >>> check_sharding(Contiguous(), n_obs=20)
    """
    checked_sharding(sharding, "check_sharding takes an object with a method deal, such as Contiguous()")
    if n_obs is not None:
        n_obs = _at_most("n_obs", n_obs, _MOST_ROWS)
    max_world_size = _at_most("max_world_size", max_world_size, _MOST_RANKS)
    unanswered: dict[str, str] = {}
    answered: set[bool] = set()
    shared_out: set[bool] = set()

    # the first examples are slow while modules load; and examples that are kept would be taken for another sharding's
    @settings(deadline=None, database=None)
    @given(deals(n_obs, max_world_size), st.sampled_from(POLICIES), st.integers(1, 12))
    # whatever is drawn, a job of two ranks is tried with all rows
    @example(Deal(60 if n_obs is None else n_obs, None, min(2, max_world_size), epoch=0, seed=0), "drop", 12)
    def keeps_the_laws(asked: Deal, remainder: Remainder, batch_size: int) -> None:
        note(f"rows: {asked.rows}")
        try:
            asked.ask(sharding)
        except ValueError as error:
            unanswered.setdefault(str(error), str(asked))
            return
        answered.add(True)
        _is_frozen(sharding)
        _depends_on_the_question_alone(sharding, asked)
        _deals_every_row_once(sharding, asked)
        _rows_are_the_same_by_any_way(sharding, asked)
        if _ranks_share_out_the_window(sharding, asked, remainder, batch_size) and asked.world_size > 1:
            shared_out.add(True)

    keeps_the_laws()
    reasons = "\n".join(f"{error} ({asked})" for error, asked in islice(unanswered.items(), 5))
    assert answered, f"A sharding deals rows, but every question was a ValueError. {reasons}"
    assert shared_out or max_world_size == 1, "No job of two ranks or more could run, with any remainder."
    _is_the_same_in_another_process(sharding, n_obs)


#: What is enumerated must end.
_MOST_ROWS, _MOST_RANKS = 100_000, 1_000


def _at_most(name: str, value: int, most: int) -> int:
    value = integer(name, value, least=1)
    if value > most:
        raise ValueError(
            f"{name} must be at most {most}, since each is looked at in turn, got {value}. Check a smaller one."
        )
    return value


def _answer(sharding: Sharding, asked: Deal) -> list[Rows]:
    """What a sharding answers: Rows for all ranks, or for each of them."""
    dealt = asked.ask(sharding)
    answer = list(dealt) if isinstance(dealt, Sequence) else [dealt]
    assert all(isinstance(rows, Rows) for rows in answer), f"deal returns Rows, or a list of them, but gave {dealt!r}."
    assert isinstance(dealt, Rows) or len(answer) == asked.world_size, (
        f"There are Rows for each of {asked.world_size} ranks, or one for all, but there are {len(answer)}."
    )
    return answer


def _enumerated(sharding: Sharding, asked: Deal) -> list[list[int]]:
    """What a sharding answers, as lists: one of all rows, or one for each rank."""
    return [list(rows) for rows in _answer(sharding, asked)]


def _is_frozen(sharding: Sharding) -> None:
    duplicate = copy.copy(sharding)
    for name, value in getattr(sharding, "__dict__", {}).items():
        try:
            setattr(duplicate, name, value)
        except AttributeError:  # FrozenInstanceError is one
            continue
        raise AssertionError(f"A sharding is frozen, but its {name!r} can be set. Make it a @dataclass(frozen=True).")


def _depends_on_the_question_alone(sharding: Sharding, asked: Deal) -> None:
    first = _enumerated(sharding, asked)
    duplicate = copy.deepcopy(sharding)
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 the global state must not matter
    try:
        for global_seed in (1, 2):
            random.seed(global_seed)
            np.random.seed(global_seed)  # noqa: NPY002 the global state must not matter
            for asking in (sharding, duplicate):
                again = _enumerated(asking, asked)
                assert again == first, f"The same question has the same answer, but {again} is not {first}."
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002 the global state must not matter


#: What the other process runs: it is another rank, by all that launchers tell, and hashes strings otherwise.
_ANOTHER_PROCESS = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
sharding, questions = pickle.load(sys.stdin.buffer)
answers = []
for rows, asked in questions:
    try:
        dealt = sharding.deal(rows, **asked)
    except ValueError:
        answers.append(None)
        continue
    answers.append([list(rows) for rows in (dealt if isinstance(dealt, (list, tuple)) else [dealt])])
pickle.dump(answers, sys.stdout.buffer)
"""
_ANOTHER_RANK = {
    "PYTHONHASHSEED": "12345",
    **dict.fromkeys(("RANK", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "JAX_PROCESS_ID"), "5"),
}


def _is_the_same_in_another_process(sharding: Sharding, n_obs: int | None) -> None:
    # what can't be imported there, because it was defined in a notebook or within a function, is asked here only
    questions = [
        Deal(size, None, world_size, epoch, seed)
        for size in ((7, 1009) if n_obs is None else (n_obs,))
        for world_size in (1, 3)
        for epoch, seed in ((0, 0), (2, 0), (0, 1), (0, None))
    ]
    try:
        # what is sent is made of integers, so that nothing is loaded there but what the sharding needs
        asked_there = [
            (asked.rows, {"world_size": asked.world_size, "epoch": asked.epoch, "seed": asked.seed})
            for asked in questions
        ]
        question = pickle.dumps((sharding, asked_there))
    except (AttributeError, TypeError, pickle.PicklingError):
        return
    if type(sharding).__module__ == "__main__":
        return
    run = subprocess.run(
        [sys.executable, "-c", _ANOTHER_PROCESS],
        input=pickle.dumps(sys.path) + question,
        capture_output=True,
        env=os.environ | _ANOTHER_RANK,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, f"A sharding deals rows in another process too, but: {run.stderr.decode()}"
    for asked, there in zip(questions, pickle.loads(run.stdout), strict=True):
        try:
            here = _enumerated(sharding, asked)
        except ValueError:
            here = None
        assert there == here, f"The same question has the same answer in every process, but not {asked}."


def _deals_every_row_once(sharding: Sharding, asked: Deal) -> None:
    shares = _enumerated(sharding, asked)
    window = set(asked.rows)
    if draws(sharding):
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


def _ranks_share_out_the_window(sharding: Sharding, asked: Deal, remainder: Remainder, batch_size: int) -> bool:
    """Run every rank of a job, and return whether they could run."""
    wrapped: Sampler = SequentialSampler(1, batch_size, batch_size)
    if draws(sharding):
        wrapped = RandomSampler(1, batch_size, batch_size, replacement=True)
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
        return False  # too few rows for so many ranks, or shares too uneven for the policy

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
    if draws(sharding):
        for rows, shard in zip(read, shards, strict=True):
            assert set(rows) <= set(shard.rows) <= set(window), "A rank draws from rows of the window: its own."
        return True
    for rows, shard in zip(read, shards, strict=True):
        assert sorted(rows) == sorted(shard.rows), "What is read is what was planned."
    own = chain.from_iterable(list(shard.rows)[: shard.n_own] for shard in shards)
    assert sorted(chain(own, plan.lost)) == window, "What the ranks own and what is lost is the window, each row once."
    repeated = list(chain.from_iterable(shard.repeated for shard in shards))
    assert set(repeated) <= set(window), "What is repeated is of the window."
    assert len(repeated) == plan.n_repeated, "As many rows are repeated as the plan says."
    assert len(plan.lost) == plan.n_lost, "As many rows are lost as the plan says."
    return True


def _rows_read(requests: Iterable[LoadRequest]) -> Iterable[int]:
    """The rows of a pass, as its splits index them."""
    for request in requests:
        rows = [row for part in request["requests"] for row in range(part.start, part.stop)]
        for split in request["splits"]:
            for position in split:
                yield rows[position]
