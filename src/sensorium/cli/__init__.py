"""The `sensorium` command: its exit codes and its commands.

The exit codes are 0 for success, 1 for an error, which is explained on stderr, 2 for wrong usage,
130 for an interruption, and 141 if the reader of a pipe has left.
"""

from __future__ import annotations

import argparse
import difflib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import sensorium
from sensorium.cli.chat import add_chat, add_generate
from sensorium.cli.deploy import add_deploy
from sensorium.cli.encode import add_encode
from sensorium.cli.flags import take_late_words
from sensorium.cli.models import add_models
from sensorium.cli.serve import add_demo, add_serve
from sensorium.cli.transcribe import add_transcribe
from sensorium.types.errors import SensoriumError
from sensorium.utils.openmp import wait_without_spinning
from sensorium.utils.printable import make_printable

_LEAST_LIKENESS = 0.75  # of two words that may be the same one
_LEAST_NEARNESS = 0.75  # of two flags: the share of words that they have in common
_LEAST_RATIO = 0.87  # of two flags, letter by letter


def main() -> None:
    """Run the `sensorium` command with this process's command-line arguments."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal can show what models write
    wait_without_spinning()
    try:
        try:
            arguments = _parse_arguments()
            arguments.run(arguments)
        finally:
            sys.stdout.flush()
    except SensoriumError as error:
        sys.exit(f"sensorium: {make_printable(str(error))}")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # What is still buffered must not raise once more when the interpreter flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _parse_arguments() -> argparse.Namespace:
    parser = _make_parser()
    arguments, rest = parser.parse_known_args()
    take_late_words(arguments, rest)
    if rest:
        _refuse(arguments.parser, rest)
    return arguments


def _refuse(parser: argparse.ArgumentParser, rest: list[str]) -> NoReturn:
    flags = [flag for action in parser._actions for flag in action.option_strings]
    parser.error(f"unrecognized arguments: {' '.join(rest)}{hint_at_flag(rest[0], flags)}")


def hint_at_flag(word: str, flags: Sequence[str]) -> str:
    """Return a hint for an error message that names the flag that `word` may stand for, or "".

    A flag is a close match if most words of the two are the same, or if `word` has at least two
    words and all of them are in the flag.
    """
    given = word.partition("=")[0].replace("_", "-")
    if not given.startswith("--"):
        return ""
    if "." in given and given.partition(".")[0] in flags:  # vLLM's form of a JSON object
        return f" (write {given.partition('.')[0]} with a JSON object)"
    ranked = [(_compare_flags(given, flag), flag) for flag in flags if flag.startswith("--")]
    best, nearest = max(ranked, default=(0.0, ""))
    return f" (did you mean {nearest}?)" if best >= _LEAST_NEARNESS else ""


def _compare_flags(given: str, flag: str) -> float:
    """Return the similarity of a flag and the given word, from 0 to 1."""
    words, known = given[2:].split("-"), flag[2:].split("-")
    matches = sum(
        bool(difflib.get_close_matches(word, known, 1, _LEAST_LIKENESS)) for word in words
    )
    share = 2 * matches / (len(words) + len(known))
    if matches == len(words) >= 2:
        share = max(share, _LEAST_NEARNESS)
    whole = difflib.SequenceMatcher(None, given, flag).ratio()
    return max(share, whole if whole >= _LEAST_RATIO else 0)


class _Parser(argparse.ArgumentParser):
    """A parser that raises `BrokenPipeError` if its help can't be written; argparse ignores it."""

    def print_help(self, file: Any = None) -> None:
        (file or sys.stdout).write(self.format_help())


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="sensorium", description="Multimodal LLM inference: everything is perceived once."
    )
    parser.add_argument("--version", action="version", version=f"sensorium {sensorium.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for add_command in (
        add_serve,
        add_deploy,
        add_encode,
        add_chat,
        add_generate,
        add_transcribe,
        add_models,
        add_demo,
    ):
        add_command(commands)
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return parser
