"""Collections that commands are given by a URL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from annbatch_distributed.loader import collection as opening
from tests.cli.test_cells import made, saved
from tests.cli.test_commands import SMALL, said
from tests.object_storage import serving
from tests.processes.launch import python, run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def url(collection: Path) -> Iterator[str]:
    """The collection in a bucket, of whose server clients know by the environment."""
    with serving() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        server.put(collection, "atlas", "cells.zarr")
        yield "s3://atlas/cells.zarr"


@pytest.mark.parametrize("has_obstore", [True, False])
def test_commands_print_same_for_url_and_folder(
    has_obstore: bool,
    url: str,
    collection: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Commands print the same for a URL as for a folder."""
    if not has_obstore:
        monkeypatch.setattr(opening, "find_spec", lambda _: None)
    state = saved(made(collection), tmp_path)
    for command in (
        ("plan", "--by", "label", *SMALL),
        ("cells", "--state", state, "--steps", "0:2"),
    ):
        name, *options = command
        assert said(capsys, name, url, *options) == said(capsys, name, collection, *options)


def test_ranks_that_check_starts_open_a_url_too(url: str) -> None:
    # in a process of its own, as those that it forks ranks from know the environment of its beginning
    (done,) = run(python("-m", "annbatch_distributed", "check", url, *SMALL))
    assert "2 ranks have read" in done.stdout


def test_commands_read_through_a_cache(collection: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = "--cache", tmp_path / "cache", "--cache-limit", "1GB"
    steps = "--state", saved(made(collection), tmp_path), "--steps", "0:2"
    listed = said(capsys, "cells", collection.as_uri(), *steps, *cache)
    assert listed == said(capsys, "cells", collection, *steps)
    assert "2 ranks have read" in said(capsys, "check", collection.as_uri(), *SMALL, *cache)
    assert [path for path in (tmp_path / "cache").rglob("X/**/*") if path.is_file()]
    assert "Leave out --cache" in said(capsys, "check", collection, "--data", *cache, code=2)


def test_missing_url_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A URL without a collection is one line on stderr."""
    line = said(capsys, "plan", f"{url}/nothing", code=2)
    assert f"{url}/nothing: can't be read as a collection: " in line


def test_server_without_tls_names_the_variable(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    line = said(capsys, "plan", url, code=2)
    assert "needs AWS_ALLOW_HTTP=true" in line
