"""The shapes of a chat's messages and tools, for the OpenAPI document only.

They are checked, and mistakes named, where they are used: `render.messages` and
`render.answers.tools`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from sensorium.render.answers.tools import NAME_PATTERN
from sensorium.server.http.protocol.fields import FilledText, JsonObject, refer_to

_Text = str | UnsetType
_Part = Annotated[Any, Meta(extra_json_schema=refer_to("ContentPart"))]
_Content = str | Annotated[list[_Part], Meta(min_length=1)]


class TextPart(Struct, kw_only=True):
    type: Literal["text"]
    text: str


class MediaUrl(Struct, kw_only=True):
    url: str
    detail: _Text = UNSET


class SoundData(Struct, kw_only=True):
    data: str
    format: _Text = UNSET


class _MediaPart(Struct, kw_only=True):
    """Media may be null where its uuid stands for it."""

    uuid: FilledText | None = None


class ImageUrlPart(_MediaPart, kw_only=True):
    type: Literal["image_url"]
    image_url: MediaUrl | None


class AudioUrlPart(_MediaPart, kw_only=True):
    type: Literal["audio_url"]
    audio_url: MediaUrl | None


class VideoUrlPart(_MediaPart, kw_only=True):
    type: Literal["video_url"]
    video_url: MediaUrl | None


class InputAudioPart(_MediaPart, kw_only=True):
    type: Literal["input_audio"]
    input_audio: SoundData | None


class ImageEmbedsPart(_MediaPart, kw_only=True):
    type: Literal["image_embeds"]
    image_embeds: str | None


class AudioEmbedsPart(_MediaPart, kw_only=True):
    type: Literal["audio_embeds"]
    audio_embeds: str | None


class CalledFunction(Struct, kw_only=True):
    name: str
    arguments: str


class MadeToolCall(Struct, kw_only=True):
    """A call that the assistant has made, as a message carries it."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class InputMessage(Struct, kw_only=True):
    role: Literal["system", "developer", "user"]
    content: _Content
    name: _Text = UNSET


class AssistantMessage(Struct, kw_only=True):
    role: Literal["assistant"]
    content: _Content | UnsetType | None = UNSET
    tool_calls: list[MadeToolCall] | UnsetType = UNSET
    reasoning_content: _Text = UNSET


class ToolMessage(Struct, kw_only=True):
    role: Literal["tool"]
    content: _Content
    tool_call_id: str


class ToolFunction(Struct, kw_only=True):
    name: Annotated[str, Meta(pattern=NAME_PATTERN)]
    description: str | UnsetType | None = UNSET
    parameters: JsonObject | UnsetType | None = UNSET
    strict: bool | UnsetType | None = UNSET


class Tool(Struct, kw_only=True):
    type: Literal["function"]
    function: ToolFunction


class FunctionName(Struct, kw_only=True):
    name: str


class NamedTool(Struct, kw_only=True):
    """The one tool that the answer must call."""

    type: Literal["function"]
    function: FunctionName


class TextFormat(Struct, kw_only=True):
    type: Literal["text"]


class JsonObjectFormat(Struct, kw_only=True):
    type: Literal["json_object"]


class NamedSchema(Struct, kw_only=True):
    schema: JsonObject
    name: _Text = UNSET
    strict: bool | UnsetType | None = UNSET


class JsonSchemaFormat(Struct, kw_only=True):
    type: Literal["json_schema"]
    json_schema: NamedSchema


_PARTS = (
    TextPart,
    ImageUrlPart,
    AudioUrlPart,
    VideoUrlPart,
    InputAudioPart,
    ImageEmbedsPart,
    AudioEmbedsPart,
)
_MESSAGES = (InputMessage, AssistantMessage, ToolMessage)
_FORMATS = (TextFormat, JsonObjectFormat, JsonSchemaFormat)
MESSAGE_TYPES = (*_PARTS, *_MESSAGES, *_FORMATS, Tool, NamedTool)
# Names in the document -> the types that they stand for.
MESSAGE_UNIONS: dict[str, tuple[type[Struct], ...]] = {
    "ContentPart": _PARTS,
    "ChatMessage": _MESSAGES,
    "ResponseFormat": _FORMATS,
}
