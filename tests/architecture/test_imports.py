"""Imports go down only, and the part that decides never loads the part that computes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src" / "sensorium"
HEAVY = ("torch", "numpy", "transformers", "PIL")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )


def test_the_layers_of_the_package_hold() -> None:
    result = run(str(Path(sys.executable).parent / "lint-imports"), "--no-cache")
    assert result.returncode == 0, result.stdout + result.stderr
    assert " kept, 0 broken." in result.stdout


@pytest.mark.parametrize("module", ["core.scheduler", "types.request", "types.outputs", "cli"])
def test_a_fresh_interpreter_loads_it_without_torch(module: str) -> None:
    """The contracts read source text; this sees what is really loaded, through any detour."""
    script = f"import sys, sensorium.{module}; print(*sorted(set(sys.modules) & {set(HEAVY)}))"
    result = run(sys.executable, "-c", script)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr


@pytest.mark.parametrize(
    "module",
    [
        "server.processes.supervisor",
        "cli.serve",
        "server.processes.core_main",
        "server.processes.frontend_main",
    ],
)
def test_processes_open_their_channels_before_anything_heavy_is_loaded(module: str) -> None:
    """The parent for as long as it lives; its children until they are notified of its end."""
    heavy = {*HEAVY, "starlette", "uvicorn"}
    script = f"import sys, sensorium.{module}; print(*sorted(set(sys.modules) & {heavy}))"
    result = run(sys.executable, "-c", script)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if path.read_text() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_the_package_offers_what_it_names() -> None:
    import sensorium

    missing = [name for name in sensorium.__all__ if not hasattr(sensorium, name)]
    assert missing == []
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        sensorium.nonsense  # noqa: B018
