"""What a failed test leaves behind costs no other test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = """
import gc
import os

def test_that_fails():
    circle = [os.fdopen(os.open(os.devnull, os.O_RDONLY))]
    circle.append(circle)
    raise ValueError

def test_that_collects_garbage():
    gc.collect()
"""


@pytest.mark.processes
def test_a_test_that_collects_garbage_does_not_meet_files_of_one_that_failed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "test_two.py"
    path.write_text(TESTS)
    flags = ["-p", "no:cacheprovider", "-p", "tests.leftovers", "-W", "error"]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, f"--rootdir={tmp_path}", str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        check=False,
    )
    assert "1 failed, 1 passed" in found.stdout, found.stdout
