"""Coverage: whether the rows that all ranks have read in an epoch are those that were planned.

Each process states what it has read and what was planned for it, as tallies. That they are equal shows that every rank
has read its share; that the shares add up to the window, without the rows that are lost and with those that are
repeated, shows that they are the whole.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Self

from annbatch_distributed.checks import messages
from annbatch_distributed.checks.agreement import (
    Description,
    disagreement,
    exchange_statements,
    find_disagreement,
    message,
    read_all,
)
from annbatch_distributed.checks.exchange import Verdict
from annbatch_distributed.checks.tally import Tally
from annbatch_distributed.sharding.batches import WorkerBatches, batches_left

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from annbatch.abc import Sampler

    from annbatch_distributed.checks.exchange import Gather, Timeout
    from annbatch_distributed.ranks import Membership
    from annbatch_distributed.resume.cursor import PassRecord
    from annbatch_distributed.sharding import EpochPlan

__all__ = ["Reading", "all_shares", "compare_readings", "epoch_read", "summary"]


@dataclass(frozen=True)
class Reading:
    """What a process says of its epoch."""

    description: Description
    """Who it is, and what all processes must have the same."""
    read: Tally = field(default_factory=Tally)
    """The rows that it has read."""
    planned: Tally = field(default_factory=Tally)
    """The rows that were planned for it."""
    is_share: bool = False
    """Whether the plan is all of its share, instead of what the wrapped sampler draws or is left of it."""
    plan: EpochPlan | None = None
    """The plan of all, which other processes aren't sent; None if there is none."""
    n_joined: int = 1
    """Of how many virtual ranks of it a rank joins the batches, which isn't sent either."""

    @classmethod
    def of(
        cls,
        description: Description,
        last: PassRecord | None,
        read: Tally,
        plan: EpochPlan,
        *,
        sampler: Sampler,
        ranks: range,
        root_seed: int,
    ) -> Self:
        """Return what a rank says of the pass that it began last, by a plan, with the wrapped sampler and a root seed.

        ``ranks`` is which ranks of the plan it is, several if they are virtual. It raises a ValueError or a TypeError
        if it isn't known what was planned or read.
        """
        if last is None:
            raise ValueError("no pass was begun since the epoch was set or a state loaded; check before set_epoch")
        if last.was_loaded:
            raise ValueError("the workers have loaded a state each, which isn't known here")
        if last.n_obs not in (None, plan.n_obs):
            raise ValueError(f"n_obs must be that of the last pass, {last.n_obs}, got {plan.n_obs}")
        if not isinstance(read, Tally):
            raise TypeError(f"read must be a Tally, got {read!r}")
        position, n_batches = last.position, max(map(plan.n_batches, ranks))
        share = sum((Tally.of_rows(plan.shard(rank).rows) for rank in ranks), Tally())
        collected = position.collected(plan.world_size)
        due = [batches_left(plan.n_batches(rank), collected) for rank in ranks]
        if read == share and n_batches == max(sum(map(len, left)) for left in due) and not plan.shares_draws:
            planned = Tally(n_batches, share.n_rows, share.value)
            return cls(description, read, planned, is_share=True, plan=plan, n_joined=len(ranks))
        # a part of the share, or what the wrapped sampler draws of it
        rerun = partial(_rerun, sampler, plan, ranks, root_seed, position.passes)
        planned = rerun(tuple(WorkerBatches(left, left) for left in due))
        if _must_read_each_row(sampler, plan, share.n_rows) and rerun(None) != share:
            name = type(sampler).__name__
            raise ValueError(
                f"{name} doesn't read each row of its share once, as remainder={plan.remainder!r} promises. Mend it; "
                "or pass remainder='drop', which promises full batches only; or, if it draws rows with replacement, "
                "register a function for its type with annbatch_distributed.passes.n_draws"
            )
        return cls(description, read, planned, plan=plan, n_joined=len(ranks))

    def to_json(self) -> str:
        """Return it as a message."""
        read, planned = self.read.to_dict(), self.planned.to_dict()
        own = {"description": asdict(self.description), "read": read, "planned": planned, "is_share": self.is_share}
        return message("check_epoch_read", own)

    @classmethod
    def of_content(cls, content: object) -> Self:
        """Read what such a message holds, or raise a ValueError."""
        return cls(**messages.record(content, _FIELDS))

    def judge(self, texts: Sequence[str], numbers: Sequence[int]) -> Verdict:
        """Return the verdict on what all processes say."""
        return compare_readings(texts, numbers, plan=self.plan, n_joined=self.n_joined)


def _tally(content: object) -> Tally:
    return Tally(**messages.record(content, dict.fromkeys(Tally().to_dict(), messages.count())))


_FIELDS = {"description": Description.of_content, "read": _tally, "planned": _tally, "is_share": messages.flag}


def epoch_read(
    member: Callable[[], Membership],
    statement: Callable[[Membership], Reading],
    *,
    timeout: Timeout,
    gather: Gather | None,
) -> str:
    """Return what all processes together have read, or raise in all: see :func:`agreement.exchange_statements`."""
    return exchange_statements(member, statement, Reading, timeout=timeout, gather=gather)


def _rerun(
    sampler: Sampler,
    plan: EpochPlan,
    ranks: range,
    root_seed: int,
    passes: int,
    batches: tuple[WorkerBatches, ...] | None,
) -> Tally:
    """Run a pass once more, without reading, and count the rows of its batches: of all, or of some of them."""
    # imported here, since what only compares texts needs no annbatch
    from annbatch_distributed.passes.requests import batches_of
    from annbatch_distributed.passes.run import Pass

    found = Tally()
    for request in Pass(sampler, plan, ranks, root_seed, passes, batches=batches):
        for rows in batches_of(request):
            found.add(rows)
    return found


def _must_read_each_row(sampler: Sampler, plan: EpochPlan, n_rows: int) -> bool:
    """Whether a sampler of a user's own has to read each row of its share once."""
    from annbatch_distributed.passes.annbatch_samplers import is_annbatchs_own
    from annbatch_distributed.passes.traits import n_draws

    is_known = is_annbatchs_own(sampler)
    return not is_known and plan.remainder != "drop" and n_draws(sampler, n_rows) is None


def compare_readings(
    texts: Sequence[str], numbers: Sequence[int], *, plan: EpochPlan | None, n_joined: int = 1
) -> Verdict:
    """Compare what processes with some numbers have read with what was planned, if there is a plan.

    ``n_joined`` is of how many virtual ranks a rank joins the batches.
    """
    readings = read_all(texts, numbers, Reading.of_content)
    if isinstance(readings, Verdict):
        return readings
    if found := find_disagreement([reading.description for reading in readings], numbers):
        return found
    if plan is None:  # a problem that this process has said, and nobody has heard
        return disagreement("The ranks of this job can't be compared:", ["what one of them has said was not handed on"])
    # one counts of those that have the same share
    shares = {reading.description.rank: reading for reading in readings}
    pairs = zip(numbers, readings, strict=True)
    most = None if plan.batch_size is None else plan.batch_size * n_joined
    problems = [problem for number, reading in pairs if (problem := _problem(number, reading, most))]
    total = sum((share.read for share in shares.values()), Tally())
    is_whole = not plan.shares_draws and total == all_shares(plan)
    if not problems and not is_whole and all(share.is_share for share in shares.values()):
        problems = [f"the shares of all ranks, {total.n_rows} rows, differ from the plan"]
    if problems:
        masked = f" ({_masked(plan)})" if _masked(plan) else ""
        return disagreement(
            f"What the ranks have read in epoch {plan.epoch} is not what was planned{masked}:", problems
        )
    return Verdict("fine", summary(plan, total, len(shares), is_whole=is_whole))


def all_shares(plan: EpochPlan) -> Tally:
    """Return the tally of what the window becomes: without what is lost, and with what is repeated."""
    total = Tally.of_rows(plan.window) - Tally.of_rows(plan.lost)
    if plan.n_repeated:
        total = sum((Tally.of_rows(plan.shard(rank).repeated) for rank in range(plan.world_size)), total)
    return total


def _problem(number: int, reading: Reading, batch_size: int | None) -> str:
    """Return what a process has read otherwise than planned; empty if nothing."""
    read, planned = _counted(reading.read), _counted(reading.planned)
    if read != planned:
        what = f"read {read}, not {planned}"
    elif reading.read != reading.planned:
        what = f"read {read} as planned, but other rows"
    elif batch_size is not None and reading.read.largest > batch_size:
        what = f"read {read} as planned, but one of {reading.read.largest} rows, with batch size {batch_size}"
    else:
        return ""
    peer = f" (process {number})" if reading.description.n_peers != 1 else ""
    return f"rank {reading.description.rank}{peer} has {what}"


def _counted(tally: Tally) -> str:
    rows, batches = "row" if tally.n_rows == 1 else "rows", "batch" if tally.n_batches == 1 else "batches"
    return f"{tally.n_rows} {rows} in {tally.n_batches} {batches}"


def summary(plan: EpochPlan, total: Tally, n_ranks: int, *, is_whole: bool) -> str:
    """Return what so many ranks have read as planned, in a line."""
    epoch = f"what was left of epoch {plan.epoch}" if plan.segment else f"epoch {plan.epoch}"
    ranks = f"{n_ranks} ranks have" if n_ranks > 1 else "1 rank has"
    text = f"{epoch}: {ranks} read {_counted(total)}, as planned"
    if not is_whole:
        return text
    text += f". Each of the {len(plan.window) - plan.n_lost} rows was read once"
    text += f", {plan.n_repeated} were repeated" if plan.n_repeated else ""
    text += f", {plan.n_lost} of the {len(plan.window)} are lost in this epoch" if plan.n_lost else ""
    return text + (f"; {_masked(plan)}" if _masked(plan) else "")


def _masked(plan: EpochPlan) -> str:
    """Return which rows the mask selects, which tells loaders of one collection apart; empty if it selects all."""
    # what is left of an epoch is no mask
    is_masked = len(plan.window) < plan.n_obs and not plan.segment
    return f"the mask selects {plan.window.in_short(3)}" if is_masked else ""
