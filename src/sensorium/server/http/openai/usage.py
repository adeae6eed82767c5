"""Counts tokens for the client."""

from __future__ import annotations

from collections.abc import Iterable

from sensorium.server.http.protocol.answers import PromptTokensDetails, Usage
from sensorium.types.outputs import RequestOutput


def make_usage(outputs: Iterable[RequestOutput]) -> Usage:
    """Of all prompts of one call. A prompt counts once, however many completions it has."""
    prompt = completion = cached = 0
    for output in outputs:
        prompt += len(output.prompt_token_ids)
        completion += sum(len(entry.token_ids) for entry in output.outputs)
        cached += output.num_cached_tokens
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached),
    )


def make_running_usage(num_prompt_tokens: int, num_completion_tokens: int) -> Usage:
    """While it runs; what was cached is known at the end."""
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_completion_tokens,
        total_tokens=num_prompt_tokens + num_completion_tokens,
    )
