"""The routes that render: the body of a route for text in, requests for a server that generates
out. Nothing is run here.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from sensorium.core.admission import check_length
from sensorium.engine.inputs.chat_batch import Chat
from sensorium.engine.inputs.input_processor import ProcessedRequest
from sensorium.server.http.bodies.body import read_body
from sensorium.server.http.bodies.encoding import make_response, wants_msgpack
from sensorium.server.http.calls import Context, Work, check_model, set_uuid_scope
from sensorium.server.http.connections.disconnect import run_until_disconnect
from sensorium.server.http.openai.chat import find_chat_paths, make_chat
from sensorium.server.http.openai.chat_answers import make_chat_answers
from sensorium.server.http.openai.completions import find_prompt_paths, prepare_completion
from sensorium.server.http.openai.sampling import make_chat_params
from sensorium.server.http.protocol.reading import read_request
from sensorium.server.http.protocol.rendering import ChatRenderRequest, CompletionRenderRequest
from sensorium.server.http.protocol.token_wire import RenderedRequest
from sensorium.server.http.threads import run_in_thread
from sensorium.server.http.tokens.features_out import make_features
from sensorium.server.http.wire_paths import WirePaths
from sensorium.types.prompts import Prompt
from sensorium.types.sampling import SamplingParams

_Wire = TypeVar("_Wire", bound=ChatRenderRequest | CompletionRenderRequest)
# How the text is made, which is the matter of whoever makes it.
_NOT_SENT = frozenset({"kept_special_token_ids"})
_DEFAULTS = SamplingParams()


async def render_chat(http_request: Request, context: Context) -> Response:
    def prepare(request: ChatRenderRequest) -> Work:
        answers = make_chat_answers(context.answers, request)
        params = answers.make_params(make_chat_params(request))
        is_trusted = context.options.trust_request_chat_template
        return [make_chat(request, answers, is_trusted=is_trusted)], params

    request, (prompts, params) = await _receive(
        http_request, context, ChatRenderRequest, prepare, make_paths=find_chat_paths
    )
    rendering = _Rendering(context, request, params, is_msgpack=wants_msgpack(http_request))
    request_id = f"chatcmpl-{uuid.uuid4().hex}"

    async def work() -> Response:
        return await rendering.respond(await rendering.render(prompts[0], request_id))

    return await run_until_disconnect(http_request.receive, work())


async def render_completion(http_request: Request, context: Context) -> Response:
    request, (prompts, params) = await _receive(
        http_request,
        context,
        CompletionRenderRequest,
        prepare_completion,
        make_paths=find_prompt_paths,
    )
    rendering = _Rendering(context, request, params, is_msgpack=wants_msgpack(http_request))
    request_id = f"cmpl-{uuid.uuid4().hex}"
    is_single = len(prompts) == 1

    async def work() -> Response:
        rendered = [
            await rendering.render(prompt, request_id if is_single else f"{request_id}-{index}")
            for index, prompt in enumerate(prompts)
        ]
        return await rendering.respond(rendered)

    return await run_until_disconnect(http_request.receive, work())


async def _receive(
    http_request: Request,
    context: Context,
    kind: type[_Wire],
    prepare: Callable[[_Wire], Work],
    *,
    make_paths: Callable[[_Wire], WirePaths],
) -> tuple[_Wire, Work]:
    def parse(body: dict[str, Any]) -> tuple[_Wire, Work]:
        request = read_request(kind, body)
        check_model(request.model, context.options.model_names)
        return request, prepare(request)

    request, (prompts, params) = await read_body(http_request, parse, intake=context.bodies)
    http_request.state.paths = make_paths(request)
    return request, (set_uuid_scope(prompts, http_request), params)


class _Rendering:
    """One call. `is_msgpack`: how it is answered."""

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

    async def respond(self, value: RenderedRequest | list[RenderedRequest]) -> Response:
        return await run_in_thread(lambda: make_response(value, is_msgpack=self._is_msgpack))

    def _make_request(self, processed: ProcessedRequest, request_id: str) -> RenderedRequest:
        request = self._request
        token_ids = processed.request.prompt_token_ids
        options = request.stream_options
        return RenderedRequest(
            request_id=request_id,
            token_ids=token_ids,
            features=make_features(
                processed, is_msgpack=self._is_msgpack, has_kwargs=self._has_kwargs
            ),
            sampling_params=self._make_params(processed),
            model=self._model,
            stream=bool(request.stream),
            stream_options=None if options is None else options.model_dump(exclude_none=True),
            cache_salt=request.cache_salt,
            priority=request.priority or 0,
        )

    def _make_params(self, processed: ProcessedRequest) -> dict[str, Any]:
        """Without a limit it is the room that the context has left, where that is known here. What
        the answer must look like may depend on the rendered prompt.
        """
        num_tokens = len(processed.request.prompt_token_ids)
        structured = processed.request.sampling_params.structured_outputs
        params = get_given(replace(self._params, structured_outputs=structured))
        info = self._engine.info
        if info is not None:
            check_length(num_tokens, info.max_model_len)
            params.setdefault("max_tokens", info.max_model_len - num_tokens)
        return params


def get_given(params: SamplingParams) -> dict[str, Any]:
    """What differs from what is meant where nothing is said, by its name; and the limit."""
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
