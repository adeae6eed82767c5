"""Writes a benchmark's figures with all that is needed to measure them again."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RECORDS = Path(__file__).parent / "records"
_PACKAGES = ("torch", "transformers", "numpy", "tokenizers", "flashinfer-python")


def write_record(
    name: str, figures: dict[str, Any], *, path: Path | None = None, commit: str | None = None
) -> Path:
    """Write the figures to `records/NAME.json` or `path`, replacing the last record there.

    `commit` is for machines that have the tree but not its history.
    """
    path = path or RECORDS / f"{name}.json"
    script = f"benchmarks/{Path(sys.argv[0]).name}"
    record = {
        "benchmark": name,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit or _git("rev-parse", "HEAD"),
        "has_uncommitted_changes": bool(
            _git("status", "--porcelain", "--", "src", "benchmarks/*.py")
        ),
        "command": " ".join(["python", script, *sys.argv[1:]]),
        "hardware": {
            "machine": platform.machine(),
            "processor": _processor(),
            "num_cores": os.cpu_count(),
            "memory_gib": round(
                os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1
            ),
            **_gpu(),
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "figures": figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def _gpu() -> dict[str, str]:
    return {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}


def _git(*arguments: str) -> str:
    """Return the output of git, or nothing where there is no git or no repository."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(Path(__file__).parent.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [
        line.split(":")[1].strip() for line in lines if line.startswith(("model name", "CPU part"))
    ]
    return names[0] if names else platform.processor()


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
