"""The JSON schema of a chat's messages, for the OpenAPI document; `render.messages` is what checks
them.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_NULL: Schema = {"type": "null"}
_UUID: Schema = {"anyOf": [{"type": "string", "minLength": 1}, _NULL]}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _make_object(required: tuple[str, ...], **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _make_media_part(kind: str, value: Schema) -> Schema:
    """The media may be left out where its uuid stands for it."""
    return _make_object(
        ("type", kind),
        type={"const": kind, "type": "string"},
        uuid=_UUID,
        **{kind: {"anyOf": [value, _NULL]}},
    )


def _make_url_part(modality: str) -> Schema:
    value = _make_object(("url",), url=_TEXT, detail=_TEXT)
    return _make_media_part(f"{modality}_url", value)


_PARTS: dict[str, Schema] = {
    "TextPart": _make_object(
        ("type", "text"), type={"const": "text", "type": "string"}, text=_TEXT
    ),
    "ImageUrlPart": _make_url_part("image"),
    "AudioUrlPart": _make_url_part("audio"),
    "VideoUrlPart": _make_url_part("video"),
    "InputAudioPart": _make_media_part(
        "input_audio", _make_object(("data",), data=_TEXT, format=_TEXT)
    ),
    "ImageEmbedsPart": _make_media_part("image_embeds", _TEXT),
    "AudioEmbedsPart": _make_media_part("audio_embeds", _TEXT),
}
_TOOL_CALL = _make_object(
    ("id", "type", "function"),
    id=_TEXT,
    type={"const": "function", "type": "string"},
    function=_make_object(("name", "arguments"), name=_TEXT, arguments=_TEXT),
)
_CONTENT: Schema = {
    "anyOf": [_TEXT, {"type": "array", "items": _ref("ContentPart"), "minItems": 1}]
}


def _make_message(*roles: str) -> Schema:
    return _make_object(
        ("role", "content"), role={"enum": list(roles)}, content=_CONTENT, name=_TEXT
    )


MESSAGE_SCHEMAS: dict[str, Schema] = {
    **_PARTS,
    "ContentPart": {"anyOf": [_ref(name) for name in _PARTS]},
    "ToolCall": _TOOL_CALL,
    "InputMessage": _make_message("system", "developer", "user"),
    "ToolMessage": _make_object(
        ("role", "content", "tool_call_id"),
        role={"const": "tool", "type": "string"},
        content=_CONTENT,
        tool_call_id=_TEXT,
    ),
    "AssistantMessage": _make_object(
        ("role",),
        role={"const": "assistant", "type": "string"},
        content={"anyOf": [_CONTENT, _NULL]},
        tool_calls={"type": "array", "items": _ref("ToolCall")},
        reasoning_content=_TEXT,
    ),
    "ChatMessage": {"anyOf": [_ref("InputMessage"), _ref("AssistantMessage"), _ref("ToolMessage")]},
}
