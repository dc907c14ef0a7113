"""What a rank has read is compared with the plan, and each difference is found; the ranks are threads here."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from annbatch.samplers import RandomSampler

from annbatch_distributed import DistributedSampler, Rank, StatefulLoader
from annbatch_distributed.cli import check, main
from tests.cli.page import check_schema
from tests.processes.configurations import N_OBS

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator
    from pathlib import Path

    type Batch = dict[str, Any]

OPTIONS = "--chunk-size=8", "--preload-nchunks=4", "--batch-size=8", "--sharding=shuffled"


@pytest.fixture(autouse=True)
def _in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_threads(options: Namespace, mask: Any) -> Iterator[list[Any]]:
        together, said = threading.Barrier(options.ranks), [None] * options.ranks
        epochs: list[list[Any]] = []

        def stream(rank: int) -> None:
            def meet(what: Any) -> list[Any]:
                said[rank] = what
                together.wait(60)
                heard: list[Any] = list(said)
                together.wait(60)
                if rank == 0 and isinstance(what, tuple):
                    epochs.append(heard)
                return heard

            check.as_rank(options, mask, rank, meet)

        with ThreadPoolExecutor(options.ranks) as ranks:
            list(ranks.map(stream, range(options.ranks)))
        yield from epochs

    monkeypatch.setattr(check, "_streamed", in_threads)


def checked(path: Path, capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> list[dict[str, Any]]:
    """Check a collection, and return what each epoch has."""
    assert main(["check", str(path), "--json", *OPTIONS, *options]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is (code == 0)
    check_schema("check", found)
    epochs: list[dict[str, Any]] = found["epochs"]
    return epochs


@pytest.mark.parametrize("policy", ["drop", "exact --virtual-ranks=6"])
def test_check_accepts_planned_rows(collection: Path, policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = f"--remainder={policy} --epoch=3 --epochs=2 --prefetch=1".split()
    epochs = checked(collection, capsys, *options)
    assert [(epoch["epoch"], epoch["ok"], epoch["problems"]) for epoch in epochs] == [(3, True, []), (4, True, [])]
    for epoch in epochs:
        assert [rank["rank"] for rank in epoch["ranks"]] == [0, 1]
        assert all(rank["rows_per_second"] > 0 <= rank["longest_wait"] for rank in epoch["ranks"])
    assert main(["check", str(collection), *OPTIONS, *options]) == 0
    text = capsys.readouterr().out
    assert text.count("as planned. Each of the 3") == 2
    assert text.endswith("\n2 of 2 epochs were read as planned\n")


def leave_out(batch: Batch) -> Iterator[Batch]:
    yield from ()


def of_the_other_rank(batch: Batch) -> Iterator[Batch]:
    sampler = DistributedSampler(RandomSampler(8, 4, 8), dist_info=Rank(0, 2), sharding="shuffled", seed=0)
    sampler.set_epoch(1)
    yield {**batch, "index": [sampler.plan(N_OBS).shard(0).rows.to_array()[5], *batch["index"][1:]]}


#: What rank 1 makes of a batch, and what is said of it.
WRONG: dict[str, tuple[Callable[[Batch], Iterator[Batch]], str]] = {
    "a batch that is left out": (leave_out, "21 batches, not 174 rows in 22 batches"),
    "a row of the other rank": (of_the_other_rank, "different rows"),
}


@pytest.mark.parametrize("what", WRONG)
def test_check_finds_unplanned_rows(
    collection: Path, what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the second of two epochs."""
    change, expected = WRONG[what]
    as_they_are = StatefulLoader.__iter__

    def changed(self: StatefulLoader) -> Iterator[Batch]:
        for number, batch in enumerate(as_they_are(self)):
            yield from change(batch) if (self.sampler.rank, self.sampler.epoch, number) == (1, 1, 3) else [batch]

    monkeypatch.setattr(StatefulLoader, "__iter__", changed)
    first, second = checked(collection, capsys, "--epochs=2", code=1)
    assert (first["ok"], second["ok"]) == (True, False)
    assert any("rank 1 " in problem and expected in problem for problem in second["problems"])
    assert main(["check", str(collection), *OPTIONS, "--epochs=2"]) == 1
    problems = "\n".join(second["problems"])
    assert capsys.readouterr().out.endswith(f"{problems}\n\n1 of 2 epochs were read as planned\n")
