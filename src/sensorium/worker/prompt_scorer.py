"""Computes log-probabilities of prompt tokens, for the requests of a step that want them.

The logits at a position predict the token after it. They are computed for a bounded number of
positions at a time, because those of a whole prompt may take more memory than the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sensorium.models.adapter import ModelAdapter
from sensorium.types.request import TokenLogprobs
from sensorium.utils.arrays import IntArray, StagingBuffer
from sensorium.worker.input_batch import Row
from sensorium.worker.sampling.logprobs import compute_logprobs, to_entries

MAX_ROWS = 128  # the number of positions that have logits in memory at the same time


class PromptScorer:
    """A scorer that computes the log-probabilities of prompt tokens for requests that want them."""

    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter
        self._staging = StagingBuffer(device=adapter.device, num_words=1 << 10)

    def score(
        self, hidden: torch.Tensor, rows: Sequence[Row]
    ) -> dict[str, tuple[TokenLogprobs, ...]]:
        """Return the log-probabilities of the prompt tokens that this step predicts, by request id.

        `hidden` [N, width] has the hidden states of the step's tokens, in the order of `rows`. The
        result has one entry for each token of the step that another prompt token follows. Requests
        that do not want log-probabilities of their prompt are left out.
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
