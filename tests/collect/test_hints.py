"""Messages: what they tell a user to pass is valid in Python and in the command, and helps."""

from __future__ import annotations

import ast
import shlex
from contextlib import suppress
from inspect import signature
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from annbatch_distributed.cli import main
from annbatch_distributed.collect import Problems, collect

if TYPE_CHECKING:
    from pathlib import Path

ARGUMENTS = [*signature(collect).parameters]


def hints_in(text: str) -> dict[str, Any]:
    """Arguments of Python that a text names, with their values; each is the longest text that Python can parse."""
    found: dict[str, Any] = {}
    for name in ARGUMENTS:
        start = text.find(f" {name}=") + 1 or text.find(f"({name}=") + 1
        for end in range(len(text), start or len(text), -1):
            with suppress(SyntaxError):
                call: Any = ast.parse(f"collect({text[start:end]})", mode="eval").body
                found[name] = ast.literal_eval(call.keywords[0].value)
                break
        else:
            assert not start, text
    return found


def in_words(name: str, value: Any) -> list[str]:
    """Words of the command for an argument."""
    option = f"--{name.replace('_', '-')}"
    if value is True:
        return [option]
    values = [f"{old}={new}" for old, new in value.items()] if isinstance(value, dict) else value
    return [option, *([values] if isinstance(values, str) else values)]


def file_of(path: Path, genes: str = "abc", values: Any = None, **obs: Any) -> ad.AnnData:
    index = [f"{path.stem}{number}" for number in range(4)]
    cells = ad.AnnData(np.arange(12).reshape(4, 3).astype("float32") if values is None else values)
    cells.obs, cells.var_names = pd.DataFrame(obs, index=index), [*genes]
    cells.write_h5ad(path)
    return cells


def places(one: Path, two: Path) -> None:
    file_of(one)
    cells = file_of(two, values=np.full((4, 3), 0.5, "float32"))
    cells.layers["counts"] = np.ones((4, 3), "float32")
    cells.write_h5ad(two)


def layers(one: Path, two: Path) -> None:
    for path in (one, two):
        cells = file_of(path)
        cells.layers["my counts"], cells.X = cells.X, None
        cells.write_h5ad(path)


def names(one: Path, two: Path) -> None:
    file_of(one)
    two.write_bytes(one.read_bytes())


def types(one: Path, two: Path) -> None:
    for path in (one, two):
        cells = file_of(path)
        cells.var["feature_types"] = ["Gene Expression", "Gene Expression", "Antibody Capture"]
        cells.write_h5ad(path)


def obs(**columns: list[Any]) -> Any:
    """A maker of files with columns, of which the first half is of the first file."""
    halves = ({name: own[:4] for name, own in columns.items()}, {name: own[4:] for name, own in columns.items()})
    return lambda *paths: [file_of(path, **half) for path, half in zip(paths, halves, strict=True)]


#: What makes two files, arguments, part of the message, and the names of arguments in its hint.
SITUATIONS: dict[str, tuple[Any, dict[str, Any], str, list[str]]] = {
    "kinds": (places, {}, "must have the same kind of values", ["layer"]),
    "place": (layers, {}, "has no X, but layer my counts", ["layer"]),
    "names": (names, {}, "4 cell names repeated", ["make_unique"]),
    "genes": (lambda one, two: (file_of(one), file_of(two, "xyz")), {}, "no gene is in all files", ["join"]),
    "types": (types, {}, "features of several types", ["feature_types"]),
    "reserved": (obs(src_path=["it's"] * 8), {}, "must not have a column src_path", ["obs", "rename"]),
    "kept": (obs(a=[*"xyzw"] * 2, b=[*"xyzw"] * 2), {"obs": ["a"], "group_by": ["b"]}, "must be kept, got b", ["obs"]),
    "dtypes": (obs(a=[*"xyzw"] * 2, b=[True] * 4 + [*"xyzw"]), {}, "b: booleans and values such as", ["obs"]),
    "missing": (obs(a=["nan", "it's] NA", *"ab"] * 2, b=["n/a"] * 8), {}, "may stand for missing", ["na_values"]),
    "column": (obs(a=[*"xyzw"] * 2), {"rename": {"b": "a"}}, "rename: no file has columns b", []),
    "stored": (obs(), {}, "which loaders of this package yield as float32", ["dtype"]),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_what_a_message_tells_to_pass_helps(situation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In Python and in the command, arguments of a message are valid, and with them it isn't said again."""
    make, options, message, expected = SITUATIONS[situation]
    files = [tmp_path / "one.h5ad", tmp_path / "two.h5ad"]
    make(*files)

    outs = (tmp_path / f"{number}.zarr" for number in range(9))

    def in_python(**others: Any) -> str:
        lines = list[str]()
        try:
            collect(files, next(outs), tell=lines.append, **options | others)
        except Problems as problems:
            lines += problems.args
        return "\n".join(lines)

    def in_command(**others: Any) -> str:
        given = [word for pair in (options | others).items() for word in in_words(*pair)]
        main(["collect", *map(str, files), "--out", str(next(outs)), *given])
        return "".join(capsys.readouterr())

    line = next(line for line in in_python().splitlines() if message in line)
    hints = hints_in(line)
    assert [*hints] == expected
    text = in_command()
    assert "=" not in text.replace("NAME=", "").replace("=NEW", "")
    for name, value in hints.items():
        assert shlex.join(in_words(name, value)) in text
        if value != ["NAME"]:  # a placeholder for a column
            assert message not in in_python(**{name: value})
            assert message not in in_command(**{name: value})
