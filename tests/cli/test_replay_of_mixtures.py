"""Replays of mixtures: their cells, from a state and a collection of each source."""

from __future__ import annotations

import json
import warnings
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from annbatch import DatasetCollection
from annbatch.samplers import RandomSampler

from annbatch_distributed import AlignedLoader, MixedLoader
from tests.cli.page import not_named
from tests.cli.test_commands import said
from tests.cli.test_past import made, saved

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: A row of a table: its step, source, rank and row.
type Cell = tuple[int, str, int, int]


@pytest.fixture(scope="module")
def paths(collection: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Path of each source's collection."""
    folder = tmp_path_factory.mktemp("census")
    obs = pd.DataFrame({"donor": [f"c{row % 3}" for row in range(130)]}, index=[f"census {row}" for row in range(130)])
    ad.AnnData(np.ones((130, 2), np.float32), obs=obs).write_h5ad(folder / "census.h5ad")
    written = DatasetCollection(folder / "census.zarr")
    written.add_adatas([folder / "census.h5ad"], shuffle_chunk_size=10, dataset_size=70)
    return {"tahoe": collection, "census": folder / "census.zarr"}


# divided by their sum, and then divided by their sum again, these differ
WEIGHTS = {"tahoe": 7, "census": 4}
JOBS: dict[str, dict[str, Any]] = {
    "weights": {"weights": WEIGHTS, "n_steps": 30, "seed": 1},
    "changing weights": {"weights": [(0, WEIGHTS), (40, {"tahoe": 0, "census": 1})], "n_steps": 30},
    "until": {"weights": WEIGHTS, "until": "all"},
    "within a batch": {"within_batch": True, "until": "first"},
}


def mixture_of(
    paths: dict[str, Path], rank: int, world_size: int, *, n_workers: int = 0, virtual_ranks: Any = None, **options: Any
) -> MixedLoader:
    """A rank's mixture of two sources, of which one has a drawn root and a mask."""
    place = {"rank": rank, "world_size": world_size, "remainder": "exact"}
    drawn = RandomSampler(4, 2, 4, rng=np.random.default_rng(5))
    loaders = {
        "tahoe": made(paths["tahoe"], **place, virtual_ranks=virtual_ranks),
        "census": made(paths["census"], drawn, **place, seed=None, mask=[slice(10, 90)]),
    }
    readers = {name: loader.to_dataloader(num_workers=n_workers) for name, loader in loaders.items()}
    return MixedLoader(readers if n_workers else loaders, **options)


def cells_read(ranks: list[Iterator[dict[str, Any]]], first: int, n_steps: int | None = None) -> list[Cell]:
    """The rows that the ranks read in their next steps, in the order of steps, sources and ranks."""
    cells = []
    for rank, batches in enumerate(ranks):
        for step, batch in enumerate(islice(batches, n_steps), start=first):
            parts = {batch["source"]: batch} if "source" in batch else batch
            cells += [(step, source, rank, row) for source, part in parts.items() for row in part["index"].tolist()]
    return sorted(cells, key=lambda cell: cell[:3])


def arguments_of(paths: dict[str, Path], state: object, folder: Path) -> list[Any]:
    """The arguments of a replay of a state, which is written to a file."""
    (folder / "mixture.json").write_text(json.dumps(state))
    sources = chain.from_iterable(("--source", f"{name}={path}") for name, path in paths.items())
    return ["replay", "--state", folder / "mixture.json", *sources]


def replayed(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[Cell]:
    """The cells that a replay prints."""
    cells = json.loads(said(capsys, *arguments, "--json"))["cells"]
    return [(cell["step"], cell["source"], cell["rank"], cell["row"]) for cell in cells]


@pytest.mark.parametrize("job", JOBS)
def test_replay_lists_cells_across_resize(
    job: str, paths: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """States that 2 and then 3 ranks save tell the rows of all steps, done or not."""
    two = [mixture_of(paths, rank, 2, **JOBS[job]) for rank in range(2)]
    three = [mixture_of(paths, rank, 3, **JOBS[job]) for rank in range(3)]
    for mixture in two:
        mixture.set_epoch(1)
    cells = cells_read([iter(mixture) for mixture in two], 0, 5)
    arguments = arguments_of(paths, state := two[0].state_dict(), tmp_path)
    assert replayed(capsys, *arguments, "--steps", ":5") == cells

    for mixture in three:
        mixture.load_state_dict(state)
    batches = [iter(mixture) for mixture in three]
    cells += cells_read(batches, 5, 1)
    # under weights, one of the sources was read by 2 ranks only
    soon = three[0].state_dict()
    assert {source["since"][-1][0] for source in soon["sources"].values()} == (
        {3} if job == "within a batch" else {2, 3}
    )
    cells += cells_read(batches, 6)
    at_end = three[0].state_dict()
    assert at_end["finished"]
    for mixture in three:
        mixture.set_epoch(2)
    later = cells_read([iter(mixture) for mixture in three], 0, 12)
    for state in (soon, at_end):
        arguments = arguments_of(paths, state, tmp_path)
        assert replayed(capsys, *arguments, "--steps", ":") == cells
        assert replayed(capsys, *arguments, "--steps", ":12", "--epoch", 2) == later
    (_, *_, (last, *_)) = cells
    assert replayed(capsys, *arguments, "--steps", last) == [cell for cell in cells if cell[0] == last]


def test_replay_names_cells_of_each_source(
    paths: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = mixture_of(paths, 0, 2, **JOBS["weights"]).state_dict()
    arguments = [*arguments_of(paths, state, tmp_path), "--steps", "3:9", "--obs", "donor"]
    replay = json.loads(said(capsys, *arguments, "--json"))
    obs = {name: DatasetCollection(path, mode="r").obs() for name, path in paths.items()}
    assert replay["epoch"] == 0
    assert {cell["source"] for cell in replay["cells"]} == {"tahoe", "census"}
    for cell in replay["cells"]:
        own = obs[cell["source"]].iloc[cell["row"]]
        assert (cell["cell"], cell["donor"]) == (own.name, own["donor"])
    assert not_named(replay) <= {"donor"}
    header, *lines = said(capsys, *arguments).splitlines()
    assert header.split() == ["step", "source", "rank", "row", "dataset", "cell", "donor"]
    assert len(lines) == len(replay["cells"])


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_replay_has_steps_of_workers(
    paths: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers of a job read batches in a different order than one process does."""
    plain, mixture = (mixture_of(paths, 0, 2, n_workers=number, **JOBS["weights"]) for number in (0, 9))
    arguments = [*arguments_of(paths, mixture.state_dict(), tmp_path), "--steps", ":"]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "This DataLoader will create")  # a replay starts no worker
        cells = replayed(capsys, *arguments)
    columns = ["step", "source", "rank", "row"]
    assert cells == [*mixture.cells_of(slice(None), [])[columns].itertuples(index=False, name=None)]
    assert cells != [*plain.cells_of(slice(None), [])[columns].itertuples(index=False, name=None)]


def test_replay_asks_for_ranks_of_virtual_ranks(
    paths: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixture = mixture_of(paths, 0, 2, virtual_ranks=4, **JOBS["weights"])
    arguments = [*arguments_of(paths, mixture.state_dict(), tmp_path), "--steps", ":"]
    line = said(capsys, *arguments, code=2)
    assert "got numbers of ranks or virtual ranks census 2, tahoe 4" in line
    rows = mixture.cells_of(slice(None), [])["row"].tolist()
    assert [row for *_, row in replayed(capsys, *arguments, "--ranks", 2)] == rows


def test_mixture_state_is_found_in_checkpoint(
    paths: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mixture has one state in a checkpoint, although each of its sources has a state in it."""
    state = mixture_of(paths, 0, 2, **JOBS["weights"]).state_dict()
    arguments = [*arguments_of(paths, state, tmp_path), "--steps", "1"]
    cells = replayed(capsys, *arguments)
    torch.save({"loops": [{"train": state}]}, tmp_path / "mixture.json")
    assert replayed(capsys, *arguments) == cells
    torch.save({"train": state, "validation": state}, tmp_path / "mixture.json")
    assert "got 2: ['train'], ['validation']" in said(capsys, *arguments, code=2)


SOURCES = ["--source", "tahoe={tahoe}", "--source", "census={census}"]
MISTAKES: dict[str, tuple[list[str], str]] = {
    "neither": ([], "either the PATH of a collection or --source NAME=PATH for each source"),
    "both": (["{tahoe}", *SOURCES], "either the PATH of a collection or --source NAME=PATH for each source"),
    "path": (
        ["{tahoe}"],
        "the state is of a mixture of census, tahoe. Instead of the path, pass --source census=PATH --source tahoe=",
    ),
    "single": (
        ["--state", "{single}", *SOURCES],
        "state.json: the state is of a single loader. Pass the PATH of its collection instead of --source.",
    ),
    "unknown": (
        [*SOURCES, "--source", "own={census}"],
        "--source own: must be a source of the mixture, census, tahoe.",
    ),
    "missing": (SOURCES[:2], "but census is missing. Pass --source census=PATH."),
    "twice": ([*SOURCES, *SOURCES[:2]], "--source must name each source once, got tahoe, census, tahoe."),
    "no path": (["--source", "tahoe"], "--source: must be NAME=PATH, such as tahoe=tahoe.zarr, got 'tahoe'"),
    "no name": (["--source", "=a.zarr"], "--source: must be NAME=PATH, such as tahoe=tahoe.zarr, got '=a.zarr'"),
    "no collection": (["--source", "tahoe=none", *SOURCES[2:]], "none: can't be read as a collection"),
    "other collection": (
        ["--source", "tahoe={census}", "--source", "census={tahoe}"],
        "This is the state of the source 'census'.",
    ),
    "mask": ([*SOURCES, "--mask", "0:9"], "--mask applies to a single collection"),
    "where": ([*SOURCES, "--where", "donor=d1"], "--where applies to a single collection"),
    "by": ([*SOURCES, "--by", "donor"], "--by applies to a single collection"),
    "batch size": ([*SOURCES, "--batch-size", "2"], "sampler.batch_size is 4 in the state and 2 here"),
    "sampler": ([*SOURCES, "--sampler", "sequential"], "sampler.type is"),
    "seed": ([*SOURCES, "--seed", "4"], "and 4 here"),
    "remainder": ([*SOURCES, "--remainder", "keep"], "remainder='keep'"),
    "virtual ranks": ([*SOURCES, "--virtual-ranks", "3"], "census: virtual_ranks must be a multiple of"),
    "column": ([*SOURCES, "--obs", "none"], "has no columns none in obs"),
    "step": ([*SOURCES, "--steps", "30"], "Steps of an epoch of 30"),
    "steps": ([*SOURCES, "--steps", "30:40"], "--steps must have a step of epoch 0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_in_a_replay_is_one_line(
    mistake: str, paths: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, message = MISTAKES[mistake]
    mixture = mixture_of(paths, 0, 2, **JOBS["weights"])
    for _ in zip(range(5), mixture, strict=False):  # each source has a batch
        pass
    state = arguments_of({}, mixture.state_dict(), tmp_path)
    single = saved(made(paths["tahoe"]), tmp_path)
    line = said(capsys, *state, "--steps", 1, *(option.format(**paths, single=single) for option in options), code=2)
    assert message in line
    assert "strict=False" not in line  # which the command has no option for


def test_state_that_cannot_be_replayed_is_refused(
    paths: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors name what a state lacks: weights, a mask, or a key."""
    often = [(step, WEIGHTS) for step in range(17)]
    whole = mixture_of(paths, 0, 2, **JOBS["weights"]).state_dict()
    census = whole["sources"]["census"]
    masked = census | {"identity": census["identity"] | {"rows": {"length": 80, "digest": "0" * 32}}}
    for state, message in (
        (
            mixture_of(paths, 0, 2, weights=often, n_steps=30).state_dict(),
            "only a digest of the 17 weights of each source",
        ),
        (
            whole | {"sources": whole["sources"] | {"census": masked}},
            "mixture.json: census: the mask can't be restored",
        ),
        (whole | {"sources": {"census": census}}, "Weights must name the sources census, got census, tahoe"),
        (whole | {"identity": {}}, "mixture.json: the state is damaged (KeyError: 'n_steps')"),
        (whole | {"sources": whole["sources"] | {"census": {"since": []}}}, "census: The state is damaged: version"),
        (whole | {"sources": 3}, "mixture.json: The state is damaged"),
        (whole | {"step": -1}, "mixture.json: The state is damaged: step must be"),
        ({}, "must be of a mixture"),
        ([], "mixture.json: state must be a dict"),
    ):
        names = state["sources"] if isinstance(state, dict) and isinstance(state.get("sources"), dict) else paths
        arguments = arguments_of({name: paths[name] for name in names}, state, tmp_path)
        line = said(capsys, *arguments, "--steps", 1, code=2)
        assert message in line
        assert "strict=False" not in line


def test_replay_takes_a_store_of_an_aligned_state(
    collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The state of an AlignedLoader is replayed from the collection of any of its stores, also within a mixture."""
    stores = {name: made(collection, rank=0, world_size=1) for name in ("rna", "protein")}
    loader = AlignedLoader(stores, batch_sampler=stores["rna"].sampler)
    batches = iter(loader)
    read = [next(batches)["rna"]["index"].tolist() for _ in range(3)]
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    text = said(capsys, "replay", collection, "--state", tmp_path / "state.json", "--steps", "2", "--json")
    assert [cell["row"] for cell in json.loads(text)["cells"]] == read[2]
    mixture = MixedLoader({"both": loader}, weights={"both": 1}, n_steps=5)
    read = [batch["rna"]["index"].tolist() for batch in mixture]
    arguments = arguments_of({"both": collection}, mixture.state_dict(), tmp_path)
    assert [row for *_, row in replayed(capsys, *arguments, "--steps", "4")] == read[4]
