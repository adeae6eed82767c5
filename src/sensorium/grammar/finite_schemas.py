"""Narrows a JSON schema to answers of bounded length, so that every answer ends.

A small model that may write a free string, a list without a limit or a number of any length often
never closes it. The narrowed schema allows a part of what the schema allows, never anything else:
what it leaves out is only length. A limit that the schema sets itself is kept.

Bounded are strings, the digits of numbers, the entries of lists and of objects with free keys, and
how often a definition may contain itself. Patterns and formats of the schema's own bound their
strings less tightly, since a value that they demand may be long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sensorium.grammar.closed_schemas import Schema, resolve_reference

_MAX_DEPTH = 2  # of lists in lists, from which on they have one entry
_MAX_SELF_REFERENCES = 4
_MAX_PATTERN_LENGTH = 256
_MAX_INTEGER = 10**15 - 1  # every JSON reader holds it exactly
_MAX_NUMBER = 10**9
_FRACTION = 0.001  # numbers are multiples of it, which bounds their digits
_WORDS = r"^\S+(\s\S+)*$"  # without runs of blanks
_NO_WORDS_OR_SOME = r"^(\S+(\s\S+)*)?$"
_KEY = r"^[A-Za-z_][A-Za-z0-9_]{0,15}$"
_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Keywords that tell the type of a value where `type` does not.
_TYPE_HINTS = {
    "object": ("properties", "patternProperties", "additionalProperties", "required"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": _NUMERIC,
}
_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf")
_DEFINITIONS = ("$defs", "definitions")


def make_finite(root: Schema, max_string_length: int) -> Schema:
    """Return the narrowed schema. `RecursionError` if it is nested too deeply."""
    return _Narrowing(root, max_string_length).make()


class _Narrowing:
    """One pass over the schema `root`.

    A place in the schema has a `depth`, the number of lists and maps around it, and a `level`, the
    number of definitions around it that contain themselves.
    """

    def __init__(self, root: Schema, max_string_length: int) -> None:
        self._root = root
        self._max_string_length = max_string_length
        # Of a list, of a list in it, and of all that lie deeper: as short as the strings are.
        self._max_entries = (max(1, max_string_length // 8), max(1, max_string_length // 16), 1)
        self._recursive = _find_recursive(root)
        self._definitions: dict[str, Schema] = {}  # name -> narrowed schema
        self._names: dict[tuple[str, int, int], str] = {}  # (reference, depth, level) -> name

    def make(self) -> Schema:
        narrowed = self._narrow(self._root, 0, 0)
        if not self._definitions:
            return narrowed
        return {**narrowed, "$defs": self._definitions}

    def _narrow(self, schema: Schema, depth: int, level: int, *, is_part: bool = False) -> Schema:
        """`is_part`: the keys of an object are bounded by the schema around this one."""
        if schema is True:
            return self._make_any(depth)
        if not isinstance(schema, Mapping) or "enum" in schema or "const" in schema:
            return schema
        result = {key: value for key, value in schema.items() if key not in _DEFINITIONS}
        types = _get_types(schema)
        if not types and not any(key in schema for key in _APPLICATORS):
            return {**self._make_any(depth), **result}
        if isinstance(schema.get("$ref"), str):
            name = self._define(schema["$ref"], depth, level)
            if name is None:
                return False
            result["$ref"] = name
        self._narrow_branches(result, depth, level, is_part=is_part)
        self._bound_scalars(result, types)
        if types:
            result["type"] = types if len(types) > 1 else types[0]
        if "array" in types:
            self._bound_list(result, depth, level)
        if "object" in types:
            self._bound_object(result, depth, level, is_part=is_part)
        return result

    def _narrow_branches(
        self, schema: dict[str, Any], depth: int, level: int, *, is_part: bool
    ) -> None:
        for key in ("allOf", "anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                are_parts = is_part or key == "allOf" or "properties" in schema
                schema[key] = [
                    self._narrow(entry, depth, level, is_part=are_parts) for entry in schema[key]
                ]

    def _define(self, reference: str, depth: int, level: int) -> str | None:
        """Return a reference to the narrowed definition; `None` where it would go too deep."""
        target = resolve_reference(self._root, reference)
        if target is None:
            return reference  # the compiler says what is wrong with it
        level += reference in self._recursive
        if level > _MAX_SELF_REFERENCES:
            return None
        key = (reference, min(depth, _MAX_DEPTH), level)
        if key not in self._names:
            name = self._names[key] = f"narrowed_{len(self._names)}"
            self._definitions[name] = self._narrow(target, depth, level)
        return f"#/$defs/{self._names[key]}"

    def _make_any(self, depth: int) -> dict[str, Any]:
        """Return a schema for a value of any kind, nested no deeper than lists in lists."""
        is_nested = depth < _MAX_DEPTH
        kinds = ["string", "number", "boolean", "null", *(("array", "object") * is_nested)]
        return {"anyOf": [self._narrow({"type": kind}, depth, 0) for kind in kinds]}

    def _bound_scalars(self, schema: dict[str, Any], types: list[str]) -> None:
        if "string" in types:
            is_free = "pattern" not in schema and "format" not in schema
            most = self._max_string_length if is_free else _MAX_PATTERN_LENGTH
            least = _get_count(schema, "minLength")
            schema.setdefault("maxLength", max(most, least))
            # The compiler can't join a pattern with a length that must be reached, or a large one.
            if is_free and least <= 1 and _get_count(schema, "maxLength") <= _MAX_PATTERN_LENGTH:
                schema["pattern"] = _WORDS if schema.pop("minLength", 0) else _NO_WORDS_OR_SOME
        if "number" in types:
            schema.setdefault("multipleOf", _FRACTION)
            _bound_range(schema, _MAX_NUMBER)
        elif "integer" in types:
            _bound_range(schema, _MAX_INTEGER)

    def _bound_list(self, schema: dict[str, Any], depth: int, level: int) -> None:
        prefix = schema.get("prefixItems")
        if not isinstance(prefix, list):  # older drafts have it under `items`
            prefix = schema["items"] if isinstance(schema.get("items"), list) else None
        if prefix is not None:
            key = "prefixItems" if "prefixItems" in schema else "items"
            schema[key] = [self._narrow(entry, depth + 1, level) for entry in prefix]
            schema.setdefault("maxItems", max(len(prefix), _get_count(schema, "minItems")))
            return
        schema["items"] = self._narrow(schema.get("items", True), depth + 1, level)
        most = max(self._max_entries[min(depth, _MAX_DEPTH)], _get_count(schema, "minItems"))
        schema.setdefault("maxItems", most)

    def _bound_object(
        self, schema: dict[str, Any], depth: int, level: int, *, is_part: bool
    ) -> None:
        """Free keys are left out beside declared ones, and few and short on their own."""
        is_joined = any(key in schema for key in _APPLICATORS)
        for key in ("properties", "patternProperties"):
            if isinstance(schema.get(key), Mapping):
                schema[key] = {
                    # A key that another part describes is bounded there.
                    name: value
                    if value is True and is_joined
                    else self._narrow(value, depth, level)
                    for name, value in schema[key].items()
                }
        if is_part:
            return
        values = schema.get("additionalProperties", True)
        if schema.get("properties"):
            schema.pop("patternProperties", None)
        elif not schema.get("patternProperties"):
            if values is False:
                return
            schema.pop("properties", None)
            schema["patternProperties"] = {_KEY: self._narrow(values, depth + 1, level)}
        schema["additionalProperties"] = False
        if schema.get("patternProperties"):
            most = max(
                self._max_entries[min(depth, _MAX_DEPTH)], _get_count(schema, "minProperties")
            )
            schema.setdefault("maxProperties", most)


def _get_types(schema: Mapping[str, Any]) -> list[str]:
    """Return the types of a value, found by its other keywords if the schema names none."""
    types = schema.get("type")
    if isinstance(types, str):
        return [types]
    if isinstance(types, list):
        return [entry for entry in types if isinstance(entry, str)]
    hints = _TYPE_HINTS.items()
    return [kind for kind, keywords in hints if any(word in schema for word in keywords)]


def _get_count(schema: Mapping[str, Any], key: str) -> int:
    value = schema.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _bound_range(schema: dict[str, Any], most: int) -> None:
    """Give a number both bounds; the one that is missing lies far from the one that is there."""
    low = _get_bound(schema, "minimum", "exclusiveMinimum")
    high = _get_bound(schema, "maximum", "exclusiveMaximum")
    if low is None:
        schema["minimum"] = int(min(-most, (high or 0) - most))
    if high is None:
        schema["maximum"] = int(max(most, (low or 0) + most))


def _get_bound(schema: Mapping[str, Any], *keys: str) -> float | None:
    values = (schema.get(key) for key in keys)
    numbers = (v for v in values if isinstance(v, int | float) and not isinstance(v, bool))
    return next(numbers, None)


def _find_recursive(root: Schema) -> frozenset[str]:
    """Return the references whose definitions lead back to themselves, and what joins them."""
    direct: dict[str, list[str]] = {}
    waiting = _list_references(root)
    while waiting:
        reference = waiting.pop()
        if reference not in direct:
            direct[reference] = _list_references(resolve_reference(root, reference))
            waiting += direct[reference]
    reverse: dict[str, list[str]] = {reference: [] for reference in direct}
    for reference, targets in direct.items():
        for target in targets:
            reverse[target].append(reference)
    return _find_endless(direct, reverse) & _find_endless(reverse, direct)


def _find_endless(
    forward: Mapping[str, list[str]], backward: Mapping[str, list[str]]
) -> frozenset[str]:
    """Return the nodes of a graph from which a walk along `forward` need not end."""
    num_open = {node: len(targets) for node, targets in forward.items()}
    waiting = [node for node, number in num_open.items() if number == 0]
    for node in waiting:  # grows while it is walked; each node enters once
        for source in backward[node]:
            num_open[source] -= 1
            if num_open[source] == 0:
                waiting.append(source)
    return frozenset(num_open) - frozenset(waiting)


def _list_references(schema: Schema) -> list[str]:
    """Return the references in a schema, of its definitions those alone that it is itself."""
    found: list[str] = []
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            if isinstance(value.get("$ref"), str):
                found.append(value["$ref"])
            waiting += [entry for key, entry in value.items() if key not in _DEFINITIONS]
        elif isinstance(value, list):
            waiting += value
    return found
