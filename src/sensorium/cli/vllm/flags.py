"""Accepts the flags of `vllm serve` that Sensorium lacks, so that command lines still work.

A flag that would change nothing is accepted, and a line says so. A flag for which Sensorium has an
option of another name is read as that option. Any other flag is refused with a sentence that says
what Sensorium has in its place.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from sensorium.cli.vllm.table import ANY, OFF, ON, TABLE
from sensorium.server.options import LogLevel
from sensorium.types.multimodal import MODALITIES
from sensorium.types.options import join_words

_SEVERAL, _OPTIONAL = "...", "?"  # the end of a metavar
_NUM_VALUES = {_SEVERAL: "+", _OPTIONAL: "?"}  # the same for argparse
# Names of levels of vLLM that the server does not have -> the nearest one of its own.
_LOG_LEVELS = {"critical": "error", "trace": "debug"}


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """A flag of vLLM, with the values that change nothing here and a sentence about it."""

    names: tuple[str, ...]  # the first is the one that is shown
    metavar: str  # empty for a switch
    sentence: str  # what there is here instead
    accepted: tuple[str, ...] = ()  # values that change nothing
    option: str = ""  # the attribute in which argparse stores the option that it is taken as
    convert: Callable[[Sequence[str]], Any] = list  # the values that were given -> that of `option`

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def num_values(self) -> int | str | None:
        """Return how many values the flag has, in the notation of argparse's `nargs`."""
        if not self.metavar:
            return 0
        return next((n for end, n in _NUM_VALUES.items() if self.metavar.endswith(end)), None)

    def accepts(self, values: Sequence[str]) -> bool:
        return ANY in self.accepted or (
            bool(values) and all(value.lower() in self.accepted for value in values)
        )


def _read_level(values: Sequence[str]) -> str:
    level = values[0].lower()
    level, known = _LOG_LEVELS.get(level, level), get_args(LogLevel)
    if level not in known:
        raise argparse.ArgumentTypeError(f"it must be {join_words(known)}, not {values[0]}")
    return level


def _read_sizes(values: Sequence[str]) -> tuple[int, ...]:
    words = [word for value in values for word in value.strip("[]").split(",")]
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise argparse.ArgumentTypeError("the sizes must be integers >= 1")
    return tuple(map(int, words))


def _read_table() -> tuple[ForeignFlag, ...]:
    flags = []
    for text, accepted, sentence in TABLE:
        names, _, metavar = text.partition(" ")
        flags.append(
            ForeignFlag(tuple(names.split("|")), metavar, sentence, tuple(accepted.split()))
        )
    return tuple(flags)


FLAGS = (
    *_read_table(),
    ForeignFlag(
        ("--disable-uvicorn-access-log",),
        "",
        "It is taken as --no-access-log.",
        option="access_log",
        convert=lambda _: False,
    ),
    ForeignFlag(
        ("--uvicorn-log-level",),
        "LEVEL",
        "It is taken as --log-level, for the whole server.",
        option="log_level",
        convert=_read_level,
    ),
    ForeignFlag(
        ("--disable-mm-preprocessor-cache",),
        "",
        "It is taken as --mm-processor-cache-gb 0.",
        option="mm_processor_cache_gb",
        convert=lambda _: 0.0,
    ),
    ForeignFlag(
        ("--language-model-only",),
        "",
        "It is taken as --limit-mm-per-prompt image=0,video=0,audio=0.",
        option="limit_mm_per_prompt",
        convert=lambda _: dict.fromkeys(MODALITIES, 0),
    ),
    ForeignFlag(
        ("--cudagraph-capture-sizes",),
        "N...",
        "It is taken as --cuda-graph-sizes.",
        option="cuda_graph_sizes",
        convert=_read_sizes,
    ),
)


def add_foreign_flags(parser: argparse.ArgumentParser) -> None:
    """Let a parser accept the flags of vLLM that it lacks; its help does not list them.

    A flag that is used adds a sentence about what it does to the list `notes` of the namespace.
    """
    own = parser._option_string_actions
    options = {action.dest for action in parser._actions}
    for flag in FLAGS:
        names = [name for name in flag.names if name not in own]
        if flag.name not in names or (flag.option and flag.option not in options):
            continue
        if not flag.metavar and flag.option == "":
            names.append(f"--no-{flag.name[2:]}")
        # `add_argument` would also make a help formatter each time, a tenth of a second in all.
        parser._add_action(_Take(names, flag))


class _Take(argparse.Action):
    """An argparse action that reads a flag of vLLM as an option, ignores it, or refuses it."""

    def __init__(self, names: Sequence[str], flag: ForeignFlag) -> None:
        super().__init__(
            names, dest=argparse.SUPPRESS, nargs=flag.num_values, help=argparse.SUPPRESS
        )
        self._flag = flag

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        flag, given = self._flag, option_string or ""
        words = [values] if isinstance(values, str) else list(values or ())
        if not flag.metavar:
            words = [OFF if given.startswith("--no-") else ON]
        if flag.option:
            try:
                setattr(namespace, flag.option, flag.convert(words))
            except argparse.ArgumentTypeError as error:
                parser.error(f"{flag.name}: {error}")
        elif not flag.accepts(words):
            parser.error(f"{given} is a flag of vLLM and not supported here. {flag.sentence}")
        shown = given if not flag.metavar else f"{flag.name} {' '.join(words)}"
        note = flag.sentence if flag.option else f"It has no effect. {flag.sentence}"
        namespace.notes = [*getattr(namespace, "notes", ()), f"{shown} is a flag of vLLM. {note}"]
