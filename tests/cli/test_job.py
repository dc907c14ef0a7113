"""What a signal does while the processes of a job are started."""

from __future__ import annotations

import os
import signal

import pytest

from annbatch_distributed.cli.job import _Endings


def test_a_signal_waits_until_a_process_is_started_and_then_ends_this_one() -> None:
    done: list[str] = []

    def start() -> None:
        with _Endings() as endings:
            with endings.held():
                os.kill(os.getpid(), signal.SIGTERM)
                done.append("started")
            done.append("never")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        start()
    assert done == ["started"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_ends_at_once_where_nothing_is_started() -> None:
    with pytest.raises(SystemExit, match="130"), _Endings():
        os.kill(os.getpid(), signal.SIGINT)
