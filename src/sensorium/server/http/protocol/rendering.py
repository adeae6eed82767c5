"""What the routes that render take: the bodies of the routes for text, and one word more."""

from __future__ import annotations

from sensorium.server.http.protocol.chat import ChatCompletionRequest
from sensorium.server.http.protocol.completions import CompletionRequest


class ChatRenderRequest(ChatCompletionRequest):
    """`return_kwargs`: false for an answer without the media's tensors, which then need not be
    computed.
    """

    return_kwargs: bool | None = None


class CompletionRenderRequest(CompletionRequest):
    """`return_kwargs` has nothing to leave out: these prompts have no media."""

    return_kwargs: bool | None = None
