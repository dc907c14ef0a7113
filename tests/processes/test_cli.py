"""The command `check`: processes that stream a collection, and that none is left, however it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest

from annbatch_distributed.cli import check, main
from tests.cli.page import keys_in, not_named
from tests.processes import cli_ranks
from tests.processes.launch import ROOT, python

if TYPE_CHECKING:
    from pathlib import Path

SMALL = "--chunk-size=8", "--batch-size=8", "--remainder=exact"

#: A job whose ranks wait for ever.
WAITING = """
from annbatch_distributed.cli import check
from tests.processes.cli_ranks import without_end
check._rank = without_end
if __name__ == "__main__":
    from argparse import Namespace
    next(check._streamed(Namespace(ranks=2, epochs=1), None))
"""


def ranks_of(parent: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in parent.children():
        with suppress(psutil.Error):  # libraries run programs as they are imported, which are gone at once
            found += [child] * ("multiprocessing.spawn" in " ".join(child.cmdline()))
    return found


def test_ranks_read_what_was_planned_and_a_row_that_was_not_is_found(
    collection: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "_rank", cli_ranks.tampered)
    code = main(["check", str(collection), "--epochs=2", "--json", *SMALL])
    out, err = capfd.readouterr()
    found = json.loads(out)

    assert (code, found["ok"], err) == (1, False, "")
    first, second = found["epochs"]
    assert first["ok"]
    assert [rank["rows"] for rank in first["ranks"]] == [173, 174]
    assert [rank["batches"] for rank in first["ranks"]] == [22, 22]
    assert not second["ok"]
    assert any("rank 1 " in problem and "other rows" in problem for problem in second["problems"])
    assert len(keys_in(found)) > 20
    assert not_named(found) == set()


def test_a_rank_that_is_killed_ends_the_others_and_is_one_line(
    collection: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "_rank", cli_ranks.killed)
    code = main(["check", str(collection), *SMALL])
    out, err = capfd.readouterr()

    assert (code, out) == (1, "")
    (line,) = err.splitlines()
    assert line.startswith("annbatch-distributed: rank 1 ended with SIGKILL")
    assert line.endswith("the other ranks were ended")
    assert not ranks_of(psutil.Process())


def wait_for_end(parent: psutil.Popen, number: signal.Signals) -> tuple[int, str, str]:
    """Send a signal once there are two ranks; return the exit code and the output, when no process is left."""
    try:
        while len(ranks := ranks_of(parent)) < 2:
            assert parent.poll() is None, parent.communicate()
            time.sleep(0.02)
        parent.send_signal(number)
        out, err = parent.communicate(timeout=60)
        _, left = psutil.wait_procs(ranks, timeout=30)
        assert not left
        return parent.returncode, out, err
    finally:
        if parent.poll() is None:
            parent.kill()


def test_control_c_ends_all_ranks(collection: Path) -> None:
    command = python("-m", "annbatch_distributed", "check", collection, "--epochs=10000", "--json", *SMALL)
    parent = psutil.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert wait_for_end(parent, signal.SIGINT) == (130, "", "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -15), (signal.SIGHUP, -1), (signal.SIGKILL, -9)])
def test_ranks_end_with_their_parent(tmp_path: Path, number: signal.Signals, code: int) -> None:
    script = tmp_path / "waiting.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{WAITING}")
    parent = psutil.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert wait_for_end(parent, number)[0] == code
