"""Computes the log-probabilities of given tokens and of the likeliest ones, from the logits.

The tokens are those that were sampled, or those of prompts (`PromptScorer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sensorium.models.adapter import ModelAdapter
from sensorium.types.request import TokenLogprobs
from sensorium.types.sampling import MAX_LOGPROBS
from sensorium.utils.arrays import IntArray, StagingBuffer
from sensorium.worker.input_batch import Row

MAX_ROWS = 128  # the number of prompt positions that have logits in memory at the same time


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsTensors:
    """The log-probabilities at B positions, as tensors on the device."""

    chosen: torch.Tensor  # [B], those of the given tokens
    ranks: torch.Tensor  # [B], those of the given tokens; the likeliest token has rank 1
    top_ids: torch.Tensor  # [B, k], the likeliest first
    top_values: torch.Tensor  # [B, k]


def compute_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, *, has_top: bool
) -> LogprobsTensors:
    """Return the log-probabilities of token ids [B] in the logits [B, vocabulary].

    Some placeholders have an id outside the vocabulary. Such an id has the probability 0.
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
    """Return the rows of all parts, each with as many of the likeliest tokens as it asked for."""
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


class PromptScorer:
    """A scorer of the prompt tokens of requests that want their log-probabilities.

    The logits at a position predict the token after it. They are computed for a bounded number of
    positions at a time, because those of a whole prompt may take more memory than the model.
    """

    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter
        self._staging = StagingBuffer(device=adapter.device, num_words=1 << 10)

    def score(
        self, hidden: torch.Tensor, rows: Sequence[Row]
    ) -> dict[str, tuple[TokenLogprobs, ...]]:
        """Return the log-probabilities of this step's prompt tokens by request id.

        The hidden states [N, width] are those of the rows, one row's tokens after the other's.
        """
        if all(state.params.prompt_logprobs is None for _, state in rows):
            return {}
        index: list[IntArray] = []
        targets: list[IntArray] = []
        # Request id, number of positions, number of top tokens.
        spans: list[tuple[str, int, int]] = []
        start = 0
        for scheduled, state in rows:
            first = scheduled.num_computed_tokens
            # The last prompt token predicts the first output token, which is not scored here.
            num_scored = min(scheduled.num_new_tokens, state.num_prompt_tokens - 1 - first)
            if state.params.prompt_logprobs is not None and num_scored > 0:
                index.append(np.arange(start, start + num_scored))
                targets.append(state.token_ids.values[first + 1 : first + 1 + num_scored])
                spans.append((scheduled.request_id, num_scored, state.params.prompt_logprobs))
            start += scheduled.num_new_tokens
        if not spans:
            return {}
        counts = [count for _, num_scored, count in spans for _ in range(num_scored)]
        entries = iter(
            self._compute(hidden, np.concatenate(index), np.concatenate(targets), counts)
        )
        return {name: tuple(next(entries) for _ in range(length)) for name, length, _ in spans}

    def _compute(
        self, hidden: torch.Tensor, index: IntArray, targets: IntArray, counts: Sequence[int]
    ) -> list[TokenLogprobs]:
        tensors = self._staging.upload({"index": index, "targets": targets})
        parts = []
        for first in range(0, len(index), MAX_ROWS):
            places = tensors["index"][first : first + MAX_ROWS]
            logits = self._adapter.logits(hidden.index_select(0, places))
            wanted = tensors["targets"][first : first + MAX_ROWS]
            parts.append(compute_logprobs(logits, wanted, has_top=any(counts)))
        return to_entries(parts, counts)
