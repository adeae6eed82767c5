"""Tests that the wheel, installed as a user installs it, works with every supported Python.

    python scripts/test_install.py [--python 3.12] [--folder DIR]
    python scripts/test_install.py --resolve [--machine aarch64] [--tested]

For each Python that is found: a clean environment, the wheel with the newest versions that it
allows, the server with the embedded model, and a question about a picture, a recording and a video.
With `--resolve` nothing is installed: pip only has to find wheels for another architecture.

This needs the package registry, several GB of disk, and minutes: `make test` does not run it.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from installing.environments import (
    ROOT,
    build_wheel,
    find_media,
    get_free_gb,
    install,
    make_environment,
    measure_size,
    read_versions,
    resolve_for,
)
from installing.pythons import VERSIONS, find_python
from installing.server_check import InstallError, check_server

_MACHINES = ("x86_64", "aarch64")
_NEEDED_GB = 12.0  # wheels for all versions, and the largest environment
_SHOWN = ("torch", "transformers", "av", "pillow", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one version of Python."""

    version: str
    state: str  # "passed", "FAILED" or "not tested"
    detail: str


Trial = Callable[[str, Path, Path, Path], str]  # version, interpreter, wheel, folder -> detail


def main() -> None:
    arguments = _parse()
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="sensorium-install-") as name:
        folder = Path(name)
        if not arguments.resolve and get_free_gb(folder) < _NEEDED_GB:
            sys.exit(f"{folder} has less than {_NEEDED_GB:g} GB of room: use --folder.")
        _say("building the wheel")
        wheel = build_wheel(folder)
        trial: Trial = try_installation
        if arguments.resolve:
            trial = make_resolver(arguments.machine, is_tested_set=arguments.tested)
        outcomes = [try_version(version, trial, wheel, folder) for version in arguments.python]
    title = f"resolving for {arguments.machine}" if arguments.resolve else "installations"
    print(f"\n{title}, on {platform.machine()}")
    for outcome in outcomes:
        print(f"  Python {outcome.version:5} {outcome.state:11} {outcome.detail}")
    states = [outcome.state for outcome in outcomes]
    if "FAILED" in states or "passed" not in states:
        sys.exit(1)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Test that the wheel can be installed and works.")
    parser.add_argument(
        "--python",
        action="append",
        choices=VERSIONS,
        help="a version to test; may be repeated (default: all that are found)",
    )
    parser.add_argument("--folder", type=Path, help="where temporary files go")
    parser.add_argument(
        "--resolve",
        action="store_true",
        help="install nothing; find wheels for another architecture only",
    )
    other = "x86_64" if platform.machine() == "aarch64" else "aarch64"
    parser.add_argument(
        "--machine",
        choices=_MACHINES,
        default=other,
        help=f"the architecture for --resolve (default: {other})",
    )
    parser.add_argument(
        "--tested",
        action="store_true",
        help="with --resolve: the versions of constraints.txt instead of the newest ones",
    )
    arguments = parser.parse_args()
    arguments.python = arguments.python or list(VERSIONS)
    return arguments


def try_version(version: str, trial: Trial, wheel: Path, folder: Path) -> Outcome:
    """Return what became of one version. One that is not installed is not tested."""
    python = find_python(version)
    if python is None:
        _say(f"Python {version}: not found")
        reason = "no interpreter on PATH or in the folders of version managers"
        return Outcome(version=version, state="not tested", detail=reason)
    _say(f"Python {version}: {python}")
    started = time.monotonic()
    try:
        detail = trial(version, python, wheel, folder)
    except InstallError as error:
        _say(f"Python {version}: FAILED: {error}")
        return Outcome(version=version, state="FAILED", detail=str(error).splitlines()[0])
    minutes = (time.monotonic() - started) / 60
    return Outcome(version=version, state="passed", detail=f"{detail}; {minutes:.1f} min")


def try_installation(version: str, python: Path, wheel: Path, folder: Path) -> str:
    """Install the wheel, ask its server, and return what was installed."""
    place = folder / f"python{version}"
    wheels = folder / "wheels"
    try:
        own_python = make_environment(python, place / "environment")
        _say(f"Python {version}: installing the newest versions allowed")
        install(own_python, wheel, wheels)
        versions = read_versions(own_python)
        size_gb = measure_size(place / "environment")
        _say(f"Python {version}: {size_gb:.1f} GB; starting the server")
        command = [str(own_python.parent / "sensorium"), "serve", "--port", "0"]
        answers = check_server(command, find_media(own_python), place)
        for kind, answer in answers.items():
            _say(f"Python {version}: {kind}: {answer}")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    shown = ", ".join(f"{name} {versions[name]}" for name in _SHOWN)
    return f"{shown}; {size_gb:.1f} GB"


def make_resolver(machine: str, *, is_tested_set: bool) -> Trial:
    """Return a trial that only finds wheels for that architecture."""

    def try_to_resolve(version: str, python: Path, wheel: Path, folder: Path) -> str:
        own_python = make_environment(python, folder / f"python{version}")
        constraints = ROOT / "constraints.txt" if is_tested_set else None
        found = resolve_for(machine, own_python, str(wheel), folder, constraints)
        found = {name.lower(): number for name, number in found.items()}
        shown = ", ".join(f"{name} {found[name]}" for name in _SHOWN)
        return f"wheels for all {len(found)} packages: {shown}"

    return try_to_resolve


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
