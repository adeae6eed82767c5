"""The dependencies have ranges that end, and a tested version for each that lies in its range."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from installing.pythons import VERSIONS
from make_constraints import make_lines

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEPENDENCIES = [Requirement(text) for text in PROJECT["dependencies"]]
DEVELOPMENT = [Requirement(text) for text in PROJECT["optional-dependencies"]["dev"]]
LINES = [
    line
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
# Modules that are not called as the package that brings them.
PACKAGES = {"PIL": "pillow", "zmq": "pyzmq"}
# The extras `cuda`, `scale` and `remote`, and what comes with CUDA builds of torch.
OPTIONAL = {"flashinfer", "ray", "redis", "triton"}


def get_tested_versions(python: str) -> dict[str, str]:
    """Return the version of each package in constraints.txt for that Python."""
    environment = {**default_environment(), "python_version": python}
    found: dict[str, str] = {}
    for constraint in map(Requirement, LINES):
        if constraint.marker is None or constraint.marker.evaluate(environment):
            assert canonicalize_name(constraint.name) not in found, constraint
            found[canonicalize_name(constraint.name)] = next(iter(constraint.specifier)).version
    return found


@pytest.mark.parametrize("dependency", DEPENDENCIES + DEVELOPMENT, ids=str)
def test_every_dependency_is_bounded_from_above(dependency: Requirement) -> None:
    assert not dependency.specifier.contains("9999"), dependency


@pytest.mark.parametrize("python", VERSIONS)
def test_the_tested_version_of_every_dependency_lies_in_its_range(python: str) -> None:
    tested = get_tested_versions(python)
    for dependency in DEPENDENCIES + DEVELOPMENT:
        version = tested[canonicalize_name(dependency.name)]
        assert dependency.specifier.contains(version), (dependency, version)


def test_constraints_hold_on_every_machine() -> None:
    """No host, no path and no local build such as `+cpu` is in them."""
    pattern = re.compile(r'[a-z0-9-]+==[0-9][\w.]*(; python_version == "3\.\d+"( or .*)?)?')
    for line in LINES:
        assert pattern.fullmatch(line), line


def test_every_package_that_the_source_imports_is_a_dependency() -> None:
    declared = {canonicalize_name(dependency.name) for dependency in DEPENDENCIES}
    for path in (ROOT / "src").rglob("*.py"):
        for module in _iterate_modules(path) - OPTIONAL:
            package = canonicalize_name(PACKAGES.get(module, module))
            assert package in declared, f"{path} imports {module}"


def _iterate_modules(path: Path) -> set[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append(node.module or "")
    modules = {name.partition(".")[0] for name in names}
    return modules - set(sys.stdlib_module_names) - {"sensorium"}


def test_a_version_that_depends_on_the_python_gets_a_line_for_each() -> None:
    lines = make_lines(
        {
            "3.11": {"Numpy": "2.3.5", "torch": "2.13.0+cpu", "sensorium": "0.1.0"},
            "3.12": {"numpy": "2.3.5", "torch": "2.13.0", "nvidia-nccl-cu13": "2.29.7"},
            "3.13": {"numpy": "2.5.4", "torch": "2.13.0", "triton": "3.7", "typing_x": "1.0"},
        }
    )
    assert lines == [
        'numpy==2.3.5; python_version == "3.11" or python_version == "3.12"\n',
        'numpy==2.5.4; python_version == "3.13"\n',
        "torch==2.13.0\n",
        "typing-x==1.0\n",
    ]
