"""Sets of cells: the cells of each set, and samplers that treat a set as a row."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler
from hypothesis import given
from hypothesis import strategies as st

from annbatch_distributed import CellSets, DistributedSampler, Rank, StatefulLoader
from tests.samplers import batches, job, request_rows
from tests.strategies import jobs
from tests.test_laws import drops_rows, runnable

if TYPE_CHECKING:
    from tests.strategies import Job


class Cells(NamedTuple):
    """Cells of one set."""

    rows: np.ndarray
    are_controls: np.ndarray
    are_repeats: np.ndarray


def cells_in(sets: CellSets, epoch: int, seed: int | None = None) -> list[Cells]:
    """The cells of each set of an epoch."""
    in_epoch, result = sets.in_epoch(sets.n_obs, epoch, seed), []
    for number in range(len(sets)):
        rows, which, marks = in_epoch.rows_of(np.array([number]))
        assert not which.any()
        assert not marks["set"].any()
        assert ("repeated" in marks) == (sets.remainder == "pad")
        result.append(Cells(rows, marks["is_control"], marks.get("repeated", np.zeros(len(rows), dtype=bool))))
    return result


@dataclass(frozen=True)
class Drawn:
    """Cells of some lines and drugs, and the arguments that make sets of them."""

    obs: pd.DataFrame
    arguments: dict[str, Any]
    epoch: int

    def sets(self) -> CellSets:
        return CellSets.from_obs(self.obs, **self.arguments)

    def in_epoch(self, epoch: int) -> list[Cells]:
        """The cells of each set of an epoch."""
        return cells_in(self.sets(), epoch)

    @cached_property
    def used(self) -> dict[int, dict[str, str]]:
        """The labels of the cells in use, by row."""
        mask = self.arguments["mask"]
        return {row: own for row, own in enumerate(self.obs.to_dict("records")) if mask is None or mask[row]}

    @cached_property
    def groups(self) -> dict[tuple[str, str], list[int]]:
        """The treated cells in use, by line and drug, enumerated."""
        result: dict[tuple[str, str], list[int]] = {}
        for row, own in self.used.items():
            if own["drug"] != "DMSO" or self.arguments["controls"] is None:
                result.setdefault((own["line"], own["drug"]), []).append(row)
        return result

    def pool(self, cell: int) -> list[int]:
        """The controls of a cell, enumerated."""
        columns, labels = self.arguments["match"] or [], self.used[cell]
        return [
            row
            for row, own in self.used.items()
            if own["drug"] == "DMSO" and all(own[column] == labels[column] for column in columns)
        ]


@st.composite
def drawn_sets(draw: st.DrawFn) -> Drawn:
    chunk = draw(st.integers(1, 4))
    size = chunk * draw(st.integers(1, 4))
    # numbers of cells by line and drug; one group is large enough, and each line has a control on each plate
    numbers = {("A", "x"): draw(st.integers(size, 5 * size))}
    for line in ("A", "B"):
        numbers[line, "DMSO"] = draw(st.integers(2, 3 * size))
        for drug in ("y", "z"):
            numbers[line, drug] = draw(st.integers(0, 4 * size))
    length = draw(st.integers(1, size))  # of a run of cells on one plate
    cells = [
        (*pair, str(number // (1 if pair[1] == "DMSO" else length) % 2))
        for pair, n_cells in numbers.items()
        for number in range(n_cells)
    ]
    if draw(st.booleans()):
        cells = [cells[place] for place in np.random.default_rng(draw(st.integers(0, 3))).permutation(len(cells))]
    obs = pd.DataFrame(cells, columns=["line", "drug", "plate"])
    has_controls = draw(st.booleans())
    mask = None
    if draw(st.booleans()):  # without a cell of the large groups
        mask = np.ones(len(obs), dtype=np.bool_)
        mask[(obs["drug"] == "y").to_numpy().nonzero()[0][:1]] = False
    arguments = {
        "by": ["line", "drug"],
        "set_size": size,
        "chunk_size": chunk,
        "controls": {"drug": "DMSO"} if has_controls else None,
        "match": draw(st.sampled_from([None, ["line"], ["plate"], ["plate", "line"]])) if has_controls else None,
        "mask": mask,
        "remainder": draw(st.sampled_from(["drop", "keep", "pad"])),
        "seed": draw(st.integers(0, 3)),
    }
    return Drawn(obs, arguments, draw(st.integers(0, 4)))


quiet = pytest.mark.filterwarnings("ignore:remainder=.drop. drops")


@quiet
@given(drawn_sets())
def test_each_cell_is_in_one_set(drawn: Drawn) -> None:
    """Each cell is in one set of its group, except for the cells of a dropped remainder."""
    size, remainder = drawn.arguments["set_size"], drawn.arguments["remainder"]
    in_sets = dict.fromkeys(drawn.groups, 0)
    for cells, name in zip(drawn.in_epoch(drawn.epoch), drawn.sets().groups, strict=True):
        rows, group = cells.rows[~cells.are_controls].tolist(), tuple(name.split(", "))
        own = cells.rows[~cells.are_controls & ~cells.are_repeats].tolist()
        assert set(rows) <= set(drawn.groups[group])
        assert len(rows) == size or (remainder == "keep" and len(rows) == len(drawn.groups[group]) % size)
        assert len(set(own)) == len(own)
        assert remainder == "pad" or own == rows
        in_sets[group] += len(own)
    for group, rows in drawn.groups.items():
        assert in_sets[group] == len(rows) - (len(rows) % size if remainder == "drop" else 0)
    own = [
        row for cells in drawn.in_epoch(drawn.epoch) for row in cells.rows[~(cells.are_controls | cells.are_repeats)]
    ]
    assert len(set(own)) == len(own)


@quiet
@given(drawn_sets())
def test_two_epochs_use_every_cell(drawn: Drawn) -> None:
    """Two consecutive epochs use every cell of a group that is large enough for a set."""
    first, second = (
        {int(row) for cells in drawn.in_epoch(epoch) for row in cells.rows[~cells.are_controls]}
        for epoch in (drawn.epoch, drawn.epoch + 1)
    )
    for rows in drawn.groups.values():
        if len(rows) >= drawn.arguments["set_size"]:
            assert set(rows) <= first | second


@quiet
@given(drawn_sets())
def test_controls_match_their_cells(drawn: Drawn) -> None:
    """The controls of a set match its cells one by one, and repeat only if a pool has too few cells."""
    for cells in drawn.in_epoch(drawn.epoch):
        treated, controls = cells.rows[~cells.are_controls].tolist(), cells.rows[cells.are_controls].tolist()
        if drawn.arguments["controls"] is None:
            assert controls == []
            continue
        assert cells.are_controls.tolist() == [False] * len(treated) + [True] * len(treated)
        by_pool: dict[tuple[int, ...], list[int]] = {}
        for cell, control in zip(treated, controls, strict=True):
            by_pool.setdefault(tuple(drawn.pool(cell)), []).append(control)
        for pool, own in by_pool.items():
            counts = Counter(own)
            assert set(counts) <= set(pool)
            assert max(counts.values()) <= -(-len(own) // len(pool))


@quiet
@given(drawn_sets())
def test_chunks_of_a_group_stay_together(drawn: Drawn) -> None:
    """Chunks of a group stay together, and so do chunks of a pool that has enough cells for a set."""
    chunk, size = drawn.arguments["chunk_size"], drawn.arguments["set_size"]
    for cells, name in zip(drawn.in_epoch(drawn.epoch), drawn.sets().groups, strict=True):
        line, drug = name.split(", ")
        parts = [(cells.rows[~cells.are_controls], drawn.groups[line, drug])]
        pool = drawn.pool(int(cells.rows[0]))
        if drawn.arguments["controls"] and len(pool) >= size and "plate" not in (drawn.arguments["match"] or ()):
            parts.append((cells.rows[cells.are_controls], pool))
        for rows, order in parts:
            if len(rows) == size and not cells.are_repeats.any():
                places = np.array([order.index(row) for row in rows]).reshape(-1, chunk)
                assert (np.diff(places) == 1).all()


def example(**options: Any) -> CellSets:
    """40 sets of 4 cells in 8 groups, with controls: each of 2 lines has 4 drugs of 20 cells, and 20 controls."""
    drugs = ["DMSO", "a", "b", "c", "d"]
    pairs = [(line, drug) for line in ("A", "B") for drug in drugs for _ in range(20)]
    defaults = {
        "by": ["line", "drug"],
        "set_size": 4,
        "chunk_size": 2,
        "seed": 0,
        "controls": {"drug": "DMSO"},
        "match": "line",
    }
    return CellSets.from_obs(pd.DataFrame(pairs, columns=["line", "drug"]), **defaults | options)


N_CELLS, N_SETS = 200, 40


def cells(sets: CellSets, epoch: int, seed: int | None = None) -> list[list[int]]:
    return [own.rows.tolist() for own in cells_in(sets, epoch, seed)]


@pytest.mark.parametrize(("size", "chunk"), [(1, 1), (2, 1), (10, 5), (16, 8), (17, 1), (20, 10), (32, 16), (64, 16)])
def test_default_chunk_divides_size(size: int, chunk: int) -> None:
    """The default chunk is the largest divisor up to 16 and to half of a set, so that sets are new in each epoch."""
    obs = pd.DataFrame({"donor": 100 * ["a"]})
    assert CellSets.from_obs(obs, by="donor", set_size=size, seed=0).chunk_size == chunk


def test_sets_are_new_in_each_epoch() -> None:
    """Sets are new in each epoch, and the same in every process."""
    assert len(example()) == N_SETS
    assert cells(example(), 3) == cells(pickle.loads(pickle.dumps(copy.deepcopy(example()))), 3)
    assert cells(example(seed=None), 0, seed=5) == cells(example(seed=5), 0) != cells(example(), 0)
    # few sets have the cells, or the controls, of the set with the same number in an epoch with the same tails
    for half in (slice(0, 4), slice(4, 8)):
        first, second = ([sorted(rows[half]) for rows in cells(example(), epoch)] for epoch in (0, 2))
        assert sum(one == other for one, other in zip(first, second, strict=True)) < N_SETS / 4


def test_identity_depends_on_no_order_of_values() -> None:
    """The identity ignores the order of values and categories, the form of controls, and a mask of all cells."""
    obs = pd.DataFrame({"drug": 8 * [*"abcd"], "line": 32 * ["A"]})
    reordered = obs.assign(drug=pd.Categorical(obs["drug"], categories=[*"dxcba"]))
    expected = CellSets.from_obs(obs, by="drug", set_size=2, chunk_size=1, controls={"drug": ["a", "b"]}, seed=0)
    same = [
        (reordered, ["b", "a"], None),
        (obs, {"a", "b"}, slice(0, 32)),
        (obs, pd.Index(["b", "a"]), np.ones(32, bool)),
    ]
    for table, controls, mask in [*same, (obs, np.array(["a", "b"]), None)]:
        sets = CellSets.from_obs(
            table, by="drug", set_size=2, chunk_size=1, controls={"drug": controls}, mask=mask, seed=0
        )
        assert sets.identity == expected.identity
        assert [*sets.groups] == [*expected.groups]


def test_groups_of_similar_values_are_distinct() -> None:
    """Groups are distinct even if their values look the same as text, and in tables of many categories."""
    obs = pd.DataFrame({"p": ["a, b"] * 8 + ["a"] * 8 + ["1"] * 8, "q": ["c"] * 8 + ["b, c"] * 8 + [1] * 8})
    sets = CellSets.from_obs(obs, by=["p", "q"], set_size=4, chunk_size=2, seed=0)
    assert [*dict.fromkeys(sets.groups)] == ["'1', 1", "'a', 'b, c'", "'a, b', 'c'"]
    # many columns of many categories, most of them unused
    many = pd.Categorical(["v0"] * 24, categories=[f"v{number}" for number in range(2**16)])
    wide = obs.assign(**{f"k{number}": many for number in range(4)})
    assert len(set(CellSets.from_obs(wide, by=[*wide], set_size=4, chunk_size=2, seed=0).groups)) == 3


def test_group_without_sets_needs_no_controls() -> None:
    """Under `drop`, a group that is too small for a set needs no controls."""
    obs = pd.DataFrame({"line": ["A"] * 40 + ["B"] * 2, "drug": ["D"] * 20 + ["x"] * 22})
    with pytest.warns(UserWarning, match="drops 1 of 2 groups"):
        sets = CellSets.from_obs(obs, by=["line", "drug"], set_size=16, controls={"drug": "D"}, match="line", seed=0)
    assert len(sets) == 1


def test_every_control_is_used_eventually() -> None:
    """Every control of a pool of 23 cells is used within 12 epochs, although chunks of 4 don't divide the pool."""
    obs = pd.DataFrame({"drug": 23 * ["DMSO"] + 40 * ["a"]})
    sets = CellSets.from_obs(obs, by="drug", set_size=4, chunk_size=4, controls={"drug": "DMSO"}, seed=0)
    used = {int(row) for epoch in range(12) for cells in cells_in(sets, epoch) for row in cells.rows}
    assert used == set(range(63))


def test_set_is_independent_of_later_groups() -> None:
    """Adding a group that sorts last doesn't change the sets of the other groups."""
    obs = pd.DataFrame({"drug": 20 * ["a"] + 20 * ["b"] + 20 * ["c"]})
    few, many = (
        CellSets.from_obs(obs, by="drug", set_size=4, chunk_size=2, seed=0, mask=slice(0, stop)) for stop in (40, 60)
    )
    for number in range(10):
        assert np.array_equal(*(cells_in(sets, 1)[number].rows for sets in (few, many)))


# Samplers treat a set as a row


def sets_like_rows(n_sets: int, **options: Any) -> CellSets:
    """One set of two cells and two controls for each row of a collection; the last set may have one cell."""
    obs = pd.DataFrame({"drug": ["a"] * (2 * n_sets - 1) + ["DMSO"] * 5})
    defaults = {
        "by": "drug",
        "set_size": 2,
        "chunk_size": 1,
        "controls": {"drug": "DMSO"},
        "remainder": "keep",
        "seed": 1,
    }
    sets = CellSets.from_obs(obs, **defaults | options)
    assert len(sets) == n_sets
    return sets


def expected(in_epoch: list[Cells], numbers: list[list[int]]) -> list[list[int]]:
    """The cells of the sets in each batch."""
    return [[row for number in batch for row in in_epoch[number].rows.tolist()] for batch in numbers]


@given(jobs(), st.integers(0, 2), st.integers(0, 3), st.booleans())
def test_batches_have_the_cells_of_sampled_sets(drawn: Job, epoch: int, which: int, is_virtual: bool) -> None:
    """A batch has the cells of the sets whose numbers are the rows that the same sampler reads without sets."""
    options = {**drawn.options, "mask": None, "seed": int(drawn.options["seed"] or 0)}
    n_ranks = drawn.world_size
    if is_virtual:  # on all ranks, or on fewer
        options["virtual_ranks"] = n_ranks
        fitting = [number for number in range(1, n_ranks + 1) if n_ranks % number == 0]
        n_ranks = fitting[which % len(fitting)]
    drawn, sets = replace(drawn, options=options, world_size=n_ranks), sets_like_rows(drawn.n_obs)
    in_epoch = cells_in(sets, epoch)
    for rows in runnable(drawn, epoch):
        cells = drawn.rank(rows.rank, sets=sets)
        cells.set_epoch(epoch)
        assert cells.n_batches(sets.n_obs) == rows.n_batches(drawn.n_obs)
        assert batches(cells.sample(sets.n_obs)) == expected(in_epoch, batches(rows.sample(drawn.n_obs)))


@given(jobs(kinds=("random", "sequential")), st.sampled_from(["keep", "pad"]))
def test_load_requests_describe_each_cell(drawn: Job, remainder: str) -> None:
    """A load request gives the set of each cell within its batch, and marks controls and repeated cells."""
    drawn = replace(drawn, options={**drawn.options, "mask": None, "seed": 0})
    sets = sets_like_rows(drawn.n_obs, remainder=remainder)
    in_epoch, n_repeated = cells_in(sets, 0), 0
    for plain in runnable(drawn):
        ours = drawn.rank(plain.rank, sets=sets)
        for of_rows, request in zip(plain.sample(drawn.n_obs), ours.sample(sets.n_obs), strict=True):
            is_pad = drawn.options["remainder"] == "pad"
            assert ("repeated" in request) == (is_pad or remainder == "pad")
            for number, (split, numbers) in enumerate(zip(of_rows["splits"], batches([of_rows]), strict=True)):
                parts = [in_epoch[number] for number in numbers]
                sizes = [len(part.rows) for part in parts]
                key: Any = request
                assert key["set"][number].tolist() == np.repeat(np.arange(len(parts)), sizes).tolist()
                assert key["is_control"][number].tolist() == [flag for part in parts for flag in part.are_controls]
                if "repeated" in request:
                    marks = of_rows["repeated"][split] if is_pad else [False] * len(parts)  # type: ignore[typeddict-item]  # our key
                    fills = [flags.tolist() for flags in (part.are_repeats for part in parts)]
                    wanted = [flag or bool(mark) for mark, flags in zip(marks, fills, strict=True) for flag in flags]
                    assert key["repeated"][number].tolist() == wanted
                    n_repeated += sum(wanted)
    assert n_repeated or remainder == "keep" or drawn.options["remainder"] == "drop" or drops_rows(drawn)


def test_shared_controls_are_read_once() -> None:
    """All sets of a load request have controls from the same two chunks of a pool."""
    obs = pd.DataFrame({"drug": ["DMSO"] * 8 + ["a"] * 80})
    sets = CellSets.from_obs(obs, by="drug", set_size=8, chunk_size=4, controls={"drug": "DMSO"}, seed=0)
    sampler = DistributedSampler(
        RandomSampler(1, 10, 2, rng=np.random.default_rng(0)), dist_info=Rank(0, 1), sets=sets, seed=0, max_gap=0
    )
    (request,) = sampler.sample(88)
    assert request_rows(request) == list(range(88))
    assert [len(split) for split in request["splits"]] == [32] * 5


def test_max_gap_is_between_cells() -> None:
    """`max_gap` applies to gaps between cells, not to gaps between the numbers of sets."""
    sets = example(controls=None, match=None, mask=slice(0, 40))
    for max_gap, n_read in ((0, 8), (64, None)):
        sampler = DistributedSampler(
            SequentialSampler(1, 2, 2), dist_info=Rank(0, 1), sets=sets, seed=0, max_gap=max_gap
        )
        requests = list(sampler.sample(N_CELLS))
        assert [len(request_rows(request)) for request in requests] == [
            n_read or request["requests"][-1].stop - request["requests"][0].start for request in requests
        ]


def test_plan_counts_sets_and_composition_counts_groups() -> None:
    """The text of a plan counts sets, and its composition counts the sets of each group."""
    sampler = DistributedSampler(RandomSampler(1, 8, 4), dist_info=Rank(0, 2), sets=example(), seed=0)
    plan = sampler.plan(N_CELLS)
    assert str(plan).splitlines() == [
        'epoch 0: 2 ranks share 40 of 40 sets (remainder="drop", batch size 4)',
        "rank  batches  sets  repeated  numbers",
        "   0        5    20         0  0:20",
        "   1        5    20         0  20:40",
        "dropped in this epoch: 0 sets",
    ]
    assert repr(plan) == "<EpochPlan of epoch 0: 2 ranks, 40 sets of 40, up to 5 batches each>"
    table = plan.composition()
    assert table["sets"].loc[0].to_dict() == {f"A, {drug}": 5 for drug in "abcd"} | {f"B, {drug}": 0 for drug in "abcd"}
    assert table.equals(plan.composition(example().groups))


def test_class_samplers_sample_sets_by_group() -> None:
    """A set has one group, so a class sampler samples groups by their weights."""
    sets = example()
    classes = pd.Categorical([name[:1] for name in sets.groups])
    wrapped = ClassSampler(4, 2, 4, classes=classes, num_samples=40, class_weights=np.array([0.0, 1.0]))
    ranks = job(wrapped, 2, sets=sets, seed=0, sharding="independent")
    for sampler in ranks:
        rows = sampler.rows_of(N_CELLS, slice(None))
        assert set(rows["row"]) <= set(range(100, 200))


def test_state_identifies_the_sets() -> None:
    """A state contains the arguments that determine the sets, among them the seed of the sampler."""

    def sampler(sets: CellSets | None, seed: int = 0) -> DistributedSampler:
        return DistributedSampler(RandomSampler(1, 8, 4), dist_info=Rank(0, 2), sets=sets, seed=seed)

    before = sampler(example())
    before.sample(N_CELLS)
    state = json.loads(json.dumps(before.state_dict(batches_done=2)))
    assert state["identity"]["n_obs"] == N_CELLS
    sampler(example()).load_state_dict(state)
    others = [
        (example(seed=1), r"sets\.seed is 0 in the state and 1 here"),
        (example(remainder="pad"), r"sets\.remainder is 'drop' in the state and 'pad' here"),
        (example(controls=None, match=None), r"sets\.pools is '\w+' in the state and None here"),
        (example(mask=slice(0, 180)), r"sets\.cells is "),
        (None, r"sets\.set_size is 4 in the state and None here"),
    ]
    for sets, message in others:
        with pytest.raises(ValueError, match=message):
            sampler(sets).load_state_dict(state)
    seeded = sampler(example(seed=None), seed=5)
    seeded.sample(N_CELLS)
    with pytest.raises(ValueError, match=r"seed is 5 in the state and 6 here"):
        sampler(example(seed=None), seed=6).load_state_dict(seeded.state_dict(batches_done=2))


# Errors

OBS = pd.DataFrame(
    {"line": [*"AAAAAABBBBBB"], "drug": [*"xxxxDDxxyyyD"], "plate": ["1"] * 11 + [None]},
    index=[f"cell {number}" for number in range(12)],
)
ARGUMENTS = {"by": ["line", "drug"], "set_size": 2, "chunk_size": 1, "controls": {"drug": "D"}, "match": ["line"]}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"by": ["line", "batch"]}, ValueError, r"must have the column batch, got only line, drug, plate"),
        ({"controls": {"dose": 0}}, ValueError, r"must have the column dose"),
        ({"by": 3}, TypeError, r"by must be the name of a column of obs, or a list of names, got 3"),
        ({"set_size": 0}, ValueError, r"size must be at least 1"),
        (
            {"set_size": 8, "chunk_size": 3},
            ValueError,
            r"chunk_size must divide set_size, got chunk_size=3 and set_size=8. Pass chunk_size=2",
        ),
        ({"remainder": "exact"}, ValueError, r"remainder must be one of 'drop', 'keep', 'pad', got 'exact'"),
        ({"seed": -1}, ValueError, r"seed must be at least 0"),
        ({"match": ["plate"]}, ValueError, r"plate must have a value in each cell to use, but 1 cell"),
        ({"controls": None}, ValueError, r"match requires controls, got match=\['line'\] without"),
        (
            {"set_size": 5},
            ValueError,
            r"drops 3 of 3 groups .* set_size=5 cells \(9 cells in total\)",
        ),
        ({"by": ["plate", "drug"], "match": []}, TypeError, r"match must be the name of a column"),
        ({"by": ["plate"], "match": "plate"}, ValueError, r"plate must have a value in each cell to use, but 1 cell"),
        ({"controls": {"drug": "E"}}, ValueError, r"controls must name values of drug, got 'E'"),
        ({"controls": {"drug": ["D", "E"]}}, ValueError, r"controls must name values of drug, got 'E'"),
        ({"controls": {}, "match": None}, ValueError, r"controls must be a dict of columns .*, got \{\}"),
        (
            {"controls": "D"},
            ValueError,
            r"controls must be a dict of columns",
        ),
        ({"controls": np.zeros(3, dtype=bool)}, ValueError, r"boolean array of shape \(12,\)"),
        ({"controls": np.zeros(12, dtype=bool)}, ValueError, r"controls must select at least one cell"),
        (
            {"by": ["line"], "controls": {"plate": "1"}, "match": None},
            ValueError,
            r"plate must have a value in each cell to use, but 1 cell",
        ),
        (
            {"mask": slice(0, 11)},
            ValueError,
            r"with the same line, got none for cells of 2 groups: B, x \(2 cells\); B, y \(3 cells\)\. Exclude",
        ),
        ({"mask": slice(0, 4)}, ValueError, r"controls must select at least one cell"),
        ({"mask": slice(4, 6)}, ValueError, r"No cells remain for sets"),
        ({"mask": pd.Series(True, index=OBS.index[::-1])}, ValueError, r"obs_names of the collection in"),
        ({"controls": (OBS["drug"] == "D")[::-1]}, ValueError, r"obs_names of the collection in a different"),
    ],
)
def test_arguments_that_make_no_sets_are_refused(arguments: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        CellSets.from_obs(OBS, **ARGUMENTS | arguments)


def test_columns_must_be_labels() -> None:
    with pytest.raises(ValueError, match="a single column drug, got 2"):
        CellSets.from_obs(OBS[["drug", "drug"]], by="drug", set_size=1, chunk_size=1)
    lists = OBS.assign(drug=[[drug] for drug in OBS["drug"]])
    with pytest.raises(TypeError, match="unhashable"):
        CellSets.from_obs(lists, by="drug", set_size=1, chunk_size=1)
    with pytest.raises(ValueError, match="at least one cell"):
        CellSets.from_obs(OBS[:0], by="drug", set_size=1, chunk_size=1)


def test_obs_must_be_a_table() -> None:
    with pytest.raises(TypeError, match=r"obs must be a pandas DataFrame, got dict"):
        CellSets.from_obs({"drug": [*"abc"]}, by="drug", set_size=1, chunk_size=1)


def test_groups_that_are_too_small_are_named() -> None:
    with pytest.warns(
        UserWarning, match=r"2 of 3 groups .* set_size=4 cells \(5 cells in total\): B, x \(2 cells\), B, y"
    ):
        sets = CellSets.from_obs(OBS, **ARGUMENTS | {"set_size": 4})
    assert len(sets) == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mask": slice(0, 5)}, ValueError, r"can't be combined with sets, .* CellSets.from_obs\(mask="),
        ({"sets": example(seed=None), "seed": None}, ValueError, r"sets require a seed"),
        ({"sets": "sets"}, TypeError, r"sets must be CellSets, got 'sets'. Create them with CellSets.from_obs"),
    ],
)
def test_sampler_refuses_arguments_that_sets_exclude(options: dict[str, Any], error: type, message: str) -> None:
    """Sets can't be combined with a mask, and require a seed and the type `CellSets`."""
    arguments = {"dist_info": Rank(0, 2), "sets": example(), "seed": 0} | options
    with pytest.raises(error, match=message):
        DistributedSampler(RandomSampler(1, 8, 4), **arguments)


def test_mask_cannot_be_combined_with_sets() -> None:
    """A mask of the wrapped sampler, and one that is assigned later, can't be combined with sets."""
    with pytest.raises(ValueError, match="can't be combined with sets"):
        DistributedSampler(RandomSampler(1, 8, 4, mask=slice(0, 9)), dist_info=Rank(0, 1), sets=example(), seed=0)
    sampler = DistributedSampler(RandomSampler(1, 8, 4), dist_info=Rank(0, 1), sets=example(), seed=0)
    with pytest.raises(ValueError, match="can't be combined with sets"):
        sampler.mask = slice(0, 9)
    sampler.mask = slice(0, None)
    assert sampler.n_batches(N_CELLS) == 10


def test_different_collection_is_refused_by_every_rank() -> None:
    for sampler in job(RandomSampler(1, 8, 4), 2, sets=example(), seed=0):
        with pytest.raises(ValueError, match="200 cells, but this collection has 100"):
            sampler.plan(100)


def test_reordered_names_are_refused() -> None:
    names = [f"cell {number}" for number in range(N_CELLS)]
    obs = pd.DataFrame({"drug": 20 * [*"abcdefghij"]}, index=names)
    for order, expectation in (
        (slice(None), None),
        (slice(None, None, -1), "obs_names of the collection"),
    ):
        sets = CellSets.from_obs(obs[order], by="drug", set_size=4, chunk_size=4, seed=0)
        sampler = DistributedSampler(RandomSampler(1, 8, 4), dist_info=Rank(0, 2), sets=sets, seed=0)
        loader = StatefulLoader(batch_sampler=sampler, preload_to_gpu=False)
        loader.add_adata(ad.AnnData(np.zeros((N_CELLS, 1)), obs=obs))
        if expectation is None:
            assert len(list(loader)) == 6
            assert b"cell 199" not in pickle.dumps(sampler)  # names are compared once, then dropped
            continue
        with pytest.raises(ValueError, match=expectation):
            next(iter(loader))
