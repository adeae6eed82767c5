"""The size limits hold, and the check that says so can fail."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent
# Exceptions that are known today. Take one away when its file has shrunk; never add one.
KNOWN_EXCEPTIONS: frozenset[str] = frozenset()


@pytest.fixture(scope="module")
def check_sizes() -> ModuleType:
    path = ROOT / "scripts" / "check_sizes.py"
    spec = importlib.util.spec_from_file_location("check_sizes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository in which everything is just small enough."""
    (tmp_path / "README.md").write_text("line\n" * 120)
    (tmp_path / "ARCHITECTURE.md").write_text("line\n" * 200)
    write(tmp_path / "src/package/module.py", num_lines=600, longest_function=60)
    write_family(tmp_path / "src/package/families.py", num_lines=150)
    write(tmp_path / "benchmarks/bench.py", num_lines=600)
    return tmp_path


def write(path: Path, *, num_lines: int, longest_function: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    function = ["def work():", *["    pass"] * (longest_function - 1)]
    path.write_text("\n".join([*function, *["x = 1"] * (num_lines - longest_function)]))


def write_family(path: Path, *, num_lines: int) -> None:
    """Write a module of a family with two classes, where the second has `num_lines`."""
    classes = ["class First:", "    x = 1", "class Second:", *["    x = 1"] * (num_lines - 1)]
    path.write_text("\n".join(classes))


def test_every_file_and_function_is_within_its_limit(check_sizes: ModuleType) -> None:
    assert list(check_sizes.find_problems(ROOT)) == []


def test_exceptions_only_shrink(check_sizes: ModuleType) -> None:
    assert check_sizes.EXCEPTIONS <= KNOWN_EXCEPTIONS


def test_what_is_just_small_enough_is_no_problem(check_sizes: ModuleType, tree: Path) -> None:
    assert list(check_sizes.find_problems(tree)) == []


@pytest.mark.parametrize(
    ("name", "num_lines", "longest_function", "problem"),
    [
        ("src/package/module.py", 601, 2, "src/package/module.py: 601 lines, 600 at most"),
        ("src/package/module.py", 90, 61, "src/package/module.py:work: 61 lines, 60 at most"),
        ("benchmarks/bench.py", 90, 61, "benchmarks/bench.py:work: 61 lines, 60 at most"),
        ("README.md", 161, 2, "README.md: 161 lines, 160 at most"),
    ],
)
def test_one_line_more_is_a_problem(
    check_sizes: ModuleType,
    tree: Path,
    name: str,
    num_lines: int,
    longest_function: int,
    problem: str,
) -> None:
    write(tree / name, num_lines=num_lines, longest_function=longest_function)
    (found,) = check_sizes.find_problems(tree)
    assert found.endswith(problem)


def test_one_line_more_of_a_family_is_a_problem(check_sizes: ModuleType, tree: Path) -> None:
    write_family(tree / "src/package/families.py", num_lines=151)
    (found,) = check_sizes.find_problems(tree)
    assert found == "src/package/families.py:Second: 151 lines, 150 at most"
