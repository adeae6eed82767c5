"""Log-probabilities as OpenAI's two APIs shape them, and those of a prompt."""

from __future__ import annotations

from msgspec import Struct


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True, kw_only=True):
    """One entry per token in each. `None`: the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


# By token id, in decimal.
PromptLogprobs = list[dict[str, PromptLogprob] | None]
