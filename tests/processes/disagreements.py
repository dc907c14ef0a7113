"""What one rank of a job may have that the others don't, and what a rank does about it."""

from __future__ import annotations

import copy
import json
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self
from unittest.mock import patch

import numpy as np
from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, Rank, Shuffled, Tally
from annbatch_distributed.ranks import Membership, resolve
from tests.samplers import batches, flat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from annbatch_distributed.checks.exchange import Gather
    from annbatch_distributed.ranks import DistInfo

N_OBS = 200
#: The rank that is unlike the others.
ODD = 1
#: For how many seconds a rank waits for one that is missing.
PATIENCE = 3.0

CHUNKS = {"chunk_size": 4, "preload_nchunks": 2, "batch_size": 4}


@dataclass(frozen=True)
class Heard:
    """What a rank heard."""

    kind: str
    """The type of the error; empty if there was none."""
    message: str


@dataclass(frozen=True)
class Told:
    """All that one rank tells."""

    rank: int
    heard: dict[str, Heard] = field(default_factory=dict)
    """What it heard, by what one rank had that the others didn't."""

    def write(self, folder: Path) -> None:
        """Write it to a file of this rank."""
        (folder / f"rank{self.rank}.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read such a file."""
        told = json.loads(path.read_text())
        return cls(told["rank"], {name: Heard(**heard) for name, heard in told["heard"].items()})


def sampler(dist_info: DistInfo, *, wrapped: dict[str, Any] | None = None, **kwargs: Any) -> DistributedSampler:
    """Make a sampler that only the arguments tell from those of other ranks."""
    inner = RandomSampler(**{**CHUNKS, **(wrapped or {})}, rng=np.random.default_rng(0))
    return DistributedSampler(inner, dist_info=dist_info, **{"seed": 0, "sharding": "shuffled", **kwargs})


def resumed(dist_info: DistInfo) -> DistributedSampler:
    """Make a sampler in the middle of an epoch."""
    found = sampler(dist_info)
    found.load_state_dict(found.state_dict(batches_done=2))
    return found


def after_a_look(dist_info: DistInfo) -> DistributedSampler:
    """Make a sampler that has begun a pass."""
    found = sampler(dist_info)
    next(found.sample(N_OBS))
    return found


def in_epoch_3(dist_info: DistInfo) -> DistributedSampler:
    """Make a sampler in another epoch."""
    found = sampler(dist_info)
    found.set_epoch(3)
    return found


#: By a name: how the odd rank makes its sampler, from the dist_info of all ranks and the number of ranks.
ODD_SAMPLERS: dict[str, Callable[[DistInfo, int], DistributedSampler]] = {
    "nothing": lambda dist_info, _: sampler(dist_info),
    "seed": lambda dist_info, _: sampler(dist_info, seed=1),
    "mask": lambda dist_info, _: sampler(dist_info, mask=slice(0, 190)),
    "batch_size": lambda dist_info, _: sampler(dist_info, wrapped={"batch_size": 8}),
    "remainder": lambda dist_info, _: sampler(dist_info, remainder="exact"),
    "sharding": lambda dist_info, _: sampler(dist_info, sharding=Shuffled(5)),
    "sampler": lambda dist_info, _: sampler(dist_info, wrapped={"preload_nchunks": 4}),
    "epoch": lambda dist_info, _: in_epoch_3(dist_info),
    "batches done": lambda dist_info, _: resumed(dist_info),
    "passes since set_epoch": lambda dist_info, _: after_a_look(dist_info),
    "world size": lambda _, world_size: sampler(Rank(ODD, world_size + 1)),
    "rank": lambda _, world_size: sampler(Rank(0, world_size)),
    "a configuration that can't run": lambda dist_info, _: sampler(dist_info, mask=slice(0, 2)),
}


def tally(read: Iterable[list[int]]) -> Tally:
    """Count the rows of some batches."""
    found = Tally()
    for rows in read:
        found.add(np.array(rows))
    return found


def read_all(found: DistributedSampler) -> list[list[int]]:
    """Return the batches of a pass."""
    return batches(list(found.sample(N_OBS)))


def without_a_pass(found: DistributedSampler) -> list[list[int]]:
    """Return the batches of a pass of another sampler."""
    return read_all(copy.deepcopy(found))


#: By a name: the batches that the odd rank has read, as it says.
ODD_READINGS: dict[str, Callable[[DistributedSampler], list[list[int]]]] = {
    "all rows read": read_all,
    "a batch left out": lambda found: read_all(found)[:-1],
    "a batch read twice": lambda found: [*(read := read_all(found)), read[0]],
    "a row read in place of another": lambda found: [[(read := read_all(found))[1][0], *read[0][1:]], *read[1:]],
    "batches of other sizes": lambda found: [flat(read_all(found))],
    "no pass begun": without_a_pass,
}


def check_all(dist_info: DistInfo, rank: int, world_size: int, gather: Gather | None = None) -> Told:
    """Let one of three ranks be odd in one thing after the other, and tell what this rank heard."""
    told = Told(rank)

    def check(
        name: str, found: DistributedSampler, n_obs: int, timeout: float = 60.0, call: str = "check_ranks_agree"
    ) -> None:
        kind, message = "", ""
        more = [Tally()] if call == "check_epoch_read" else []
        try:
            getattr(found, call)(n_obs, *more, timeout=timeout, gather=gather)
        except (ValueError, TimeoutError) as error:
            kind, message = type(error).__name__, str(error)
        told.heard[name] = Heard(kind, message)

    is_odd = rank == ODD
    for name, odd in ODD_SAMPLERS.items():
        check(name, odd(dist_info, world_size) if is_odd else sampler(dist_info), N_OBS)
    check("n_obs", sampler(dist_info), N_OBS - is_odd)

    with patch("importlib.metadata.version", lambda name: "odd" if is_odd and name == "annbatch" else "even"):
        check("version of annbatch", sampler(dist_info), N_OBS)

    for name, odd_reading in ODD_READINGS.items():
        found, kind = sampler(dist_info, remainder="keep"), ""
        read = tally(odd_reading(found) if is_odd else read_all(found))
        try:
            message = found.check_epoch_read(N_OBS, read, timeout=60, gather=gather)
        except ValueError as error:
            kind, message = type(error).__name__, str(error)
        told.heard[name] = Heard(kind, message)

    # one rank makes another call than the others
    check("call", sampler(dist_info), N_OBS, call="check_epoch_read" if is_odd else "check_ranks_agree")

    if gather is None:
        if not is_odd:  # a job of the other processes alone
            of_part = Membership(Rank(rank // 2, 2), "a part", resolve(dist_info).framework, (0, 2))
            check("nothing in a part", sampler(of_part), N_OBS)
            check("seed in a part", sampler(of_part, seed=rank), N_OBS)
        if is_odd:  # it comes too late
            time.sleep(PATIENCE + 6)
        check("a rank in time", sampler(dist_info), N_OBS, timeout=PATIENCE)
        check("nothing any more", sampler(dist_info), N_OBS)
        if not is_odd:  # it never comes
            check("a rank", sampler(dist_info), N_OBS, timeout=PATIENCE)
    return told
