"""Holds source files, functions and pages to their size limits.

Exceptions stand here and may only become fewer.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_FAMILY_LINES = 150  # of a class in a module `families.py`
MAX_DOCUMENT_LINES = {"README.md": 160, "ARCHITECTURE.md": 200}
EXCEPTIONS: frozenset[str] = frozenset()


def find_problems(root: Path) -> Iterator[str]:
    for name, limit in MAX_DOCUMENT_LINES.items():
        yield from _check_lines(root / name, root, limit)
    for path in sorted([*root.glob("src/**/*.py"), *root.glob("benchmarks/*.py")]):
        yield from _check_lines(path, root, MAX_FILE_LINES)
        yield from _check_definitions(path, root)


def _check_lines(path: Path, root: Path, limit: int) -> Iterator[str]:
    name = path.relative_to(root).as_posix()
    num_lines = len(path.read_text().splitlines())
    if num_lines > limit and name not in EXCEPTIONS:
        yield f"{name}: {num_lines} lines, {limit} at most"


def _check_definitions(path: Path, root: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            limit = MAX_FUNCTION_LINES
        elif isinstance(node, ast.ClassDef) and path.name == "families.py":
            limit = MAX_FAMILY_LINES
        else:
            continue
        name = f"{path.relative_to(root).as_posix()}:{node.name}"
        num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if num_lines > limit and name not in EXCEPTIONS:
            yield f"{name}: {num_lines} lines, {limit} at most"


def main() -> None:
    problems = list(find_problems(ROOT))
    print("\n".join(problems) or "sizes: ok")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
