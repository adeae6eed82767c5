"""`/tokenize` and `/detokenize`: what the model reads of a text or a conversation, and back."""

from __future__ import annotations

import uuid
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from sensorium.engine.inputs.chat_batch import Chat
from sensorium.server.http.bodies.body import read_body
from sensorium.server.http.bodies.encoding import make_response
from sensorium.server.http.calls import Context, check_model, set_uuid_scope
from sensorium.server.http.connections.disconnect import run_until_disconnect
from sensorium.server.http.errors import ApiError
from sensorium.server.http.openai.chat import make_chat
from sensorium.server.http.protocol.chat import ChatCompletionRequest
from sensorium.server.http.protocol.reading import read_request
from sensorium.server.http.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from sensorium.server.http.threads import run_in_thread
from sensorium.server.http.wire_paths import make_chat_paths, make_prompt_paths
from sensorium.types.prompts import Prompt, TextPrompt
from sensorium.types.sampling import SamplingParams

_Wire = TypeVar("_Wire", bound=TokenizeRequest | DetokenizeRequest)
_CHAT_FIELDS = (
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "tools",
    "mm_processor_kwargs",
    "media_io_kwargs",
)


async def answer_tokenize(http_request: Request, context: Context) -> Response:
    request = await _receive(http_request, context, TokenizeRequest)
    prompt = _make_prompt(request, is_trusted=context.options.trust_request_chat_template)
    is_chat = request.prompt is None
    paths = make_chat_paths(request.messages) if is_chat else make_prompt_paths()
    http_request.state.paths = paths
    (scoped,) = set_uuid_scope([prompt], http_request)
    work = _tokenize(context, request, scoped)
    return await run_until_disconnect(http_request.receive, work)


async def answer_detokenize(http_request: Request, context: Context) -> Response:
    request = await _receive(http_request, context, DetokenizeRequest)
    tokenizer = context.engine.tokenizer

    def work() -> Response:
        num_tokens = len(tokenizer)
        for index, token_id in enumerate(request.tokens):
            if token_id >= num_tokens:
                raise ApiError(
                    f"tokens[{index}] is {token_id}: the vocabulary has {num_tokens} tokens",
                    param=f"tokens[{index}]",
                )
        return make_response(DetokenizeResponse(prompt=tokenizer.decode(request.tokens)))

    return await run_in_thread(work)


async def _receive(http_request: Request, context: Context, kind: type[_Wire]) -> _Wire:
    def parse(body: dict[str, Any]) -> _Wire:
        request = read_request(kind, body)
        check_model(request.model, context.options.model_names)
        return request

    return await read_body(http_request, parse, intake=context.bodies)


def _make_prompt(request: TokenizeRequest, *, is_trusted: bool) -> TextPrompt | Chat:
    if (request.prompt is None) == (request.messages is None):
        raise ApiError("there must be either prompt or messages", param="prompt")
    if request.prompt is not None:
        is_special = request.add_special_tokens is not False
        return {"prompt": request.prompt, "add_special_tokens": is_special}
    own = {name: getattr(request, name) for name in _CHAT_FIELDS}
    chat = ChatCompletionRequest(messages=request.messages, **own)
    return make_chat(chat, is_trusted=is_trusted)


async def _tokenize(context: Context, request: TokenizeRequest, prompt: Prompt | Chat) -> Response:
    engine = context.engine
    async with engine.render(
        prompt,
        SamplingParams(),
        request_id=f"tokenize-{uuid.uuid4().hex}",
        needs_tensors=False,
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
