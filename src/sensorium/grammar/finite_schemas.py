"""Narrows a JSON schema to answers of bounded length, so that every answer ends.

A small model that may write a string, a list or a number of any length often never ends it. The
narrowed schema allows the answers of the original schema, except the longest ones. Limits that the
schema itself sets are kept.

Limits are set for strings, the digits of numbers, the entries of lists and of objects with free
keys, and how often a definition may contain itself. Strings with a pattern or a format get a higher
limit, since a value that fits them may have to be long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sensorium.grammar.closed_schemas import Schema, resolve_reference

_MAX_DEPTH = 2  # lists that are nested this deep or deeper have at most one entry
_MAX_SELF_REFERENCES = 4
_MAX_PATTERN_LENGTH = 256
_MAX_INTEGER = 10**15 - 1  # every JSON reader represents it exactly
_MAX_NUMBER = 10**9
_FRACTION = 0.001  # numbers are multiples of it, which limits their digits
_WORDS = r"^\S+(\s\S+)*$"  # words with single whitespace characters between them
_NO_WORDS_OR_SOME = r"^(\S+(\s\S+)*)?$"
_KEY = r"^[A-Za-z_][A-Za-z0-9_]{0,15}$"
_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Type -> keywords that imply it in a schema without `type`.
_TYPE_HINTS = {
    "object": ("properties", "patternProperties", "additionalProperties", "required"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": _NUMERIC,
}
_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf")
_DEFINITIONS = ("$defs", "definitions")


def make_finite(root: Schema, max_string_length: int) -> Schema:
    """Return a narrowed schema, in which `max_string_length` is the default limit for strings.

    Raise `RecursionError` if the schema is nested too deeply.
    """
    narrowing = _Narrowing(root, max_string_length)
    narrowed = narrowing.narrow(root, 0, 0)
    return {**narrowed, "$defs": narrowing.definitions} if narrowing.definitions else narrowed


class _Narrowing:
    """A pass over one JSON schema that adds limits, so that every answer ends.

    Each place in the schema has a `depth`, the number of lists and free-key objects around it, and
    a `level`, the number of definitions around it that contain themselves.
    """

    def __init__(self, root: Schema, max_string_length: int) -> None:
        self._root = root
        self._max_string_length = max_string_length
        # The most entries of a list or an object with free keys at depth 0, at depth 1, and deeper.
        # They depend on the limit for strings.
        self._max_entries = (max(1, max_string_length // 8), max(1, max_string_length // 16), 1)
        self._recursive = _find_recursive(root)
        self.definitions: dict[str, Schema] = {}  # name -> narrowed schema
        self._names: dict[tuple[str, int, int], str] = {}  # (reference, depth, level) -> name

    def narrow(self, schema: Schema, depth: int, level: int, *, is_part: bool = False) -> Schema:
        """Return a copy of a schema that allows only answers of bounded length.

        With `is_part`, the schema is a branch of another schema and describes the same object; then
        the outer schema limits which other keys the object may have.
        """
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
                    self.narrow(entry, depth, level, is_part=are_parts) for entry in schema[key]
                ]

    def _define(self, reference: str, depth: int, level: int) -> str | None:
        """Return a `$ref` to a narrowed copy of the definition that `reference` points to.

        Return `None` if a definition would contain itself too often.
        """
        target = resolve_reference(self._root, reference)
        if target is None:
            return reference  # the compiler will report what is wrong with it
        level += reference in self._recursive
        if level > _MAX_SELF_REFERENCES:
            return None
        key = (reference, min(depth, _MAX_DEPTH), level)
        if key not in self._names:
            name = self._names[key] = f"narrowed_{len(self._names)}"
            self.definitions[name] = self.narrow(target, depth, level)
        return f"#/$defs/{self._names[key]}"

    def _make_any(self, depth: int) -> dict[str, Any]:
        """Return a schema that allows a bounded value of any JSON type.

        From depth `_MAX_DEPTH` on, it allows neither lists nor objects.
        """
        is_nested = depth < _MAX_DEPTH
        kinds = ["string", "number", "boolean", "null", *(("array", "object") * is_nested)]
        return {"anyOf": [self.narrow({"type": kind}, depth, 0) for kind in kinds]}

    def _bound_scalars(self, schema: dict[str, Any], types: list[str]) -> None:
        if "string" in types:
            is_free = "pattern" not in schema and "format" not in schema
            most = self._max_string_length if is_free else _MAX_PATTERN_LENGTH
            least = _get_count(schema, "minLength")
            schema.setdefault("maxLength", max(most, least))
            # The compiler can't combine a pattern with a minimum length, or with a large maximum.
            if is_free and least <= 1 and _get_count(schema, "maxLength") <= _MAX_PATTERN_LENGTH:
                schema["pattern"] = _WORDS if schema.pop("minLength", 0) else _NO_WORDS_OR_SOME
        if "number" in types:
            schema.setdefault("multipleOf", _FRACTION)
            _bound_range(schema, _MAX_NUMBER)
        elif "integer" in types:
            _bound_range(schema, _MAX_INTEGER)

    def _bound_list(self, schema: dict[str, Any], depth: int, level: int) -> None:
        prefix = schema.get("prefixItems")
        if not isinstance(prefix, list):  # in older drafts `items` holds the prefix
            prefix = schema["items"] if isinstance(schema.get("items"), list) else None
        if prefix is not None:
            key = "prefixItems" if "prefixItems" in schema else "items"
            schema[key] = [self.narrow(entry, depth + 1, level) for entry in prefix]
            schema.setdefault("maxItems", max(len(prefix), _get_count(schema, "minItems")))
            return
        schema["items"] = self.narrow(schema.get("items", True), depth + 1, level)
        self._bound_entries(schema, "Items", depth)

    def _bound_entries(self, schema: dict[str, Any], noun: str, depth: int) -> None:
        """Limit the entries of a list ("Items") or object ("Properties") that has no limit yet."""
        most = self._max_entries[min(depth, _MAX_DEPTH)]
        schema.setdefault(f"max{noun}", max(most, _get_count(schema, f"min{noun}")))

    def _bound_object(
        self, schema: dict[str, Any], depth: int, level: int, *, is_part: bool
    ) -> None:
        """Limit the keys of an object, and narrow the schemas of its values; `schema` is changed.

        If the schema declares keys, it allows no others. If not, it allows a few others with short
        names.
        """
        is_joined = any(key in schema for key in _APPLICATORS)
        for key in ("properties", "patternProperties"):
            if isinstance(schema.get(key), Mapping):
                schema[key] = {
                    # If another part describes the key, its value is limited there.
                    name: value if value is True and is_joined else self.narrow(value, depth, level)
                    for name, value in schema[key].items()
                }
        if is_part:  # the outer schema decides about other keys
            return
        values = schema.get("additionalProperties", True)
        if schema.get("properties"):
            schema.pop("patternProperties", None)
        elif not schema.get("patternProperties"):
            if values is False:
                return
            schema.pop("properties", None)
            schema["patternProperties"] = {_KEY: self.narrow(values, depth + 1, level)}
        schema["additionalProperties"] = False
        if schema.get("patternProperties"):
            self._bound_entries(schema, "Properties", depth)


def _get_types(schema: Mapping[str, Any]) -> list[str]:
    """Return the JSON types that a schema allows, inferred from keywords if it has no `type`."""
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
    """Set the missing bounds of a number in `schema`, in place.

    A missing minimum becomes `-most`, or `maximum - most` if the maximum is negative. A missing
    maximum becomes `most`, or `minimum + most` if the minimum is positive.
    """
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
    """Return the `$ref` values in a schema that point to definitions which contain themselves.

    References on a path between two such definitions are included.
    """
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
    """Return the nodes of a graph from which a walk may never end.

    `forward` has the targets of each node's edges, and `backward` the sources.
    """
    num_open = {node: len(targets) for node, targets in forward.items()}
    waiting = [node for node, number in num_open.items() if number == 0]
    for node in waiting:  # the list grows meanwhile, but each node enters it at most once
        for source in backward[node]:
            num_open[source] -= 1
            if num_open[source] == 0:
                waiting.append(source)
    return frozenset(num_open) - frozenset(waiting)


def _list_references(schema: Schema) -> list[str]:
    """Return the `$ref` values in a schema, but not those inside its `$defs` or `definitions`."""
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
