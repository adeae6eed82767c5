"""Chooses the next tokens of a batch, all rows at once.

The order, for each row:

  1. `logit_bias` is added.
  2. `repetition_penalty` divides or multiplies the logits of tokens of prompt and output; then
     `frequency_penalty` and `presence_penalty` are subtracted for tokens of the output.
  3. Bans: tokens outside `allowed_token_ids`, those that the row's grammar doesn't allow here,
     those that complete a banned sequence, those that end the request before `min_tokens`. A row
     without a token left fails.
  4. A greedy row takes the likeliest token; other rows divide their logits by `temperature`.
  5. `top_k`, then `top_p` of what that left, then `min_p`, as in Transformers. `min_p` is a share
     of the likeliest token's probability, and no filter removes that token. So `min_p` cuts the
     same tokens before or after `top_k`, but before `top_p` it would change the mass that `top_p`
     is a share of.
  6. The draw depends only on the seed and the token's index. What else is in the batch, and whether
     the request was preempted, makes no difference.

vLLM and Transformers do steps 1 to 3 in the same order. Log-probabilities are computed before step
1, except for transcripts: there after step 3, because Whisper's rules compare those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sensorium.types.request import TokenLogprobs
from sensorium.utils.arrays import Download, StagingBuffer
from sensorium.worker.sampling.drawing import draw, prepare_draw
from sensorium.worker.sampling.logits_edits import Arrays, apply_edits, prepare_edits
from sensorium.worker.sampling.logprobs import compute_logprobs, to_entries
from sensorium.worker.sampling.sampling_row import SamplingRow

# Marks that stand in place of a token in a row that has none -> the reason in the error.
_FAILURES = {
    -1: "the model's output (logits) for this request is not a finite number",
    -2: "no token is left to choose from: the request's allowed_token_ids, structured_outputs, "
    "bad_words and min_tokens, and the model's generation config, ban all of them",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOutput:
    """The chosen tokens of a batch, with one entry for each row (a request)."""

    token_ids: tuple[int | None, ...]  # None for a row in `failures`
    logprobs: tuple[TokenLogprobs | None, ...]  # None for a row that does not want them
    failures: Mapping[int, str]  # row -> why it has no token


class Sampling:
    """The tokens of a batch that the device chooses, until the host reads them."""

    def __init__(
        self,
        token_ids: torch.Tensor,
        rows: Sequence[SamplingRow],
        logprobs: Mapping[str, torch.Tensor],
    ) -> None:
        self.token_ids = token_ids  # [B] on the device, below 0 in a row without a usable token
        self._rows = rows
        self._has_logprobs = bool(logprobs)
        self._download = Download({"token_ids": token_ids, **logprobs})

    def arrives_within(self, seconds: float) -> bool:
        """Wait for the tokens for a short time, and return whether they have arrived."""
        return self._download.arrives_within(seconds)

    def read(self) -> SamplerOutput:
        """Wait until the device has chosen the tokens, and return them."""
        tensors = self._download.read()
        chosen = tensors["token_ids"].tolist()
        counts = [row.params.logprobs for row in self._rows]
        entries = iter(
            to_entries(tensors, [count for count in counts if count is not None])
            if self._has_logprobs
            else ()
        )
        return SamplerOutput(
            token_ids=tuple(token_id if token_id >= 0 else None for token_id in chosen),
            logprobs=tuple(None if count is None else next(entries) for count in counts),
            failures={row: _FAILURES[mark] for row, mark in enumerate(chosen) if mark < 0},
        )


class Sampler:
    """A sampler that chooses the next token of each request in a batch."""

    def __init__(self, *, device: torch.device) -> None:
        self._staging = StagingBuffer(device=device, num_words=1 << 10)

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        likeliest: torch.Tensor | None = None,
    ) -> Sampling:
        """Begin to choose a token for each row of float32 logits [B, vocabulary].

        `likeliest` is what `mark_likeliest` returns for these logits, if the caller has it.
        """
        edits = prepare_edits(rows, logits.shape[-1])
        arrays = edits | prepare_draw(rows, logits.shape[-1]) | _prepare_logprobs(rows)
        if not arrays and likeliest is not None:
            return Sampling(likeliest, rows, {})
        tensors = self._staging.upload(arrays) if arrays else {}
        edited = apply_edits(logits, tensors) if edits else logits
        highest, token_ids = edited.max(dim=-1)  # NaN for a row that has a NaN anywhere
        if "random_rows" in tensors:
            token_ids = token_ids.index_copy(0, tensors["random_rows"], draw(edited, tensors))
        marked = _mark(highest, token_ids)
        if edits:
            is_all_banned = highest.isneginf() & logits.amax(-1).isfinite()
            marked = marked.masked_fill(is_all_banned, -2)
        if "ruled_rows" in tensors:  # log-probabilities after the rules
            ruled = tensors["ruled_rows"]
            logits = (
                edited
                if len(ruled) == len(rows)
                else logits.index_copy(0, ruled, edited.index_select(0, ruled))
            )
        return Sampling(marked, rows, _compute_logprobs(logits, token_ids, tensors, rows))


def mark_likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return the likeliest token of each row [B], or -1 if its logit is infinite or any is NaN."""
    return _mark(*logits.max(dim=-1))


def _mark(highest: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return torch.where(highest.isfinite(), token_ids, -1)


def _prepare_logprobs(rows: Sequence[SamplingRow]) -> Arrays:
    wanted = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    if not wanted:
        return {}
    arrays: Arrays = {"logprobs_rows": np.array(wanted, dtype=np.int64)}
    ruled = [index for index in wanted if rows[index].params.speech is not None]
    return arrays | ({"ruled_rows": np.array(ruled, dtype=np.int64)} if ruled else {})


def _compute_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    rows: Sequence[SamplingRow],
) -> dict[str, torch.Tensor]:
    if "logprobs_rows" not in tensors:
        return {}
    index = tensors["logprobs_rows"]
    if len(index) < len(rows):
        logits, token_ids = logits.index_select(0, index), token_ids.index_select(0, index)
    return compute_logprobs(logits, token_ids, has_top=any(row.params.logprobs for row in rows))
