"""The clock: where the next iteration of any loader begins."""

from __future__ import annotations

import json
import warnings
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

from annbatch_distributed import Rank, StatefulLoader
from tests.loader import test_interface as kinds
from tests.loader.test_interface import Make, contents, read

if TYPE_CHECKING:
    from collections.abc import Callable

#: Errors that the next reads of load requests raise.
ERRORS: list[BaseException] = []


@pytest.fixture(autouse=True)
def _failing(monkeypatch: pytest.MonkeyPatch) -> None:
    read_request = StatefulLoader._read_request

    def read(self: StatefulLoader, request: Any) -> Any:
        if ERRORS:
            raise ERRORS.pop()
        yield from read_request(self, request)

    monkeypatch.setattr(StatefulLoader, "_read_request", read)


#: Loaders of sets have no clock of their own.
KINDS = [make for make in kinds.MAKERS if "sets" not in make.__name__]
every = pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)

#: The epoch of the place, and the number of batches that are done or taken there.
EPOCH, DONE = 1, 5


@cache
def epochs(make: Make) -> list[list[Any]]:
    """The batches of each of the first epochs."""
    return kinds.epochs(make, 4)


def within(make: Make, n_taken: int = DONE) -> Any:
    """A loader in epoch `EPOCH`, of which some batches were taken before the loop was left."""
    loader = make(Rank(0, 2))
    loader.set_epoch(EPOCH)
    for _ in islice(loader, n_taken):
        pass
    return loader


def loaded(make: Make, n_done: int = DONE) -> Any:
    loader = make(Rank(0, 2))
    loader.load_state_dict(json.loads(json.dumps(within(make, n_done).state_dict())))
    return loader


def set_before(make: Make) -> Any:
    loader = make(Rank(0, 2))
    loader.set_epoch(EPOCH)
    return loader


def begun(make: Make) -> Any:
    loader = within(make, 0)
    kept = iter(loader)
    for _ in range(DONE):
        next(kept)
    loader.kept = kept  # the iterator stays open
    return loader


def failed(make: Make) -> Any:
    """A loader whose read has failed, after batches were taken."""
    loader = set_before(make)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 the error comes at any batch
        for _ in loader:
            ERRORS[:] = [KeyboardInterrupt()]
    ERRORS.clear()
    return loader


def looked(make: Make) -> Any:
    """A loader that has resumed an epoch, and was left after a batch."""
    loader = loaded(make)
    next(iter(loader))
    return loader


def ended(make: Make) -> Any:
    return within(make, 10**3)


def resumed_and_ended(make: Make) -> Any:
    loader = loaded(make)
    list(loader)
    return loader


def loaded_at_the_end(make: Make) -> Any:
    return loaded(make, 10**3)


def set_again(make: Make) -> Any:
    """A loader of a finished epoch, which has no batches left."""
    loader = loaded_at_the_end(make)
    loader.set_epoch(EPOCH)
    assert read(loader) == []
    return loader


def resharded(make: Make) -> Any:
    """A loader that was on one rank until now."""
    loader = make(Rank(0, 2))
    loader.load_state_dict(within(make).state_dict())
    loader.reshard(Rank(0, 2))
    return loader


#: What has happened; and where the next iteration begins, as the epoch and its done batches: after no call, after
#: set_epoch of the place's epoch, of the next one, and of an earlier one. None means that no batch is left, and an
#: empty tuple that the call raises.
TABLE: dict[Callable[[Make], Any], list[tuple[int, ...] | None]] = {
    set_before: [(1, 0), (1, 0), (2, 0), (0, 0)],
    within: [(1, 0), (1, 0), (2, 0), (0, 0)],
    begun: [(1, 0), (1, 0), (2, 0), (0, 0)],
    failed: [(1, 0), (1, 0), (2, 0), (0, 0)],
    loaded: [(1, DONE), (1, DONE), (2, 0), ()],
    looked: [(1, DONE), (1, DONE), (2, 0), (0, 0)],
    resharded: [(1, DONE), (1, DONE), (2, 0), ()],
    ended: [(2, 0), (1, 0), (2, 0), (0, 0)],
    resumed_and_ended: [(2, 0), (1, 0), (2, 0), (0, 0)],
    loaded_at_the_end: [(2, 0), None, (2, 0), ()],
    set_again: [(2, 0), (1, 0), (2, 0), (0, 0)],
}
CALLS = [None, EPOCH, EPOCH + 1, EPOCH - 1]


@pytest.mark.parametrize(
    ("make", "happened"),
    [
        pytest.param(make, happened, id=f"{make.__name__}-{happened.__name__}")
        for make in (*KINDS, kinds.forked)
        # not one that keeps its loop open: torch waits seconds for workers whose loop is collected as garbage
        for happened in ((within, loaded, loaded_at_the_end, resumed_and_ended) if make is kinds.forked else TABLE)
    ],
)
def test_next_iteration_begins_where_the_table_says(make: Make, happened: Callable[[Make], Any]) -> None:
    """The epoch moves when its last batch has been taken, and by set_epoch; nothing else moves it."""
    whole = epochs(make)
    for call, place in zip(CALLS, TABLE[happened], strict=True):
        loader = happened(make)
        if place == ():
            with pytest.raises(ValueError, match="would discard the loaded state of epoch 1"):
                loader.set_epoch(call)
            place = TABLE[happened][0]  # noqa: PLW2901 as if nothing was called
        elif call is not None:
            loader.set_epoch(call)
        epoch, n_done = (EPOCH, len(whole[EPOCH])) if place is None else place or (-1, -1)
        assert (loader.next_epoch, loader.batches_done) == (epoch + (place is None), n_done)
        assert len(loader) == len(whole[epoch])
        rest, following = ([], whole[EPOCH + 1]) if place is None else (whole[epoch][n_done:], whole[epoch + 1])
        if call is not None and place is not None:
            assert read(loader, 2) == rest[:2]
            continue
        # the same after a look, and the next epoch after the last batch
        looks = [read(loader, 1), read(loader, 2 if place is None else None), read(loader, 2)]
        assert looks == ([[], following[:2], following[:2]] if place is None else [rest[:1], rest, following[:2]])


@every
def test_third_iteration_at_a_place_warns_once(make: Make) -> None:
    """The third iteration that begins at the same place warns, and none after whole epochs or set_epoch."""
    loader = make(Rank(0, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            for _ in loader:
                pass
        loader.set_epoch(0)
        for _ in range(2):
            read(loader, 1)
        loader.set_epoch(0)  # as a validation does that reads a part of an epoch several times
        for _ in range(2):
            read(loader, 1)
        assert not [one for one in caught if "in a row" in str(one.message)]
        for _ in range(3):
            read(loader, 1)
    (warning,) = [one for one in caught if "in a row" in str(one.message)]
    assert "begins after 0 batches of epoch 0" in str(warning.message)
    assert "load_state_dict(state_dict())" in str(warning.message)
    if make is not kinds.dataloader:  # torch calls the loader then
        assert warning.filename == kinds.__file__


@every
def test_open_iterator_goes_on_after_set_epoch(make: Make) -> None:
    """An iterator that is open when another epoch is set yields its own batches, and doesn't move the clock."""
    whole, loader = epochs(make), make(Rank(0, 2))
    batches = iter(loader)
    first = [contents(batch) for batch in islice(batches, 2)]
    loader.set_epoch(2)
    assert first + [contents(batch) for batch in batches] == whole[0]
    assert (loader.next_epoch, read(loader)) == (2, whole[2])
