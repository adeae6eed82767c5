"""What `/v1/chat/completions` takes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import WithJsonSchema

from sensorium.render.answers.tools import CHOICES, NAME_PATTERN
from sensorium.server.http.protocol.fields import JsonObject, Length, NumLogprobs, Unsupported
from sensorium.server.http.protocol.generating import GeneratingRequest

# Checked in depth by `render.messages`, which names the field.
Messages = Annotated[
    Any,
    WithJsonSchema(
        {"type": "array", "items": {"$ref": "#/components/schemas/ChatMessage"}, "minItems": 1}
    ),
]

_TOOL: JsonObject = {
    "type": "object",
    "properties": {
        "type": {"const": "function", "type": "string"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": NAME_PATTERN},
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"]},
                "strict": {"type": ["boolean", "null"]},
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
_TOOL_CHOICE: JsonObject = {
    "anyOf": [
        {"enum": [*CHOICES, None]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function", "type": "string"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}},
                    "required": ["name"],
                },
            },
            "required": ["type", "function"],
        },
    ]
}
# Checked in depth by `render.answers.tools`, which names the field.
Tool = Annotated[JsonObject, WithJsonSchema(_TOOL)]
ToolChoice = Annotated[Any, WithJsonSchema(_TOOL_CHOICE)]

_TEXT_ONLY = {
    "type": "array",
    "items": {"const": "text", "type": "string"},
    "minItems": 1,
    "maxItems": 1,
}


class ChatCompletionRequest(GeneratingRequest):
    """One conversation. `max_completion_tokens` goes before `max_tokens`; without either, the
    answer may fill the context. `include_reasoning`: false leaves it out of the answer.
    """

    unsupported: ClassVar[tuple[str, ...]] = (
        *GeneratingRequest.unsupported,
        "functions",
        "function_call",
        "audio",
    )

    messages: Messages
    max_completion_tokens: Length | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    functions: Unsupported = None
    function_call: Unsupported = None
    modalities: Annotated[list[str], WithJsonSchema(_TEXT_ONLY)] | None = None
    audio: Unsupported = None

    chat_template: str | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    metadata: JsonObject | None = None
    store: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prediction: Any = None
    web_search_options: Any = None
