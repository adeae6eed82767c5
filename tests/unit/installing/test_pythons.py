"""Interpreters are found along PATH and in the folders of version managers, if they work."""

from __future__ import annotations

import sys
from pathlib import Path

from installing.pythons import find_python, is_usable

VERSION = "{}.{}".format(*sys.version_info)
OTHER = "3.11" if VERSION != "3.11" else "3.12"


def make_python(path: Path, version: str | None) -> Path:
    """Write a program that answers as an interpreter of that version, or that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    action = "exit 127" if version is None else f"echo {version}"
    path.write_text(f"#!/bin/sh\n{action}\n")
    path.chmod(0o755)
    return path


def test_a_real_interpreter_is_usable_as_its_own_version_only() -> None:
    assert is_usable(Path(sys.executable), VERSION)
    assert not is_usable(Path(sys.executable), OTHER)


def test_a_shim_without_a_version_behind_it_is_passed_over(tmp_path: Path) -> None:
    make_python(tmp_path / "shims" / "python3.12", None)
    installed = make_python(tmp_path / "pyenv" / "versions" / "3.12.1" / "bin" / "python", "3.12")
    environment = {
        "PATH": str(tmp_path / "shims"),
        "PYENV_ROOT": str(tmp_path / "pyenv"),
        "HOME": str(tmp_path / "home"),
    }
    assert find_python("3.12", environment) == installed


def test_the_folders_of_version_managers_are_searched(tmp_path: Path) -> None:
    places = {
        "3.11": ".local/share/uv/python/cpython-3.11.9-linux-x86_64-gnu/bin/python3",
        "3.12": ".asdf/installs/python/3.12.4/bin/python",
        "3.13": ".local/share/mise/installs/python/3.13.1/bin/python",
    }
    for version, place in places.items():
        made = make_python(tmp_path / place, version)
        assert find_python(version, {"PATH": "", "HOME": str(tmp_path)}) == made


def test_a_version_that_is_nowhere_is_not_found(tmp_path: Path) -> None:
    assert find_python("3.99", {"PATH": str(tmp_path), "HOME": str(tmp_path)}) is None
