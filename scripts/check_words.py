"""Checks the words of docstrings and the width of Markdown pages.

A docstring begins with a whole sentence on its first line: at least four words, a period at its
end, no backtick at its beginning. It uses none of the words that only this project would
understand. A line of a Markdown page has at most 100 columns, outside tables and code blocks.
Each problem is printed as `file:line: what to do`.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHON_FOLDERS = ("src", "scripts", "benchmarks", "training", "tests")
# Places with docstrings that still have to be rewritten. The list may only become shorter.
NOT_YET: tuple[str, ...] = ()
MAX_COLUMNS = 100
MIN_WORDS = 4
# Each of these is a word of daily speech that hides what is meant. The value says what to do.
PRIVATE_WORDS = {
    "news": "name what arrived: outputs, deltas, messages",
    "told": "write who passes what to whom",
    "hears": "write what it receives",
    "nobody": "write what does not happen",
    "whoever": "name who it is",
    "of now": "write `now`, or the time",
    "as far as": "write the condition",
    "of which": "begin a new sentence",
}
_PRIVATE = re.compile(rf"\b({'|'.join(PRIVATE_WORDS)})\b(?! apart)", re.IGNORECASE)
_CODE = re.compile(r"`[^`]*`|\"[^\"]*\"")

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def find_problems(root: Path, not_yet: tuple[str, ...] = NOT_YET) -> Iterator[str]:
    for folder in PYTHON_FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if not any(name == each or name.startswith(f"{each}/") for each in not_yet):
                for line, advice in check_docstrings(path.read_text()):
                    yield f"{name}:{line}: {advice}"
    for path in find_pages(root):
        for line, advice in check_page(path.read_text()):
            yield f"{path.relative_to(root).as_posix()}:{line}: {advice}"


def find_pages(root: Path) -> list[Path]:
    """Return the Markdown pages of the repository, without those of installed packages."""
    folders = ("docs", "src", "scripts", "benchmarks", "training", "tests")
    inner = [path for folder in folders for path in (root / folder).rglob("*.md")]
    return sorted([*root.glob("*.md"), *inner])


def check_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the advice for each docstring that breaks a rule."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Documented):
            text = ast.get_docstring(node, clean=True)
            if text is not None:
                line = node.body[0].lineno
                for advice in _check_first_line(text.split("\n", 1)[0]):
                    yield line, advice
                for word in _PRIVATE.findall(_CODE.sub("", text)):
                    yield line, f"the docstring has {word!r}: {PRIVATE_WORDS[word.lower()]}"


def _check_first_line(first: str) -> Iterator[str]:
    if first.startswith("`"):
        yield "begin the docstring with a word, not with a backtick"
    if not first.endswith("."):
        yield "end the docstring's first line, which is one whole sentence, with a period"
    if len(first.split()) < MIN_WORDS:
        yield f"write a sentence of at least {MIN_WORDS} words, or leave the docstring out"


def check_page(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the advice for each line of a page that is too wide."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        is_free = is_code or line.lstrip().startswith("|")
        # A line without a space, a long address for example, can't be broken.
        if len(line) > MAX_COLUMNS and not is_free and " " in line.strip():
            yield number, f"break this line: {len(line)} columns, at most {MAX_COLUMNS}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="also the folders that are not yet done")
    arguments = parser.parse_args()
    problems = list(find_problems(ROOT, () if arguments.all else NOT_YET))
    print("\n".join(problems) or "words: ok")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
