"""What a caller of `LLM.generate` gets back; names as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from sensorium.types.errors import RequestError
from sensorium.types.request import FinishReason
from sensorium.types.times import CoreTimes, ItemTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """`rank` is 1 for the likeliest token."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One generated sequence.

    `stop_reason`: the stop string or token id that ended it; `None` for end-of-sequence.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    logprobs: tuple[dict[int, Logprob], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItemReport:
    """Which caches served an item: `is_processor_hit`: it was not processed for this request;
    `transfer`: what went to the core, "tensors", "shared" (a place in shared memory) or "none".
    `times`: seconds by stage, of what was done for this request. `mm_index`, `prompt_end`: which of
    the prompt's items it is, and where its placeholders end, once that is known.
    """

    modality: str
    mm_hash: str
    is_processor_hit: bool
    transfer: str
    times: ItemTimes = field(default_factory=dict)
    mm_index: int | None = None
    prompt_end: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A request and what came of it: `n` completions, in the order of their indices.

    `prompt_logprobs`: `None` for the first token of the prompt, which nothing predicts, then as in
    a completion. `num_cached_tokens` came from the prefix cache, `num_encoder_hits` counts the
    items whose encoder output was there already (`encoder_hits`: which), `mm_items` says of each
    item how it came there. `times` are those of the first completion in the core, `stages` the
    seconds by stage of what came before it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    num_cached_tokens: int = 0
    num_encoder_hits: int = 0
    encoder_hits: tuple[int, ...] = ()
    mm_items: tuple[MediaItemReport, ...] = ()
    times: CoreTimes | None = None
    stages: ItemTimes = field(default_factory=dict)
    error: RequestError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionDelta:
    """What one completion has got since the last time. The one with a `finish_reason` is its last.

    `text` may lag behind `token_ids`: it is given out when nothing that follows can change it.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[dict[int, Logprob], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDelta:
    """News of a request that is streamed: at most one delta per completion.

    `final`: the whole request, with its last news only. The texts of all deltas of a completion
    together are the text that it has there.
    """

    request_id: str
    deltas: tuple[CompletionDelta, ...]
    prompt_token_ids: tuple[int, ...] = ()
    final: RequestOutput | None = None
