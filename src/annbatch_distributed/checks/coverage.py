"""Coverage: whether the rows that all ranks have read in an epoch are those that were planned.

Each process states what it has read and what was planned for it, as tallies. That they are equal shows that every rank
has read its share; that the shares add up to the window, without the rows that are lost and with those that are
repeated, shows that they are the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Self

import numpy as np

from annbatch_distributed.checks.agreement import Description, disagreement, ranks_agree
from annbatch_distributed.checks.tally import Tally
from annbatch_distributed.lanes import Lane
from annbatch_distributed.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from annbatch.abc import Sampler

    from annbatch_distributed.checks.exchange import Gather, Timeout
    from annbatch_distributed.lanes import Numbers
    from annbatch_distributed.passes import Pass
    from annbatch_distributed.plan import EpochPlan
    from annbatch_distributed.progress import Begun
    from annbatch_distributed.ranks import Membership

__all__ = ["Reading", "compare_readings", "epoch_read"]


@dataclass(frozen=True)
class Reading:
    """What a process says of its epoch."""

    description: Description
    """Who it is, what all processes must have the same, and its tallies, which all are sent."""
    plan: EpochPlan
    """The plan of all."""
    n_joined: int
    """Of how many virtual ranks a rank joins the batches."""

    @classmethod
    def of(
        cls,
        description: Description,
        last: Begun | None,
        read: Tally,
        plan: EpochPlan,
        *,
        sampler: Sampler,
        lanes: Sequence[Lane],
        own: range,
        root_seed: int,
    ) -> Self:
        """Return what a rank says of the pass that it began last, by a plan, with the wrapped sampler and a root seed.

        ``lanes`` is what each lane of the job had to read, and ``own`` which of them are the rank's, several if they
        are virtual ranks. It raises a ValueError or a TypeError if it isn't known what was planned or read.
        """
        if last is None:
            raise ValueError("no pass was begun since the epoch was set or a state loaded; check before set_epoch")
        if last.n_obs != plan.n_obs:
            raise ValueError(f"n_obs must be that of the last pass, {last.n_obs}, got {plan.n_obs}")
        if not isinstance(read, Tally):
            raise TypeError(f"read must be a Tally, got {read!r}")
        # imported here, since what only compares texts needs no annbatch
        from annbatch_distributed.passes import Pass

        run = partial(Pass, sampler, plan, root_seed=root_seed, passes=last.position.passes)
        own_lanes, before, again, is_share = [lanes[lane] for lane in own], Tally(), Tally(), False
        if last.position.resumes:
            planned = _counted(run(own_lanes))
            before = _counted(run([Lane(_not_due(plan, lanes, own))]))
            repeats = [Lane((), lane.last) for lane in own_lanes if lane.last is not None and lane.last.is_repeat]
            again = _counted(run(repeats)) if repeats else Tally()
        else:
            n_batches = max(map(len, own_lanes))
            share = sum((Tally.of_rows(plan.shard(rank).rows) for rank in own), Tally())
            planned = Tally(n_batches, share.n_rows, share.value)
            is_share = read == share and read.n_batches == n_batches and plan.n_draws is None
            planned = planned if is_share else _counted(run(own_lanes))
            if not is_share and _must_read_each_row(sampler, plan, share.n_rows) and planned != share:
                name = type(sampler).__name__
                raise ValueError(
                    f"{name} doesn't read each row of its share once, as remainder={plan.remainder!r} promises. Mend "
                    "it; or pass remainder='drop', which promises full batches only; or, if it draws rows with "
                    "replacement, give it a method n_draws(n_rows) that says how many"
                )
        tallies = {"read": read, "planned": planned, "before": before, "again": again}
        said = {name: tally.to_dict() for name, tally in tallies.items()} | {"is_share": is_share}
        return cls(replace(description, read=said), plan, len(own))


def _not_due(plan: EpochPlan, lanes: Sequence[Lane], own: range) -> Numbers:
    """Return the batches that no lane has to read any more, of those streams that a rank counts for all."""
    are_left = np.ones(plan.first_number(plan.world_size), dtype=np.bool_)
    for lane in lanes:
        for part in (*lane.numbers, *([] if lane.last is None else [range(lane.last.number, lane.last.number + 1)])):
            are_left[part.start : part.stop : part.step] = False
    numbers: list[range] = []
    for stream in range(plan.world_size):
        if stream % len(lanes) in own:
            first = plan.first_number(stream)
            left = Rows.where(are_left[first : plan.first_number(stream + 1)])
            numbers += map(range, (left.starts + first).tolist(), (left.stops + first).tolist())
    return tuple(numbers)


def epoch_read(
    member: Callable[[], Membership],
    read: Callable[[Membership], Reading],
    *,
    timeout: Timeout,
    gather: Gather | None,
) -> str:
    """Return what all processes together have read, or raise in all: see :func:`agreement.ranks_agree`."""
    own: list[Reading] = []

    def describe(job: Membership) -> Description:
        own.append(read(job))
        return own[0].description

    said = ranks_agree(member, describe, timeout=timeout, gather=gather, call="check_epoch_read")
    return compare_readings(said, own[0].plan, n_joined=own[0].n_joined)


def _counted(requests: Pass) -> Tally:
    """Count the rows of all batches of load requests, without reading them."""
    found = Tally()
    for rows in requests.batches():
        found.add(rows)
    return found


def _must_read_each_row(sampler: Sampler, plan: EpochPlan, n_rows: int) -> bool:
    """Whether a sampler of a user's own has to read each row of its share once."""
    from annbatch_distributed.known import is_annbatchs_own, n_draws

    is_known = is_annbatchs_own(sampler)
    return not is_known and plan.remainder != "drop" and n_draws(sampler, n_rows) is None


def compare_readings(said: Mapping[int, Description], plan: EpochPlan, *, n_joined: int = 1) -> str:
    """Return what processes, by number, have read by a plan; a ValueError if it isn't what was planned.

    ``n_joined`` is of how many virtual ranks a rank joins the batches.
    """
    most = None if plan.batch_size is None else plan.batch_size * n_joined
    problems = [problem for number, process in said.items() if (problem := _problem(number, process, most))]
    # one counts of those that have the same share
    shares = {process.rank: process.read for process in said.values()}
    total = sum((Tally(**share["read"]) for share in shares.values()), Tally())
    before, again = (sum((Tally(**share[name]) for share in shares.values()), Tally()) for name in ("before", "again"))
    is_whole = plan.n_draws is None and _are_whole(total + before, again, plan)
    if not problems and not is_whole and all(share["is_share"] for share in shares.values()):
        problems = [f"the shares of all ranks, {total.n_rows} rows, differ from the plan"]
    if problems:
        masked = f" ({_masked(plan)})" if _masked(plan) else ""
        raise disagreement(f"What the ranks have read in epoch {plan.epoch} is not what was planned{masked}:", problems)
    return _summary(plan, total, len(shares), is_whole=is_whole)


def _are_whole(shares: Tally, again: Tally, plan: EpochPlan) -> bool:
    """Whether rows are those of the window, without what is lost, with what is repeated, and what comes again."""
    repeated = [plan.shard(rank).repeated for rank in range(plan.world_size)] if plan.n_repeated else []
    return shares + Tally.of_rows(plan.lost) == sum(map(Tally.of_rows, repeated), Tally.of_rows(plan.window) + again)


def _problem(number: int, process: Description, batch_size: int | None) -> str:
    """Return what a process has read otherwise than planned; empty if nothing."""
    read, planned = Tally(**process.read["read"]), Tally(**process.read["planned"])
    if _in_words(read) != _in_words(planned):
        what = f"read {_in_words(read)}, not {_in_words(planned)}"
    elif read != planned:
        what = f"read {_in_words(read)} as planned, but other rows"
    elif batch_size is not None and read.largest > batch_size:
        what = f"read {_in_words(read)} as planned, but one of {read.largest} rows, with batch size {batch_size}"
    else:
        return ""
    peer = f" (process {number})" if process.n_peers != 1 else ""
    return f"rank {process.rank}{peer} has {what}"


def _in_words(tally: Tally) -> str:
    rows, batches = "row" if tally.n_rows == 1 else "rows", "batch" if tally.n_batches == 1 else "batches"
    return f"{tally.n_rows} {rows} in {tally.n_batches} {batches}"


def _summary(plan: EpochPlan, total: Tally, n_ranks: int, *, is_whole: bool) -> str:
    """Return what so many ranks have read as planned, in a line."""
    epoch = f"epoch {plan.epoch}" if plan.left is None else f"what was left of epoch {plan.epoch}"
    ranks = f"{n_ranks} ranks have" if n_ranks > 1 else "1 rank has"
    text = f"{epoch}: {ranks} read {_in_words(total)}, as planned"
    # of another number of ranks, drop may lose whole batches
    if not is_whole or (plan.left is not None and plan.remainder == "drop"):
        return text
    text += ". " + ("Each" if plan.left is None else "With what was done before, each")
    text += f" of the {len(plan.window) - plan.n_lost} rows was read once"
    text += f", {plan.n_repeated} were repeated" if plan.n_repeated else ""
    text += f", {plan.n_lost} of the {len(plan.window)} are lost in this epoch" if plan.n_lost else ""
    return text + (f"; {_masked(plan)}" if _masked(plan) else "")


def _masked(plan: EpochPlan) -> str:
    """Return which rows the mask selects, which tells loaders of one collection apart; empty if it selects all."""
    return f"the mask selects {plan.window.in_short(3)}" if len(plan.window) < plan.n_obs else ""
