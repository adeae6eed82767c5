"""Renders conversations with tokenizers of mistral-common (Voxtral), directly to tokens.

There is no text in between. A sound becomes one marker token, which is expanded later like those
of any prompt of tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from sensorium.render.chat_options import ChatOptions
from sensorium.render.messages import Message
from sensorium.types.errors import RequestError

_SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


class MistralTemplate:
    """A template for a tokenizer of mistral-common. Transformers' wrapper is not changed."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = copy.copy(tokenizer.tokenizer)
        instruct = copy.copy(self._tokenizer.instruct_tokenizer)
        if instruct.audio_encoder is not None:
            instruct.audio_encoder = _MarkerEncoder(instruct.audio_encoder)
        self._tokenizer.instruct_tokenizer = instruct

    def render(self, messages: Sequence[Message], options: ChatOptions) -> list[int]:
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        if options.chat_template is not None or options.chat_template_kwargs:
            is_kwargs = options.chat_template is None
            raise RequestError(
                "this model's tokenizer has its own format and takes no template",
                path=("chat_template_kwargs" if is_kwargs else "chat_template",),
            )
        if options.add_generation_prompt and messages[-1].role == "assistant":
            raise RequestError(
                "the last message is the assistant's: add a user's message, or set "
                "continue_final_message"
            )
        try:
            request = ChatCompletionRequest.from_openai(
                messages=[_make_entry(message) for message in messages],
                tools=[dict(tool) for tool in options.tools or ()] or None,
                continue_final_message=options.continue_final_message,
            )
            tokens: list[int] = self._tokenizer.encode_chat_completion(request).tokens
        except Exception as error:  # its validation raises errors of many kinds
            reason = str(error)[:300]
            raise RequestError(f"the tokenizer refuses this conversation: {reason}") from error
        return tokens


class _MarkerEncoder:
    """An encoder that writes one marker per sound, in place of one that decodes the sound."""

    def __init__(self, encoder: Any) -> None:
        from mistral_common.tokens.tokenizers.audio import Audio, AudioEncoding

        self._encoding = AudioEncoding(
            tokens=[encoder.begin_audio_token, encoder.audio_token],
            audio=Audio(np.zeros(1, dtype=np.float32), sampling_rate=16_000, format="wav"),
        )

    def __call__(self, _content: object) -> Any:
        return self._encoding


def _make_entry(message: Message) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    content: Any = message.content
    if isinstance(content, tuple):
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else _SOUND for part in content
        ]
    return {"role": role, "content": content, **message.fields}
