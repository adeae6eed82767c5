"""Computes the log-probabilities of given tokens and of the likeliest ones, from the logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sensorium.types.request import TokenLogprobs
from sensorium.types.sampling import MAX_LOGPROBS


def compute_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, *, has_top: bool
) -> dict[str, torch.Tensor]:
    """Return the log-probabilities and ranks of token ids [B] in the logits [B, vocabulary].

    The tensors are on the device: `chosen` and `ranks` [B] (the likeliest token has rank 1), and
    `top_ids` and `top_values` [B, k], the likeliest first. With `has_top` k is `MAX_LOGPROBS`, else
    0. Some media placeholders have an id outside the vocabulary; their log-probability is -inf.
    """
    # The number is the same for all rows: it decides which tokens of a tie come first, and that
    # must not depend on what other requests ask for.
    num_top = MAX_LOGPROBS if has_top else 0
    vocab_size = logits.shape[-1]
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, token_ids.clamp(max=vocab_size - 1)[:, None])
    chosen = chosen.masked_fill((token_ids >= vocab_size)[:, None], float("-inf"))
    # As float32, which counts exactly to 2**24: on a CPU, sums of bools take six times as long.
    is_likelier = torch.gt(logprobs, chosen, out=torch.empty_like(logprobs))
    top_values, top_ids = logprobs.topk(min(num_top, vocab_size), dim=-1)
    return {
        "chosen": chosen[:, 0],
        "ranks": is_likelier.sum(-1).long() + 1,
        "top_ids": top_ids,
        "top_values": top_values,
    }


def to_entries(tensors: Mapping[str, torch.Tensor], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Return the results of `compute_logprobs` on the host, each with its count of top tokens."""
    names = ("chosen", "ranks", "top_ids", "top_values")
    columns = zip(*(tensors[name].tolist() for name in names), counts, strict=True)
    return [
        TokenLogprobs(
            logprob=logprob,
            rank=rank,
            top_token_ids=tuple(ids[:count]),
            top_logprobs=tuple(values[:count]),
        )
        for logprob, rank, ids, values, count in columns
    ]
