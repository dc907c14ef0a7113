"""The page about the command line shows what the commands print."""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING

import pytest

from annbatch_distributed.cli import main
from tests.cli.page import PAGE, keys_in, not_named

if TYPE_CHECKING:
    from pathlib import Path

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
    found = json.loads(capsys.readouterr().out)
    assert len(keys_in(found)) > 20
    assert not_named(found) == set()


def test_the_page_shows_some_plans() -> None:
    assert len(SHOWN) == 2
