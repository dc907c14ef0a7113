"""torch's DistributedSampler, and torchdata's StatefulDataLoader with its own kind of that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, DistributedSampler

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGES = "torch", "torchdata"


class Numbers(Dataset[int]):
    """Cells that take no time to read."""

    def __init__(self, n_obs: int) -> None:
        self.n_obs = n_obs

    def __len__(self) -> int:
        """Return the number of cells."""
        return self.n_obs

    def __getitem__(self, index: int) -> int:
        """Return a cell."""
        return index


def sampler(cells: Numbers, rank: int, world_size: int) -> DistributedSampler[int]:
    """Return a rank's sampler."""
    return DistributedSampler(cells, num_replicas=world_size, rank=rank, shuffle=True, seed=0)


def plan(n_obs: int, *numbers: int) -> Callable[[], object]:
    """Ask for the first row."""
    rank, world_size = numbers[-2:]
    return lambda: next(iter(sampler(Numbers(n_obs), rank, world_size)))


def resume(n_obs: int, *numbers: int) -> Callable[[], object]:
    """Resume in the middle of an epoch; on a different number of ranks, rows are read again."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    *_, batch_size, rank, old, new = numbers
    assert old == new
    cells = Numbers(n_obs)

    def loader() -> Any:  # noqa: ANN401 torchdata has no types
        share = StatefulDistributedSampler(cells, num_replicas=new, rank=rank, shuffle=True, seed=0)
        return StatefulDataLoader(cells, batch_size, sampler=share, drop_last=True)

    before = loader()
    batches = iter(before)
    for _ in range(len(before) // 2):
        next(batches)
    state = before.state_dict()

    def go_on() -> object:
        after = loader()
        after.load_state_dict(state)
        return next(iter(after))

    return go_on
