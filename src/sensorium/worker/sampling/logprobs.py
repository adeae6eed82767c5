"""Computes the log-probabilities of given tokens and of the likeliest ones, from the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sensorium.types.request import TokenLogprobs
from sensorium.types.sampling import MAX_LOGPROBS


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsTensors:
    """The log-probabilities at B positions, as tensors on the device.

    For each position they have the log-probability and the rank of one given token, and the ids and
    log-probabilities of the k likeliest tokens.
    """

    chosen: torch.Tensor  # [B], those of the given tokens
    ranks: torch.Tensor  # [B], those of the given tokens; the likeliest token has rank 1
    top_ids: torch.Tensor  # [B, k], the likeliest first
    top_values: torch.Tensor  # [B, k]


def compute_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, *, has_top: bool
) -> LogprobsTensors:
    """Return the log-probabilities and ranks of token ids [B] in the logits [B, vocabulary].

    With `has_top`, the `MAX_LOGPROBS` likeliest tokens of each position are included. Some media
    placeholders have an id outside the vocabulary; their log-probability is -inf.
    """
    # The number is the same for all rows: it decides which tokens of a tie come first, and that
    # must not depend on what other requests ask for.
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
    """Copy log-probabilities from the device, and return one entry for each position of all parts.

    `counts` has the number of likeliest tokens to include for each position.
    """
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
