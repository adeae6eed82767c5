"""A folder can be read at a glance, and a small module has a reason to stand alone."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src"
MAX_MODULES_PER_FOLDER = 14
MIN_CODE_LINES = 40
# Each line: a module, and why it is not joined to the only module that imports it.
REASONS = Path(__file__).parent / "small_modules.txt"


def list_modules() -> dict[str, Path]:
    """Return module name -> path, for all of the package."""
    modules = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = path
    return modules


def find_importers(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Return imported module -> modules that import it, with imports inside functions."""
    importers: dict[str, set[str]] = defaultdict(set)
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            for target in list_targets(node):
                found = target if target in modules else target.rpartition(".")[0]
                if found in modules:
                    importers[found].add(name)
    return importers


def list_targets(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return []


def count_code_lines(text: str) -> int:
    """Count lines that are not blank, nor only a comment or a part of a docstring."""
    documented: set[int] = set()
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            documented |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    silent = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def test_no_folder_has_too_many_modules() -> None:
    counts: dict[str, int] = defaultdict(int)
    for path in SOURCE.rglob("*.py"):
        counts[path.parent.relative_to(SOURCE).as_posix()] += path.name != "__init__.py"
    assert {name: count for name, count in counts.items() if count > MAX_MODULES_PER_FOLDER} == {}


def test_a_small_module_with_one_importer_has_a_stated_reason() -> None:
    modules = list_modules()
    importers = find_importers(modules)
    small = {
        name
        for name, path in modules.items()
        if path.name != "__init__.py"
        and len(importers[name]) == 1
        and count_code_lines(path.read_text()) < MIN_CODE_LINES
    }
    lines = [line for line in REASONS.read_text().splitlines() if line and line[0] != "#"]
    reasons = dict(line.split(": ", 1) for line in lines)
    assert small == set(reasons)  # a reason that is no longer needed is removed
    assert [name for name, reason in reasons.items() if len(reason.split()) < 5] == []


def test_code_lines_are_counted_without_comments_and_blank_lines() -> None:
    text = (
        '"""A\nB."""\n\n# why\nx = (\n    1,  # one\n)\n\n\ndef f():\n    """C."""\n    return 2\n'
    )
    assert count_code_lines(text) == 5
