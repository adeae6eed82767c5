"""Flags of the command line, and what they become: options, sampling parameters, media.

Options are declared elsewhere, as fields of dataclasses (`types.options`). A flag that was not
given leaves no value, so that every default stands with its option.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sensorium.checkpoints.first_look import look_at, look_into
from sensorium.cli.values import MAX_INTEGER, PARSERS, split_list
from sensorium.cli.vllm.flags import add_foreign_flags
from sensorium.embedded import EMBEDDED_MODEL
from sensorium.embedded.cache import PACKED_MODEL
from sensorium.engine.assembly.options import EngineOptions, LoadingOptions, MediaOptions
from sensorium.multimodal.media import MediaLimits
from sensorium.types.errors import RequestError
from sensorium.types.options import Option, list_options
from sensorium.types.sampling import (
    GenerationDefaults,
    SamplingField,
    SamplingParams,
    list_sampling_fields,
)
from sensorium.utils.process import reporting_steps

if TYPE_CHECKING:
    from sensorium.engine.llm import LLM

MEDIA_FLAGS = {"image": "an image", "audio": "audio", "video": "a video"}  # in their order
MODEL_HELP = (
    f"A directory or a hub id. Default: {EMBEDDED_MODEL}, the model that comes with the package."
)
ENGINE_GROUPS = (LoadingOptions, EngineOptions, MediaOptions, MediaLimits)
_URL_SCHEMES = ("http:", "https:", "data:", "file:")
_HUB_NAME = re.compile(r"[\w.-]*", re.ASCII)


# ---- options


def add_options(parser: argparse.ArgumentParser, command: str, *groups: type) -> None:
    """Add a flag for each option of these dataclasses that belongs to the command."""
    parser.set_defaults(command=command, refuse=parser.error)
    sections: dict[str, argparse._ArgumentGroup] = {}
    for group in groups:
        for each in list_options(group):
            if command not in each.commands:
                continue
            if each.section not in sections:
                sections[each.section] = parser.add_argument_group(each.section)
            details = _make_details(each, command)
            sections[each.section].add_argument(each.flag, default=argparse.SUPPRESS, **details)


def add_server_command(
    commands: Any,
    name: str,
    *groups: type,
    summary: str,
    description: str,
    examples: str,
    run: Callable[[argparse.Namespace], None],
) -> argparse.ArgumentParser:
    """Add the subcommand `name` to a parser, with a model and the options of these groups."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    _add_named_model(parser)
    add_options(parser, name, *groups)
    add_foreign_flags(parser)
    parser.set_defaults(run=run)
    return parser


def _add_named_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", dest="named_model", metavar="MODEL", help="The same as MODEL, by name."
    )


def tell_notes(arguments: argparse.Namespace, log_format: str = "text") -> None:
    """Print the remarks about the command line to stderr, or log them if the log is in JSON."""
    for note in getattr(arguments, "notes", ()):
        if log_format == "json":
            logging.getLogger(__name__).warning("%s", note)
        else:
            print(f"sensorium: {note}", file=sys.stderr, flush=True)


def _make_details(each: Option, command: str) -> dict[str, Any]:
    """Return the arguments of `add_argument` for an option, with its default in `command`."""
    is_list = each.kind in ("texts", "names")
    repeats = " May be repeated." if each.kind == "texts" else ""
    text = f"{each.help}{repeats} Default: {each.describe_default(command)}."
    details: dict[str, Any] = {"help": text.replace("%", "%%")}
    if each.kind == "switch":
        return details | {
            "action": argparse.BooleanOptionalAction if each.default else "store_true"
        }
    details["metavar"] = each.metavar or None
    if each.choices:
        details["choices"] = each.choices
        if each.synonyms:
            details["type"] = lambda text: dict(each.synonyms).get(text, text)
    elif each.kind in PARSERS:
        details["type"] = partial(_parse, each)
    if is_list:
        details["action"] = "append" if each.kind == "texts" else "extend"
    return details | ({"nargs": "+"} if each.kind == "names" else {})


def get_given(arguments: argparse.Namespace, group: type) -> dict[str, Any]:
    """Return the options of a group that were given on the command line: name -> value."""
    given = {}
    for each in list_options(group):
        if arguments.command in each.commands and hasattr(arguments, each.destination):
            value = getattr(arguments, each.destination)
            if each.kind == "texts":
                value = [text for item in value for text in split_list(item)]
            given[each.name] = tuple(value) if isinstance(value, list) else value
    return given


def _parse(each: Option, text: str) -> Any:
    """Return the value of an option, or raise an `ArgumentTypeError` if the text is not valid."""
    value = PARSERS[each.kind](text)
    if value is None or each.kind not in ("integer", "number", "bytes", "tokens"):
        return value
    value *= each.unit
    is_too_large = each.kind != "number" and abs(value) > MAX_INTEGER
    if is_too_large or not each.is_valid(value):
        raise argparse.ArgumentTypeError(f"it must be {each.rule}, not {text}")
    return value


# ---- loading


def look_at_model(model: str, arguments: argparse.Namespace, *, needs_weights: bool = True) -> None:
    """Raise `ModelError`, before torch is imported, if the model's files show that it can't run."""
    max_model_len = getattr(arguments, "max_model_len", None)
    if model == EMBEDDED_MODEL:
        look_into(PACKED_MODEL, max_model_len=max_model_len)
    else:
        look_at(model, needs_weights=needs_weights, max_model_len=max_model_len)


@contextmanager
def showing_progress(arguments: argparse.Namespace) -> Iterator[None]:
    """Print the steps of loading a model in this block to stderr, unless `--quiet` was given."""
    start = time.perf_counter()

    def show(text: str) -> None:
        if not arguments.quiet and sys.stderr is not None:
            print(f"{text} ({time.perf_counter() - start:.1f} s)", file=sys.stderr, flush=True)

    with reporting_steps(lambda step: show(f"Loading {arguments.model}: {step} ...")):
        show(f"Loading {arguments.model}: importing PyTorch and Transformers ...")
        yield
    show(f"{arguments.model} is ready.")


def add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="Do not write the steps of loading to stderr."
    )


def load_llm(arguments: argparse.Namespace) -> LLM:
    """Load the model that the command line names, with the options that it gives."""
    given: dict[str, Any] = {}
    for group in (LoadingOptions, EngineOptions, MediaOptions):
        given |= get_given(arguments, group)
    limits = MediaLimits(**get_given(arguments, MediaLimits))
    look_at_model(arguments.model, arguments)
    with showing_progress(arguments):
        from sensorium.engine.llm import LLM

        return LLM(arguments.model, media_limits=limits, **given)


# ---- sampling


def add_sampling_flags(
    command: argparse.ArgumentParser, *, max_tokens: int, has_n: bool = False
) -> None:
    """Add a flag for each sampling parameter, such as `--temperature`; `--n` only with `has_n`."""
    group = command.add_argument_group("sampling")
    for each in _list_sampling_flags():
        if each.name == "n" and not has_n:
            continue
        default = _describe_sampling_default(each, max_tokens)
        details: dict[str, Any] = {"help": f"{each.description} Default: {default}."}
        if each.kind == "flag":
            details["action"] = argparse.BooleanOptionalAction if each.default else "store_true"
        elif each.kind in ("texts", "words"):
            details |= {"action": "append", "metavar": "TEXT"}
            details["help"] = f"{each.description} May be repeated."
        else:
            details |= {"type": int if each.kind == "integer" else float, "metavar": "N"}
        flag = "--" + each.name.replace("_", "-")
        group.add_argument(flag, default=argparse.SUPPRESS, **details)
    command.set_defaults(max_tokens=max_tokens)


def _list_sampling_flags() -> list[SamplingField]:
    """Return the sampling parameters with a flag: no log-probabilities, as only text is printed."""
    kinds = ("integer", "number", "flag", "texts", "words")
    return [
        each
        for each in list_sampling_fields()
        if each.kind in kinds and not each.is_internal and "logprobs" not in each.name
    ]


def _describe_sampling_default(each: SamplingField, max_tokens: int) -> str:
    if each.name == "max_tokens":
        return str(max_tokens)
    if each.default is None:
        is_of_model = hasattr(GenerationDefaults(), each.name)
        return "as in the model's generation_config.json" if is_of_model else "none"
    if each.kind == "flag":
        return "on" if each.default else "off"
    return f"{each.default:g}" if each.kind in ("integer", "number") else "none"


def make_sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters that the command line gives; others keep their defaults."""
    names = [each.name for each in _list_sampling_flags() if hasattr(arguments, each.name)]
    return SamplingParams(**{name: getattr(arguments, name) for name in names})


# ---- media


def add_media_flags(command: argparse.ArgumentParser, purpose: str) -> None:
    """Add a repeatable flag for each modality (`--image`, ...) that takes a file or a URL.

    `purpose` completes the help of the flag, as in "An image that goes with the question".
    """
    for modality, noun in MEDIA_FLAGS.items():
        command.add_argument(
            f"--{modality}",
            action="append",
            default=[],
            metavar="FILE|URL",
            help=f"{noun.capitalize()} {purpose}. May be repeated.",
        )


def read_media(source: str) -> bytes | str:
    """Return a file's content, or a URL unchanged. Raise a `RequestError` if it can't be read."""
    if is_address(source):
        return source
    try:
        return Path(source).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RequestError(f"{source} can't be read: {reason}") from error


def is_address(source: str) -> bool:
    """Return whether media is named by a URL, and not by the path of a file."""
    return source.lower().startswith(_URL_SCHEMES)


# ---- positional arguments: a model, which may be left out, and questions or prompts


def add_words(command: argparse.ArgumentParser, name: str, help_text: str) -> None:
    """Add the flag `--model`, and an argument that collects MODEL and everything after it.

    `split_question` or `split_prompts` later decides which value is the model. `name` is the name
    of the other values in the help, such as "PROMPT".
    """
    command.add_argument("words", nargs="*", metavar=f"MODEL {name}", help=help_text)
    _add_named_model(command)


def take_late_words(arguments: argparse.Namespace, rest: list[str]) -> None:
    """Move positional arguments that argparse before 3.12 leaves in `rest` to `arguments.words`."""
    while hasattr(arguments, "words") and rest and (rest[0] == "-" or rest[0][:1] != "-"):
        arguments.words.append(rest.pop(0))


def split_question(
    words: list[str], named_model: str | None = None
) -> tuple[str, str | None, list[str]]:
    """Split the positional arguments of `chat` into model, question and surplus arguments.

    The question is `None` if there is none. A single argument is the model, unless it can't be the
    name of one; then it is the question for the default model. If the model was given by `--model`,
    none of the arguments is the model.
    """
    if named_model is None and len(words) == 1 and _is_question(words[0]):
        named_model = EMBEDDED_MODEL
    model, *rest = (words or [EMBEDDED_MODEL]) if named_model is None else (named_model, *words)
    return model, rest[0] if rest else None, rest[1:]


def split_prompts(words: list[str], named_model: str | None = None) -> tuple[str, list[str]]:
    """Split the positional arguments of `generate` into the model and the prompts.

    A single argument is a prompt for the default model, unless it is a directory or the default
    model's name. If the model was given by `--model`, all arguments are prompts.
    """
    if named_model is not None:
        return named_model, words
    if len(words) == 1 and words[0] != EMBEDDED_MODEL and not Path(words[0]).is_dir():
        return EMBEDDED_MODEL, words
    return (words[0] if words else EMBEDDED_MODEL), words[1:]


def hint_at_question(words: list[str]) -> str:
    """Return a hint for an error message if the only argument may be meant as a question, or ""."""
    if len(words) != 1 or "/" in words[0] or words[0] == EMBEDDED_MODEL or Path(words[0]).is_dir():
        return ""
    return (
        f". A single word is read as a model. To ask {EMBEDDED_MODEL} this question: "
        f"sensorium chat {EMBEDDED_MODEL} {words[0]}"
    )


def _is_question(word: str) -> bool:
    """Return whether a positional argument can't be a model's name, so that it is a question."""
    # Hub ids have only letters, digits, `_`, `-` and `.`; paths may have other characters.
    is_no_id = len(word.split()) > 1 or ("/" not in word and not _HUB_NAME.fullmatch(word))
    return is_no_id and not word.startswith(("/", ".", "~")) and not Path(word).is_dir()
