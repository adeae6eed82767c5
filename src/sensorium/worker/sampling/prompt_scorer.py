"""Log-probabilities of prompt tokens, for the requests of a step that want them.

The logits at a position are about the token behind it. They are made for a bounded number of
positions at a time: those of a whole prompt may be larger than the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sensorium.models.adapter import ModelAdapter
from sensorium.types.request import TokenLogprobs
from sensorium.utils.arrays import IntArray
from sensorium.worker.input_batch import Row
from sensorium.worker.sampling.logprobs import compute_logprobs, to_entries
from sensorium.worker.staging import StagingBuffer

MAX_ROWS = 128  # positions whose logits exist at the same time


class PromptScorer:
    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter
        self._staging = StagingBuffer(device=adapter.device, num_words=1 << 10)

    def score(
        self, hidden: torch.Tensor, rows: Sequence[Row]
    ) -> dict[str, tuple[TokenLogprobs, ...]]:
        """By request id; `hidden` [N, width] belongs to the rows one after another."""
        if all(state.params.prompt_logprobs is None for _, state in rows):
            return {}
        index: list[IntArray] = []
        targets: list[IntArray] = []
        spans: list[tuple[str, int, int]] = []  # request id, number of positions, of top tokens
        start = 0
        for scheduled, state in rows:
            first = scheduled.num_computed_tokens
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
