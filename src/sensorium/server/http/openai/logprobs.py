"""From the engine's log-probabilities to the shapes of the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sensorium.server.http.protocol.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from sensorium.types.outputs import Logprob

Entries = Sequence[Mapping[int, Logprob]]
_LEAST = -9999.0  # JSON has no infinity


def make_chat_logprobs(
    token_ids: Sequence[int], entries: Entries | None, *, num_top: int
) -> ChatLogprobs | None:
    if entries is None:
        return None
    rows = zip(token_ids, entries, strict=True)
    return ChatLogprobs([_make_token(token_id, entry, num_top) for token_id, entry in rows])


def _make_token(token_id: int, entry: Mapping[int, Logprob], num_top: int) -> TokenLogprob:
    chosen = entry[token_id]
    top = [
        TopLogprob(other.decoded_token, _clamp(other), _as_bytes(other))
        for other in _get_top(entry, num_top)
    ]
    return TokenLogprob(chosen.decoded_token, _clamp(chosen), _as_bytes(chosen), top)


def make_completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[Mapping[int, Logprob] | None] | None,
    *,
    num_top: int,
    offset: int,
    first_token: str = "",
) -> CompletionLogprobs | None:
    """`offset`: where the text of these tokens begins. `first_token`: the text of a token that has
    no entry.
    """
    if entries is None:
        return None
    logprobs = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token_id, entry in zip(token_ids, entries, strict=True):
        token = first_token if entry is None else entry[token_id].decoded_token
        logprobs.tokens.append(token)
        logprobs.token_logprobs.append(None if entry is None else _clamp(entry[token_id]))
        logprobs.top_logprobs.append(None if entry is None else _by_text(token_id, entry, num_top))
        logprobs.text_offset.append(offset)
        offset += len(token)
    return logprobs


def get_text_length(token_ids: Sequence[int], entries: Entries | None) -> int:
    """How far these tokens move the next one's offset."""
    rows = zip(token_ids, entries or (), strict=False)
    return sum(len(entry[token_id].decoded_token) for token_id, entry in rows)


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


def _by_text(token_id: int, entry: Mapping[int, Logprob], num_top: int) -> dict[str, float]:
    """The likeliest and the chosen one, as OpenAI does. Of different tokens with the same text the
    likelier one stands for both.
    """
    found: dict[str, float] = {}
    for other in (*_get_top(entry, num_top), entry[token_id]):
        found.setdefault(other.decoded_token, _clamp(other))
    return found


def _get_top(entry: Mapping[int, Logprob], num_top: int) -> list[Logprob]:
    ranked = sorted(entry.values(), key=lambda other: other.rank)
    return [other for other in ranked if other.rank <= num_top][:num_top]


def _clamp(entry: Logprob) -> float:
    return max(entry.logprob, _LEAST)


def _as_bytes(entry: Logprob) -> list[int]:
    return list(entry.decoded_token.encode("utf-8", "replace"))
