"""The rules for words hold in code and on pages, and the check that holds them can fail."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def check_words() -> ModuleType:
    path = ROOT / "scripts" / "check_words.py"
    spec = importlib.util.spec_from_file_location("check_words", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_docstring_and_page_keeps_the_rules(check_words: ModuleType) -> None:
    assert list(check_words.find_problems(ROOT)) == []


@pytest.mark.parametrize(
    "docstring",
    [
        "Return the number of blocks.",
        "A thing that is neither red nor blue.\n\n    More follows here",
        'A page that has "news" in quotes, and `nobody` as code.',
    ],
)
def test_a_plain_sentence_is_accepted(check_words: ModuleType, docstring: str) -> None:
    source = f'def work():\n    """{docstring}"""\n'
    assert list(check_words.check_docstrings(source)) == []


@pytest.mark.parametrize(
    ("docstring", "advice"),
    [
        ("`name`: what it is called here.", "backtick"),
        ("Return the number of blocks", "period"),
        ("Return the number of blocks that\n    are free.", "period"),
        ("The blocks.", "at least 4 words"),
        ("Return the news of this step.", "'news'"),
        ("Return the outputs of this step.\n\n    Nobody reads them.", "'Nobody'"),
        ("Return the length of a sound.", "'sound'"),
        ("Return how much was heard of it.", "'heard'"),
        ("Release the blocks of a request, too.", "'too'"),
    ],
)
def test_other_first_lines_are_refused_with_advice(
    check_words: ModuleType, docstring: str, advice: str
) -> None:
    source = f'class Work:\n    """{docstring}"""\n'
    ((line, found),) = check_words.check_docstrings(source)
    assert line == 2
    assert advice in found


def test_comments_are_read(check_words: ModuleType) -> None:
    source = 'a = 1\nb = "# a sound"  # waits beside others\n# `sound` is the name of a field\n'
    ((line, advice),) = check_words.check_comments(source)
    assert line == 2
    assert "'beside'" in advice


def test_messages_are_read_and_names_are_not(check_words: ModuleType) -> None:
    source = 'def work(kind="sound"):\n    """Work."""\n    raise ValueError(f"the sound {kind}")\n'
    ((line, advice),) = check_words.check_messages(source)
    assert line == 3
    assert "'sound'" in advice


def test_pages_are_read_but_for_their_code(check_words: ModuleType) -> None:
    page = "A sound.\n\n| a sound |\n\n```sh\ncat sound\n```\n\nThe file `sound` and audio.\n"
    assert [line for line, _ in check_words.check_page(page, has_words=True)] == [1, 3]
    assert list(check_words.check_page(page)) == []


def test_a_wide_line_of_a_page_is_refused_outside_tables_and_code(check_words: ModuleType) -> None:
    wide = "word " * 21
    page = f"{wide}\n\n| {wide} |\n\n```sh\n{wide}\n```\n\n- {wide}\n"
    assert [line for line, _ in check_words.check_page(page)] == [1, 9]
