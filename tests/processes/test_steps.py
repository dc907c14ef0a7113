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
    error, verdict = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    # the arguments of the script when the page first runs it, and when it resumes
    commands = re.findall(r"torchrun .*? bad.zarr (.*?)```", PAGE, re.DOTALL)
    first, again = (command.replace("\\\n", " ").split() for command in commands)
    script = "examples/stop_at_nan.py", tmp_path / "bad.zarr", "--state", tmp_path / "state.json"
    failed = run(*forked_ranks(*script, *first, ranks=2), expect=1)
    assert all(error in process.stderr for process in failed)

    ((command, text),) = re.findall(r"```console\n\$ annbatch-distributed (.*)\n((?:(?!```).*\n)*)```", PAGE)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == text

    done, _ = run(*forked_ranks(*script, *again, ranks=2))
    assert done.stdout == verdict
