"""Coverage: whether the rows that all ranks have read in an epoch are those that were planned.

1. Each process says what it has read, what was planned for it, its share of the plan, and the rows of a part of the
   window, all as tallies.
2. What it has read must be what was planned.
3. The shares must add up to the window, without the rows that are lost and with those that are repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Self

from annbatch_distributed.checks.agreement import Description, disagreement, ranks_agree
from annbatch_distributed.checks.tally import Tally
from annbatch_distributed.integers import counted
from annbatch_distributed.lanes import Lane
from annbatch_distributed.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from annbatch.abc import Sampler

    from annbatch_distributed.checks.exchange import Gather, Timeout
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
        are virtual ranks. A ValueError or a TypeError if it isn't known what was planned or read.
        """
        if last is None:
            raise ValueError("no pass was begun since the epoch was set or a state loaded; check before set_epoch")
        if last.n_obs != plan.n_obs:
            raise ValueError(f"n_obs must be that of the last pass, {last.n_obs}, got {plan.n_obs}")
        if not isinstance(read, Tally):
            raise TypeError(f"read must be a Tally, got {read!r}")
        # imported here, since what only compares texts needs no annbatch
        from annbatch_distributed.known import is_annbatchs_own, n_draws
        from annbatch_distributed.passes import Pass

        run = partial(Pass, sampler, root_seed=root_seed, passes=last.position.passes)
        whole, leaves_out = replace(plan, left_out=Rows()), len(plan.left_out) > 0
        own_lanes, is_resumed = [lanes[lane] for lane in own], last.position.resumes
        # a resumed epoch may have more or fewer streams than there are lanes
        streams = [stream for stream in range(plan.world_size) if stream % len(lanes) in own]
        share = sum((_tally(plan.shard(stream).rows) for stream in streams), Tally())
        share.n_batches = max(map(len, own_lanes))
        has_draws = n_draws(sampler, share.n_rows) is not None
        is_part = is_resumed or leaves_out
        if read == share and read.n_batches == share.n_batches and not is_part and not has_draws:
            planned, reads_share = share, True
        else:
            planned = _counted(run(plan, own_lanes))
            numbers = tuple(range(plan.first_number(stream), plan.first_number(stream + 1)) for stream in streams)
            reads_share = share == (_counted(run(whole, [Lane(numbers)])) if is_part else planned)
            if not reads_share and not has_draws and plan.remainder != "drop" and not is_annbatchs_own(sampler):
                name = type(sampler).__name__
                raise ValueError(
                    f"{name} doesn't read each row of its share once, as remainder={plan.remainder!r} promises. Mend "
                    "it; or pass remainder='drop', which promises full batches only; or, if it draws rows with "
                    "replacement, give it a method n_draws(n_rows) that says how many"
                )
        n_rows, rank, n_ranks = len(plan.window), description.rank, description.world_size
        part = plan.window.cut(rank * n_rows // n_ranks, (rank + 1) * n_rows // n_ranks)
        tallies = {"read": read, "planned": planned, "share": share, "window": _tally(part)}
        said = {name: tally.to_dict() for name, tally in tallies.items()}
        return cls(replace(description, read=said | {"reads_share": reads_share}), plan)


def _tally(rows: Rows) -> Tally:
    return Tally(0, len(rows), rows.mixed_sum())


def _counted(requests: Pass) -> Tally:
    """Count the rows of all batches of a pass, without reading them."""
    tally = Tally()
    for rows in requests.batches():
        tally.add(rows)
    return tally


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
    return compare_readings(said, own[0].plan)


def compare_readings(said: Mapping[int, Description], plan: EpochPlan) -> str:
    """Return what processes, by number, have read by a plan; a ValueError if it isn't what was planned."""
    problems = [problem for number, process in said.items() if (problem := _problem(number, process))]
    # ranks of several processes count once
    ranks = {process.rank: process.read for process in said.values()}.values()
    read, shares, window = (
        sum((Tally(**rank[name]) for rank in ranks), Tally()) for name in ("read", "share", "window")
    )
    if not problems and plan.n_draws is None:
        repeated = (_tally(plan.shard(rank).repeated) for rank in range(plan.world_size) if plan.n_repeated)
        if shares + _tally(plan.lost) != sum(repeated, window):
            problems = [f"the shares of all ranks, {counted(shares.n_rows, 'row')}, differ from the plan"]
    if problems:
        masked = f" ({_masked(plan)})" if _masked(plan) else ""
        raise disagreement(f"What the ranks have read in epoch {plan.epoch} is not what was planned{masked}:", problems)
    reads_each_row = plan.n_draws is None and all(rank["reads_share"] for rank in ranks)
    return _summary(plan, read, len(ranks), reads_each_row=reads_each_row)


def _problem(number: int, process: Description) -> str:
    """Return what a process has read otherwise than planned; empty if nothing."""
    read, planned = Tally(**process.read["read"]), Tally(**process.read["planned"])
    if _in_words(read) != _in_words(planned):
        what = f"read {_in_words(read)}, not {_in_words(planned)}"
    elif read != planned:
        what = f"read {_in_words(read)} as planned, but other rows"
    else:
        return ""
    peer = f" (process {number})" if process.n_peers != 1 else ""
    return f"rank {process.rank}{peer} has {what}"


def _in_words(tally: Tally) -> str:
    return f"{counted(tally.n_rows, 'row')} in {counted(tally.n_batches, 'batch')}"


def _summary(plan: EpochPlan, total: Tally, n_ranks: int, *, reads_each_row: bool) -> str:
    """Return what so many ranks have read as planned, in a line."""
    epoch = "rest of " * (plan.left is not None) + f"epoch {plan.epoch}"
    ranks = f"{counted(n_ranks, 'rank')} {'has' if n_ranks == 1 else 'have'}"
    text = f"{epoch}: {ranks} read {_in_words(total)}, as planned"
    # of another number of ranks, drop may lose whole batches
    if not reads_each_row or (plan.left is not None and plan.remainder == "drop"):
        return text
    text += ". " + ("Each" if plan.left is None else "With the batches before, each")
    text += f" of the {counted(len(plan.window) - plan.n_lost, 'row')} was read once"
    text += f", {plan.n_repeated:,} were repeated" if plan.n_repeated else ""
    text += f", but for those of {plan.left_out.in_short(3)} that were left out" if len(plan.left_out) else ""
    text += f", {plan.n_lost:,} of the {len(plan.window):,} are lost in this epoch" if plan.n_lost else ""
    return text + (f"; {_masked(plan)}" if _masked(plan) else "")


def _masked(plan: EpochPlan) -> str:
    """Return which rows the mask selects, which tells loaders of one collection apart; empty if it selects all."""
    return f"the mask selects {plan.window.in_short(3)}" if len(plan.window) < plan.n_obs else ""
