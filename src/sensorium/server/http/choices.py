"""Builds the choices of answers, in the shapes of the wire, from pieces of completions.

A `Piece` is a whole completion, or the new part of it in a stream. It comes from the engine, or
from tokens that another server has generated (`server.http.tokens.derendering`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from msgspec import UNSET, UnsetType

from sensorium.render.answers.answer import AnswerDelta
from sensorium.server.http.protocol.answers import (
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
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
) -> Piece:
    """Return the piece for an output of the engine. Its answer is the text, unless one is given.

    A completion without a reason of its own was ended together with the others of its prompt.
    """
    default = "abort" if isinstance(entry, CompletionOutput) else None
    reason = entry.finish_reason
    return Piece(
        index=entry.index,
        token_ids=entry.token_ids,
        answer=AnswerDelta(content=entry.text) if answer is None else answer,
        num_tool_calls=num_tool_calls,
        finish_reason=default if reason is None else str(reason),
        stop_reason=entry.stop_reason,
        logprobs=make_logprobs(entry.token_ids, entry.logprobs, num_top=num_top),
        offset=offset,
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
    before = [] if first_token is None else [None]
    tokens = [] if first_token is None else [first_token]
    tokens += [entry.token for entry in logprobs.content]
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[*before, *(entry.logprob for entry in logprobs.content)],
        top_logprobs=[*before, *map(_make_top, logprobs.content)],
        text_offset=list(accumulate(map(len, tokens), initial=offset))[:-1],
    )


def _make_top(entry: TokenLogprob) -> dict[str, float]:
    """Return the likeliest tokens and the chosen one, as in OpenAI's answers.

    If several tokens have the same text, the likeliest of them stands for all.
    """
    top: dict[str, float] = {}
    for other in entry.top_logprobs:
        top.setdefault(other.token, other.logprob)
    top.setdefault(entry.token, entry.logprob)
    return top


def count_characters(logprobs: ChatLogprobs | None) -> int:
    """Return how many characters these tokens add to the offset of the next token."""
    return 0 if logprobs is None else sum(len(entry.token) for entry in logprobs.content)


def make_prompt_logprobs(
    entries: Sequence[Mapping[int, Logprob] | None] | None,
) -> PromptLogprobs | None:
    """Return the log-probabilities of a prompt's tokens, or `None` if there are none."""
    if entries is None:
        return None
    return [None if entry is None else _make_scores(entry) for entry in entries]


def _make_scores(entry: Mapping[int, Logprob]) -> dict[str, PromptLogprob]:
    return {
        str(token_id): PromptLogprob(_clamp(found), found.rank, found.decoded_token)
        for token_id, found in entry.items()
    }


def _clamp(entry: Logprob) -> float:
    return max(entry.logprob, _LEAST)


def _as_bytes(entry: Logprob) -> list[int]:
    return list(entry.decoded_token.encode("utf-8", "replace"))


def make_usage(outputs: Sequence[RequestOutput]) -> Usage:
    """Return the usage of all prompts of a call. A prompt counts once, whatever its `n` is."""
    return count_usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(entry.token_ids) for output in outputs for entry in output.outputs),
        num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
    )


def count_usage(
    num_prompt_tokens: int, num_completion_tokens: int, *, num_cached_tokens: int | None = None
) -> Usage:
    """Return a usage. The number of cached tokens is known only at the end of a request."""
    details = None if num_cached_tokens is None else PromptTokensDetails(num_cached_tokens)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_completion_tokens,
        total_tokens=num_prompt_tokens + num_completion_tokens,
        prompt_tokens_details=details,
    )
