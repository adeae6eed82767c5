"""Declares each option once, as a field of a frozen dataclass.

A field that is made with `option` carries its help, its bounds and its choices. From these come the
flag of the command line, the check of the value, the keyword of `LLM` and the row of the reference
page, so that a new option is one declaration and the code that uses it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from sensorium.types.errors import ModelError

# How a value is written and checked. "texts" is a flag that may be repeated, "names" one flag with
# several values, "bytes" an integer that may have a unit, "tokens" an integer or "auto", "counts" a
# number for each modality.
Kind = Literal[
    "switch",
    "integer",
    "number",
    "bytes",
    "tokens",
    "text",
    "file",
    "texts",
    "names",
    "sizes",
    "counts",
    "mapping",
]
# The commands that may have a flag for an option.
SERVE = ("serve", "deploy")
SERVERS = ("serve", "render", "deploy")
ONE_MACHINE = ("serve", "render")  # servers that listen on a port themselves, without Ray Serve
DEPLOY = ("deploy",)
ENGINES = ("serve", "deploy", "chat", "generate", "transcribe")
ALL_COMMANDS = ("serve", "render", "deploy", "chat", "generate", "transcribe")
TOWERS = (*ENGINES, "encode")  # commands that load weights
MEDIA_COMMANDS = (*ALL_COMMANDS, "encode")  # commands that process media
_KINDS: dict[type, Kind] = {bool: "switch", int: "integer", float: "number", str: "text"}
_KEY = "option"
Group = TypeVar("Group")
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The declaration of one option: its name, default, help, allowed values and flag."""

    name: str = ""
    default: Any = None
    help: str  # whole sentences, without the default
    kind: Kind
    least: float | None = None  # the smallest value that is allowed
    above: float | None = None  # every value must be greater than this one
    most: float | None = None
    choices: tuple[str, ...] = ()
    # Pairs of another word on the command line, and the choice that it stands for.
    synonyms: tuple[tuple[str, str], ...] = ()
    metavar: str = ""
    default_text: str = ""  # the default in words, where its value explains nothing
    server_default: str = ""  # the default of a server, in words, if it has another one
    flag: str = ""  # empty: the command line has no flag for the option
    unit: int = 1  # what 1 on the command line stands for
    section: str = ""  # the heading under which the flag is listed
    commands: tuple[str, ...] = ()
    is_secret: bool = False  # the value may contain a password, so it is never shown

    @property
    def destination(self) -> str:
        """The name of the attribute in which argparse stores the value of the flag."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def rule(self) -> str:
        """The condition on a value in words, such as "an integer >= 1", to follow "must be"."""
        if self.choices:
            return join_words(self.choices)
        noun, _ = _RULES[self.kind]
        if self.above is not None:
            most = "" if self.most in (None, math.inf) else f" and at most {self.most:g}"
            return f"{noun} above {self.above:g}{most}"
        if self.least is None:
            return noun
        if self.most is None or self.most >= 2**63 - 1:
            return f"{noun} >= {self.least:g}"
        return f"{noun} from {self.least:.12g} to {self.most:.12g}"

    def is_valid(self, value: object) -> bool:
        if self.choices:
            return value in self.choices
        _, has_kind = _RULES[self.kind]
        return has_kind(value) and self._is_in_bounds(value)

    def _is_in_bounds(self, value: Any) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
        )

    def describe_default(self, command: str = "") -> str:
        """Return the default in words, for the documentation or the help text.

        Each `command` may have another default or unit. If it is empty, the text is for Python.
        """
        if self.server_default and command in (*SERVERS, "encode"):
            return self.server_default
        if self.default_text:
            return self.default_text
        if self.kind == "switch":
            return "on" if self.default else "off"
        if isinstance(self.default, int | float):
            return f"{self.default / (self.unit if command else 1):.12g}"
        return str(self.default) if self.default else "none"


def option(default: Any, *, help: str, kind: Kind | None = None, **details: Any) -> Any:
    """Return a dataclass field that declares an option.

    `details` are further fields of `Option`. The flag is named after the field unless `flag` is
    given. `kind` may be left out if it follows from the type of the default (bool, int, float or
    str).
    """
    declared = Option(help=help, kind=kind or _KINDS[type(default)], **details)
    if isinstance(default, dict):
        return field(default_factory=dict, metadata={_KEY: declared})
    return field(default=default, metadata={_KEY: declared}, repr=not declared.is_secret)


@functools.cache
def list_options(group: type) -> tuple[Option, ...]:
    """Return the options that a dataclass declares, in the order of its fields.

    An option without a section of its own belongs to the section of the option before it.
    """
    found: list[Option] = []
    for each in fields(group):
        declared: Option | None = each.metadata.get(_KEY)
        if declared is None:
            continue
        section = declared.section or (found[-1].section if found else "")
        flag = declared.flag or "--" + each.name.replace("_", "-")
        found.append(
            replace(
                declared,
                name=each.name,
                default=get_default(each),
                section=section,
                flag=flag if declared.commands else "",
            )
        )
    return tuple(found)


def get_default(each: Field[Any]) -> Any:
    """Return the default value of a dataclass field, also if it has a factory."""
    return each.default if each.default_factory is MISSING else each.default_factory()


def check_options(group: Any, *, label: str = "") -> None:
    """Raise a `ModelError` that begins with `label` if a dataclass has an invalid option."""
    kind: type = type(group)
    for each in list_options(kind):
        value = getattr(group, each.name)
        if value is None and each.default is None:
            continue
        if not each.is_valid(value):
            shown = "" if each.is_secret else f", not {value!r}"
            raise ModelError(f"{label}{each.name} must be {each.rule}{shown}")


def make_group(group: type[Group], given: Mapping[str, Any]) -> Group:
    """Return an instance of the dataclass `group`, made from the values that it has fields for."""
    names = {each.name for each in fields(group)}  # type: ignore[arg-type]
    return group(**{name: value for name, value in given.items() if name in names})


def check_names(given: Iterable[str], groups: Iterable[type], *, caller: str) -> None:
    """Raise a `TypeError` that suggests a similar field if a name is not a field of any group."""
    known = [each.name for group in groups for each in fields(group)]
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise TypeError(f"{caller} has no option {name!r}{hint}")


def takes_options(*groups: type) -> Callable[[Function], Function]:
    """Decorate a function so that its signature and help list the fields of dataclasses.

    The function takes the fields as `**options`, but `help` and `inspect.signature` list them.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = {parameter.name for parameter in own}
        keywords = [
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=get_default(each),
                annotation=each.type,
            )
            for group in groups
            for each in fields(group)
            if each.name not in names
        ]
        lines = [inspect.cleandoc(function.__doc__ or ""), ""]
        for group in groups:
            lines += [
                f"{each.name}: {each.help} Default: {each.describe_default()}."
                for each in list_options(group)
            ]
        function.__doc__ = "\n".join(lines)
        vars(function)["__signature__"] = signature.replace(parameters=[*own, *keywords])
        return function

    return decorate


def join_words(words: Iterable[str]) -> str:
    """Return words as an enumeration for a sentence, such as "a, b or c"."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_sizes(value: object) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(_is_integer(size) and size >= 1 for size in value)


def _are_texts(value: object) -> bool:
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        return False
    return all(map(_is_text, value))


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


# Kind -> what a value must be, in words, and the check of a value.
_RULES: dict[Kind, tuple[str, Callable[[object], bool]]] = {
    "switch": ("true or false", lambda value: isinstance(value, bool)),
    "integer": ("an integer", _is_integer),
    "number": ("a number", _is_number),
    "bytes": ("an integer", _is_integer),
    "tokens": ("an integer", _is_integer),
    "text": ("text", _is_text),
    "file": ("the name of a file", _is_text),
    "texts": ("a list of text", _are_texts),
    "names": ("a list of text", _are_texts),
    "sizes": ("a list of integers >= 1", _are_sizes),
    "counts": ("a mapping such as {'image': 4}", _is_mapping),
    "mapping": ("a mapping", _is_mapping),
}
