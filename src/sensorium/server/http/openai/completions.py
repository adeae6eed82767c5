"""The route `/v1/completions`, which continues one or more prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from sensorium.server.http.calls import (
    Call,
    Context,
    Work,
    check_takes_prompts,
    get_prompt_fields,
    start_call,
)
from sensorium.server.http.choices import (
    count_characters,
    make_completion_choice,
    make_completion_logprobs,
    make_logprobs,
    make_piece,
    make_prompt_logprobs,
)
from sensorium.server.http.errors import ApiError, WirePaths
from sensorium.server.http.openai.params import find_constraint_path, make_completion_params
from sensorium.server.http.protocol.answers import Completion, CompletionChoice, CompletionLogprobs
from sensorium.server.http.protocol.requests import CompletionRequest, TokenId
from sensorium.server.http.streaming import answer_call
from sensorium.server.http.usage import make_usage
from sensorium.types.checking import check
from sensorium.types.errors import RequestError, at, map_at
from sensorium.types.outputs import CompletionOutput, RequestDelta, RequestOutput
from sensorium.types.request import TextPrompt

MAX_CHOICES = 1024  # completions of all prompts in one request
_KINDS = "text, token ids, or a list of either"


async def create_completion(http_request: Request, context: Context) -> Response:
    check_takes_prompts(context)
    call = await start_call(
        http_request,
        context,
        CompletionRequest,
        prepare_completion,
        id_prefix="cmpl",
        find_paths=find_prompt_paths,
    )
    return await answer_call(http_request, call, _CompletionMaker(call))


def find_prompt_paths(request: CompletionRequest) -> WirePaths:
    return WirePaths(input=("prompt",), structured=find_constraint_path(request))


def prepare_completion(request: CompletionRequest) -> Work:
    """Return the prompts of a completion request, and the sampling parameters for all of them."""
    params = make_completion_params(request)
    entries = _split(request.prompt)
    if len(entries) * params.n > MAX_CHOICES:
        raise ApiError(
            f"prompt has {len(entries)} entries with n={params.n}, but one request may have at "
            f"most {MAX_CHOICES} completions",
            param="prompt",
        )
    fields = get_prompt_fields(request)
    prompts: list[TextPrompt] = [
        {**fields, "prompt": entry}
        if isinstance(entry, str)
        else {**fields, "prompt_token_ids": entry}
        for entry in entries
    ]
    return prompts, params


def _split(value: Any) -> list[str | list[int]]:
    """Return the prompts in the field `prompt`, each as text or as token ids."""
    if isinstance(value, str):
        return [value]
    with at("prompt"):
        if not isinstance(value, list) or not value:
            raise RequestError(f"must be {_KINDS}, and not empty")
        if isinstance(value[0], int | float):
            return [_read_token_ids(value)]
        for index, entry in enumerate(value):
            if type(entry) is not type(value[0]) or not isinstance(entry, str | list):
                raise RequestError(f"differs in kind: prompt must be {_KINDS}", path=(index,))
        return map_at(lambda e: _read_token_ids(e) if isinstance(e, list) else e, value)


def _read_token_ids(ids: list[Any]) -> list[int]:
    if not ids:
        raise RequestError("must not be empty")
    return check(ids, list[TokenId])


class _CompletionMaker:
    """A builder of the response to one `/v1/completions` request, whole or in chunks."""

    def __init__(self, call: Call[CompletionRequest]) -> None:
        self._call = call
        self._tokenizer = call.context.engine.tokenizer
        self._has_ids = bool(call.request.return_token_ids)
        # index of a choice that has begun -> where the text of its next token begins
        self._offsets: dict[int, int] = {}

    def make_answer(self, outputs: Sequence[RequestOutput]) -> Completion:
        choices = [
            self._make_choice(prompt_index, output, entry)
            for prompt_index, output in enumerate(outputs)
            for entry in output.outputs
        ]
        usage, trace = make_usage(outputs), self._call.get_trace()
        empty = self.make_empty_chunk()
        return msgspec.structs.replace(empty, choices=choices, usage=usage, sensorium_trace=trace)

    def make_chunks(self, prompt_index: int, delta: RequestDelta) -> list[Completion]:
        """Return the chunks to send for new output of the engine for one prompt.

        Text may come later than its tokens. Without new text, no chunk is sent, unless it is the
        first or the last of a completion, or the request asked for token ids or log-probabilities.
        """
        chunks = []
        for entry in delta.deltas:
            index = self._get_index(prompt_index, entry.index)
            is_first = index not in self._offsets
            offset = self._offsets.setdefault(index, 0)
            piece = make_piece(entry, num_top=self._call.num_top, offset=offset)
            self._offsets[index] += count_characters(piece.logprobs)
            is_counted = entry.token_ids and (entry.logprobs is not None or self._has_ids)
            if not (is_first or entry.text or entry.finish_reason or is_counted):
                continue
            choice = make_completion_choice(
                piece,
                index=index,
                has_ids=self._has_ids,
                echo=self._get_echo(prompt_index) if is_first else "",
                prompt_token_ids=delta.prompt_token_ids if is_first else UNSET,
            )
            chunks.append(msgspec.structs.replace(self.make_empty_chunk(), choices=[choice]))
        return chunks

    def make_empty_chunk(self) -> Completion:
        call = self._call
        return Completion(id=call.id, created=call.created, model=call.model, choices=[])

    def _get_index(self, prompt_index: int, index: int) -> int:
        return prompt_index * self._call.params.n + index

    def _make_choice(
        self, prompt_index: int, output: RequestOutput, entry: CompletionOutput
    ) -> CompletionChoice:
        is_scored = self._call.request.prompt_logprobs is not None
        prompt_logprobs = make_prompt_logprobs(output.prompt_logprobs) if is_scored else None
        return make_completion_choice(
            make_piece(entry, num_top=self._call.num_top),
            index=self._get_index(prompt_index, entry.index),
            has_ids=self._has_ids,
            echo=self._get_echo(prompt_index),
            logprobs=self._make_echoed_logprobs(output, entry),
            prompt_logprobs=UNSET if prompt_logprobs is None else prompt_logprobs,
            prompt_token_ids=output.prompt_token_ids,
        )

    def _get_echo(self, prompt_index: int) -> str:
        """Return the text of a prompt, or an empty string if the request has no `echo`."""
        if not self._call.request.echo:
            return ""
        prompt: Any = self._call.prompts[prompt_index]
        if "prompt" in prompt:
            return str(prompt["prompt"])
        return str(self._tokenizer.decode(prompt["prompt_token_ids"]))

    def _make_echoed_logprobs(
        self, output: RequestOutput, entry: CompletionOutput
    ) -> CompletionLogprobs | None:
        """Return the log-probabilities of prompt and completion, or `None` if not echoed."""
        if not self._call.request.echo or entry.logprobs is None:
            return None
        # The first token of a prompt has none.
        scored = [found for found in output.prompt_logprobs or () if found is not None]
        prompt_ids = output.prompt_token_ids[: len(output.prompt_logprobs or ())]
        token_ids = (*prompt_ids[len(prompt_ids) - len(scored) :], *entry.token_ids)
        logprobs = make_logprobs(token_ids, (*scored, *entry.logprobs), num_top=self._call.num_top)
        first = str(self._tokenizer.decode([prompt_ids[0]])) if prompt_ids else None
        return make_completion_logprobs(logprobs, offset=0, first_token=first)
