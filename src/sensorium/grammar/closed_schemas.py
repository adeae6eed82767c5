"""Closes the objects in a JSON schema: keys that the schema does not declare are not allowed.

JSON Schema allows every key that a schema does not mention. Users of other servers expect the
opposite, and a model that may invent keys often never stops. So an object with declared keys gets
`additionalProperties: false`, unless the schema itself has a rule for other keys.

A schema can declare the keys of one object in several places (`allOf`, or `anyOf` next to
`properties`). Such an object is closed only at the outermost of these places, and allows the keys
that any of the places declares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Schema = Any  # an object, true or false; the compiler refuses any other value that a client sends
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # name -> schema
_SINGLE_SCHEMAS = ("items", "additionalItems", "additionalProperties")
_BRANCHES = ("allOf", "anyOf", "oneOf")
_OWN_RULES = ("additionalProperties", "unevaluatedProperties")


def close_objects(root: Schema) -> Schema:
    """Return a copy of a schema with closed objects; raise `RecursionError` if it is too deep."""
    return _Closing(root).close(root)


def resolve_reference(root: Schema, reference: str) -> Schema | None:
    """Return the part of `root` that a `$ref` such as "#/$defs/name" points to; None if absent."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            return None
    return found


class _Closing:
    """A pass over one JSON schema that closes its objects."""

    def __init__(self, root: Schema) -> None:
        self._root = root  # references are resolved within it

    def close(self, schema: Schema, *, is_part: bool = False) -> Schema:
        """Return a copy of a schema in which undeclared keys are forbidden in objects.

        With `is_part`, the schema is a branch of another schema (of its `allOf`, say) and describes
        the same object. Then the outer schema closes that object, and only the objects inside it
        are closed here.
        """
        if not isinstance(schema, Mapping):
            return schema
        schema = _move_reference(schema)
        result = _map_children(schema, self.close)
        for key in _BRANCHES:
            if isinstance(schema.get(key), list):
                are_parts = is_part or key == "allOf" or _has_keys(schema)
                result[key] = [self._close_branch(entry, are_parts) for entry in schema[key]]
        names = None if is_part else self._collect_names(schema)
        if names is not None:
            own = result.get("properties", {})
            result["properties"] = {**own, **{name: True for name in names if name not in own}}
            result["additionalProperties"] = False
        return result

    def _close_branch(self, branch: Schema, is_part: bool) -> Schema:
        """Return a closed copy of one branch of `allOf`, `anyOf` or `oneOf`; see `close`."""
        # A copy of the definition takes the place of a `$ref`: the definition may also be used
        # elsewhere, and is closed there.
        if is_part and isinstance(branch, Mapping) and isinstance(branch.get("$ref"), str):
            found = resolve_reference(self._root, branch["$ref"])
            if isinstance(found, Mapping):
                rest = {key: value for key, value in branch.items() if key != "$ref"}
                branch = {**found, **rest}
        return self.close(branch, is_part=is_part)

    def _collect_names(self, schema: Mapping[str, Any]) -> list[str] | None:
        """Return the keys that an object may have, or `None` if it must not be closed.

        An object is not closed if its schema declares no keys, or if the schema or one of its
        branches has a rule of its own for other keys.
        """
        if any(key in schema for key in _OWN_RULES) or not _has_keys(schema):
            return None
        of_branches = self._collect_branches(schema)
        if of_branches is None:
            return None
        is_declared = of_branches or "properties" in schema or "patternProperties" in schema
        return list(dict.fromkeys(_list_names(schema) + of_branches)) if is_declared else None

    def _collect_branches(self, schema: Mapping[str, Any]) -> list[str] | None:
        """Return all keys that the branches declare, or `None` if one has a rule for other keys."""
        names: list[str] = []
        for branch in (entry for key in _BRANCHES for entry in _get_list(schema, key)):
            if isinstance(branch, Mapping) and isinstance(branch.get("$ref"), str):
                branch = resolve_reference(self._root, branch["$ref"])
            if not isinstance(branch, Mapping):
                continue
            has_own_rule = any(key in branch for key in (*_OWN_RULES, "patternProperties"))
            below = None if has_own_rule else self._collect_branches(branch)
            if below is None:
                return None
            names += _list_names(branch) + below
        return names


def _map_children(schema: Mapping[str, Any], change: Callable[[Schema], Schema]) -> dict[str, Any]:
    """Return a copy of a schema with `change` applied to the schemas directly inside it.

    These are its properties, list items and definitions, but not the branches of `allOf`, `anyOf`
    and `oneOf`.
    """
    result = dict(schema)
    for key in _SCHEMA_MAPS:
        if isinstance(schema.get(key), Mapping):
            result[key] = {name: change(value) for name, value in schema[key].items()}
    for key in _SINGLE_SCHEMAS:
        if isinstance(schema.get(key), Mapping):
            result[key] = change(schema[key])
    for key in ("prefixItems", "items"):  # in older drafts `items` holds the prefix
        if isinstance(schema.get(key), list):
            result[key] = [change(value) for value in schema[key]]
    return result


def _has_keys(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema declares keys of an object, or has `allOf` parts that may do so."""
    properties = schema.get("properties")
    is_pattern = isinstance(schema.get("patternProperties"), Mapping)
    return isinstance(properties, Mapping) or is_pattern or isinstance(schema.get("allOf"), list)


def _list_names(schema: Mapping[str, Any]) -> list[str]:
    """Return the keys that are listed in the `properties` or `required` of a schema."""
    properties = schema.get("properties")
    names = list(properties) if isinstance(properties, Mapping) else []
    return names + [name for name in _get_list(schema, "required") if isinstance(name, str)]


def _get_list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _move_reference(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Move a schema's `$ref` into `allOf` if the schema also declares keys of the same object."""
    if not isinstance(schema.get("$ref"), str) or not _has_keys(schema):
        return schema
    rest = {key: value for key, value in schema.items() if key != "$ref"}
    return {**rest, "allOf": [*_get_list(schema, "allOf"), {"$ref": schema["$ref"]}]}
