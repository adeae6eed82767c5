"""Builds the choices of answers, in the shapes of the wire, from pieces of completions.

A `Piece` is a whole completion, or the new part of it in a stream. It comes from the engine, or
from tokens that another server has generated (`server.http.derender`). The choices of all routes
are built here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from sensorium.render.answers.answer import AnswerDelta
from sensorium.server.http.protocol.answers import (
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
    GenerateChoice,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    TokenIds,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from sensorium.types.outputs import CompletionDelta, CompletionOutput, Logprob, RequestOutput

_LEAST = -9999.0  # in place of minus infinity, which JSON can't write


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A whole completion, or the new part of it in a stream."""

    index: int
    token_ids: TokenIds
    answer: AnswerDelta  # the text; for a chat, split into content, reasoning and calls
    num_tool_calls: int = 0  # so far
    finish_reason: str | None  # `None` as long as it goes on
    stop_reason: str | int | None
    logprobs: ChatLogprobs | None
    offset: int = 0  # where the text of the first token begins, as completions count it
    is_first: bool = True


def make_piece(
    entry: CompletionOutput | CompletionDelta,
    *,
    num_top: int,
    answer: AnswerDelta | None = None,
    num_tool_calls: int = 0,
    offset: int = 0,
    is_first: bool = True,
) -> Piece:
    """Return the piece for an output of the engine. Its answer is the text, unless one is given.

    A completion without a reason of its own was ended together with the others of its prompt.
    """
    reason = entry.finish_reason
    if reason is None and isinstance(entry, CompletionOutput):
        finish_reason: str | None = "abort"
    else:
        finish_reason = None if reason is None else str(reason)
    return Piece(
        index=entry.index,
        token_ids=entry.token_ids,
        answer=AnswerDelta(content=entry.text) if answer is None else answer,
        num_tool_calls=num_tool_calls,
        finish_reason=finish_reason,
        stop_reason=entry.stop_reason,
        logprobs=make_logprobs(entry.token_ids, entry.logprobs, num_top=num_top),
        offset=offset,
        is_first=is_first,
    )


def make_generate_choice(piece: Piece) -> GenerateChoice:
    return GenerateChoice(
        index=piece.index,
        token_ids=piece.token_ids,
        finish_reason=piece.finish_reason,
        stop_reason=piece.stop_reason,
        logprobs=piece.logprobs,
    )


def make_completion_choice(
    piece: Piece,
    *,
    index: int,
    has_ids: bool,
    echo: str = "",
    logprobs: CompletionLogprobs | None = None,
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET,
    prompt_token_ids: TokenIds | UnsetType = UNSET,
) -> CompletionChoice:
    """Return a choice for `/v1/completions`.

    `echo` is the text of the prompt, and `logprobs` are those of prompt and answer, if the request
    asked for them.
    """
    return CompletionChoice(
        index=index,
        text=echo + piece.answer.content,
        logprobs=logprobs or make_completion_logprobs(piece.logprobs, offset=piece.offset),
        finish_reason=piece.finish_reason,
        stop_reason=piece.stop_reason,
        prompt_logprobs=prompt_logprobs,
        prompt_token_ids=prompt_token_ids if has_ids else UNSET,
        token_ids=piece.token_ids if has_ids else UNSET,
    )


def make_logprobs(
    token_ids: Sequence[int], entries: Sequence[Mapping[int, Logprob]] | None, *, num_top: int
) -> ChatLogprobs | None:
    """Return the log-probabilities of tokens in the shape of a chat, the source of other shapes."""
    if entries is None:
        return None
    rows = zip(token_ids, entries, strict=True)
    return ChatLogprobs([_make_token(token_id, entry, num_top) for token_id, entry in rows])


def _make_token(token_id: int, entry: Mapping[int, Logprob], num_top: int) -> TokenLogprob:
    chosen = entry[token_id]
    ranked = sorted(entry.values(), key=lambda other: other.rank)
    top = [
        TopLogprob(other.decoded_token, _clamp(other), _as_bytes(other))
        for other in ranked[:num_top]
        if other.rank <= num_top
    ]
    return TokenLogprob(chosen.decoded_token, _clamp(chosen), _as_bytes(chosen), top)


def make_completion_logprobs(
    logprobs: ChatLogprobs | None, *, offset: int, first_token: str | None = None
) -> CompletionLogprobs | None:
    """Return log-probabilities in the shape of completions.

    `offset` is where the text of these tokens begins. `first_token` is the text of a token before
    them that has no log-probability: the first of an echoed prompt.
    """
    if logprobs is None:
        return None
    made = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    if first_token is not None:
        made.tokens.append(first_token)
        made.token_logprobs.append(None)
        made.top_logprobs.append(None)
        made.text_offset.append(offset)
        offset += len(first_token)
    for entry in logprobs.content:
        # The likeliest tokens and the chosen one, as in OpenAI's answers. If several tokens have
        # the same text, the likeliest of them stands for all.
        top: dict[str, float] = {}
        for other in entry.top_logprobs:
            top.setdefault(other.token, other.logprob)
        top.setdefault(entry.token, entry.logprob)
        made.tokens.append(entry.token)
        made.token_logprobs.append(entry.logprob)
        made.top_logprobs.append(top)
        made.text_offset.append(offset)
        offset += len(entry.token)
    return made


def count_characters(logprobs: ChatLogprobs | None) -> int:
    """Return how many characters these tokens add to the offset of the next token."""
    return 0 if logprobs is None else sum(len(entry.token) for entry in logprobs.content)


def make_prompt_logprobs(
    entries: Sequence[Mapping[int, Logprob] | None] | None,
) -> PromptLogprobs | None:
    if entries is None:
        return None
    return [None if entry is None else _by_id(entry) for entry in entries]


def _by_id(entry: Mapping[int, Logprob]) -> dict[str, PromptLogprob]:
    return {
        str(token_id): PromptLogprob(_clamp(found), found.rank, found.decoded_token)
        for token_id, found in entry.items()
    }


def _clamp(entry: Logprob) -> float:
    return max(entry.logprob, _LEAST)


def _as_bytes(entry: Logprob) -> list[int]:
    return list(entry.decoded_token.encode("utf-8", "replace"))


def make_usage(outputs: Iterable[RequestOutput]) -> Usage:
    """Return the usage of all prompts of a call. A prompt counts once, whatever its `n` is."""
    prompt = completion = cached = 0
    for output in outputs:
        prompt += len(output.prompt_token_ids)
        completion += sum(len(entry.token_ids) for entry in output.outputs)
        cached += output.num_cached_tokens
    return count_usage(prompt, completion, num_cached_tokens=cached)


def count_usage(
    num_prompt_tokens: int, num_completion_tokens: int, *, num_cached_tokens: int | None = None
) -> Usage:
    """Return a usage. The number of cached tokens is known only at the end of a request."""
    is_known = num_cached_tokens is not None
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_completion_tokens,
        total_tokens=num_prompt_tokens + num_completion_tokens,
        prompt_tokens_details=PromptTokensDetails(num_cached_tokens) if is_known else None,  # type: ignore[arg-type]
    )
