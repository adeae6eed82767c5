"""Log-probabilities of given tokens and of the likeliest ones, as the model has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sensorium.types.request import TokenLogprobs
from sensorium.types.sampling import MAX_LOGPROBS


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsTensors:
    """On the device, one row per position; the likeliest first."""

    chosen: torch.Tensor  # [B]
    ranks: torch.Tensor  # [B]
    top_ids: torch.Tensor  # [B, k]
    top_values: torch.Tensor  # [B, k]


def compute_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, *, has_top: bool
) -> LogprobsTensors:
    """Of `token_ids` [B] in the logits [B, vocabulary]. An id outside the vocabulary, as some
    placeholders are, has the probability 0.
    """
    # As many for everyone: which tokens of a tie come first depends on their number, and must not
    # depend on what neighbours want.
    num_top = MAX_LOGPROBS if has_top else 0
    vocab_size = logits.shape[-1]
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, token_ids.clamp(max=vocab_size - 1)[:, None])
    chosen = chosen.masked_fill((token_ids >= vocab_size)[:, None], float("-inf"))
    top_values, top_ids = logprobs.topk(min(num_top, vocab_size), dim=-1)
    return LogprobsTensors(
        chosen=chosen[:, 0],
        ranks=(logprobs > chosen).sum(-1) + 1,
        top_ids=top_ids,
        top_values=top_values,
    )


def to_entries(parts: Sequence[LogprobsTensors], counts: Sequence[int]) -> list[TokenLogprobs]:
    """The rows of all parts, each with as many of the likeliest as it asked for."""
    columns = zip(
        torch.cat([part.chosen for part in parts]).tolist(),
        torch.cat([part.ranks for part in parts]).tolist(),
        torch.cat([part.top_ids for part in parts]).tolist(),
        torch.cat([part.top_values for part in parts]).tolist(),
        counts,
        strict=True,
    )
    return [
        TokenLogprobs(
            logprob=logprob,
            rank=rank,
            top_token_ids=tuple(ids[:count]),
            top_logprobs=tuple(values[:count]),
        )
        for logprob, rank, ids, values, count in columns
    ]
