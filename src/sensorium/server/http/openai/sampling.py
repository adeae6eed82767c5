"""From the fields of a request to `SamplingParams`, and what isn't supported yet."""

from __future__ import annotations

from typing import Any

from sensorium.server.http.errors import ApiError
from sensorium.server.http.openai.structured import get_structured_outputs
from sensorium.server.http.protocol.chat import ChatCompletionRequest
from sensorium.server.http.protocol.completions import CompletionRequest
from sensorium.server.http.protocol.generating import GeneratingRequest
from sensorium.types.sampling import SamplingParams

_SAME_NAMES = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "ignore_eos",
    "prompt_logprobs",
)


def make_chat_params(request: ChatCompletionRequest) -> SamplingParams:
    """Raises a `RequestError` or `ApiError` that names the field."""
    _check_common(request)
    if request.modalities is not None and request.modalities != ["text"]:
        raise _make_unsupported("modalities", "other than text")
    if request.top_logprobs and not request.logprobs:
        raise ApiError("top_logprobs needs logprobs", param="top_logprobs")
    limit = request.max_completion_tokens
    return SamplingParams(
        **_get_given(request),
        max_tokens=request.max_tokens if limit is None else limit,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )


def make_completion_params(request: CompletionRequest) -> SamplingParams:
    _check_common(request)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise _make_unsupported("best_of", "other than n")
    given = _get_given(request)
    if request.echo and request.logprobs is not None:
        if request.stream:
            raise ApiError("echo with logprobs can't be streamed", param="echo")
        given.setdefault("prompt_logprobs", request.logprobs)
    if request.max_tokens is not None:
        given["max_tokens"] = request.max_tokens
    return SamplingParams(**given, logprobs=request.logprobs)


def _get_given(request: GeneratingRequest) -> dict[str, Any]:
    """`None` means the default."""
    values = {name: getattr(request, name) for name in _SAME_NAMES}
    values["structured_outputs"] = get_structured_outputs(request)
    return {name: value for name, value in values.items() if value is not None}


def _check_common(request: GeneratingRequest) -> None:
    for name in request.unsupported:
        if getattr(request, name):
            raise _make_unsupported(name)
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options needs stream", param="stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise ApiError("prompt_logprobs can't be streamed", param="prompt_logprobs")


def _make_unsupported(name: str, what: str = "") -> ApiError:
    words = f"{name} {what}".strip()
    return ApiError(f"{words} is not supported yet", param=name, code="unsupported")
