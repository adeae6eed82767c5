"""Writes a benchmark's figures with all that is needed to measure them again."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent / "records"
_PACKAGES = ("torch", "transformers", "numpy", "tokenizers")


def write_record(name: str, figures: dict[str, Any]) -> Path:
    """Put `figures` into `records/NAME.json`, replacing the last record of that name."""
    path = RECORDS / f"{name}.json"
    script = f"benchmarks/{Path(sys.argv[0]).name}"
    record = {
        "benchmark": name,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _git("rev-parse", "HEAD"),
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
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "figures": figures,
    }
    RECORDS.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
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
