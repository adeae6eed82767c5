"""The requests that go into the core, and the outputs that come out of it."""

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
    """A request that is ready to run: tokens and metadata, no text and no tensors."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams  # with the defaults of the model filled in
    mm_features: tuple[MultiModalFeatureSpec, ...] = ()  # sorted by offset
    eos_token_ids: tuple[int, ...] = ()  # tokens that end it, unless its parameters ignore them
    bans: TokenBans = NO_BANS  # tokens that it never generates
    # KV blocks and encoder outputs are shared only by requests with the same salt and adapter.
    cache_salt: str | None = None
    adapter: str | None = None
    priority: int = 0  # lower runs first
    completion_index: int = 0  # among the completions of one prompt
    # Names the call that it belongs to, with other prompts or completions; None if it is alone.
    group: str | None = None

    @property
    def encoder_key_suffix(self) -> str:
        """The end of an encoder output's key, after the item's `mm_hash`.

        With it, requests with different salts or adapters share no encoder outputs.
        """
        if self.cache_salt is None and self.adapter is None:
            return ""
        return f"/{self.adapter!r}/{self.cache_salt!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """The log-probabilities of tokens at one position."""

    logprob: float  # of the token that stands there: sampled, or of the prompt
    rank: int  # of that token; 1 is the likeliest
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreOutput:
    """The results of a step for one request. The output with a `finish_reason` is its last."""

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    # The log-probabilities of the next prompt tokens; the first token of a prompt has none.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token of the caller that ended it
    error: ErrorRecord | None = None  # the reason of `FinishReason.ERROR`
    num_cached_tokens: int = 0
    num_encoder_hits: int = 0
    # The next two are set only in the last output, and in each that a stop string may make the
    # last.
    encoder_hits: tuple[int, ...] = ()  # indices of items with an encoder output in the cache
    times: CoreTimes | None = None
