"""Describes how the next token of one request is to be chosen."""

from __future__ import annotations

from dataclasses import dataclass

from sensorium.types.sampling import SamplingParams
from sensorium.utils.arrays import IntArray
from sensorium.worker.sampling.token_history import TokenCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """The input of the sampler for one request."""

    params: SamplingParams
    num_output_tokens: int
    # They would end the request before `min_tokens`, or complete a banned sequence.
    banned_token_ids: tuple[int, ...] = ()
    counts: TokenCounts | None = None  # None if the request has no penalties
    # Bit i of word w is set if the request's grammar allows token 64 * w + i. None: no grammar.
    mask: IntArray | None = None

    @property
    def is_edited(self) -> bool:
        """Return whether some logits of this row are changed before a token is chosen."""
        return bool(
            self.banned_token_ids
            or self.counts is not None
            or self.mask is not None
            or self.params.logit_bias
            or self.params.allowed_token_ids is not None
        )
