"""The common parts of answer formats: vocabularies, readers of JSON, and parts of grammars.

A `CallReader` takes one character at a time, so that it does not matter how an answer is cut into
pieces. Its fields are its whole state, as plain data of bounded size.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from sensorium.render.answers.answer import AnswerBuffer, MakeId

if TYPE_CHECKING:  # grammars need llguidance, which the command line does without
    from sensorium.render.answers.lark import Lark

MAX_HELD = 2**14  # characters of a call that are held back until its name is known
HeldText = Annotated[str, Meta(max_length=MAX_HELD + 128)]
ShortText = Annotated[str, Meta(max_length=256)]
Depth = Annotated[int, Meta(ge=0, le=2**53)]
NAME = r"[\w.\-]{1,128}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A tokenizer with its special tokens and, if it is one of Mistral's own, its version."""

    special_tokens: Mapping[str, int] = field(default_factory=dict)  # text -> id
    mistral_version: int = 0  # 0: it is none of Mistral's own tokenizers
    tokenizer: Any = None

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        """Return the vocabulary of a tokenizer of Transformers or of mistral-common."""
        if type(tokenizer).__name__ != "MistralCommonBackend":
            added = tokenizer.added_tokens_decoder.items()
            special = {token.content: token_id for token_id, token in added if token.special}
            return cls(special_tokens=special, tokenizer=tokenizer)
        ids = tokenizer.all_special_ids
        special = dict(zip(tokenizer.convert_ids_to_tokens(ids), ids, strict=True))
        # The versions are called v1, v7, v11 and so on.
        digits = "".join(filter(str.isdecimal, str(tokenizer.tokenizer.version.value)))
        return cls(special_tokens=special, mistral_version=int(digits or 1), tokenizer=tokenizer)

    @property
    def is_mistral(self) -> bool:
        return self.mistral_version > 0

    def __contains__(self, text: str) -> bool:
        return text in self.special_tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids with special tokens, or no text without a tokenizer."""
        return "" if self.tokenizer is None else str(self.tokenizer.decode(list(token_ids)))


class Step(Enum):
    """The effect of one character on the tool call that is being read."""

    ON = auto()  # the call continues
    LAST = auto()  # the call ended with this character
    BEFORE = auto()  # the call ended before this character


class CallReader(Struct):
    """A reader of one tool call, or of one list of tool calls, in the format of a subclass."""

    # The tag and the whitespace before it, which become content if this is not a call.
    opening: ShortText = ""

    @classmethod
    def begin(cls, tag: str, opening: str) -> CallReader:  # noqa: ARG003
        """Return a reader of a tool call that begins with this tag."""
        return cls(opening=opening)

    def step(self, character: str, buffer: AnswerBuffer) -> Step:
        """Read one character, add what it completes to the buffer, and return its effect."""
        raise NotImplementedError

    def count_plain(self, text: str, start: int) -> int:  # noqa: ARG002
        """Return how many characters from `start` on can be copied to the arguments unchanged."""
        return 0

    @property
    def rest(self) -> str:
        """Return the text that becomes content if the tool call ends here."""
        raise NotImplementedError


def read_closing(tag: str, before: str, character: str) -> tuple[str, Step]:
    """Read one character of a closing tag, which may come after whitespace or be missing.

    `before` is the part of the tag that was read already. Return the part that is read now, which
    is empty after the whole tag, and the effect on the tool call.
    """
    if not before and character.isspace():
        return "", Step.ON
    begun = before + character
    if not tag.startswith(begun):
        return before, Step.BEFORE
    return ("", Step.LAST) if begun == tag else (begun, Step.ON)


Tools = Sequence[Mapping[str, Any]]


def make_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """A format in which some models write tool calls: its tags, its reader and its grammar."""

    name: str  # on the command line, as in vLLM
    tags: tuple[str, ...]  # texts that begin a call
    start_tags: tuple[str, ...] = ()  # texts that begin a call only at the start of an answer
    special_tokens: tuple[str, ...] = ()  # texts that such models may have as special tokens
    reader: type[CallReader]
    # Adds rules for calls of these tools to a grammar, and returns the body of a rule for one call
    # or, unless the last argument is true, for one or more.
    write_calls: Callable[[Lark, Tools, bool], str]
    # Whether a model with this vocabulary and chat template writes such calls.
    is_used_by: Callable[[Vocabulary, str], bool]
    # Returns the variant of this format for a model with this vocabulary and chat template.
    choose_variant: Callable[[Vocabulary, str], CallFormat] | None = None
    rank: int = 1  # formats of lower rank are tried first, because their marks are more certain
    make_id: MakeId = make_call_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """A format in which some models mark their reasoning, with a tag before and one after it."""

    name: str  # on the command line, as in vLLM
    rank: int = 1  # as in `CallFormat`
    open: str
    close: str
    # Whether a model with this vocabulary and chat template writes such reasoning.
    is_used_by: Callable[[Vocabulary, str], bool]
    is_anywhere: bool = False  # it may begin in the middle of an answer, not only at the start
    # An answer begins with reasoning even if neither the prompt nor the answer has opened it.
    is_assumed: bool = False
    special_tokens: tuple[str, ...] = ()  # texts that such models may have as special tokens

    def is_open_after(self, text: str) -> bool:
        """Return whether an answer begins inside reasoning if its prompt ends with this text."""
        text = text.rstrip()
        if self.is_assumed:
            return not text.endswith(self.close)
        return text.endswith(self.open.rstrip())


class JsonScan(Struct):
    """A scanner for the end of a JSON object or list, which is where `depth` is 0 again.

    It reads one character at a time, and looks only at brackets and strings.
    """

    depth: Depth = 0
    is_in_string: bool = False
    is_escaped: bool = False

    def step(self, character: str) -> str:
        """Read one character, and return it as JSON; control characters in strings are escaped."""
        is_raw = self.is_in_string and character < " "
        self._follow(character)
        return json.dumps(character)[1:-1] if is_raw else character

    def _follow(self, character: str) -> None:
        if self.is_in_string:
            self.is_in_string = character != '"' or self.is_escaped
            self.is_escaped = character == "\\" and not self.is_escaped
        elif character == '"':
            self.is_in_string = True
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth = max(0, self.depth - 1)

    def count_plain(self, text: str, start: int) -> int:
        """Return how many characters from `start` on open or close no bracket and no string."""
        if self.is_escaped:
            return 0
        found = (_IN_STRING if self.is_in_string else _IN_NUMBERS).match(text, start)
        return 0 if found is None else found.end() - start


_IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')
_IN_NUMBERS = re.compile(r"[\w\s:,.+\-]+")
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*', re.DOTALL
)


class CallObject(Struct):
    """A reader of one tool call that is a JSON object `{"name": …, "arguments": {…}}`.

    Arguments after the name are added to the buffer while they are read, and arguments before it
    when the object ends.
    """

    scan: JsonScan
    held: HeldText = ""
    is_begun: bool = False  # its name was given out
    is_done: bool = False  # all of its arguments were given out

    def step(self, character: str, buffer: AnswerBuffer) -> Step:
        scan = self.scan
        if not scan.is_in_string and self._is_broken(character):
            return Step.BEFORE
        if not self.is_begun and len(self.held) >= MAX_HELD:
            return Step.BEFORE
        text = scan.step(character)
        if not self.is_begun:
            self.held += character
            self._find_name(character, buffer)
        elif not self.is_done:
            buffer.add_arguments(text)
            self.is_done = scan.depth == 1
        is_end = scan.depth == 0 and character == "}" and not scan.is_in_string
        return Step.LAST if is_end else Step.ON

    def count_plain(self, text: str, start: int) -> int:
        is_free = self.is_begun and not self.is_done
        return self.scan.count_plain(text, start) if is_free else 0

    def _is_broken(self, character: str) -> bool:
        """Return whether a character outside of strings shows that this is no valid JSON object."""
        if self.scan.depth == 0:
            return character != "{" and not character.isspace()
        return character == "<"  # the beginning of a tag, so the object was cut off

    def _find_name(self, character: str, buffer: AnswerBuffer) -> None:
        scan = self.scan
        if scan.is_in_string:
            return
        if character == "{" and scan.depth == 2:
            found = _HEAD.fullmatch(self.held, 0, len(self.held) - 1)
            name = None if found is None else _load(found.group(1))
            if isinstance(name, str) and name:
                buffer.begin_call(name)
                buffer.add_arguments("{")
                self.held, self.is_begun = "", True
        elif character == "}" and scan.depth == 0:
            self._add_whole(buffer)

    def _add_whole(self, buffer: AnswerBuffer) -> None:
        call = _load(self.held)
        if not isinstance(call, dict):
            return
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
        if isinstance(name, str) and name and isinstance(arguments, dict | None):
            buffer.begin_call(name)
            buffer.add_arguments(json.dumps(arguments or {}, ensure_ascii=False))
            self.held, self.is_begun, self.is_done = "", True, True


def _load(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def get_parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments, always with the type "object"."""
    declared = tool["function"].get("parameters") or {"properties": {}}
    return {**declared, "type": "object"}


def write_value(lark: Lark, tool: Mapping[str, Any], schema: Any) -> str:
    """Return a grammar expression for a value in the arguments of a tool."""
    # Schema keywords that are not supported are ignored. With `strict`, the grammar is refused when
    # it is compiled.
    return lark.write_json(schema, is_lenient=not tool["function"].get("strict"))


def write_objects(lark: Lark, tools: Tools) -> str:
    """Add a rule for one call of any of the tools as a JSON object, and return its name."""
    objects = []
    for index, tool in enumerate(tools):
        name = json.dumps(tool["function"]["name"])
        head = lark.write_text(f'{{"name": {name}, "arguments": ')
        arguments = lark.add(f"arguments_{index}", write_value(lark, tool, get_parameters(tool)))
        objects.append(lark.add(f"object_{index}", f'{head} {arguments} "}}"'))
    return lark.add("object", " | ".join(objects))


def repeat(call: str, separator: str, is_single: bool) -> str:
    """Return a grammar expression for one tool call or, unless `is_single`, for one or more."""
    return call if is_single else f"{call} ({separator} {call})*"
