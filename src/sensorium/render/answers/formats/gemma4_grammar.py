"""From a JSON schema to a grammar for the values that Gemma 4 writes in its calls.

Types, enumerations, objects, lists, alternatives and references are followed, and bounds of
numbers, texts and lists; what else a schema says (patterns, formats) is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sensorium.render.answers.formats.gemma4 import QUOTE
from sensorium.render.answers.lark import Lark, Schema

_MAX_DEPTH = 32
_BARE_KEY = re.compile(r"[\w\-. ]*\w")
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COMMA = ' "," '
# No text may hold what ends it: here, nothing that begins like a special token, and where
# characters are counted, nothing that may begin so.
_TEXT = r"([^<]|<+[^<|])*"
_CHARACTER = "[^<]"


class Gemma4Grammar:
    """Of the arguments of one tool."""

    def __init__(self, lark: Lark, parameters: Mapping[str, Any]) -> None:
        self._lark = lark
        self._root = parameters
        self._quote = lark.write_text(QUOTE)
        self._references: dict[str, str] = {}
        self._any: str | None = None

    def add_arguments(self) -> str:
        return self._add_object(self._root, 0)

    def _add(self, schema: Schema | Any, depth: int) -> str:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return self._add_any()
        if isinstance(schema.get("$ref"), str):
            return self._add_reference(schema["$ref"], depth)
        if "const" in schema or isinstance(schema.get("enum"), list):
            values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]]
            return self._add_choice([self._write(value) for value in values])
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

    def _add_list(self, item: str, least: Any, most: Any) -> str:
        low = least if isinstance(least, int) and least > 0 else 0
        high = most if isinstance(most, int) else self._get_most(low, 8)
        if high == 0:
            return self._lark.add_new("list", '"[]"')
        more = f'("," {item}){{{max(low - 1, 0)},{"" if high is None else high - 1}}}'
        body = f"{item} {more}"
        return self._lark.add_new("list", f'"[" {body} "]"' if low else f'"[" ({body})? "]"')

    def _add_text(self, least: Any = None, most: Any = None) -> str:
        low = least if isinstance(least, int) and least > 0 else 0
        high = most if isinstance(most, int) else self._get_most(low, 1)
        text = _TEXT
        if low or high is not None:
            text = f"{_CHARACTER}{{{low},{'' if high is None else high}}}"
        return self._lark.add_new("text", f"{self._quote} /{text}/ {self._quote}")

    def _get_most(self, least: int, share: int) -> int | None:
        """Return the bound of what the schema leaves free; `None` where answers are not bounded."""
        limit = self._lark.max_string_length
        return None if limit is None else max(least, limit // share, 1)

    def _add_any(self) -> str:
        if self._any is None:
            self._any = self._lark.add_new("any", "")
            scalar = self._lark.write_json({"type": ["number", "boolean", "null"]})
            kinds = (self._lark.add_new("scalar", scalar), self._add_text())
            nested = (self._add_list(self._any, None, None), self._add_map(True, 0))
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
        """A value as the model writes it."""
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
    """What a reference within the schema means; anything, if it means nothing."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name, True) if isinstance(found, Mapping) else True
    return found if reference.startswith("#") else True
