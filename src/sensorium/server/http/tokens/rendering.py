"""The routes that render (to token ids and processed media), tokenize and detokenize."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sensorium.core.admission import check_length
from sensorium.engine.inputs.input_processor import ProcessedRequest
from sensorium.engine.inputs.renderer import Chat
from sensorium.server.http.bodies.reading import make_response, wants_msgpack
from sensorium.server.http.calls import Context, Work, read_call, set_uuid_scope
from sensorium.server.http.connections import run_in_thread, run_until_disconnect
from sensorium.server.http.errors import ApiError, WirePaths
from sensorium.server.http.openai.chat import find_chat_paths, make_chat, prepare_chat
from sensorium.server.http.openai.completions import find_prompt_paths, prepare_completion
from sensorium.server.http.protocol.answers import (
    DetokenizeResponse,
    RenderedRequest,
    TokenizeResponse,
)
from sensorium.server.http.protocol.requests import (
    ChatCompletionRequest,
    ChatRenderRequest,
    CompletionRenderRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from sensorium.server.http.tokens.features import make_features
from sensorium.types.errors import RequestError
from sensorium.types.request import Prompt, TextPrompt
from sensorium.types.sampling import SamplingParams

_Wire = TypeVar("_Wire", bound=ChatRenderRequest | CompletionRenderRequest)
# Parameters that are chosen by the server that turns the generated token ids into text.
_NOT_SENT = frozenset({"kept_special_token_ids"})
_DEFAULTS = SamplingParams()


async def render_chat_completion(http_request: Request, context: Context) -> Response:
    return await _render(
        http_request,
        context,
        ChatRenderRequest,
        lambda request: prepare_chat(request, context),
        find_chat_paths,
        id_prefix="chatcmpl",
    )


async def render_prompts(http_request: Request, context: Context) -> Response:
    return await _render(
        http_request,
        context,
        CompletionRenderRequest,
        prepare_completion,
        find_prompt_paths,
        id_prefix="cmpl",
        is_list=True,
    )


async def _render(
    http_request: Request,
    context: Context,
    kind: type[_Wire],
    prepare: Callable[[_Wire], Work],
    find_paths: Callable[[_Wire], WirePaths],
    *,
    id_prefix: str,
    is_list: bool = False,
) -> Response:
    """Answer with a list of the request's rendered prompts or, without `is_list`, the only one."""
    request, (prompts, params) = await read_call(
        http_request, context, kind, prepare, find_paths=find_paths
    )
    is_msgpack = wants_msgpack(http_request)
    rendering = _Rendering(context, request, params, is_msgpack=is_msgpack)
    request_id = f"{id_prefix}-{uuid.uuid4().hex}"
    is_single = len(prompts) == 1

    async def work() -> Response:
        rendered = [
            await rendering.render(prompt, request_id if is_single else f"{request_id}-{index}")
            for index, prompt in enumerate(set_uuid_scope(prompts, http_request))
        ]
        answer = rendered if is_list else rendered[0]
        return await run_in_thread(lambda: make_response(answer, is_msgpack=is_msgpack))

    return await run_until_disconnect(http_request.receive, work())


class _Rendering:
    """A renderer that turns one request's prompts into bodies for `/inference/v1/generate`."""

    def __init__(
        self,
        context: Context,
        request: ChatRenderRequest | CompletionRenderRequest,
        params: SamplingParams,
        *,
        is_msgpack: bool,
    ) -> None:
        self._engine = context.engine
        self._request = request
        self._params = params
        self._model = request.model or context.options.model_names[0]
        self._is_msgpack = is_msgpack
        self._has_kwargs = request.return_kwargs is not False

    async def render(self, prompt: Prompt | Chat, request_id: str) -> RenderedRequest:
        async with self._engine.render(
            prompt, self._params, request_id=request_id, needs_tensors=self._has_kwargs
        ) as processed:
            return await run_in_thread(lambda: self._make_request(processed, request_id))

    def _make_request(self, processed: ProcessedRequest, request_id: str) -> RenderedRequest:
        request = self._request
        options = request.stream_options
        return RenderedRequest(
            request_id=request_id,
            token_ids=processed.request.prompt_token_ids,
            features=make_features(
                processed, is_msgpack=self._is_msgpack, has_kwargs=self._has_kwargs
            ),
            sampling_params=self._make_params(processed),
            model=self._model,
            stream=bool(request.stream),
            stream_options=None if options is None else msgspec.to_builtins(options),
            cache_salt=request.cache_salt,
            priority=request.priority or 0,
        )

    def _make_params(self, processed: ProcessedRequest) -> dict[str, Any]:
        """Return the sampling parameters for the response, without those that are defaults.

        `max_tokens` is by default the rest of the model's context, if its length is known. The
        constraint may depend on the rendered prompt. Raise a `RequestError` if the prompt does not
        fit.
        """
        num_tokens = len(processed.request.prompt_token_ids)
        structured = processed.request.sampling_params.structured_outputs
        params = _get_given(replace(self._params, structured_outputs=structured))
        info = self._engine.info
        if info is not None:
            check_length(num_tokens, info.max_model_len)
            params.setdefault("max_tokens", info.max_model_len - num_tokens)
        return params


def _get_given(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that differ from their defaults, and `max_tokens` if it is set."""
    given: dict[str, Any] = {}
    for field in fields(params):
        value = getattr(params, field.name)
        if field.name not in _NOT_SENT and value != getattr(_DEFAULTS, field.name):
            given[field.name] = value
    if params.max_tokens is None:
        given.pop("max_tokens", None)
    else:
        given["max_tokens"] = params.max_tokens
    if params.structured_outputs is not None:
        own = asdict(params.structured_outputs)
        given["structured_outputs"] = {k: v for k, v in own.items() if v is not None}
    return given


# the fields of a conversation in a request to tokenize it
_CHAT_FIELDS = frozenset(TokenizeRequest.__struct_fields__) & frozenset(
    ChatCompletionRequest.__struct_fields__
)


async def tokenize(http_request: Request, context: Context) -> Response:
    is_trusted = context.options.trust_request_chat_template
    request, prompt = await read_call(
        http_request,
        context,
        TokenizeRequest,
        lambda request: _make_prompt(request, is_trusted=is_trusted),
        find_paths=_find_paths,
    )
    (scoped,) = set_uuid_scope([prompt], http_request)
    return await run_until_disconnect(http_request.receive, _tokenize(context, request, scoped))


async def detokenize(http_request: Request, context: Context) -> Response:
    tokenizer = context.engine.tokenizer
    request, _ = await read_call(http_request, context, DetokenizeRequest, lambda _: None)

    def work() -> Response:
        num_tokens = len(tokenizer)
        for index, token_id in enumerate(request.tokens):
            if token_id >= num_tokens:
                raise RequestError(
                    f"is {token_id}, but the vocabulary has {num_tokens} tokens",
                    path=("tokens", index),
                )
        return make_response(DetokenizeResponse(prompt=tokenizer.decode(request.tokens)))

    return await run_in_thread(work)


def _find_paths(request: TokenizeRequest) -> WirePaths:
    return WirePaths(input=("messages" if request.prompt is None else "prompt",))


def _make_prompt(request: TokenizeRequest, *, is_trusted: bool) -> TextPrompt | Chat:
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(
            "the request must have either prompt or messages, and not both", param="prompt"
        )
    if request.prompt is not None:
        is_special = request.add_special_tokens is not False
        return {"prompt": request.prompt, "add_special_tokens": is_special}
    own = {name: getattr(request, name) for name in _CHAT_FIELDS}
    return make_chat(ChatCompletionRequest(**own), is_trusted=is_trusted)


async def _tokenize(context: Context, request: TokenizeRequest, prompt: Prompt | Chat) -> Response:
    engine = context.engine
    request_id = f"tokenize-{uuid.uuid4().hex}"
    async with engine.render(
        prompt, SamplingParams(), request_id=request_id, needs_tensors=False
    ) as processed:
        token_ids = processed.request.prompt_token_ids

    def work() -> Response:
        names = None
        if request.return_token_strs:
            names = [str(name) for name in engine.tokenizer.convert_ids_to_tokens(list(token_ids))]
        info = engine.info
        answer = TokenizeResponse(
            count=len(token_ids),
            max_model_len=None if info is None else info.max_model_len,
            tokens=token_ids,
            token_strs=names,
        )
        return make_response(answer)

    return await run_in_thread(work)
