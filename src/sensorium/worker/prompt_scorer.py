"""Computes log-probabilities of prompt tokens, for the requests of a step that want them.

The logits at a position predict the token after it. They are computed for a bounded number of
positions at a time, because those of a whole prompt may take more memory than the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from sensorium.models.hf_model import HfModel
from sensorium.types.request import TokenLogprobs
from sensorium.utils.arrays import Download, IntArray, StagingBuffer
from sensorium.worker.input_batch import Row
from sensorium.worker.sampling.logprobs import compute_logprobs, to_entries

MAX_ROWS = 128  # the number of positions that have logits in memory at the same time


class PromptScores:
    """The log-probabilities of prompt tokens that one step computes, until the host reads them."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], spans: Sequence[tuple[str, int, int]]
    ) -> None:
        self._download = Download(tensors)
        self._spans = spans  # request id, number of positions, number of top tokens

    def read(self) -> dict[str, tuple[TokenLogprobs, ...]]:
        """Return one entry for each position, by request id."""
        if not self._spans:
            return {}
        counts = [count for _, length, count in self._spans for _ in range(length)]
        entries = iter(to_entries(self._download.read(), counts))
        return {
            name: tuple(next(entries) for _ in range(length)) for name, length, _ in self._spans
        }


NO_SCORES = PromptScores({}, ())


class PromptScorer:
    """A scorer that computes the log-probabilities of prompt tokens for requests that want them."""

    def __init__(self, hf_model: HfModel) -> None:
        self._hf_model = hf_model
        self._staging = StagingBuffer(device=hf_model.device, num_words=1 << 10)

    def score(self, hidden: torch.Tensor, rows: Sequence[Row]) -> PromptScores:
        """Return the log-probabilities of the prompt tokens that this step predicts.

        `hidden` [N, width] has the hidden states of the step's tokens, in the order of `rows`.
        There is an entry for each token of the step that another prompt token follows.
        """
        if all(state.params.prompt_logprobs is None for _, state in rows):
            return NO_SCORES
        index: list[IntArray] = []
        targets: list[IntArray] = []
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
            return NO_SCORES
        has_top = any(count for _, _, count in spans)
        places = {"index": np.concatenate(index), "targets": np.concatenate(targets)}
        return PromptScores(self._compute(hidden, places, has_top=has_top), spans)

    def _compute(
        self, hidden: torch.Tensor, places: Mapping[str, IntArray], *, has_top: bool
    ) -> dict[str, torch.Tensor]:
        tensors = self._staging.upload(places)
        parts = []
        for first in range(0, len(places["index"]), MAX_ROWS):
            index = tensors["index"][first : first + MAX_ROWS]
            logits = self._hf_model.logits(hidden.index_select(0, index))
            wanted = tensors["targets"][first : first + MAX_ROWS]
            parts.append(compute_logprobs(logits, wanted, has_top=has_top))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
