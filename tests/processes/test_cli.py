"""The command `check`: it compares its ranks, and leaves no process behind, however it ends."""

from __future__ import annotations

import signal
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest

from annbatch_distributed.cli import check, main
from tests.processes import cli_ranks
from tests.processes.launch import ROOT, python

if TYPE_CHECKING:
    from pathlib import Path

SMALL = "--chunk-size=8", "--batch-size=8", "--remainder=exact"

#: A job whose ranks wait forever.
WAITING = """
from annbatch_distributed.cli import check
from tests.processes.cli_ranks import without_end
check._rank = without_end
if __name__ == "__main__":
    from argparse import Namespace
    next(check._streamed(Namespace(ranks=2, epochs=1), None))
"""


def ranks_of(parent: psutil.Process) -> list[psutil.Process]:
    """Return the processes that the parent's fork server has started."""
    ranks: list[psutil.Process] = []
    for child in parent.children():
        with suppress(psutil.Error):  # imports of libraries run programs, which end at once
            if "multiprocessing.forkserver" in " ".join(child.cmdline()):
                ranks += child.children()
    return ranks


def test_check_finds_wrong_row_and_killed_rank(
    collection: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """check finds an unplanned row, and a killed rank ends the others."""
    monkeypatch.setattr(check, "_rank", cli_ranks.failing)
    code = main(["check", str(collection), "--epochs=4", *SMALL])
    out, err = capfd.readouterr()

    assert code == 1
    assert err == "annbatch-distributed: rank 1 ended with SIGKILL, so all ranks were stopped\n"
    first, second = out.split("\n\n")
    rows = [line.split()[:3] for line in first.splitlines()]
    assert rows[:3] == [["rank", "rows", "batches"], ["0", "173", "22"], ["1", "174", "22"]]
    assert "as planned. Each of the 347 rows was read once" in first
    assert "rank 1 " in second
    assert "different rows" in second
    assert not ranks_of(psutil.Process())


def wait_for_end(parent: psutil.Popen, number: signal.Signals) -> tuple[int, str, str]:
    """Send a signal once there are two ranks. Return the exit code and the output after all have ended."""
    try:
        while len(ranks := ranks_of(parent)) < 2:
            assert parent.poll() is None, parent.communicate()
            time.sleep(0.02)
        parent.send_signal(number)
        out, err = parent.communicate(timeout=150)  # its server may still import libraries
        _, left = psutil.wait_procs(ranks, timeout=90)
        assert not left
        return parent.returncode, out, err
    finally:
        if parent.poll() is None:
            parent.kill()


def start(*command: object) -> psutil.Popen:
    """Start a command that starts two ranks."""
    return psutil.Popen(
        python(*command), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.usefixtures("interruptible")
def test_no_rank_outlives_its_parent(collection: Path, tmp_path: Path) -> None:
    """Ctrl-C ends the command and its ranks without output, and ranks end with a parent that is killed."""
    script = tmp_path / "waiting.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{WAITING}")
    interrupted = start("-m", "annbatch_distributed", "check", collection, "--epochs=300", "--json", *SMALL)
    killed = start(script)
    try:
        assert wait_for_end(interrupted, signal.SIGINT) == (130, "", "")
    finally:
        assert wait_for_end(killed, signal.SIGKILL)[0] == -9
