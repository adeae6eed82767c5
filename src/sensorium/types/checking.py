"""Checks values from outside against a type, and names the first mistake by its path.

msgspec converts and checks. This module adds three things: `1.0` is accepted as an integer, because
JSON has one kind of number; the path of a mistake has the keys of mappings; and messages are in
plain words. A correct value costs no extra time: this code runs after msgspec has refused a value.
"""

from __future__ import annotations

import re
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from sensorium.types.errors import FieldPath, RequestError, UnknownFieldError

_Checked = TypeVar("_Checked")
# "Expected `int`, got `str` - at `$.stop[1]`", or "... - at `key` in `$.logit_bias`"
_PLACE = re.compile(r" - at (`key` in )?`\$([^`]*)`$")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_UNKNOWN = "Object contains unknown field "
_KIND = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_BOUND = re.compile(r"Expected `\w+` ([<>]=?) (.+)")
_LENGTH = re.compile(r"Expected `(\w+)` of length ([<>]=) (\d+)")
_NOUNS = {
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "bytes": "bytes",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_BOUNDS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}


def check(value: Any, kind: type[_Checked]) -> _Checked:
    """Return a value converted to the type `kind`.

    Raise a `RequestError` with the path of the first mistake if it does not have that type.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        first = error
    if "got `float`" in str(first):
        value = _with_integers(value, kind)
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            first = error
    raise _explain(str(first), value, kind) from first


def _with_integers(value: Any, hint: Any) -> Any:
    """Return a copy of a value in which whole floats are integers where `hint` allows no floats."""
    if isinstance(value, float):
        kinds = set(_list_members(hint))
        is_wanted = int in kinds and float not in kinds and value.is_integer()
        return int(value) if is_wanted else value
    member = _choose_member(value, hint)
    if isinstance(value, list) and member is not None:
        (entry_hint, *_) = get_args(member)
        return [_with_integers(entry, entry_hint) for entry in value]
    if isinstance(value, dict) and get_origin(member) is dict:
        return {key: _with_integers(entry, get_args(member)[1]) for key, entry in value.items()}
    if isinstance(value, dict) and member is not None:
        hints = _get_hints(member)
        return {key: _with_integers(entry, hints.get(key, Any)) for key, entry in value.items()}
    return value


def _list_members(hint: Any) -> list[Any]:
    """Return the types in a union, or a single type, without their `Annotated` metadata."""
    if get_origin(hint) is Annotated:
        return _list_members(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [member for entry in get_args(hint) for member in _list_members(entry)]
    return [hint]


def _choose_member(value: Any, hint: Any) -> Any:
    """Return the first type in `hint` that fits the list or dictionary `value`, or `None`."""
    for member in _list_members(hint):
        origin = get_origin(member)
        if isinstance(value, list) and origin in (list, tuple):
            return member
        is_struct = isinstance(member, type) and issubclass(member, msgspec.Struct)
        if isinstance(value, dict) and (origin is dict or is_struct):
            return member
    return None


@cache
def _get_hints(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(struct, include_extras=True)


def _find_unknown(value: Any, hint: Any) -> FieldPath | None:
    """Return the path of the first unknown field in a struct that forbids these, or `None`."""
    member = _choose_member(value, hint)
    if member is None:
        return None
    if isinstance(value, list):
        entries = [(index, entry, get_args(member)[0]) for index, entry in enumerate(value)]
    elif get_origin(member) is dict:
        entries = [(key, entry, get_args(member)[1]) for key, entry in value.items()]
    else:
        hints, config = _get_hints(member), member.__struct_config__
        entries = [(key, entry, hints.get(key)) for key, entry in value.items()]
        if config.forbid_unknown_fields and (more := [key for key in value if key not in hints]):
            return (str(more[0]),)
    for key, entry, entry_hint in entries:
        if (found := _find_unknown(entry, entry_hint)) is not None:
            return (key, *found)
    return None


def _explain(message: str, value: Any, hint: Any) -> RequestError:
    if message.startswith(_UNKNOWN) and (found := _find_unknown(value, hint)) is not None:
        return UnknownFieldError(path=found)
    place = _PLACE.search(message)
    if place is None:
        path: FieldPath = ()
    else:
        message = message[: place.start()]
        steps = [name or index for name, index in _STEP.findall(place[2])]
        path, value, hint = _follow(value, hint, steps)
        if place[1]:  # the mistake is a key of the mapping at this path
            member = _choose_member(value, hint)
            key_hint = get_args(member)[0] if get_origin(member) is dict else str
            path = (*path, next(str(key) for key in value if not _is_right(key, key_hint)))
    missing = _MISSING.match(message)
    if missing is not None:
        return RequestError("is missing", path=(*path, missing[1]))
    return RequestError(_translate(message), path=path)


def _follow(value: Any, hint: Any, steps: list[str]) -> tuple[FieldPath, Any, Any]:
    """Return the full path of an error of msgspec, and the value and the type at its end.

    `steps` are msgspec's path, which leaves out the keys of dictionaries.
    """
    path: list[str | int] = []
    for step in steps:
        member = _choose_member(value, hint)
        key: str | int = step
        if isinstance(value, list):
            key, hint = int(step), get_args(member)[0]
        elif get_origin(member) is dict:
            hint = get_args(member)[1]
            key = next(name for name, entry in value.items() if not _is_right(entry, hint))
        else:
            hint = _get_hints(member)[step]
        path.append(key)
        value = value[key]
    return tuple(path), value, hint


def _is_right(value: Any, hint: Any) -> bool:
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    return True


def _translate(message: str) -> str:
    """Return an error message of msgspec in plain words, without names of Python types."""
    if found := _KIND.fullmatch(message):
        names = [name for name in found[1].split(" | ") if name != "null"] or ["null"]
        expected = " or ".join(_NOUNS.get(name, name) for name in names)
        is_fraction = found[2] == "float" and "int" in names
        given = "a fraction" if is_fraction else _NOUNS.get(found[2], found[2])
        return f"must be {expected}, not {'a number' if given == 'an integer' else given}"
    if found := _BOUND.fullmatch(message):
        return f"must be {_BOUNDS[found[1]]} {found[2].removesuffix('.0')}"
    if found := _LENGTH.fullmatch(message):
        noun = {"str": "characters", "bytes": "bytes"}.get(found[1], "entries")
        is_filled = found[2] == ">=" and found[3] == "1"
        return (
            "must not be empty" if is_filled else f"must have {_BOUNDS[found[2]]} {found[3]} {noun}"
        )
    if message == "Expected `str`":  # of a key
        return "must be text"
    if message.startswith("Expected `str` matching regex "):
        return f"must match {message.removeprefix('Expected `str` matching regex ')}"
    return f"is not valid: {message[:1].lower()}{message[1:]}"
