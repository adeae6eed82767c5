"""Every rule of docs/invariants.md names tests, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "invariants.md"
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def list_rules() -> list[str]:
    """Return the items of the page's lists, each as one text."""
    return re.findall(r"(?m)^- .*(?:\n  .*)*", PAGE.read_text())


@cache
def find_names(path: Path) -> frozenset[str]:
    """Return the names that a test file defines: functions, classes and assigned test cases."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(names)


def find_elsewhere(name: str) -> list[str]:
    """Return the test files that define the name, to say where a test has moved to."""
    paths = sorted((ROOT / "tests").rglob("*.py"))
    return [path.relative_to(ROOT).as_posix() for path in paths if name in find_names(path)]


@pytest.mark.parametrize("rule", list_rules(), ids=lambda rule: rule[2:40])
def test_every_rule_names_tests_that_exist(rule: str) -> None:
    named = _TEST.findall(rule)
    assert named, f"Name the test that holds this rule: {rule}"
    for path, name in named:
        file = ROOT / path
        exists = file.exists() and name in find_names(file)
        assert exists, f"{path} has no {name}; it is in {find_elsewhere(name) or 'no test file'}"


def test_the_page_has_rules() -> None:
    assert len(list_rules()) > 40
