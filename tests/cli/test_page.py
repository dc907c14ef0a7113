"""The page about the command line shows what the commands print."""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING

from annbatch_distributed.cli import main
from tests.cli.page import PAGE, check_schema

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

SHOWN = dict(re.findall(r"```console\n\$ annbatch-distributed (plan .*)\n((?:(?!```).*\n)+)```", PAGE))


def test_page_shows_output_of_plan(
    cells: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plans on the page are what the command prints."""
    monkeypatch.chdir(cells.parent)
    assert len(SHOWN) == 1
    for command, text in SHOWN.items():
        assert main(shlex.split(command)) == 0
        assert capsys.readouterr().out == text


def test_plan_prints_json_of_its_schema(cells: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--by", "donor", "--virtual-ranks", "4"]):
        assert main(["plan", str(cells), *options, "--json"]) == 0
        check_schema("plan", json.loads(capsys.readouterr().out))
