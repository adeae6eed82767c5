"""One request's wishes for its next token, as the sampler takes them."""

from __future__ import annotations

from dataclasses import dataclass

from sensorium.types.sampling import SamplingParams
from sensorium.utils.arrays import IntArray
from sensorium.worker.sampling.token_history import TokenCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """`banned_token_ids` can't be chosen: they would end the request before `min_tokens`, or
    complete a banned sequence. `counts` are there if the request has penalties. `mask`: bit i of
    word w says whether its grammar allows token 64 * w + i.
    """

    params: SamplingParams
    num_output_tokens: int
    banned_token_ids: tuple[int, ...] = ()
    counts: TokenCounts | None = None
    mask: IntArray | None = None

    @property
    def is_edited(self) -> bool:
        """Whether its logits are not taken as the model gives them."""
        return bool(
            self.banned_token_ids
            or self.counts is not None
            or self.mask is not None
            or self.params.logit_bias
            or self.params.allowed_token_ids is not None
        )
