"""A conversation as it came over the wire or from a script, checked: roles, contents, tool calls.

Every mistake is a `RequestError` that names the field. Fields that nobody knows are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sensorium.render.media_parts import MediaPart, parse_part
from sensorium.types.errors import RequestError

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
    if not isinstance(messages, list | tuple):
        raise RequestError(f"messages must be a list, not {type(messages).__name__}")
    if not messages:
        raise RequestError("messages must not be empty")
    return tuple(
        _parse_message(message, f"messages[{index}]") for index, message in enumerate(messages)
    )


def _parse_message(message: object, path: str) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(f"{path} must be an object, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{path}.role must be one of {', '.join(ROLES)}")
    fields = _parse_fields(message, path)
    content = message.get("content")
    if content is None and (role != "assistant" or not fields.keys() - {"name"}):
        raise RequestError(f"{path}.content must be a string or a list of parts")
    return Message(role=role, content=_parse_content(content, f"{path}.content"), fields=fields)


def _parse_content(content: object, path: str) -> Content | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(
            f"{path} must be a string or a list of parts, not {type(content).__name__}"
        )
    return tuple(parse_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _parse_fields(message: Mapping[str, Any], path: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name in _STRING_FIELDS:
        value = message.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise RequestError(f"{path}.{name} must be a string, not {type(value).__name__}")
        fields[name] = value
    if message.get("tool_calls"):
        fields["tool_calls"] = _parse_tool_calls(message["tool_calls"], f"{path}.tool_calls")
    return fields


def _parse_tool_calls(calls: object, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise RequestError(f"{path} must be a list, not {type(calls).__name__}")
    return [_parse_tool_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def _parse_tool_call(call: object, path: str) -> dict[str, Any]:
    """Templates write arguments as JSON themselves, so they are given an object."""
    if not isinstance(call, Mapping):
        raise RequestError(f"{path} must be an object, not {type(call).__name__}")
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{path}.function must be an object")
    if not isinstance(function.get("name"), str):
        raise RequestError(f"{path}.function.name must be a string")
    arguments = _parse_arguments(function.get("arguments"), f"{path}.function.arguments")
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _parse_arguments(arguments: object, path: str) -> Mapping[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{path} is not valid JSON") from error
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{path} must be an object, or the JSON of one")
    return arguments


def get_media(messages: Sequence[Message]) -> dict[str, list[MediaPart]]:
    """The media of a conversation by modality, each in its order."""
    media: dict[str, list[MediaPart]] = {}
    for message in messages:
        for part in message.media:
            media.setdefault(part.modality, []).append(part)
    return media
