"""Checks the words of docstrings, comments, messages and pages, and the width of pages.

A docstring begins with a whole sentence on its first line: at least four words, a period at its
end, no backtick at its beginning. Docstrings, comments, messages of `src` and Markdown pages have
none of the words that only this project would understand (docs/glossary.md has its words). A line
of a Markdown page has at most 100 columns, outside tables and code blocks. Each problem is printed
as `file:line: what to do`.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHON_FOLDERS = ("src", "scripts", "benchmarks", "training", "tests")
# Decisions and changes of earlier versions keep the words that they were written in.
HISTORY = ("docs/adr/", "CHANGELOG.md")
# Texts that models are asked with.
PROMPTS = ("src/sensorium/speech/instructions.py", "src/sensorium/embedded/samples.py")
MAX_COLUMNS = 100
MIN_WORDS = 4
# Words of daily speech for which the field has its own, or that hide what is meant. The value says
# what to do. Pages have none of these.
PAGE_WORDS = {
    r"sounds?": "write `audio`, or what it is: a recording, a file, a clip",
    r"(?:write|writes|wrote|written|writing) down": "write `transcribe`",
    r"hears?|heard|hearing": "write who receives, recognises or transcribes what",
    r"goes on|go on|going on|went on": "write `continues`, or `streaming` of audio",
    r"apart": "write `remote` of encoders, else `separate` or `distinguish`",
    r"recognisers?": "write `CTC/transducer model`",
    r"the begin": "write `the beginning` or `the start`",
    r"left alone|leave alone|leaves alone": "write `unchanged`, or what is not done",
    r"whoever": "name who it is",
}
# Texts of `src` that users read have none of these.
MESSAGE_WORDS = PAGE_WORDS | {
    r"beside": "write `outside the prompt`, `next to` or `in addition to`",
    r"nobody": "write what does not happen",
    r"told": "write who passes what to whom",
}
PRIVATE_WORDS = MESSAGE_WORDS | {
    r"news": "name what arrived: outputs, deltas, messages",
    r"of now": "write `now`, or the time",
    r"as far as": "write the condition",
    r"of which": "begin a new sentence",
    r"whose": "begin a new sentence",
    r"knows": "write what it has or reads",
    r"perceiv(?:e|es|ed|ing)(?! once)": "write what is done: fetch, decode, process, encode",
    r"too(?=[.,;:)]|$)": "write `also` before the verb, or leave it out",
}
_CODE = re.compile(r"`[^`]*`|\"[^\"]*\"|\]\([^)]*\)|https?://\S+")

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def find_problems(root: Path, below: str = "") -> Iterator[str]:
    for folder in PYTHON_FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if name.startswith(below):
                source = path.read_text()
                checks = [check_docstrings(source), check_comments(source)]
                if folder == "src" and name not in PROMPTS:
                    checks.append(check_messages(source))
                for line, advice in (problem for check in checks for problem in check):
                    yield f"{name}:{line}: {advice}"
    for path in find_pages(root):
        name = path.relative_to(root).as_posix()
        if name.startswith(below):
            for line, advice in check_page(path.read_text(), has_words=not _is_history(name)):
                yield f"{name}:{line}: {advice}"


def find_pages(root: Path) -> list[Path]:
    """Return the Markdown pages of the repository, without those of installed packages."""
    folders = ("docs", "src", "scripts", "benchmarks", "training", "tests")
    inner = [path for folder in folders for path in (root / folder).rglob("*.md")]
    return sorted([*root.glob("*.md"), *inner])


def _is_history(name: str) -> bool:
    return name.startswith(HISTORY)


def check_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the advice for each docstring that breaks a rule."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Documented):
            text = ast.get_docstring(node, clean=True)
            if text is not None:
                line = node.body[0].lineno
                for advice in _check_first_line(text.split("\n", 1)[0]):
                    yield line, advice
                for advice in _check_words(text, PRIVATE_WORDS):
                    yield line, f"the docstring has {advice}"


def _check_first_line(first: str) -> Iterator[str]:
    if first.startswith("`"):
        yield "begin the docstring with a word, not with a backtick"
    if not first.endswith("."):
        yield "end the docstring's first line, which is one whole sentence, with a period"
    if len(first.split()) < MIN_WORDS:
        yield f"write a sentence of at least {MIN_WORDS} words, or leave the docstring out"


def check_comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            for advice in _check_words(token.string, PRIVATE_WORDS):
                yield token.start[0], f"the comment has {advice}"


def check_messages(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the advice for each text of several words that a user may read."""
    tree = ast.parse(source)
    documented = (node for node in ast.walk(tree) if isinstance(node, Documented) and node.body)
    docstrings = {id(getattr(node.body[0], "value", None)) for node in documented}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in docstrings:
            continue
        if isinstance(node.value, str) and " " in node.value.strip():
            for advice in _check_words(node.value, MESSAGE_WORDS):
                yield node.lineno, f"the message has {advice}"


def check_page(text: str, *, has_words: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the line and the advice for each line of a page that is too wide, or has odd words."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        is_free = is_code or line.lstrip().startswith("|")
        # A line without a space, a long address for example, can't be broken.
        if len(line) > MAX_COLUMNS and not is_free and " " in line.strip():
            yield number, f"break this line: {len(line)} columns, at most {MAX_COLUMNS}"
        if has_words and not is_code:
            for advice in _check_words(line, PAGE_WORDS):
                yield number, f"the page has {advice}"


def _check_words(text: str, words: Mapping[str, str]) -> Iterator[str]:
    plain = _CODE.sub("", text)
    for pattern, advice in words.items():
        for found in re.findall(rf"\b(?:{pattern})\b", plain, re.IGNORECASE | re.MULTILINE):
            yield f"{found!r}: {advice}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("below", nargs="?", default="", help="check only paths that begin so")
    problems = list(find_problems(ROOT, parser.parse_args().below))
    print("\n".join(problems) or "words: ok")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
