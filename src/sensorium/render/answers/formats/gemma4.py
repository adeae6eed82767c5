"""Reads and constrains the tool calls and the reasoning of Gemma 4.

A call is `<|tool_call>call:name{key:<|"|>text<|"|>,n:3}<tool_call|>`: keys are bare, texts stand
between two tokens that can't be escaped, and the rest is as in JSON. The arguments are returned as
JSON while they are read; brackets that don't match are corrected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from sensorium.render.answers.answer import AnswerBuffer
from sensorium.render.answers.syntax import (
    NAME,
    CallFormat,
    CallReader,
    ReasoningFormat,
    ShortText,
    Step,
    Tools,
    get_parameters,
    read_closing,
    repeat,
)

if TYPE_CHECKING:
    from sensorium.render.answers.lark import Lark, Schema

_OPEN = "<|tool_call>"
_CLOSE = "<tool_call|>"
_QUOTE = '<|"|>'
_CHANNEL = "<|channel>"
_END_OF_CHANNEL = "<channel|>"
_MAX_WORD = 192  # characters of a key, or of a value that is no text
_MAX_DEPTH = 64
_HEAD = re.compile(rf"\s*call:\s*({NAME})\s*")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null", "": "null"}
_PLAIN_TEXT = re.compile(r'[^<"\\\x00-\x1f]+')
_MAX_SCHEMA_DEPTH = 32
_BARE_KEY = re.compile(r"[\w\-. ]*\w")
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COMMA = ' "," '
# A text must not contain the token that ends it. So it has no "<|", with which special tokens
# begin, and no "<" at all where its characters are counted.
_TEXT = r"([^<]|<+[^<|])*"
_CHARACTER = "[^<]"
_Place = Literal["head", "key", "value", "text", "string", "after", "end"]


class Gemma4Call(CallReader, tag="gemma4"):
    """A reader of one tool call in the format of Gemma 4."""

    place: _Place = "head"  # what is being read
    # The beginning of a head, a key, a bare value, the end of a text or the closing tag.
    word: ShortText = ""
    # The brackets that are open.
    nesting: Annotated[str, Meta(max_length=_MAX_DEPTH, pattern=r"^[\[{]*$")] = ""
    has_comma: bool = False  # one was read, and is given out with what follows it
    is_escaped: bool = False

    def __post_init__(self) -> None:
        if self.place in ("key", "value", "text", "string", "after") and not self.nesting:
            raise ValueError(
                "the state of a tool call inside its arguments must have an open bracket"
            )

    def step(self, character: str, buffer: AnswerBuffer) -> Step:
        return _STEPS[self.place](self, character, buffer)

    @property
    def rest(self) -> str:
        if self.place == "head":
            return self.opening + self.word
        return self.word if self.place == "end" else ""

    def count_plain(self, text: str, start: int) -> int:
        if self.place != "text" or self.word:
            return 0
        found = _PLAIN_TEXT.match(text, start)
        return 0 if found is None else found.end() - start

    def _step_head(self, character: str, buffer: AnswerBuffer) -> Step:
        if character == "{":
            found = _HEAD.fullmatch(self.word)
            if found is None:
                return Step.BEFORE
            buffer.begin_call(found.group(1))
            self.word, self.opening = "", ""
            return self._open("{", buffer)
        if len(self.word) >= _MAX_WORD:
            return Step.BEFORE
        self.word += character
        return Step.ON

    def _step_key(self, character: str, buffer: AnswerBuffer) -> Step:
        if not self.word and (character.isspace() or character == ","):
            return Step.ON
        if not self.word and character in "}]":
            return self._pop(buffer)
        if character == ":" and not _is_open_quote(self.word):
            self._add_next(json.dumps(_unquote(self.word), ensure_ascii=False) + ": ", buffer)
            self.word, self.place = "", "value"
            return Step.ON
        return self._add_to_word(character, buffer)

    def _step_value(self, character: str, buffer: AnswerBuffer) -> Step:
        if not self.word:
            if character.isspace():
                return Step.ON
            if character in "{[":
                return self._open(character, buffer)
            if character == "]" and self.nesting[-1] == "[":
                return self._pop(buffer)
            if character == '"':
                self._add_next('"', buffer)
                self.place = "string"
                return Step.ON
        if character in ",}]":
            self._add_next(_convert(self.word.strip()), buffer)
            self.word, self.place = "", "after"
            return self._step_after(character, buffer)
        if self.word + character == _QUOTE:
            self._add_next('"', buffer)
            self.word, self.place = "", "text"
            return Step.ON
        return self._add_to_word(character, buffer)

    def _step_text(self, character: str, buffer: AnswerBuffer) -> Step:
        """Read one character of a text between two `<|"|>` tokens."""
        word, self.word = self.word + character, ""
        if word == _QUOTE:
            buffer.add_arguments('"')
            self.place = "after"
        elif _QUOTE.startswith(word):
            self.word = word  # it may be the beginning of the token that ends the text
        else:
            buffer.add_arguments(json.dumps(word[0], ensure_ascii=False)[1:-1])
            for later in word[1:]:
                self._step_text(later, buffer)
        return Step.ON

    def _step_string(self, character: str, buffer: AnswerBuffer) -> Step:
        """Read one character of a string in double quotes, which some models write for a text."""
        buffer.add_arguments(json.dumps(character)[1:-1] if character < " " else character)
        if character == '"' and not self.is_escaped:
            self.place = "after"
        self.is_escaped = character == "\\" and not self.is_escaped
        return Step.ON

    def _step_after(self, character: str, buffer: AnswerBuffer) -> Step:
        if character.isspace():
            return Step.ON
        if character in "}]":
            return self._pop(buffer)
        if character != ",":
            return self._break_off(character, buffer)
        self.has_comma = True
        self.place = "key" if self.nesting[-1] == "{" else "value"
        return Step.ON

    def _step_end(self, character: str, _: AnswerBuffer) -> Step:
        """Read one character of the closing tag, which may be missing."""
        self.word, step = read_closing(_CLOSE, self.word, character)
        return step

    def _break_off(self, character: str, buffer: AnswerBuffer) -> Step:
        """End incomplete arguments, because no valid value follows, and read a closing tag."""
        self.place, self.word = "end", ""
        return self._step_end(character, buffer)

    def _add_to_word(self, character: str, buffer: AnswerBuffer) -> Step:
        if len(self.word) >= _MAX_WORD:
            return self._break_off(character, buffer)
        self.word += character
        if not self.word.endswith(_CLOSE):
            return Step.ON
        self.word, self.place = "", "end"
        return Step.LAST

    def _open(self, bracket: str, buffer: AnswerBuffer) -> Step:
        if len(self.nesting) >= _MAX_DEPTH:
            return self._break_off(bracket, buffer)
        self._add_next(bracket, buffer)
        self.nesting += bracket
        self.place = "key" if bracket == "{" else "value"
        return Step.ON

    def _pop(self, buffer: AnswerBuffer) -> Step:
        buffer.add_arguments("}" if self.nesting[-1] == "{" else "]")
        self.nesting, self.has_comma = self.nesting[:-1], False
        self.place = "after" if self.nesting else "end"
        return Step.ON

    def _add_next(self, text: str, buffer: AnswerBuffer) -> None:
        buffer.add_arguments(", " + text if self.has_comma else text)
        self.has_comma = False


# what is being read -> the method that reads a character of it
_STEPS = {
    "head": Gemma4Call._step_head,
    "key": Gemma4Call._step_key,
    "value": Gemma4Call._step_value,
    "text": Gemma4Call._step_text,
    "string": Gemma4Call._step_string,
    "after": Gemma4Call._step_after,
    "end": Gemma4Call._step_end,
}


def _convert(word: str) -> str:
    """Return the JSON of a value without quotes; one that is no JSON becomes a string."""
    if _SCALAR.fullmatch(word):
        return word
    return _PYTHON_WORDS.get(word) or json.dumps(word, ensure_ascii=False)


def _is_open_quote(word: str) -> bool:
    return any(
        word.startswith(quote) and not (len(word) > len(quote) and word.endswith(quote))
        for quote in (_QUOTE, '"')
    )


def _unquote(word: str) -> str:
    word = word.strip()
    for quote in (_QUOTE, '"'):
        if len(word) >= 2 * len(quote) and word.startswith(quote) and word.endswith(quote):
            return word[len(quote) : -len(quote)]
    return word


class _ArgumentsGrammar:
    """A builder of the grammar for one tool's arguments, from their JSON schema.

    It follows types, enumerations, objects, lists, alternatives, references, and bounds of numbers,
    texts and lists. It ignores patterns and formats.
    """

    def __init__(self, lark: Lark, parameters: Mapping[str, Any]) -> None:
        self._lark = lark
        self._root = parameters
        self._quote = lark.write_text(_QUOTE)
        self._references: dict[str, str] = {}
        self._any: str | None = None

    def add_arguments(self) -> str:
        return self._add_object(self._root, 0)

    def _add(self, schema: Schema | Any, depth: int) -> str:
        if not isinstance(schema, Mapping) or depth > _MAX_SCHEMA_DEPTH:
            return self._add_any()
        if isinstance(schema.get("$ref"), str):
            return self._add_reference(schema["$ref"], depth)
        if isinstance(schema.get("enum"), list):
            return self._add_choice([self._write(value) for value in schema["enum"]])
        if "const" in schema:
            return self._write(schema["const"])
        for name in ("anyOf", "oneOf", "allOf"):
            entries = schema.get(name)
            if isinstance(entries, list) and entries and (name != "allOf" or len(entries) == 1):
                return self._add_choice([self._add(entry, depth + 1) for entry in entries])
        types = _get_types(schema)
        if not types:
            return self._add_any()
        return self._add_choice([self._add_type(kind, schema, depth) for kind in types])

    def _add_type(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "object":
            return self._add_object(schema, depth)
        if kind == "array":
            item = self._add(schema.get("items", True), depth + 1)
            return self._add_list(item, schema.get("minItems"), schema.get("maxItems"))
        if kind == "string":
            return self._add_text(schema.get("minLength"), schema.get("maxLength"))
        bounds = {name: schema[name] for name in _BOUNDS if name in schema}
        return self._lark.add_new("scalar", self._lark.write_json({"type": kind, **bounds}))

    def _add_object(self, schema: Mapping[str, Any], depth: int) -> str:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            return self._add_map(schema.get("additionalProperties", True), depth)
        required = schema.get("required") or ()
        entries = [
            (f"{self._write_key(key)} {self._add(value, depth + 1)}", key in required)
            for key, value in properties.items()
        ]
        body = self._lark.add_ordered("field", entries, separator=",")
        return self._lark.add_new("object", f'"{{" {body} "}}"')

    def _add_map(self, values: Any, depth: int) -> str:
        if values is False:
            return self._lark.add_new("object", '"{}"')
        entry = f'/[a-zA-Z_][a-zA-Z0-9_]{{0,31}}/ ":" {self._add(values, depth + 1)}'
        return self._lark.add_new("object", f'"{{" ({entry} ("," {entry})*)? "}}"')

    def _add_list(self, item: str, least: Any = None, most: Any = None) -> str:
        low, high = self._get_bounds(least, most, 8)
        if high == 0:
            return self._lark.add_new("list", '"[]"')
        more = f'("," {item}){{{max(low - 1, 0)},{"" if high is None else high - 1}}}'
        body = f"{item} {more}"
        return self._lark.add_new("list", f'"[" {body} "]"' if low else f'"[" ({body})? "]"')

    def _add_text(self, least: Any = None, most: Any = None) -> str:
        low, high = self._get_bounds(least, most, 1)
        text = _TEXT
        if low or high is not None:
            text = f"{_CHARACTER}{{{low},{'' if high is None else high}}}"
        return self._lark.add_new("text", f"{self._quote} /{text}/ {self._quote}")

    def _get_bounds(self, least: Any, most: Any, share: int) -> tuple[int, int | None]:
        """Return the least and the greatest length that the schema's `least` and `most` allow.

        If the schema has no `most`, the greatest length is the grammar's `max_string_length`
        divided by `share`, or `None` if there is no such limit either.
        """
        low = least if isinstance(least, int) and least > 0 else 0
        limit = self._lark.max_string_length
        if isinstance(most, int):
            return low, most
        return low, None if limit is None else max(low, limit // share, 1)

    def _add_any(self) -> str:
        if self._any is None:
            self._any = self._lark.add_new("any", "")
            scalar = self._lark.write_json({"type": ["number", "boolean", "null"]})
            kinds = (self._lark.add_new("scalar", scalar), self._add_text())
            nested = (self._add_list(self._any), self._add_map(True, 0))
            self._lark.add(self._any, " | ".join((*kinds, *nested)))
        return self._any

    def _add_reference(self, reference: str, depth: int) -> str:
        if reference not in self._references:
            name = self._lark.add_new("reference", "")
            self._references[reference] = name
            self._lark.add(name, self._add(_resolve(self._root, reference), depth + 1))
        return self._references[reference]

    def _add_choice(self, bodies: Sequence[str]) -> str:
        return bodies[0] if len(bodies) == 1 else self._lark.add_new("choice", " | ".join(bodies))

    def _write(self, value: Any) -> str:
        """Return a grammar expression for exactly this JSON value, as Gemma 4 writes it."""
        if isinstance(value, str):
            return f"{self._quote} {self._lark.write_text(value)} {self._quote}"
        if isinstance(value, list):
            return f'"[" {_COMMA.join(map(self._write, value))} "]"'
        if isinstance(value, Mapping):
            fields = (f"{self._write_key(key)} {self._write(value[key])}" for key in value)
            return f'"{{" {_COMMA.join(fields)} "}}"'
        return self._lark.write_text(json.dumps(value))

    def _write_key(self, key: str) -> str:
        if _BARE_KEY.fullmatch(key):
            return self._lark.write_text(f"{key}:")
        return f'{self._quote} {self._lark.write_text(key)} {self._quote} ":"'


def _get_types(schema: Mapping[str, Any]) -> list[str]:
    kind = schema.get("type")
    if kind is None:
        kind = "object" if "properties" in schema else "array" if "items" in schema else []
    kinds = [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else []
    return [entry for entry in kinds if entry in _TYPES]


def _resolve(root: Mapping[str, Any], reference: str) -> Any:
    """Return the schema that a `$ref` names, or `True` (any value) if there is none."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name, True) if isinstance(found, Mapping) else True
    return found if reference.startswith("#") else True


def _write_calls(lark: Lark, tools: Tools, is_single: bool) -> str:
    opening, closing = lark.write_text(_OPEN), lark.write_text(_CLOSE)
    calls = []
    for index, tool in enumerate(tools):
        name = lark.write_text(f"call:{tool['function']['name']}")
        arguments = _ArgumentsGrammar(lark, get_parameters(tool)).add_arguments()
        calls.append(lark.add(f"call_{index}", f"{name} {arguments}"))
    call = lark.add("call", f"{opening} ({' | '.join(calls)}) {closing}")
    return repeat(call, "", is_single)


CALLS = CallFormat(
    name="gemma4",
    rank=0,
    tags=(_OPEN,),
    special_tokens=(_OPEN, _CLOSE, _QUOTE),
    reader=Gemma4Call,
    write_calls=_write_calls,
    is_used_by=lambda vocabulary, template: _OPEN in vocabulary or _OPEN in template,
)
REASONING = ReasoningFormat(
    name="gemma4",
    rank=0,
    open=f"{_CHANNEL}thought\n",
    close=_END_OF_CHANNEL,
    is_used_by=lambda vocabulary, template: _CHANNEL in vocabulary or _CHANNEL in template,
    is_anywhere=True,
    special_tokens=(_CHANNEL, _END_OF_CHANNEL),
)
