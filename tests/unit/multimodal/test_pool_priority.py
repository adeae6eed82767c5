from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sensorium.multimodal.pool.worker import run_at_low_priority

AUTOGROUP = Path("/proc/self/autogroup")


def _get_priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def _get_group_priority() -> str:
    text = AUTOGROUP.read_text() if AUTOGROUP.exists() else ""
    return text.rpartition("nice")[2].strip() or "none"  # empty: no session was started here yet


def test_a_long_job_runs_at_a_low_priority_and_nothing_else_does() -> None:
    # In a session of its own: the processes of a session share one priority as a group, and those
    # that run other tests may set it at any time.
    command = [sys.executable, "-c", f"from {__name__} import check_priorities as c; c()"]
    subprocess.run(command, start_new_session=True, check=True, timeout=300)


def check_priorities() -> None:
    before, group_before = _get_priority(), _get_group_priority()

    within, group_within = run_at_low_priority(lambda: (_get_priority(), _get_group_priority()))

    assert within > before
    assert group_within in ("10", "none")
    assert _get_priority() == before
    assert _get_group_priority() == group_before


def test_errors_of_a_long_job_reach_the_caller() -> None:
    def fail() -> None:
        raise ValueError("a damaged file")

    with pytest.raises(ValueError, match="a damaged file"):
        run_at_low_priority(fail)
