"""Finds the installed Python interpreters of the supported versions.

Looks along PATH and in the usual folders of version managers. An interpreter counts only if it runs
and can make virtual environments: shims of version managers stand for versions that may be missing.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13")
_PROBE = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
_PROBE_TIMEOUT_S = 60.0
# Patterns of interpreters below the home folder; {v} stands for a version such as 3.12.
_HOME_PATTERNS = (
    ".local/share/uv/python/cpython-{v}.*/bin/python3",
    ".asdf/installs/python/{v}.*/bin/python",
    ".local/share/mise/installs/python/{v}*/bin/python",
    ".local/share/rtx/installs/python/{v}*/bin/python",
    ".rye/py/cpython@{v}.*/bin/python3",
    "miniconda3/envs/*/bin/python{v}",
    "miniforge3/envs/*/bin/python{v}",
    "anaconda3/envs/*/bin/python{v}",
)
_ROOT_PATTERNS = (
    "opt/python/*/bin/python{v}",
    "opt/homebrew/bin/python{v}",
    "usr/local/bin/python{v}",
)


def find_python(version: str, environment: Mapping[str, str] | None = None) -> Path | None:
    """Return an interpreter of that version that works, or None if there is none."""
    for path in iterate_candidates(version, os.environ if environment is None else environment):
        if is_usable(path, version):
            return path
    return None


def iterate_candidates(version: str, environment: Mapping[str, str]) -> Iterator[Path]:
    """Yield every place where an interpreter of that version may be, PATH first."""
    home = Path(environment.get("HOME", "~")).expanduser()
    for folder in environment.get("PATH", "").split(os.pathsep):
        if folder:
            yield Path(folder) / f"python{version}"
    pyenv = Path(environment.get("PYENV_ROOT") or home / ".pyenv")
    yield from _find_newest(pyenv, "versions/{v}.*/bin/python", version)
    if "UV_PYTHON_INSTALL_DIR" in environment:
        uv = Path(environment["UV_PYTHON_INSTALL_DIR"])
        yield from _find_newest(uv, "cpython-{v}.*/bin/python3", version)
    for root, patterns in ((home, _HOME_PATTERNS), (Path("/"), _ROOT_PATTERNS)):
        for pattern in patterns:
            yield from _find_newest(root, pattern, version)


def _find_newest(root: Path, pattern: str, version: str) -> list[Path]:
    return sorted(root.glob(pattern.format(v=version)), reverse=True)


def is_usable(path: Path, version: str) -> bool:
    """Return whether this is an interpreter of that version that can make environments."""
    if not os.access(path, os.X_OK):
        return False
    try:
        completed = subprocess.run(
            [str(path), "-I", "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return completed.returncode == 0 and completed.stdout.strip() == version
