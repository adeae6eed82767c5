"""Fresh processes that write metrics into a given directory, as those of a server do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sensorium.server.metrics.shared_files import Files, Values

ROOT = Path(__file__).parents[4]
_TIMEOUT_S = 120.0  # against hanging only


def start(script: str, directory: Path, arguments: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start a process that runs `script` and then waits until its input ends."""
    code = f"{script}\nprint('written', flush=True)\nimport sys\nsys.stdin.read()\n"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(directory)},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "written\n":
        process.kill()
        raise AssertionError("the writer failed")
    return process


def end(process: subprocess.Popen[str]) -> None:
    with process:
        process.communicate(timeout=_TIMEOUT_S)
    assert process.returncode == 0


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a process as the kernel does when memory is short: without any clean-up."""
    with process:
        process.kill()
        process.wait(_TIMEOUT_S)


def run(script: str, directory: Path) -> str:
    """Return what a process that runs `script` prints."""
    return subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(directory)},
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    ).stdout


def read(directory: Path) -> Values:
    return Values(Files(directory))
