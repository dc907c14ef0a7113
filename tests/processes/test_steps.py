"""The page about debugging a step: its job of two ranks, its commands, and its fix."""

from __future__ import annotations

import re
import shlex
import shutil
from typing import TYPE_CHECKING

import numpy as np
import zarr

from annbatch_distributed.cli import main
from tests.processes.launch import ROOT, forked_ranks, run

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

PAGE = (ROOT / "docs/debugging.md").read_text()


def test_page_finds_and_skips_nan(
    cells: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page finds a NaN from the checkpoint, and resumes without it."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(cells, "bad.zarr")
    zarr.open_array("bad.zarr/dataset_0/obs/donor/codes", mode="r+")[10_240:12_288] = 9
    zarr.open_array("bad.zarr/dataset_0/X/data", mode="r+")[160_000] = np.nan
    (script,) = re.findall(r"```\{code-block\} python\n(?::caption: [^\n]*\n\n)?(.*?)```", PAGE, re.DOTALL)
    (diff,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    error, verdict = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    script = f"import os; os.chdir({str(tmp_path)!r})\n{script}"
    (tmp_path / "train.py").write_text(script)
    failed = run(*forked_ranks(tmp_path / "train.py", ranks=2), expect=1)
    assert all(error in process.stderr for process in failed)

    shown = re.findall(r"```console\n\$ annbatch-distributed (.*)\n((?:(?!```).*\n)*)```", PAGE)
    assert [command.split()[0] for command, _ in shown] == ["cells", "cells"]
    for command, text in shown:
        assert main(shlex.split(command)) == 0
        lines, *rest = text.split("...\n")
        printed = capsys.readouterr().out
        assert printed.startswith(lines)
        assert rest or printed == lines

    (tmp_path / "train.py").write_text(applied(diff, script))
    done = run(*forked_ranks(tmp_path / "train.py", ranks=2))
    assert all(verdict.strip() in process.stdout for process in done)


def applied(diff: str, script: str) -> str:
    """Apply a diff to a script; added lines follow the unchanged or removed line before them."""
    for old, new in re.findall(r"^[- ](.*\n)((?:^\+.*\n)*)", diff, re.MULTILINE):
        assert script.count(old) == 1
        kept = old if f"\n {old}" in f"\n{diff}" else ""
        script = script.replace(old, kept + re.sub(r"^\+", "", new, flags=re.MULTILINE))
    return script
