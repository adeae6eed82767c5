"""The route `/inference/v1/generate`, which continues token ids and returns token ids."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sensorium.server.http.bodies.reading import wants_msgpack
from sensorium.server.http.calls import Call, Context, Work, start_call
from sensorium.server.http.choices import make_piece, make_prompt_logprobs
from sensorium.server.http.errors import ApiError, WirePaths
from sensorium.server.http.protocol.answers import GenerateChoice, GenerateResponse
from sensorium.server.http.protocol.requests import SAMPLING_FIELDS
from sensorium.server.http.protocol.tokens import GenerateRequest, WireMediaPart
from sensorium.server.http.streaming import answer_call
from sensorium.server.http.tokens.features import read_features
from sensorium.server.http.usage import make_usage
from sensorium.types.errors import FieldPath, at
from sensorium.types.outputs import CompletionDelta, CompletionOutput, RequestDelta, RequestOutput
from sensorium.types.request import Prompt, RenderedPrompt, TextPrompt
from sensorium.types.sampling import SamplingParams

_NAMES = ("image", "video", "audio")
# type of a content part -> the modality of its media
_MODALITIES = {
    **{name: name for name in _NAMES},
    **{f"{name}_url": name for name in _NAMES},
    "input_audio": "audio",
}
# fields of the engine -> their places in a request
_FIELDS: dict[str, FieldPath] = {
    "mm_hashes": ("features", "mm_hashes"),
    "mm_placeholders": ("features", "mm_placeholders"),
    "mm_kwargs": ("features", "kwargs_data"),
    "mm_layouts": ("features", "kwargs_data"),
    **{entry.name: ("sampling_params", entry.name) for entry in SAMPLING_FIELDS},
}


async def generate(http_request: Request, context: Context) -> Response:
    call = await start_call(
        http_request,
        context,
        GenerateRequest,
        _prepare,
        id_prefix="gen",
        find_paths=_find_paths,
        n_path="sampling_params.n",
        takes_msgpack=True,
    )
    if call.request.request_id is not None:
        call.id = call.request.request_id
    is_msgpack = wants_msgpack(http_request)
    return await answer_call(http_request, call, _GenerateMaker(call), is_msgpack=is_msgpack)


def _prepare(request: GenerateRequest) -> Work:
    values = {entry.name: getattr(request.sampling_params, entry.name) for entry in SAMPLING_FIELDS}
    with at("sampling_params"):
        params = SamplingParams(**{k: v for k, v in values.items() if v is not None})
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options needs stream to be true", param="stream_options")
    if request.stream and params.prompt_logprobs is not None:
        name = "sampling_params.prompt_logprobs"
        raise ApiError(f"{name} can't be streamed: set stream to false", param=name)
    return [_make_prompt(request)], params


def _make_prompt(request: GenerateRequest) -> Prompt:
    prompt: TextPrompt | RenderedPrompt
    if request.features is None:
        prompt = {"prompt_token_ids": request.token_ids}
        prompt.update(_read_parts(request.content_parts or ()))
    elif request.content_parts:
        raise ApiError(
            "features and content_parts exclude each other: send one", param="content_parts"
        )
    else:
        prompt = read_features(request.features, request.token_ids)
    if request.cache_salt is not None:
        prompt["cache_salt"] = request.cache_salt
    if request.priority is not None:
        prompt["priority"] = request.priority
    return prompt


def _read_parts(parts: Sequence[WireMediaPart]) -> TextPrompt:
    """Return the URLs and uuids of media items by modality, as fields of a prompt."""
    media: dict[str, list[str | None]] = {}
    uuids: dict[str, list[str | None]] = {}
    for index, part in enumerate(parts):
        modality = _MODALITIES.get(part.type)
        if modality is None:
            path = f"content_parts[{index}].type"
            known = ", ".join(_MODALITIES)
            raise ApiError(f"{path} {part.type[:50]!r} is unknown, use {known}", param=path)
        if part.url is None and part.uuid is None:
            path = f"content_parts[{index}]"
            raise ApiError(f"{path} has neither a url nor a uuid: add one", param=path)
        media.setdefault(modality, []).append(part.url)
        uuids.setdefault(modality, []).append(part.uuid)
    return {"multi_modal_data": media, "multi_modal_uuids": uuids} if media else {}


def _find_paths(request: GenerateRequest) -> WirePaths:
    media: dict[str, list[FieldPath]] = {}
    for index, part in enumerate(request.content_parts or ()):
        media.setdefault(_MODALITIES[part.type], []).append(("content_parts", index))
    other = "content_parts" if media else "token_ids"
    name = other if request.features is None else "features"
    return WirePaths(input=(name,), prompt=("token_ids",), media=media, fields=_FIELDS)


class _GenerateMaker:
    """A builder of the response of `/inference/v1/generate` to one request, whole or in chunks."""

    def __init__(self, call: Call[GenerateRequest]) -> None:
        self._call = call

    def make_answer(self, outputs: Sequence[RequestOutput]) -> GenerateResponse:
        (output,) = outputs
        return msgspec.structs.replace(
            self.make_empty_chunk(),
            choices=[self._make_choice(entry) for entry in output.outputs],
            usage=make_usage(outputs),
            prompt_logprobs=make_prompt_logprobs(output.prompt_logprobs),
            sensorium_trace=self._call.get_trace(),
        )

    def make_chunks(self, _: int, delta: RequestDelta) -> list[GenerateResponse]:
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

    def _make_choice(self, entry: CompletionOutput | CompletionDelta) -> GenerateChoice:
        piece = make_piece(entry, num_top=self._call.num_top)
        return GenerateChoice(
            index=piece.index,
            token_ids=piece.token_ids,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            logprobs=piece.logprobs,
        )
