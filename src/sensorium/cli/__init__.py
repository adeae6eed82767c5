"""The `sensorium` command: exit codes, and one module per command.

0: done. 1: an error, told on stderr. 2: wrong usage. 130: interrupted. 141: the reader of a pipe
has left.
"""

from __future__ import annotations

import argparse
import io
import os
import sys

import sensorium
from sensorium.cli import chat, demo, generate, models, render, serve
from sensorium.cli.words import take_late_words
from sensorium.types.errors import SensoriumError


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # models say what not every terminal can show
    try:
        try:
            arguments = _parse_arguments()
            arguments.run(arguments)
        finally:
            sys.stdout.flush()
    except SensoriumError as error:
        sys.exit(f"sensorium: {error}")
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
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return arguments


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sensorium", description="Multimodal LLM inference: everything is perceived once."
    )
    parser.add_argument("--version", action="version", version=f"sensorium {sensorium.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in (serve, render, chat, generate, models, demo):
        command.add_command(commands)
    return parser
