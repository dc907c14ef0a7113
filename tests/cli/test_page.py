"""The page about the command line shows what the commands print."""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING

import pytest

from annbatch_distributed.cli import main
from tests.processes.launch import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PAGE = (ROOT / "docs" / "command-line.md").read_text()
SHOWN = dict(re.findall(r"```console\n\$ annbatch-distributed (plan .*)\n((?:(?!```).*\n)+)```", PAGE))


@pytest.mark.parametrize("command", SHOWN)
def test_a_plan_of_the_page_is_what_the_command_prints(
    cells: Path, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(cells.parent)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == SHOWN[command]


def test_the_page_names_every_key_of_a_plan(cells: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(cells), "--by", "donor", "--json"]) == 0
    found = keys_in(json.loads(capsys.readouterr().out))
    assert len(found) > 20
    assert all(f"`{key}`" in PAGE for key in found)


def keys_in(content: object) -> set[str]:
    if isinstance(content, dict):
        return set(content).union(*map(keys_in, content.values()))
    return set().union(*map(keys_in, content)) if isinstance(content, list) else set()


def test_the_page_shows_some_plans() -> None:
    assert len(SHOWN) == 2
