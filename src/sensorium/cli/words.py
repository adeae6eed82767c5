"""Words of a command line that are no flags: a model, which may be left out, and questions."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from sensorium.embedded import EMBEDDED_MODEL

_HUB_NAME = re.compile(r"[\w.-]*", re.ASCII)


def add_words(command: argparse.ArgumentParser, name: str, help_text: str) -> None:
    """MODEL and others, all optional to argparse."""
    command.add_argument("words", nargs="*", metavar=f"MODEL {name}", help=help_text)
    command.set_defaults(refuse=command.error)


def take_late_words(arguments: argparse.Namespace, rest: list[str]) -> None:
    """Words may come behind flags, where argparse no longer expects them (before 3.12)."""
    while hasattr(arguments, "words") and rest and not rest[0].startswith("-"):
        arguments.words.append(rest.pop(0))


def split_question(words: list[str]) -> tuple[str, str | None, list[str]]:
    """Model, question, and what is too much. A single word is a model, unless it can't be one."""
    if len(words) == 1 and _is_question(words[0]):
        return EMBEDDED_MODEL, words[0], []
    model = words[0] if words else EMBEDDED_MODEL
    return model, words[1] if len(words) > 1 else None, words[2:]


def split_prompts(words: list[str]) -> tuple[str, list[str]]:
    """Model and prompts. A single word is a prompt, unless it is a model."""
    if len(words) == 1 and words[0] != EMBEDDED_MODEL and not Path(words[0]).is_dir():
        return EMBEDDED_MODEL, words
    return (words[0] if words else EMBEDDED_MODEL), words[1:]


def hint_at_question(words: list[str]) -> str:
    """To be added to an error, if the only word may have been meant as a question."""
    if len(words) != 1 or "/" in words[0] or words[0] == EMBEDDED_MODEL or Path(words[0]).is_dir():
        return ""
    return (
        f". A single word is taken for a model; as a question for {EMBEDDED_MODEL}: "
        f"sensorium chat {EMBEDDED_MODEL} {words[0]}"
    )


def _is_question(word: str) -> bool:
    """Hub ids have no spaces, and letters, digits, `_`, `-` and `.` only; paths may have others."""
    is_no_id = len(word.split()) > 1 or ("/" not in word and not _HUB_NAME.fullmatch(word))
    return is_no_id and not word.startswith(("/", ".", "~")) and not Path(word).is_dir()
