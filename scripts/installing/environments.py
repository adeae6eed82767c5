"""Builds the wheel, makes clean environments and runs pip in them.

Downloads and built wheels are shared: each environment is installed from one folder of wheels, to
which pip adds only what is not there yet.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from installing.server_check import InstallError

ROOT = Path(__file__).resolve().parents[2]
_PIP_TIMEOUT_S = 3600.0
_MAX_CHARACTERS = 3000  # of pip's output in an error
# glibc versions of the wheels that a machine with glibc 2.36 (Debian 12) takes.
_GLIBC_MINORS = range(17, 37)


def make_environment(python: Path, folder: Path) -> Path:
    """Make a clean virtual environment and return its interpreter."""
    _run([str(python), "-m", "venv", str(folder)])
    return folder / "bin" / "python"


def build_wheel(folder: Path) -> Path:
    """Build this checkout's wheel into the folder and return its path."""
    python = make_environment(Path(sys.executable), folder / "builder")
    _run([str(python), *_PIP, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)])
    return next(folder.glob("sensorium-*.whl"))


def install(python: Path, wheel: Path, wheels: Path) -> None:
    """Install the newest versions that the wheel allows, by way of the shared folder of wheels."""
    shared = ["--find-links", str(wheels)]
    _run([str(python), *_PIP, "wheel", *shared, "--wheel-dir", str(wheels), str(wheel)])
    _run([str(python), *_PIP, "install", "--no-index", *shared, str(wheel)])


def resolve(python: Path, requirement: str, folder: Path) -> dict[str, str]:
    """Return the version of each package that pip would install on this machine."""
    return _read_report(python, requirement, folder, [])


def resolve_for(
    machine: str, python: Path, requirement: str, folder: Path, constraints: Path | None = None
) -> dict[str, str]:
    """Return the version of each package that pip would install on a machine of that architecture.

    Only wheels count. pip reads conditions on the architecture as if for this machine.
    """
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in _GLIBC_MINORS]
    platforms += [f"manylinux2014_{machine}", f"linux_{machine}"]
    options = [word for name in platforms for word in ("--platform", name)]
    if constraints is not None:
        options += ["--constraint", str(constraints)]
    sources = _build_pure_sources(python, folder)
    target = ["--target", str(folder / "target"), "--find-links", str(sources)]
    return _read_report(python, requirement, folder, ["--only-binary", ":all:", *options, *target])


def measure_size(folder: Path) -> float:
    """Return the size of a folder in GB, as the disk has it."""
    files = {
        (status.st_dev, status.st_ino): status.st_blocks * 512
        for path in folder.rglob("*")
        if not path.is_symlink() and (status := path.stat())
    }
    return sum(files.values()) / 1e9


def read_versions(python: Path) -> dict[str, str]:
    """Return the version of each package that is installed in an environment."""
    code = (
        "import importlib.metadata as m, json; "
        "print(json.dumps({d.name.lower(): d.version for d in m.distributions()}))"
    )
    versions: dict[str, str] = json.loads(_run([str(python), "-I", "-c", code]))
    return versions


def find_media(python: Path) -> Path:
    """Return the folder of the samples that come with the installed package."""
    code = "from sensorium.embedded.samples import MEDIA_FOLDER; print(MEDIA_FOLDER)"
    return Path(_run([str(python), "-I", "-c", code]).strip())


def get_free_gb(folder: Path) -> float:
    """Return how much room there is where the folder lies."""
    return shutil.disk_usage(folder).free / 1e9


# docopt, which num2words needs, is published as source only. It is pure Python.
_PURE_SOURCES = ("docopt",)
_PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def _build_pure_sources(python: Path, folder: Path) -> Path:
    wheels = folder / "pure"
    if not wheels.exists():
        _run([str(python), *_PIP, "wheel", "--no-deps", "--wheel-dir", str(wheels), *_PURE_SOURCES])
    return wheels


def _read_report(
    python: Path, requirement: str, folder: Path, options: Sequence[str]
) -> dict[str, str]:
    report = folder / "report.json"
    dry = ["install", "--dry-run", "--ignore-installed", "--report", str(report)]
    _run([str(python), *_PIP, *dry, *options, requirement])
    found: list[Mapping[str, Any]] = json.loads(report.read_text())["install"]
    return {entry["metadata"]["name"]: entry["metadata"]["version"] for entry in found}


def _run(command: list[str]) -> str:
    """Return the output of a command. Raise `InstallError` if it fails."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    try:
        completed = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_PIP_TIMEOUT_S,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"{' '.join(command[:4])} could not be run: {error}") from error
    if completed.returncode != 0:
        errors = completed.stderr[-_MAX_CHARACTERS:]
        raise InstallError(f"{' '.join(command[:6])} ... failed:\n{errors}")
    return completed.stdout
