"""Chooses the next tokens of a batch, all rows at once.

A row draws one number per token, a function of its request's seed and the token's index alone: what
else is in the batch, and whether the request was preempted, makes no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sensorium.types.request import TokenLogprobs
from sensorium.types.sampling import SamplingParams
from sensorium.worker.staging import StagingBuffer


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """`banned_token_ids` can't be chosen: they would end the request before `min_tokens`."""

    params: SamplingParams
    num_output_tokens: int
    banned_token_ids: tuple[int, ...] = ()


class Sampler:
    def __init__(self, *, device: torch.device) -> None:
        self._staging = StagingBuffer(device=device, num_words=1 << 10)

    def sample(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> tuple[list[int | None], list[TokenLogprobs | None]]:
        """float32 logits [B, vocabulary] → a token, and log-probabilities if the row wants them,
        for each row. `None` for a row whose logits are not numbers to choose by.
        """
        raw_logits = logits
        logits = _ban(logits, rows)
        highest, token_ids = logits.max(dim=-1)  # a NaN anywhere in a row is its maximum
        random = [index for index, row in enumerate(rows) if not row.params.is_greedy]
        if random:
            drawn = self._draw(logits, rows, random)
            token_ids = token_ids.index_copy(0, drawn[0], drawn[1])
        chosen = torch.where(highest.isfinite(), token_ids, -1).tolist()
        logprobs = _get_logprobs(raw_logits, token_ids, rows)
        return [None if token_id < 0 else token_id for token_id in chosen], logprobs

    def _draw(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], random: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        params = [rows[index].params for index in random]
        vocab_size = logits.shape[-1]
        tensors = self._staging.upload(
            {
                "rows": np.array(random, dtype=np.int64),
                "top_k": np.array(
                    [min(p.top_k or vocab_size, vocab_size) for p in params], dtype=np.int64
                ),
                "temperature": np.array([p.temperature for p in params], dtype=np.float64),
                # Infinite for "all": rounding must not cut off the tail of an unfiltered row.
                "top_p": np.array(
                    [np.inf if p.top_p == 1.0 else p.top_p for p in params], dtype=np.float64
                ),
                "uniform": get_uniforms(
                    [p.seed or 0 for p in params],
                    [rows[index].num_output_tokens for index in random],
                ),
            }
        )
        scaled = logits.index_select(0, tensors["rows"]) / tensors["temperature"].float()[:, None]
        probs = scaled.softmax(-1)
        if any(p.top_k or p.top_p != 1.0 for p in params):
            probs = _filter(probs, tensors["top_k"], tensors["top_p"])
        return tensors["rows"], _invert(probs, tensors["uniform"])


def get_uniforms(seeds: Sequence[int], indices: Sequence[int]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1), each a hash of a seed and an index (the finaliser of SplitMix64,
    applied twice).
    """
    words = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
    with np.errstate(over="ignore"):
        words = _mix(words) + np.array(indices, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        words = _mix(words)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _filter(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Zeros for all but the `top_k` likeliest, and then for all but the fewest of these that hold
    `top_p` of their mass. Tokens keep their places: an unfiltered row draws the same token whether
    or not a neighbour is filtered.
    """
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    is_kept = torch.arange(probs.shape[-1], device=probs.device) < top_k[:, None]
    mass = (ranked.double() * is_kept).cumsum(-1)
    is_kept &= mass - ranked < top_p[:, None] * mass[:, -1:]
    return probs * torch.zeros_like(is_kept).scatter_(1, order, is_kept)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The index in each row at which the running share of the weights first exceeds `uniform`."""
    cumulative = weights.double().cumsum(-1)
    target = uniform[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # Rounding may put the target at the very end: the last index with any weight is meant.
    last = weights.shape[-1] - 1 - weights.gt(0).flip(-1).to(torch.uint8).argmax(-1)
    return torch.minimum(index, last)


def _ban(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    pairs = [
        (index, token_id)
        for index, row in enumerate(rows)
        for token_id in row.banned_token_ids
        if token_id < logits.shape[-1]  # others can't be chosen anyway
    ]
    if not pairs:
        return logits
    row_index, token_ids = torch.tensor(pairs, device=logits.device).unbind(1)
    return logits.index_put((row_index, token_ids), logits.new_tensor(float("-inf")))


def _get_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, rows: Sequence[SamplingRow]
) -> list[TokenLogprobs | None]:
    wanted = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    result: list[TokenLogprobs | None] = [None] * len(rows)
    if not wanted:
        return result
    index = torch.tensor(wanted, device=logits.device)
    logprobs = logits.index_select(0, index).log_softmax(-1)
    chosen = logprobs.gather(1, token_ids.index_select(0, index)[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    most = max(rows[i].params.logprobs or 0 for i in wanted)
    top_values, top_ids = (
        logprobs.topk(most, dim=-1) if most else (logprobs[:, :0], logprobs[:, :0].long())
    )
    columns = zip(
        wanted,
        chosen[:, 0].tolist(),
        ranks.tolist(),
        top_ids.tolist(),
        top_values.tolist(),
        strict=True,
    )
    for row, logprob, rank, ids, values in columns:
        count = rows[row].params.logprobs or 0
        result[row] = TokenLogprobs(
            logprob=logprob,
            rank=rank,
            top_token_ids=tuple(ids[:count]),
            top_logprobs=tuple(values[:count]),
        )
    return result
