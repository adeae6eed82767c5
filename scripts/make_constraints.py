"""Writes constraints.txt: the newest versions that pyproject.toml allows, for each Python.

    python scripts/make_constraints.py [--folder DIR]

pip resolves the package with its development tools in a clean environment of each supported Python;
nothing is installed. Run the tests afterwards: what is in the file is what is tested. Packages that
only a CUDA build of torch brings along are left out, because torch itself decides their versions.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from installing.environments import ROOT, build_wheel, make_environment, resolve
from installing.pythons import VERSIONS, find_python

_HEADER = """\
# The versions that are tested, for each supported Python. `make setup` uses them.
# `make constraints` renews them; pyproject.toml has the ranges.
"""
_OF_CUDA = re.compile(r"(nvidia|cuda)-|triton$")
_OWN_NAME = "sensorium"


def main() -> None:
    parser = argparse.ArgumentParser(description="Renew constraints.txt.")
    parser.add_argument("--folder", type=Path, help="where temporary files go")
    arguments = parser.parse_args()
    pythons = {version: find_python(version) for version in VERSIONS}
    missing = [version for version, python in pythons.items() if python is None]
    if missing:
        sys.exit(f"Python {', '.join(missing)} is needed to renew the constraints.")
    versions: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="sensorium-resolve-") as name:
        folder = Path(name)
        wheel = build_wheel(folder)
        for version, python in pythons.items():
            if python is not None:
                print(f"resolving for Python {version}", flush=True)
                own_python = make_environment(python, folder / version)
                versions[version] = resolve(own_python, f"{wheel}[dev]", folder)
    (ROOT / "constraints.txt").write_text(_HEADER + "".join(make_lines(versions)))


def make_lines(versions: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a line for each package, or several if its version depends on the Python.

    `versions` maps a Python version to the packages' versions there. Local parts such as `+cpu` are
    dropped: which build of a version is taken depends on the machine.
    """
    pythons: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for python, packages in versions.items():
        for name, version in packages.items():
            normal = re.sub(r"[-_.]+", "-", name).lower()
            if normal != _OWN_NAME and not _OF_CUDA.match(normal):
                pythons[normal][version.partition("+")[0]].append(python)
    return [
        f"{name}=={version}{_make_marker(found) if len(by_version) > 1 else ''}\n"
        for name, by_version in sorted(pythons.items())
        for version, found in sorted(by_version.items())
    ]


def _make_marker(pythons: list[str]) -> str:
    return "; " + " or ".join(f'python_version == "{python}"' for python in pythons)


if __name__ == "__main__":
    main()
