"""The types of request bodies of OpenAI's routes, and of those that render and tokenize.

`null` means the same as no value. Unknown fields are ignored, with a warning (`bodies.reading`).
Types are strict: "5" is not a number, but 1.0 is an integer (see `types.checking`). Numbers are
bounded so that they can be sent to other processes, or have the bounds of `SamplingParams`. Lists
are bounded because some are searched for every token, on the event loop.

The types of messages, tools, formats and constraints are for the OpenAPI document only. Their
values are checked where they are used: `render.messages`, `render.answers.tools`,
`server.http.openai.params` and `types.structured`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from sensorium.render.answers.tools import CHOICES, NAME_PATTERN
from sensorium.types.sampling import MAX_BIAS, MAX_LOGPROBS, SamplingField, list_sampling_fields
from sensorium.types.structured import MAX_CHARACTERS

MAX_INTEGER = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1
_MAX_TEXTS = 64
_MAX_TEXT_LENGTH = 1024
_MAX_BIASES = 4096
_MAX_TOKEN_IDS = 65_536

Integer = Annotated[int, Meta(ge=-MAX_INTEGER - 1, le=MAX_INTEGER)]
Count = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Length = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
FilledText = Annotated[str, Meta(min_length=1)]
JsonObject = dict[str, Any]
# A field that is refused unless it is null; see `server.http.openai.params`.
Unsupported = Annotated[Any, Meta(extra_json_schema={"type": "null"})]

# Empty texts are refused by `SamplingParams`, with the path of the whole list.
_StopText = Annotated[str, Meta(max_length=_MAX_TEXT_LENGTH, extra_json_schema={"minLength": 1})]
_StopTexts = _StopText | Annotated[list[_StopText], Meta(max_length=_MAX_TEXTS)]
_Bias = Annotated[
    float, Meta(extra_json_schema={"minimum": -MAX_BIAS, "maximum": MAX_BIAS})
]  # checked by `SamplingParams`
_Biases = Annotated[
    dict[Annotated[str, Meta(pattern="^[0-9]{1,9}$")], _Bias], Meta(max_length=_MAX_BIASES)
]


def refer_to(name: str) -> dict[str, str]:
    """Return a JSON schema that refers to the schema `name` of the OpenAPI document."""
    return {"$ref": f"#/components/schemas/{name}"}


_STRUCTURED = {**refer_to("StructuredOutputs"), "minProperties": 1, "maxProperties": 1}


def _make_wire_type(declared: SamplingField) -> Any:
    if declared.kind == "integer":
        least = -MAX_INTEGER - 1 if declared.least is None else int(declared.least)
        most = MAX_INTEGER if declared.most is None else int(declared.most)
        return Annotated[int, Meta(ge=least, le=most)]
    if declared.kind == "number":
        return Annotated[float, Meta(ge=declared.least, le=declared.most)]
    if declared.kind == "token_ids":
        length = Meta(min_length=declared.min_length or None, max_length=_MAX_TOKEN_IDS)
        return Annotated[list[TokenId], length]
    return {
        "flag": bool,
        "texts": _StopTexts,
        "words": _StopTexts,
        "biases": _Biases,
        # Checked by `SamplingParams`.
        "structured": Annotated[JsonObject, Meta(extra_json_schema=_STRUCTURED)],
    }[declared.kind]


def make_sampling_struct(name: str, entries: Iterable[SamplingField]) -> type[Struct]:
    """Return a base of request bodies with these sampling parameters; null means the default."""

    def describe(entry: SamplingField) -> Any:
        return Annotated[_make_wire_type(entry) | None, Meta(description=entry.description)]

    fields = [(entry.name, describe(entry), None) for entry in entries]
    return msgspec.defstruct(name, fields, module=__name__, frozen=True, kw_only=True)


SAMPLING_FIELDS = tuple(entry for entry in list_sampling_fields() if not entry.is_internal)
if TYPE_CHECKING:

    class SamplingFields(Struct, frozen=True, kw_only=True):
        def __getattr__(self, name: str) -> Any: ...

else:
    SamplingFields = make_sampling_struct("SamplingFields", SAMPLING_FIELDS)


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A constraint on the text of the answer; exactly one of the fields must be set."""

    json: JsonObject | FilledText | UnsetType = UNSET
    json_object: bool | UnsetType = UNSET
    regex: FilledText | UnsetType = UNSET
    choice: Annotated[list[FilledText], Meta(min_length=1)] | UnsetType = UNSET
    grammar: FilledText | UnsetType = UNSET


_Text = str | UnsetType
_Part = Annotated[Any, Meta(extra_json_schema=refer_to("ContentPart"))]
_Content = str | Annotated[list[_Part], Meta(min_length=1)]


class TextPart(Struct, kw_only=True):
    type: Literal["text"]
    text: str


class MediaUrl(Struct, kw_only=True):
    url: str
    detail: _Text = UNSET


class AudioData(Struct, kw_only=True):
    data: str
    format: _Text = UNSET


class _MediaPart(Struct, kw_only=True):
    """A part of a message with a media item, which may be null if its uuid is in the cache."""

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
    input_audio: AudioData | None


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
    """A tool call that the assistant has made earlier in the conversation."""

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
    """A value of `tool_choice` that names the one tool that the answer must call."""

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
_MESSAGE_KINDS = (InputMessage, AssistantMessage, ToolMessage)
_FORMATS = (TextFormat, JsonObjectFormat, JsonSchemaFormat)
MESSAGE_TYPES = (*_PARTS, *_MESSAGE_KINDS, *_FORMATS, Tool, NamedTool)
# Names in the document -> the types that they stand for.
MESSAGE_UNIONS: dict[str, tuple[type[Struct], ...]] = {
    "ContentPart": _PARTS,
    "ChatMessage": _MESSAGE_KINDS,
    "ResponseFormat": _FORMATS,
}


MAX_TEXT_CHARACTERS = 2**22  # of a text for `/tokenize`
MAX_TOKENS = 2**20  # of a list for `/detokenize`


def _make_list_schema(items: JsonObject) -> JsonObject:
    return {"type": "array", "items": items, "minItems": 1}


_NULL: JsonObject = {"type": "null"}
_TEXT: JsonObject = {"type": "string", "minLength": 1}
_MESSAGES = _make_list_schema({**refer_to("ChatMessage")})
# Checked by `render.messages`.
Messages = Annotated[Any, Meta(extra_json_schema=_MESSAGES)]
# Checked by `render.answers.tools`.
_Tool = Annotated[JsonObject, Meta(extra_json_schema=refer_to("Tool"))]
_ToolChoice = Annotated[
    Any, Meta(extra_json_schema={"anyOf": [{"enum": [*CHOICES, None]}, refer_to("NamedTool")]})
]
# Checked by `server.http.openai.params`.
_ResponseFormat = Annotated[JsonObject, Meta(extra_json_schema=refer_to("ResponseFormat"))]
_Modality = Annotated[str, Meta(extra_json_schema={"enum": ["text"]})]
_Modalities = Annotated[list[_Modality], Meta(extra_json_schema={"minItems": 1, "maxItems": 1})]
_SchemaOrText = Annotated[
    Any, Meta(extra_json_schema={"anyOf": [{"type": "object"}, _TEXT, _NULL]})
]
_Regex = Annotated[str, Meta(min_length=1, max_length=MAX_CHARACTERS["regex"])]
_Grammar = Annotated[str, Meta(min_length=1, max_length=MAX_CHARACTERS["grammar"])]
# `server.http.openai.completions` distinguishes the kinds. With a union of types, msgspec would
# read a million ids four times.
_TOKEN_IDS = _make_list_schema({"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID})
_PROMPT: JsonObject = {
    "anyOf": [_TEXT, _make_list_schema(_TEXT), _TOKEN_IDS, _make_list_schema(_TOKEN_IDS)]
}


class StreamOptions(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The options of a stream, which add the counts of tokens to its chunks."""

    include_usage: Annotated[
        bool | None, Meta(description="Send a last chunk with token counts.")
    ] = None
    continuous_usage_stats: Annotated[
        bool | None,
        Meta(description="With `include_usage`: send the counts so far in every chunk."),
    ] = None


class GeneratingRequest(SamplingFields, frozen=True, kw_only=True):
    """The fields that all requests for text have: OpenAI's, and those of similar servers.

    Only one of `response_format`, `guided_*` and `structured_outputs` may constrain the answer.
    """

    # Fields that are not implemented. They are refused, because they would change the answer.
    unsupported: ClassVar[tuple[str, ...]] = ("use_beam_search",)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: _ResponseFormat | None = None
    guided_json: _SchemaOrText = None
    guided_regex: _Regex | None = None
    guided_choice: Annotated[list[_Grammar], Meta(min_length=1)] | None = None
    guided_grammar: _Grammar | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    mm_processor_kwargs: JsonObject | None = None
    media_io_kwargs: dict[str, JsonObject] | None = None
    cache_salt: FilledText | None = None
    priority: Integer | None = None
    trace: bool | None = None
    use_beam_search: Unsupported = None

    # Accepted without effect.
    user: str | None = None
    service_tier: str | None = None
    request_id: str | None = None


class ChatCompletionRequest(GeneratingRequest, frozen=True, kw_only=True):
    """The request body of `/v1/chat/completions`: a conversation that the model answers.

    `max_completion_tokens` takes precedence over `max_tokens`. If neither is set, the answer may
    fill the rest of the model's context.
    """

    unsupported = ("use_beam_search", "functions", "function_call", "audio")

    messages: Messages
    max_completion_tokens: Length | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice = None
    parallel_tool_calls: bool | None = None
    include_reasoning: Annotated[
        bool | None, Meta(description="False leaves reasoning out of the answer.")
    ] = None
    functions: Unsupported = None
    function_call: Unsupported = None
    modalities: _Modalities | None = None
    audio: Unsupported = None

    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    # Accepted without effect.
    metadata: JsonObject | None = None
    store: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prediction: Any = None
    web_search_options: Any = None


class CompletionRequest(GeneratingRequest, frozen=True, kw_only=True):
    """The request body of `/v1/completions`: one or more prompts that the model continues.

    If `max_tokens` is not set, each completion has at most 16 tokens.
    """

    unsupported = ("use_beam_search", "suffix")

    prompt: Annotated[Any, Meta(extra_json_schema=_PROMPT)]
    best_of: Integer | None = None
    echo: bool | None = None
    suffix: Unsupported = None


class ChatRenderRequest(ChatCompletionRequest, frozen=True, kw_only=True):
    """The body of a request to turn a conversation into token ids and processed media items.

    If `return_kwargs` is false, no tensors of media items are computed and sent.
    """

    return_kwargs: bool | None = None


class CompletionRenderRequest(CompletionRequest, frozen=True, kw_only=True):
    """The body of a request to turn prompts into token ids; `return_kwargs` has no effect."""

    return_kwargs: bool | None = None


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """The request body of `/tokenize`: the text `prompt`, or `messages` with their options."""

    model: str | None = None
    prompt: Annotated[str, Meta(max_length=MAX_TEXT_CHARACTERS)] | None = None
    messages: Annotated[Any, Meta(extra_json_schema={"anyOf": [_MESSAGES, _NULL]})] = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    tools: list[JsonObject] | None = None
    mm_processor_kwargs: JsonObject | None = None
    media_io_kwargs: dict[str, JsonObject] | None = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """The request body of `/detokenize`: the token ids that are turned into text."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
    model: str | None = None
