"""The page about the command line shows what the commands print."""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING

from annbatch_distributed.cli import main
from tests.cli.page import PAGE, keys_in, not_named

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

SHOWN = dict(re.findall(r"```console\n\$ annbatch-distributed (plan .*)\n((?:(?!```).*\n)+)```", PAGE))


def test_page_shows_output_of_plan(
    cells: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plans on the page are what the command prints."""
    monkeypatch.chdir(cells.parent)
    assert len(SHOWN) == 2
    for command, text in SHOWN.items():
        assert main(shlex.split(command)) == 0
        assert capsys.readouterr().out == text


def test_the_page_names_every_key_of_a_plan(cells: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(cells), "--by", "donor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(keys_in(found)) > 20
    assert not_named(found) == set()
