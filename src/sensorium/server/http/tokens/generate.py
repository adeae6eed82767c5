"""`/inference/v1/generate`: tokens in, tokens out, with media that was processed elsewhere or that
is loaded here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from sensorium.server.http.bodies.encoding import make_response, wants_msgpack
from sensorium.server.http.calls import Call, Context, Work, get_finish_reason, receive_call
from sensorium.server.http.connections.disconnect import run_until_disconnect
from sensorium.server.http.errors import ApiError, FailureLog
from sensorium.server.http.openai.logprobs import make_chat_logprobs, make_prompt_logprobs
from sensorium.server.http.openai.usage import make_usage
from sensorium.server.http.protocol.fields import MAX_TOKEN_ID, as_integer
from sensorium.server.http.protocol.token_wire import (
    ContentPart,
    GenerateChoice,
    GenerateRequest,
    GenerateResponse,
    WireSamplingParams,
)
from sensorium.server.http.streaming.sse import EventStream
from sensorium.server.http.streaming.streaming import SseChunks
from sensorium.server.http.tokens.features import read_features
from sensorium.server.http.wire_paths import WirePaths
from sensorium.types.errors import FieldPath, at
from sensorium.types.outputs import CompletionDelta, RequestDelta, RequestOutput
from sensorium.types.prompts import Prompt, RenderedPrompt, TextPrompt
from sensorium.types.sampling import SamplingParams

_MODALITIES = {
    **{name: name for name in ("image", "video", "audio")},
    **{f"{name}_url": name for name in ("image", "video", "audio")},
    "input_audio": "audio",
}
# Fields of the engine -> their places in a request.
_FIELDS: dict[str, FieldPath] = {
    "mm_hashes": ("features", "mm_hashes"),
    "mm_placeholders": ("features", "mm_placeholders"),
    "mm_kwargs": ("features", "kwargs_data"),
    "mm_layouts": ("features", "kwargs_data"),
    **{name: ("sampling_params", name) for name in WireSamplingParams.model_fields},
}


async def answer_generate(
    http_request: Request, context: Context, failures: FailureLog
) -> Response:
    call = await receive_call(
        http_request,
        context,
        GenerateRequest,
        _prepare,
        id_prefix="gen",
        make_paths=_make_paths,
        takes_msgpack=True,
    )
    if call.request.request_id is not None:
        call.generation.request_id = call.request.request_id
    if call.request.stream:
        frames = SseChunks(call, _GenerateChunks(call)).run()
        return EventStream(frames, make_error_body=failures.make_reporter(http_request))
    (output,) = await run_until_disconnect(http_request.receive, call.generation.finish())
    return make_response(_make_answer(call, output), is_msgpack=wants_msgpack(http_request))


def _prepare(request: GenerateRequest) -> Work:
    params = _make_params(request.sampling_params)
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options needs stream", param="stream_options")
    if request.stream and params.prompt_logprobs is not None:
        name = "sampling_params.prompt_logprobs"
        raise ApiError(f"{name} can't be streamed", param=name)
    return [_make_prompt(request)], params


def _make_params(given: WireSamplingParams) -> SamplingParams:
    values = ((name, getattr(given, name)) for name in WireSamplingParams.model_fields)
    with at("sampling_params"):
        return SamplingParams(**{name: value for name, value in values if value is not None})


def _make_prompt(request: GenerateRequest) -> Prompt:
    token_ids = _read_token_ids(request.token_ids)
    prompt: TextPrompt | RenderedPrompt
    if request.features is None:
        prompt = {"prompt_token_ids": token_ids, **_read_parts(request.content_parts or ())}
    elif request.content_parts:
        raise ApiError("features and content_parts exclude each other", param="content_parts")
    else:
        prompt = read_features(request.features, token_ids)
    if request.cache_salt is not None:
        prompt["cache_salt"] = request.cache_salt
    if request.priority is not None:
        prompt["priority"] = request.priority
    return prompt


def _read_token_ids(ids: list[Any]) -> list[int]:
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= MAX_TOKEN_ID:
        return ids
    token_ids: list[int] = []
    for index, entry in enumerate(ids):
        token_id = as_integer(entry)
        if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
            raise ApiError(f"token_ids[{index}] must be a token id", param=f"token_ids[{index}]")
        token_ids.append(token_id)
    return token_ids


def _read_parts(parts: Sequence[ContentPart]) -> TextPrompt:
    """Media by modality: the n-th marker of a kind among the tokens is that kind's n-th part."""
    media: dict[str, list[str | None]] = {}
    uuids: dict[str, list[str | None]] = {}
    for index, part in enumerate(parts):
        modality = _MODALITIES.get(part.type)
        if modality is None:
            path = f"content_parts[{index}].type"
            known = ", ".join(_MODALITIES)
            raise ApiError(f"{path} {part.type[:50]!r} is unknown (known: {known})", param=path)
        if part.url is None and part.uuid is None:
            path = f"content_parts[{index}]"
            raise ApiError(f"{path} has neither a url nor a uuid", param=path)
        media.setdefault(modality, []).append(part.url)
        uuids.setdefault(modality, []).append(part.uuid)
    return {"multi_modal_data": media, "multi_modal_uuids": uuids} if media else {}


def _make_paths(request: GenerateRequest) -> WirePaths:
    """Return where the fields stand that errors of the engine are about."""
    media: dict[str, list[FieldPath]] = {}
    for index, part in enumerate(request.content_parts or ()):
        media.setdefault(_MODALITIES[part.type], []).append(("content_parts", index))
    name = "token_ids" if not media else "content_parts"
    if request.features is not None:
        name = "features"
    return WirePaths(input=(name,), prompt=("token_ids",), media=media, fields=_FIELDS)


def _make_answer(call: Call[GenerateRequest], output: RequestOutput) -> GenerateResponse:
    num_top = call.generation.params.logprobs or 0
    choices = [
        GenerateChoice(
            index=entry.index,
            token_ids=entry.token_ids,
            finish_reason=get_finish_reason(output, entry.index),
            stop_reason=entry.stop_reason,
            logprobs=make_chat_logprobs(entry.token_ids, entry.logprobs, num_top=num_top),
        )
        for entry in output.outputs
    ]
    return GenerateResponse(
        request_id=call.id,
        model=call.model,
        created=call.created,
        choices=choices,
        usage=make_usage([output]),
        prompt_logprobs=make_prompt_logprobs(output.prompt_logprobs),
        sensorium_trace=call.make_trace() if call.has_trace else UNSET,
    )


class _GenerateChunks:
    def __init__(self, call: Call[GenerateRequest]) -> None:
        self._call = call
        self._num_top = call.generation.params.logprobs or 0

    def make_chunks(self, prompt_index: int, delta: RequestDelta) -> list[GenerateResponse]:
        del prompt_index
        return [
            msgspec.structs.replace(self.make_empty_chunk(), choices=[self._make_choice(entry)])
            for entry in delta.deltas
            if entry.token_ids or entry.finish_reason is not None
        ]

    def make_empty_chunk(self) -> GenerateResponse:
        call = self._call
        return GenerateResponse(
            request_id=call.id, model=call.model, created=call.created, choices=[]
        )

    def _make_choice(self, entry: CompletionDelta) -> GenerateChoice:
        return GenerateChoice(
            index=entry.index,
            token_ids=entry.token_ids,
            finish_reason=None if entry.finish_reason is None else str(entry.finish_reason),
            stop_reason=entry.stop_reason,
            logprobs=make_chat_logprobs(entry.token_ids, entry.logprobs, num_top=self._num_top),
        )
