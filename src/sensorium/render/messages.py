"""A conversation as it came over the wire or from a script, checked: roles, contents, tool calls.

Every mistake is a `RequestError` with the path of the field. Unknown fields are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sensorium.render.media_parts import MediaPart, parse_part
from sensorium.types.errors import RequestError, at, map_at

ROLES = ("system", "developer", "user", "assistant", "tool")
_STRING_FIELDS = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")

Content = str | tuple[str | MediaPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """`content` is `None` where an assistant only called tools. `fields`: what else a template may
    want to see.
    """

    role: str
    content: Content | None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def media(self) -> list[MediaPart]:
        if self.content is None or isinstance(self.content, str):
            return []
        return [part for part in self.content if isinstance(part, MediaPart)]


def parse_messages(messages: object) -> tuple[Message, ...]:
    """Return the messages of a conversation, or raise a `RequestError` with a field's path."""
    with at("messages"):
        return tuple(map_at(_parse_message, _check_list(messages, may_be_empty=False)))


def _check_list(value: object, *, may_be_empty: bool = True) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise RequestError(f"must be a list, not {type(value).__name__}")
    if not value and not may_be_empty:
        raise RequestError("must not be empty")
    return value


def _parse_message(message: object) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(f"must be an object, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"must be one of {', '.join(ROLES)}", path=("role",))
    fields = _parse_fields(message)
    content = message.get("content")
    with at("content"):
        if content is None and (role != "assistant" or not fields.keys() - {"name"}):
            raise RequestError("must be a string or a list of parts")
        return Message(role=role, content=_parse_content(content), fields=fields)


def _parse_content(content: object) -> Content | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"must be a string or a list of parts, not {type(content).__name__}")
    return tuple(map_at(parse_part, content))


def _parse_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name in _STRING_FIELDS:
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise RequestError(f"must be a string, not {type(value).__name__}", path=(name,))
        fields[name] = value
    if message.get("tool_calls"):
        with at("tool_calls"):
            fields["tool_calls"] = map_at(_parse_tool_call, _check_list(message["tool_calls"]))
    return fields


def _parse_tool_call(call: object) -> dict[str, Any]:
    """Return a call with its arguments as an object: templates write them as JSON themselves."""
    if not isinstance(call, Mapping):
        raise RequestError(f"must be an object, not {type(call).__name__}")
    function = call.get("function")
    with at("function"):
        if not isinstance(function, Mapping):
            raise RequestError("must be an object")
        if not isinstance(function.get("name"), str):
            raise RequestError("must be a string", path=("name",))
        with at("arguments"):
            arguments = _parse_arguments(function.get("arguments"))
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _parse_arguments(arguments: object) -> Mapping[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise RequestError("is not valid JSON") from error
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise RequestError("must be an object, or the JSON of one")
    return arguments


def get_media(messages: Sequence[Message]) -> dict[str, list[MediaPart]]:
    """The media of a conversation by modality, each in its order."""
    media: dict[str, list[MediaPart]] = {}
    for message in messages:
        for part in message.media:
            media.setdefault(part.modality, []).append(part)
    return media
