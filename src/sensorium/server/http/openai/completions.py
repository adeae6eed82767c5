"""`/v1/completions`: prompts in, their continuations out."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from sensorium.server.http.calls import (
    Call,
    Context,
    Work,
    get_finish_reason,
    get_prompt_fields,
    receive_call,
)
from sensorium.server.http.connections.disconnect import run_until_disconnect
from sensorium.server.http.errors import ApiError, FailureLog
from sensorium.server.http.openai.logprobs import (
    get_text_length,
    make_completion_logprobs,
    make_prompt_logprobs,
)
from sensorium.server.http.openai.sampling import make_completion_params
from sensorium.server.http.openai.structured import find_constraint_path
from sensorium.server.http.openai.usage import make_usage
from sensorium.server.http.protocol.answers import Completion, CompletionChoice
from sensorium.server.http.protocol.completions import CompletionRequest
from sensorium.server.http.protocol.logprobs import CompletionLogprobs
from sensorium.server.http.streaming.sse import EventStream
from sensorium.server.http.streaming.streaming import SseChunks
from sensorium.server.http.wire_paths import WirePaths, make_prompt_paths
from sensorium.types.outputs import CompletionDelta, CompletionOutput, RequestDelta, RequestOutput
from sensorium.types.prompts import TextPrompt

MAX_CHOICES = 1024  # prompts and their completions, in one call


async def answer_completion(
    http_request: Request, context: Context, failures: FailureLog
) -> Response:
    call = await receive_call(
        http_request,
        context,
        CompletionRequest,
        prepare_completion,
        id_prefix="cmpl",
        make_paths=find_prompt_paths,
    )
    tokenizer = context.engine.tokenizer
    if call.request.stream:
        frames = SseChunks(call, _CompletionChunks(call, tokenizer)).run()
        return EventStream(frames, make_error_body=failures.make_reporter(http_request))
    outputs = await run_until_disconnect(http_request.receive, call.generation.finish())
    answer = Completion(
        id=call.id,
        created=call.created,
        model=call.model,
        choices=[
            _make_choice(call, tokenizer, prompt_index, output, entry)
            for prompt_index, output in enumerate(outputs)
            for entry in output.outputs
        ],
        usage=make_usage(outputs),
        sensorium_trace=call.make_trace() if call.has_trace else UNSET,
    )
    return Response(msgspec.json.encode(answer), media_type="application/json")


def find_prompt_paths(request: CompletionRequest) -> WirePaths:
    """Return where the fields stand that errors of the engine are about."""
    return make_prompt_paths(find_constraint_path(request))


def prepare_completion(request: CompletionRequest) -> Work:
    """Its prompts, and the parameters of all of them."""
    params = make_completion_params(request)
    if len(request.prompt) * params.n > MAX_CHOICES:
        raise ApiError(
            f"prompt has {len(request.prompt)} entries with n={params.n}: {MAX_CHOICES} "
            "completions at most in one call",
            param="prompt",
        )
    fields = get_prompt_fields(request)
    if request.add_special_tokens is not None:
        fields["add_special_tokens"] = request.add_special_tokens
    prompts: list[TextPrompt] = [
        {**fields, "prompt": entry}
        if isinstance(entry, str)
        else {**fields, "prompt_token_ids": entry}
        for entry in request.prompt
    ]
    return prompts, params


def _get_echo(call: Call[CompletionRequest], tokenizer: Any, prompt_index: int) -> str:
    """The prompt's text, if it was asked for."""
    if not call.request.echo:
        return ""
    entry = call.request.prompt[prompt_index]
    return entry if isinstance(entry, str) else str(tokenizer.decode(entry))


def _make_choice(
    call: Call[CompletionRequest],
    tokenizer: Any,
    prompt_index: int,
    output: RequestOutput,
    entry: CompletionOutput,
) -> CompletionChoice:
    has_ids = bool(call.request.return_token_ids)
    is_scored = call.request.prompt_logprobs is not None
    prompt_logprobs = make_prompt_logprobs(output.prompt_logprobs) if is_scored else None
    return CompletionChoice(
        index=prompt_index * call.num_choices + entry.index,
        text=_get_echo(call, tokenizer, prompt_index) + entry.text,
        logprobs=_make_logprobs(call, tokenizer, output, entry),
        finish_reason=get_finish_reason(output, entry.index),
        stop_reason=entry.stop_reason,
        prompt_logprobs=UNSET if prompt_logprobs is None else prompt_logprobs,
        prompt_token_ids=output.prompt_token_ids if has_ids else UNSET,
        token_ids=entry.token_ids if has_ids else UNSET,
    )


def _make_logprobs(
    call: Call[CompletionRequest], tokenizer: Any, output: RequestOutput, entry: CompletionOutput
) -> CompletionLogprobs | None:
    """With `echo` those of the prompt come first."""
    num_top = call.generation.params.logprobs or 0
    if not call.request.echo or entry.logprobs is None:
        return make_completion_logprobs(entry.token_ids, entry.logprobs, num_top=num_top, offset=0)
    prompt_entries = output.prompt_logprobs or ()
    prompt_ids = output.prompt_token_ids[: len(prompt_entries)]
    return make_completion_logprobs(
        (*prompt_ids, *entry.token_ids),
        (*prompt_entries, *entry.logprobs),
        num_top=num_top,
        offset=0,
        first_token=str(tokenizer.decode(list(prompt_ids[:1]))),
    )


class _CompletionChunks:
    """Remembers which choices have begun, and where the text of each one's next token begins."""

    def __init__(self, call: Call[CompletionRequest], tokenizer: Any) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._has_ids = bool(call.request.return_token_ids)
        self._num_top = call.generation.params.logprobs or 0
        self._offsets: dict[int, int] = {}

    def make_chunks(self, prompt_index: int, delta: RequestDelta) -> list[Completion]:
        return [
            self._make_chunk(prompt_index, entry, delta)
            for entry in delta.deltas
            if self._is_news(prompt_index, entry)
        ]

    def make_empty_chunk(self) -> Completion:
        call = self._call
        return Completion(id=call.id, created=call.created, model=call.model, choices=[])

    def _is_news(self, prompt_index: int, entry: CompletionDelta) -> bool:
        """Text may lag behind its tokens: then there is nothing to tell, unless tokens count."""
        is_first = self._get_index(prompt_index, entry) not in self._offsets
        has_tokens = entry.logprobs is not None or self._has_ids
        is_counted = bool(entry.token_ids) and has_tokens
        return bool(entry.text or entry.finish_reason or is_counted or is_first)

    def _get_index(self, prompt_index: int, entry: CompletionDelta) -> int:
        return prompt_index * self._call.num_choices + entry.index

    def _make_chunk(
        self, prompt_index: int, entry: CompletionDelta, delta: RequestDelta
    ) -> Completion:
        index = self._get_index(prompt_index, entry)
        is_first = index not in self._offsets
        echo = _get_echo(self._call, self._tokenizer, prompt_index) if is_first else ""
        offset = self._offsets.setdefault(index, 0)
        self._offsets[index] += get_text_length(entry.token_ids, entry.logprobs)
        prompt_ids: tuple[int, ...] | UnsetType = delta.prompt_token_ids
        choice = CompletionChoice(
            index=index,
            text=echo + entry.text,
            logprobs=make_completion_logprobs(
                entry.token_ids, entry.logprobs, num_top=self._num_top, offset=offset
            ),
            finish_reason=None if entry.finish_reason is None else str(entry.finish_reason),
            stop_reason=entry.stop_reason,
            prompt_token_ids=prompt_ids if self._has_ids and is_first else UNSET,
            token_ids=entry.token_ids if self._has_ids else UNSET,
        )
        return msgspec.structs.replace(self.make_empty_chunk(), choices=[choice])
