"""Coverage: whether the rows that all ranks have read in an epoch are those that were planned.

Each process tells what it has read and what was planned for it, as tallies. That they are equal shows that every rank
has read its share; that the shares add up to the window, without the rows that are lost and with those that are
repeated, shows that they are the whole.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Self

from annbatch_distributed.checks import messages
from annbatch_distributed.checks.agreement import Description, disagreement, find_disagreement, read_all, said_in, told
from annbatch_distributed.checks.exchange import Verdict
from annbatch_distributed.checks.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Sequence

    from annbatch_distributed.checks.exchange import Judge
    from annbatch_distributed.sharding import EpochPlan


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
    """The plan of all, which isn't told; None if there is none."""

    def to_text(self) -> str:
        """Return it as a text."""
        read, planned = self.read.to_dict(), self.planned.to_dict()
        own = {"description": asdict(self.description), "read": read, "planned": planned, "is_share": self.is_share}
        return told("check_epoch_read", own)

    @property
    def judge(self) -> Judge:
        """What makes a verdict of what all processes say, this one included."""
        return partial(compare_readings, plan=self.plan)

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Read such a text.

        Raises
        ------
        ValueError
            If it is none.
        """
        fields = {
            "description": Description.of_said,
            "read": _tally,
            "planned": _tally,
            "is_share": messages.flag,
        }
        return cls(**messages.record(said_in(text), fields))


def _tally(said: object) -> Tally:
    return Tally(**messages.record(said, dict.fromkeys(Tally().to_dict(), messages.count())))


def compare_readings(texts: Sequence[str], numbers: Sequence[int], *, plan: EpochPlan | None) -> Verdict:
    """Compare what all processes have read with what was planned.

    Parameters
    ----------
    texts
        For each process, what it says.
    numbers
        For each process, its number.
    plan
        The plan of the epoch; None if there is none.
    """
    readings = read_all(texts, numbers, Reading.of_text)
    if isinstance(readings, Verdict):
        return readings
    if found := find_disagreement([reading.description for reading in readings], numbers):
        return found
    if plan is None:  # which this process has said, and nobody has heard
        return disagreement("The ranks of this job can't be compared:", ["what one of them has said was not handed on"])
    # of those that have the same share, one counts
    shares = {reading.description.rank: reading for reading in readings}
    pairs = zip(numbers, readings, strict=True)
    problems = [
        _told(number, reading, plan.batch_size)
        for number, reading in pairs
        if not _is_as_planned(reading) or _is_too_large(reading, plan.batch_size)
    ]
    total = sum((share.read for share in shares.values()), Tally())
    is_whole = not plan.shares_draws and total == all_shares(plan)
    if not problems and not is_whole and all(share.is_share for share in shares.values()):
        problems = [f"the shares of all ranks, {total.n_rows} rows, are not those of the plan"]
    if problems:
        return disagreement(f"What the ranks have read in epoch {plan.epoch} is not what was planned:", problems)
    return Verdict("fine", _summary(plan, total, len(shares), is_whole=is_whole))


def all_shares(plan: EpochPlan) -> Tally:
    """Return the tally of what the window becomes: without what is lost, and with what is repeated."""
    total = Tally.of_rows(plan.window) - Tally.of_rows(plan.lost)
    if plan.n_repeated:
        total = sum((Tally.of_rows(plan.shard(rank).repeated) for rank in range(plan.world_size)), total)
    return total


def _is_as_planned(reading: Reading) -> bool:
    return reading.read == reading.planned and reading.read.n_batches == reading.planned.n_batches


def _is_too_large(reading: Reading, batch_size: int | None) -> bool:
    return batch_size is not None and reading.read.largest > batch_size


def _told(number: int, reading: Reading, batch_size: int | None) -> str:
    read, planned = (_counted(it) for it in (reading.read, reading.planned))
    what = f"read {read}, not {planned}" if read != planned else f"read {read} as planned, but other rows"
    if _is_as_planned(reading):
        what = f"read {read} as planned, but one of {reading.read.largest} rows, with batch size {batch_size}"
    peer = f" (process {number})" if reading.description.n_peers != 1 else ""
    return f"rank {reading.description.rank}{peer} has {what}"


def _counted(tally: Tally) -> str:
    rows, batches = "row" if tally.n_rows == 1 else "rows", "batch" if tally.n_batches == 1 else "batches"
    return f"{tally.n_rows} {rows} in {tally.n_batches} {batches}"


def _summary(plan: EpochPlan, total: Tally, n_ranks: int, *, is_whole: bool) -> str:
    epoch = f"what was left of epoch {plan.epoch}" if plan.segment else f"epoch {plan.epoch}"
    ranks = f"{n_ranks} ranks have" if n_ranks > 1 else "1 rank has"
    text = f"{epoch}: {ranks} read {_counted(total)}, as planned"
    if not is_whole:
        return text
    text += f". Each of the {len(plan.window) - plan.n_lost} rows was read once"
    text += f", {plan.n_repeated} were repeated" if plan.n_repeated else ""
    return text + (f", {plan.n_lost} of the {len(plan.window)} are lost in this epoch" if plan.n_lost else "")
