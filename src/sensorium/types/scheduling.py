"""What the core tells the worker to do in one step, and what the worker answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from sensorium.types.errors import RequestError
from sensorium.types.request import EngineCoreRequest, TokenLogprobs

# Block ids of one request, one tuple per KV cache group.
BlockIds = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInput:
    """An item to encode: the n-th of its request, and the key under which its output is kept."""

    mm_index: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRequest:
    """One request's share of a step.

    Compute the tokens `[num_computed_tokens, num_computed_tokens + num_new_tokens)`.
    `new_block_ids` are appended to the block tables that the worker keeps, or replace them when the
    request is (re)started. `is_sampled` says whether the step reaches the request's last token, so
    that a next one is chosen.
    """

    request_id: str
    num_computed_tokens: int
    num_new_tokens: int
    new_block_ids: BlockIds
    is_sampled: bool
    encoder_inputs: tuple[EncoderInput, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRequest:
    """A request that the worker doesn't hold.

    New, or resumed with the tokens it had made: after a preemption, or because it has become long.
    """

    request: EngineCoreRequest
    output_token_ids: tuple[int, ...] = ()
    # Whether the model computes it as one that is longer than `Limits.long_after`, until it stops.
    is_long: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """The only thing the worker obeys.

    Lists are in the order in which to act: drop, free, start, then run.
    """

    scheduled: tuple[ScheduledRequest, ...] = ()
    started: tuple[StartedRequest, ...] = ()
    stopped_request_ids: tuple[str, ...] = ()  # finished, aborted or preempted since the last step
    freed_encoder_keys: tuple[str, ...] = ()  # encoder outputs to drop
    num_scheduled_tokens: int = 0

    @property
    def is_empty(self) -> bool:
        return not self.scheduled


class StepMode(str, Enum):
    """How a step was computed: replayed as a CUDA graph, or launched kernel by kernel, and why."""

    DECODE_GRAPH = "decode_graph"  # one graph
    SEGMENT_GRAPHS = "segment_graphs"  # graphs with attention between them
    EAGER_NO_GRAPHS = "eager_no_graphs"  # there are none on this device, for this model, or at all
    EAGER_LARGE_BATCH = "eager_large_batch"  # more requests or tokens than the largest graph has
    EAGER_SPANS = "eager_spans"  # tokens of an item see each other in both directions
    EAGER_INPUTS = "eager_inputs"  # the decoder gets more than embeddings (DeepStack)

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """The sampled token of each request that sampled, and what failed, with the reason.

    A failed request was left out of the step, or nothing sensible came of it. `failed_encodes` are
    by encoder key. `prompt_logprobs` has an entry for each token of the step that is followed by
    another one of the prompt, for the requests that want them. `encode_s`: how long the step's
    encoders took, seen from the host. `mode` is `None` if nothing was computed.

    Of requests with a grammar: `late_request_ids` could not choose a token, because it isn't known
    yet which are allowed; they have to compute their last token once more. After their token
    `completed_request_ids` can say nothing else.
    """

    sampled_token_ids: Mapping[str, int]
    logprobs: Mapping[str, TokenLogprobs]
    failed_encodes: Mapping[str, str]
    failed_requests: Mapping[str, RequestError] = field(default_factory=dict)  # by request id
    prompt_logprobs: Mapping[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    encode_s: float = 0.0
    mode: StepMode | None = None
    late_request_ids: frozenset[str] = frozenset()
    completed_request_ids: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroup:
    """Layers that share a block table, because they need the same positions.

    `window`: they attend to the last `window` positions only; `None`: to all.
    """

    num_blocks: int
    window: int | None = None
