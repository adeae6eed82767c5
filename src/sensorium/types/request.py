"""What goes into the core and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sensorium.types.errors import ErrorRecord
from sensorium.types.multimodal import MultiModalFeatureSpec
from sensorium.types.sampling import NO_BANS, SamplingParams, TokenBans
from sensorium.types.times import CoreTimes


class FinishReason(str, Enum):
    """Why a request ended; every accepted request ends with exactly one."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # the caller gave up
    ERROR = "error"  # it could not be computed; the output carries the reason

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreRequest:
    """A request that is ready to run: tokens and metadata, no text and no tensors.

    `mm_features` are sorted by offset. `sampling_params` are resolved. `eos_token_ids` end it
    unless it ignores them. `bans` are what it never generates. `cache_salt` and `adapter` separate
    what may share KV blocks and encoder outputs. A lower `priority` runs first. `sibling`: which of
    the completions of one prompt it is.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    mm_features: tuple[MultiModalFeatureSpec, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bans: TokenBans = NO_BANS
    cache_salt: str | None = None
    adapter: str | None = None
    priority: int = 0
    sibling: int = 0
    # The call that it belongs to, with other prompts or completions; None: it has none of them.
    group: str | None = None

    @property
    def encoder_key_suffix(self) -> str:
        """What an encoder output's key has after the item's `mm_hash`.

        It keeps salts and adapters apart.
        """
        if self.cache_salt is None and self.adapter is None:
            return ""
        return f"/{self.adapter!r}/{self.cache_salt!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position.

    Those of the token that stands there (sampled, or of the prompt), its rank (1 = likeliest), and
    those of the likeliest tokens.
    """

    logprob: float
    rank: int
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreOutput:
    """News of one request after a step. The one with a `finish_reason` is its last.

    `prompt_logprobs` are those of the next prompt tokens, from the second on. `stop_token_id` is
    the token that ended it, when a token did. `error` explains `FinishReason.ERROR`. Of one that is
    the last, or may be (a stop string would make it so): `encoder_hits` are the indices of the
    items whose encoder output was there, `times` when things happened.
    """

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: ErrorRecord | None = None
    num_cached_tokens: int = 0
    num_encoder_hits: int = 0
    encoder_hits: tuple[int, ...] = ()
    times: CoreTimes | None = None
