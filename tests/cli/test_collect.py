"""The command ``collect``: what it prints, and that it does what the function does."""

from __future__ import annotations

import re
import resource
import runpy
from typing import TYPE_CHECKING, Any

import pytest
import scipy.sparse as sp

from annbatch_distributed.cli import collect as command
from annbatch_distributed.cli import main
from annbatch_distributed.collect import collect
from tests.cli.page import PAGE
from tests.collect.test_files import GENES, cells_of, counts
from tests.processes.launch import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def said(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """Run a command, and return what it prints, and the lines of what is wrong."""
    assert main(list(map(str, arguments))) == code
    out, err = capsys.readouterr()
    # annbatch writes bars to stderr
    wrong = [line for line in err.splitlines() if line.startswith("annbatch-distributed: ")]
    assert bool(wrong) == bool(code)
    return out + "\n".join(wrong)


def file_of(path: Path, **obs: Any) -> Path:
    cells_of(path.stem, counts(6, 4, 0), GENES[:4], **obs).write_h5ad(path)
    return path


def test_page_shows_output_of_collect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runpy.run_path(str(ROOT / "examples/from_h5ad/files.py"))["main"](tmp_path / "h5ad")
    (arguments, text), *_ = re.findall(r"\$ annbatch-distributed (collect .*)\n((?:(?!```).*\n)+)```", PAGE)
    monkeypatch.chdir(tmp_path)
    assert said(capsys, *arguments.split()) == text


def test_each_option_is_an_argument_of_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options have the names of arguments, and what isn't given has the default of the function."""
    passed: dict[str, Any] = {}
    monkeypatch.setattr(command, "collect", collect_into(passed))
    assert main(["collect", "a.h5ad", "b.h5ad", "--out", "c.zarr"]) == 0
    del passed["tell"]
    flags = {"make_unique": False, "restart": False, "rename": {}}
    assert passed == {"files": ["a.h5ad", "b.h5ad"], "out": "c.zarr", **flags}
    assert main(["collect", "a.h5ad", "--add-to", "d.zarr"]) == 0
    assert (passed["add_to"], "out" in passed) == ("d.zarr", False)
    lists = "--layer raw X --feature-types G --obs a --obs b --na-values N --group-by a b"
    others = "--join inner --labels l.csv --make-unique --memory 2GB --jobs 3 --scheduler tcp://h:1 --dtype int32"
    last = "--compression none --seed 7 --restart --rename a=b c=d"
    assert main(["collect", "a.h5ad", "--out", "c.zarr", *f"{lists} {others} {last}".split()]) == 0
    del passed["tell"]
    assert passed == {
        "files": ["a.h5ad"],
        "out": "c.zarr",
        "layer": ["raw", "X"],
        "feature_types": ["G"],
        "obs": ["a", "b"],
        "na_values": ["N"],
        "group_by": ["a", "b"],
        "join": "inner",
        "labels": "l.csv",
        "make_unique": True,
        "memory": "2GB",
        "jobs": 3,
        "scheduler": "tcp://h:1",
        "dtype": "int32",
        "compression": "none",
        "seed": 7,
        "restart": True,
        "rename": {"a": "b", "c": "d"},
    }


def collect_into(passed: dict[str, Any]) -> Any:
    """A function with the arguments of collect, which keeps them."""

    def kept(**arguments: Any) -> None:
        passed.clear()
        passed.update(arguments)

    kept.__signature__ = command.signature(collect)  # type: ignore[attr-defined]  # as functools.wraps does
    return kept


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["none.h5ad"], "none.h5ad: no such file"),
        (["jobs=2.h5ad"], "jobs=2.h5ad: no such file"),
        (["group_by.h5ad"], "group_by.h5ad: no such file"),
        (["a.h5ad", "a.h5ad"], "files must be different"),
        (["--rename", "type=src_path"], ": a.h5ad: obs must not have a column src_path"),
        (["--obs", "age"], "--obs: no file has columns age. They have type"),
        (["--rename", "age"], "--rename: must be OLD=NEW, got 'age'"),
        (["--rename", "type=d", "type=e"], "--rename: a column must have one new name, got another one in type=d"),
        (["--out", "s3://atlas/cells.zarr"], "--out s3://atlas/cells.zarr: must be a local folder"),
        (["--out", "none/cells.zarr"], "none/cells.zarr: No such file or directory"),
        (["--out", "link.zarr"], "--out link.zarr: already exists, a broken link. Pass a new path"),
        (["--out", "a.h5ad"], "--out a.h5ad: already exists. Pass a new path, or remove it"),
        (["--add-to", "none.zarr"], "--out: either this or --add-to must be the path of a collection, got both"),
        (["--memory", "lots"], "--memory: must be a size above 0, such as 4GB, got 'lots'"),
        (["--memory", "0"], "--memory: must be a size above 0"),
        (["--jobs", "2", "--scheduler", "tcp://h:1"], "--jobs: can't be combined with scheduler"),
        (["--group-by", "age"], "--group-by: obs has no column age. It has type"),
    ],
)
def test_error_is_one_line_and_leaves_nothing(
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Input that can't be collected is one line on stderr, in options, and no file is left behind."""
    monkeypatch.chdir(tmp_path)
    file_of(tmp_path / "a.h5ad", type=["B"] * 6)
    (tmp_path / "link.zarr").symlink_to(tmp_path / "gone")
    before = {*tmp_path.iterdir()}
    files = [] if options[0].endswith(".h5ad") else ["a.h5ad"]
    line = said(capsys, "collect", "--out", "cells.zarr", *files, *options, code=2)
    assert line.startswith("annbatch-distributed: ")
    assert message in line
    assert "\n" not in line
    assert {*tmp_path.iterdir()} == before


def test_problems_and_lines_are_those_of_the_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Problems and lines are the same as of the function, in options."""
    both = said(capsys, "collect", tmp_path / "a.h5ad", tmp_path / "b.h5ad", "--out", tmp_path / "cells.zarr", code=2)
    assert both.splitlines() == [f"annbatch-distributed: {tmp_path / name}.h5ad: no such file" for name in "ab"]
    file, lines = file_of(tmp_path / "c.h5ad", kind=["B", "nan"] * 3), list[str]()
    collect(file, tmp_path / "one.zarr", na_values=["x"], tell=lines.append)
    text = said(capsys, "collect", file, "--out", tmp_path / "two.zarr", "--na-values", "x")
    as_options = {"na_values:": "--na-values:", "na_values=['nan']": "--na-values nan", "one.zarr": "two.zarr"}
    for argument, option in {**as_options, "dtype='float32'": "--dtype float32"}.items():
        assert any(argument in line for line in lines)
        lines = [line.replace(argument, option) for line in lines]
    assert text.splitlines()[:-1] == lines
    assert "WARNING: labels that may stand for missing ones: kind 'nan'. If they do, pass --na-values nan" in lines


@pytest.mark.parametrize(("form", "most"), [(sp.csr_matrix, 1024), (sp.csc_matrix, 500)])
def test_full_disk_is_one_line_and_leaves_nothing(
    form: Any, most: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk is one line on stderr, and no file is left behind; also while a file in columns is sorted."""
    cells = cells_of("a", counts(100, 12, 0), GENES)
    cells.X = form(cells.X)
    cells.write_h5ad(tmp_path / "a.h5ad")
    before, limits = {*tmp_path.iterdir()}, resource.getrlimit(resource.RLIMIT_FSIZE)
    # no file of this process may be larger than this, as if the disk were full
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        text = said(capsys, "collect", tmp_path / "a.h5ad", "--out", tmp_path / "cells.zarr", "--memory", "5kB", code=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert text.startswith("annbatch-distributed: ")
    assert "can't be read" not in text
    assert text.endswith(f"; nothing was written to {tmp_path / 'cells.zarr'}")
    assert {*tmp_path.iterdir()} == before
