"""Builds the choices of responses in OpenAI's form.

Choices are made from a `Piece`, which comes from the engine, or from token ids that another server
has generated (`server.http.tokens.derendering`).
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
    TokenIds,
    TokenLogprob,
    TopLogprob,
)
from sensorium.types.outputs import CompletionDelta, CompletionOutput, Logprob

_LEAST = -9999.0  # in place of minus infinity, which JSON can't write


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A whole completion, or the part of one that is new since the last chunk of its stream."""

    index: int  # of the completion among those of its prompt
    token_ids: TokenIds
    answer: AnswerDelta  # the text; for a chat, split into content, reasoning and tool calls
    num_tool_calls: int = 0  # in the whole completion so far
    finish_reason: str | None  # `None` until the completion ends
    stop_reason: str | int | None
    logprobs: ChatLogprobs | None
    offset: int = 0  # the `text_offset` of the first token, in characters
    is_first: bool = True  # the first piece of its completion


def make_piece(
    entry: CompletionOutput | CompletionDelta,
    *,
    num_top: int,
    answer: AnswerDelta | None = None,
    num_tool_calls: int = 0,
    offset: int = 0,
) -> Piece:
    """Return a `Piece` for a whole completion, or for a new part of one, from the engine.

    If `answer` is `None`, all of the text is content. A whole completion without a finish reason
    was ended together with the other completions of its prompt, so it gets "abort".
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
    """Return one choice for a response of `/v1/completions`, or for a chunk of its stream.

    `echo` is the prompt's text if the request asked for it. `logprobs`, if given, cover prompt and
    completion, and replace those of the piece.
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
    """Return log-probabilities of tokens in the form of chats; `None` if `entries` is `None`.

    Each of `entries` maps token ids to log-probabilities; the `num_top` likeliest are also listed.
    """
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
    """Convert log-probabilities from the form of chat responses to that of `/v1/completions`.

    `offset` is the `text_offset` of the first entry, in characters. `first_token` is the text of
    the first token of an echoed prompt, which has no log-probability.
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
    """Return a map of token texts to log-probabilities; of equal texts, the likeliest is used."""
    top: dict[str, float] = {}
    for other in entry.top_logprobs:
        top.setdefault(other.token, other.logprob)
    top.setdefault(entry.token, entry.logprob)
    return top


def count_characters(logprobs: ChatLogprobs | None) -> int:
    """Return the number of characters in these tokens, which is added to the next `text_offset`."""
    return 0 if logprobs is None else sum(len(entry.token) for entry in logprobs.content)


def make_prompt_logprobs(
    entries: Sequence[Mapping[int, Logprob] | None] | None,
) -> PromptLogprobs | None:
    """Return the log-probabilities of a prompt's tokens in the form of a response.

    The entry of the first token is `None`, because nothing predicts it.
    """
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
