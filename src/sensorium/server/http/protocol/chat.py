"""What `/v1/chat/completions` takes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import WithJsonSchema

from sensorium.server.http.protocol.fields import JsonObject, Length, NumLogprobs, Unsupported
from sensorium.server.http.protocol.generating import GeneratingRequest

# Checked in depth by `render.messages`, which names the field.
Messages = Annotated[
    Any,
    WithJsonSchema(
        {"type": "array", "items": {"$ref": "#/components/schemas/ChatMessage"}, "minItems": 1}
    ),
]

_TEXT_ONLY = {
    "type": "array",
    "items": {"const": "text", "type": "string"},
    "minItems": 1,
    "maxItems": 1,
}


class ChatCompletionRequest(GeneratingRequest):
    """One conversation. `max_completion_tokens` goes before `max_tokens`; without either, the
    answer may fill the context.
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
    tools: list[JsonObject] | None = None
    tool_choice: Annotated[Any, WithJsonSchema({"enum": ["auto", "none", None]})] = None
    parallel_tool_calls: bool | None = None
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
