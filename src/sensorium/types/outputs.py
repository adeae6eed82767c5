"""The values that a caller of `LLM.generate` gets back, with the names that vLLM uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sensorium.types.errors import RequestError
from sensorium.types.multimodal import ItemTimes
from sensorium.types.request import CoreTimes, FinishReason, Results


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """The log-probability of one token at one position, and its rank among all tokens."""

    logprob: float
    rank: int  # 1 for the likeliest token
    decoded_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One of the completions that were generated for a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None  # None while it is being generated
    # The stop string or the stop token that ended it; None for an end-of-sequence token.
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    # For each token: token id -> log-probability. None if they were not asked for.
    logprobs: tuple[dict[int, Logprob], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItemReport:
    """A report of how one media item was processed, and how it was sent to the engine core."""

    modality: str
    mm_hash: str
    is_processor_hit: bool  # a cache had it, so that it was not processed for this request
    transfer: str  # what was sent: "tensors", "shared" (a reference to shared memory) or "none"
    times: ItemTimes = field(default_factory=dict)  # of what was done for this request
    mm_index: int | None = None  # its place among the prompt's items, once that is known
    prompt_end: int | None = None  # where its placeholders end, once that is known


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The result of one prompt: its completions, sorted by index, with counts and times."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    # As `logprobs` of a completion, but None for the prompt's first token, which nothing predicts.
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    num_cached_tokens: int = 0  # tokens of the prompt that came from the prefix cache
    num_encoder_hits: int = 0  # items with an encoder output that was in the cache
    encoder_hits: tuple[int, ...] = ()  # the indices of these items
    encoder_loads: tuple[int, ...] = ()  # indices of items with an encoder output from elsewhere
    # modality -> positions of the prompt that take embeddings of its media
    mm_tokens: Mapping[str, int] = field(default_factory=dict)
    mm_items: tuple[MediaItemReport, ...] = ()
    results: Results = field(default_factory=dict)  # tensors in addition to the text, by name
    times: CoreTimes | None = None  # of the first completion
    stages: ItemTimes = field(default_factory=dict)  # of the work before the core got the request
    error: RequestError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionDelta:
    """The part of one completion that was generated since the previous delta of a stream."""

    index: int
    # The texts of all deltas, joined, are the text of the completion in `final`. A text may lag
    # behind `token_ids`: it is sent once no later token can change it.
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None  # in the last delta of the completion only
    stop_reason: str | int | None = None
    logprobs: tuple[dict[int, Logprob], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDelta:
    """The part of a streamed request that was generated since the previous delta."""

    request_id: str
    deltas: tuple[CompletionDelta, ...]  # at most one for each completion
    prompt_token_ids: tuple[int, ...] = ()
    final: RequestOutput | None = None  # the whole request, in its last delta only
