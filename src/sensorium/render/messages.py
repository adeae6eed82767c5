"""Checks a conversation: the roles, contents and tool calls of its messages, and its options.

Content parts may have OpenAI's shapes, or those that users of Transformers and vLLM write. Media is
passed on as it came: a URL stays the caller's own string, and pixels are not touched. Every mistake
is a `RequestError` with the path of the field. Unknown fields are left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sensorium.multimodal.item_codec import PrecomputedEmbeds, decode_embeds
from sensorium.multimodal.media import MediaItem
from sensorium.multimodal.names import check_uuid
from sensorium.types.errors import RequestError, at, map_at

_ROLES = ("system", "developer", "user", "assistant", "tool")
_STRING_FIELDS = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")
_MODALITIES = ("image", "video", "audio")
_URL_TYPES = {f"{modality}_url": modality for modality in _MODALITIES}
_EMBEDS_TYPES = {"image_embeds": "image", "audio_embeds": "audio"}
_KNOWN_TYPES = ("text", *_URL_TYPES, "input_audio", *_MODALITIES, "image_pil", *_EMBEDS_TYPES)
_TEMPLATE, _KWARGS = ("chat_template",), ("chat_template_kwargs",)
# Variables that the renderer sets, so that a caller may not.
_RESERVED = frozenset(
    {
        "messages",
        "conversations",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
        "tokenize",
    }
)

Content = str | tuple[str | MediaItem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message of a conversation after it was checked."""

    role: str
    content: Content | None  # `None` if an assistant only called tools
    fields: Mapping[str, Any] = field(default_factory=dict)  # other fields that a template may read


def parse_messages(messages: object) -> tuple[Message, ...]:
    """Check the messages of a conversation, and return them as `Message` objects."""
    with at("messages"):
        return tuple(map_at(_parse_message, _check_list(messages, may_be_empty=False)))


def _check_list(value: object, *, may_be_empty: bool = True) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise RequestError(f"must be a list, not {type(value).__name__}")
    if not value and not may_be_empty:
        raise RequestError("must not be empty")
    return value


def _check_object(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(f"must be an object, not {type(value).__name__}")
    return value


def _parse_message(entry: object) -> Message:
    message = _check_object(entry)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"must be one of {', '.join(_ROLES)}", path=("role",))
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
        if message.get(name) is not None:
            fields[name] = _get_string(message, name)
    if message.get("tool_calls"):
        with at("tool_calls"):
            fields["tool_calls"] = map_at(_parse_tool_call, _check_list(message["tool_calls"]))
    return fields


def _parse_tool_call(entry: object) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, which chat templates write as JSON."""
    call = _check_object(entry)
    with at("function"):
        function = _check_object(call.get("function"))
        _get_string(function, "name")
        with at("arguments"):
            arguments = _parse_arguments(function.get("arguments"))
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _parse_arguments(arguments: object) -> Mapping[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise RequestError(f"is not valid JSON: {error}") from error
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise RequestError("must be an object, or the JSON of one")
    return arguments


def get_media(messages: Sequence[Message]) -> dict[str, list[MediaItem]]:
    """Return modality -> media items in the order of the conversation, each with its path."""
    media: dict[str, list[MediaItem]] = {}
    for index, message in enumerate(messages):
        parts = () if isinstance(message.content, str) else message.content or ()
        for part_index, part in enumerate(parts):
            if isinstance(part, MediaItem):
                path = ("messages", index, "content", part_index)
                media.setdefault(part.modality, []).append(replace(part, path=path))
    return media


def parse_part(part: object) -> str | MediaItem:
    """Return the text or the media item of a content part of a message.

    The item's own path is empty, because the part's position is not known here; `get_media` fills
    it in.
    """
    if isinstance(part, str):
        return part
    fields = _check_object(part)
    kind = _get_string(fields, "type")
    if kind in ("text", "refusal"):
        return _get_string(fields, kind)
    if kind not in _KNOWN_TYPES:
        raise RequestError(
            f"{kind[:50]!r} is unknown (known: {', '.join(_KNOWN_TYPES)})", path=("type",)
        )
    with at("uuid"):
        uuid = check_uuid(fields.get("uuid"))
    modality, item = _get_media(kind, fields)
    if item is None and uuid is None:
        raise RequestError("has neither media nor a uuid of cached media: send one of them")
    return MediaItem(path=(), modality=modality, media=item, uuid=uuid)


def _get_media(kind: str, part: Mapping[str, Any]) -> tuple[str, object]:
    with at(kind):
        if kind in _URL_TYPES:
            return _URL_TYPES[kind], _get_url(part.get(kind))
        if kind == "input_audio":
            return "audio", _get_input_audio(part.get(kind))
        if kind in _EMBEDS_TYPES:
            return _EMBEDS_TYPES[kind], _get_embeds(part.get(kind))
    modality = "image" if kind == "image_pil" else kind
    for name in (kind, modality, "url"):
        if part.get(name) is not None:
            value = part[name]
            return modality, value
    if isinstance(path := part.get("path"), os.PathLike):
        return modality, path
    if path is not None:
        return modality, _make_file_url(_get_string(part, "path"))
    if part.get("base64") is not None:
        return modality, _decode(part, "base64")
    return modality, None


def _get_url(value: object) -> str | None:
    """Return the URL in a string or in OpenAI's object with a `url`, or `None` if there is none."""
    if value is None or isinstance(value, str):
        return value or None
    if not isinstance(value, Mapping):
        raise RequestError(f"must be a URL, or an object with a url, not {type(value).__name__}")
    return None if value.get("url") is None else _get_string(value, "url")


def _get_input_audio(value: object) -> bytes | str | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError(f"must be an object with data, not {type(value).__name__}")
    if value.get("format") is not None:
        _get_string(value, "format")  # checked but not used: the format is found from the file
    return None if value.get("data") is None else _decode(value, "data")


def _get_embeds(value: object) -> PrecomputedEmbeds | None:
    """Return precomputed embeddings that were given as a tensor or as base64 text."""
    if value is None or isinstance(value, PrecomputedEmbeds):
        return value
    if not isinstance(value, str | torch.Tensor):
        raise RequestError(f"must be base64 or a tensor, not {type(value).__name__}")
    if isinstance(value, str):
        return decode_embeds(_decode_base64(value))
    return PrecomputedEmbeds(value)


def _decode(part: Mapping[str, Any], name: str) -> bytes | str:
    """Return the bytes of a field with base64 text, or the text itself if it is a `data:` URL."""
    text = _get_string(part, name)
    with at(name):
        return text if text.startswith("data:") else _decode_base64(text)


def _decode_base64(text: str) -> bytes:
    import pybase64

    try:
        return pybase64.b64decode(text, validate=True)
    except ValueError as error:
        raise RequestError("is not valid base64") from error


def _make_file_url(text: str) -> str:
    """Return the `file:` URL of a path; whether it may be read is checked when it is fetched."""
    try:
        return text if text.startswith("file:") else Path(text).absolute().as_uri()
    except UnicodeEncodeError as error:
        raise RequestError("the path of a media file is not valid Unicode") from error


def _get_string(part: Mapping[str, Any], name: str) -> str:
    value = part.get(name)
    if not isinstance(value, str):
        raise RequestError(f"must be a string, not {type(value).__name__}", path=(name,))
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """The options for rendering one conversation, checked; named as in vLLM and Transformers."""

    # The text of a template, or the name of one of the model's; never a file.
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        if self.chat_template is not None and not isinstance(self.chat_template, str):
            raise RequestError("must be a string", path=_TEMPLATE)
        if not isinstance(self.chat_template_kwargs, Mapping):
            raise RequestError("must be an object", path=_KWARGS)
        taken = sorted(_RESERVED.intersection(self.chat_template_kwargs))
        if taken:
            raise RequestError(f"can't set {', '.join(taken)} (reserved names)", path=_KWARGS)
        if not all(isinstance(name, str) for name in self.chat_template_kwargs):
            raise RequestError("must have strings as names of variables", path=_KWARGS)
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "needs add_generation_prompt=False: either the last message is continued, or "
                "a new one begins",
                path=("continue_final_message",),
            )
        with at("tools"):
            tools = () if self.tools is None else _check_list(self.tools)
            map_at(_check_object, tools)


def load_chat_template(chat_template: str | os.PathLike[str] | None) -> str | None:
    """Return the text of a chat template, or the name of one of the model's templates.

    The argument is that text, that name, or the path of a file to read. Only callers who may read
    this machine's files may use this. Raise a `RequestError` if the file can't be read.
    """
    if chat_template is None:
        return None
    if not isinstance(chat_template, str | os.PathLike) or not os.fspath(chat_template):
        raise RequestError(
            "must be the text of a template, the path of its file or its name", path=_TEMPLATE
        )
    text = os.fspath(chat_template)
    if isinstance(chat_template, str) and any(character in text for character in "{}\n"):
        return text
    path = Path(text)
    if isinstance(chat_template, str) and not _exists(path):
        if path.suffix or len(path.parts) > 1:
            raise RequestError(f"there is no file {text!r}", path=_TEMPLATE)
        return text  # the name of one of the model's templates
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{text!r} can't be read: {error}", path=_TEMPLATE) from error


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a path, or with a NUL
        return False
