"""`/tokenize` and `/detokenize`: from text or a conversation to tokens, and back."""

from __future__ import annotations

import uuid

from starlette.requests import Request
from starlette.responses import Response

from sensorium.engine.inputs.chat_batch import Chat
from sensorium.server.http.bodies.encoding import make_response
from sensorium.server.http.calls import Context, read_call, set_uuid_scope
from sensorium.server.http.connections.disconnect import run_until_disconnect
from sensorium.server.http.errors import ApiError
from sensorium.server.http.openai.chat import make_chat
from sensorium.server.http.protocol.answers import DetokenizeResponse, TokenizeResponse
from sensorium.server.http.protocol.requests import (
    ChatCompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from sensorium.server.http.threads import run_in_thread
from sensorium.server.http.wire_paths import WirePaths, make_chat_paths, make_prompt_paths
from sensorium.types.errors import RequestError
from sensorium.types.prompts import Prompt, TextPrompt
from sensorium.types.sampling import SamplingParams

_CHAT_FIELDS = (
    "messages",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "tools",
    "mm_processor_kwargs",
    "media_io_kwargs",
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
    work = _tokenize(context, request, scoped)
    return await run_until_disconnect(http_request.receive, work)


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
    return make_chat_paths(request.messages) if request.prompt is None else make_prompt_paths()


def _make_prompt(request: TokenizeRequest, *, is_trusted: bool) -> TextPrompt | Chat:
    if (request.prompt is None) == (request.messages is None):
        raise ApiError("there must be either prompt or messages", param="prompt")
    if request.prompt is not None:
        is_special = request.add_special_tokens is not False
        return {"prompt": request.prompt, "add_special_tokens": is_special}
    own = {name: getattr(request, name) for name in _CHAT_FIELDS}
    return make_chat(ChatCompletionRequest(**own), is_trusted=is_trusted)


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
