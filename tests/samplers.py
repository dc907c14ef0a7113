"""Custom samplers, and functions to look into load requests."""

# mypy ignores some lines: annbatch's LoadRequest doesn't declare the keys that samplers may add to it.

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from annbatch.abc import Sampler
from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, Rank
from annbatch_distributed.core.config import Config
from annbatch_distributed.core.units import EachRow
from annbatch_distributed.sampler import cursor_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from annbatch.types import LoadRequest

    from annbatch_distributed.core.plan import Plan


class MaskBlind(Sampler):
    """A sampler without a generator, which ignores its mask and reads its rows from the last to the first."""

    def __init__(self, batch_size: int, per_request: int = 4) -> None:
        self._batch_size, self._per_request = batch_size, per_request

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @property
    def shuffle(self) -> bool:
        return False

    def validate(self, n_obs: int) -> None:
        if n_obs < 1:
            msg = "no rows"
            raise ValueError(msg)

    def n_batches(self, n_obs: int) -> int:
        return math.ceil(n_obs / int(self._batch_size))

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        size = int(self._batch_size)  # a small NumPy integer would wrap around
        rows = self._per_request * size
        for stop in range(n_obs, 0, -rows):
            # whole batches first, so that only the last request can have a partial one
            start = max(0, stop - rows)
            positions = np.arange(stop - start)
            splits = np.split(positions, range(size, stop - start, size))
            yield {"requests": [slice(start, stop)], "splits": splits}


class IndexArrays(Sampler):
    """A sampler that yields index arrays without splits, which the loader shuffles."""

    def __init__(self, batch_size: int, per_request: int = 4, rng: np.random.Generator | None = None) -> None:
        self._batch_size, self._per_request = batch_size, per_request
        self._rng = np.random.default_rng(0) if rng is None else rng

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @property
    def shuffle(self) -> bool:
        return True

    def validate(self, n_obs: int) -> None:
        pass

    def n_batches(self, n_obs: int) -> int:
        return math.ceil(n_obs / int(self._batch_size))

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        assert self._rng is not None
        order = self._rng.permutation(n_obs)
        rows = self._per_request * int(self._batch_size)
        for start in range(0, n_obs, rows):
            yield {"requests": order[start : start + rows]}


class Counting(MaskBlind):
    """A sampler whose number of batches is any function of the number of rows."""

    def __init__(self, batch_size: int, count: Callable[[int], Any]) -> None:
        super().__init__(batch_size)
        self.count = count

    def n_batches(self, n_obs: int) -> Any:
        return self.count(n_obs)


class Irregular(MaskBlind):
    """A sampler of three batches, of which the small one is at a random place in each pass."""

    epoch = 0
    _rng: np.random.Generator | None = np.random.default_rng(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def n_batches(self, n_obs: int) -> int:
        return 3 + self.epoch % 2

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        assert self._rng is not None
        n_batches = self.n_batches(n_obs)
        sizes = np.full(n_batches, (n_obs - 1) // (n_batches - 1))
        sizes[self._rng.integers(n_batches)] = 1
        splits = np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])
        yield {"requests": [slice(0, int(sizes.sum()))], "splits": splits}


class NoBatchSize(MaskBlind):
    """A sampler that cuts its batches and has no batch size."""

    @property
    def batch_size(self) -> None:  # type: ignore[override]  # the base class allows None
        return None


class Locked(RandomSampler):
    """A sampler with a lock, which can't be copied, and with one list under two names."""

    __slots__ = "in_slot"  # noqa: PLC0205 a single name is valid, and must be handled

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings = [1, 2]
        self.same_settings = self.settings
        self.lock = threading.Lock()
        self.nested = [self.settings, self.lock]
        self.in_slot = [3]


class Uncopyable(RandomSampler):
    """A sampler that can't be copied or pickled in any way."""

    __slots__ = ("__hidden",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__hidden = [1]

    def __deepcopy__(self, memo: dict[int, Any]) -> Uncopyable:
        msg = "not me"
        raise RuntimeError(msg)

    def __reduce_ex__(self, protocol: Any) -> str:
        msg = "nor me"
        raise RuntimeError(msg)


def config_of(sampler: Sampler, **options: Any) -> Config:
    """The configuration of a sampler of rows."""
    defaults = {"remainder": None, "enforce_equal_batches": True, "sharding": "contiguous", "mask": None}
    return Config.of(sampler, **{**defaults, "seed": 0, "units": EachRow()} | options)


def plan_of(sampler: DistributedSampler, n_obs: int) -> Plan:
    """The plan that a sampler's ranks follow in the next epoch."""
    cursor = cursor_of(sampler)
    return cursor.epochs.plan(n_obs, cursor.next())


def request_rows(request: LoadRequest) -> list[int]:
    """Every row of a request, in order."""
    requests = request["requests"]
    if isinstance(requests, np.ndarray) and requests.dtype != object:
        return [int(row) for row in requests]
    return [row for part in requests for row in range(part.start, part.stop)]


def batches(requests: Iterable[LoadRequest]) -> list[list[int]]:
    """The rows of each batch, in order, as annbatch's loader would yield them."""
    result = []
    for request in requests:
        rows = request_rows(request)
        result += [[rows[position] for position in split] for split in request["splits"]]
    return result


def repeats(requests: Iterable[LoadRequest]) -> list[list[bool]]:
    """The marks of repeated rows, for each batch."""
    return [
        [bool(request["repeated"][position]) for position in split]  # type: ignore[typeddict-item]  # a key of a user's own
        for request in requests
        for split in request["splits"]
    ]


def job(sampler: Sampler, world_size: int, **kwargs: Any) -> list[DistributedSampler]:
    """The sampler of each rank, as its process would create it."""
    return [DistributedSampler(sampler, dist_info=Rank(rank, world_size), **kwargs) for rank in range(world_size)]


def flat(lists: Iterable[Iterable[int]]) -> list[int]:
    """The elements of lists, in order."""
    return [element for part in lists for element in part]
