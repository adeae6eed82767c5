"""The scheduler's plan of one step for the worker, and the worker's result of that step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from sensorium.types.errors import RequestError
from sensorium.types.request import EngineCoreRequest, Results, TokenLogprobs

# Block ids of one request, one tuple per KV cache group.
BlockIds = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInput:
    """A media item that the worker has to encode in a step."""

    mm_index: int  # among the media items of the request
    key: str  # of the output in the encoder cache


class ScheduledRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The work for one request in a step."""

    request_id: str
    num_computed_tokens: int  # the index of the first token to compute
    num_new_tokens: int  # to compute
    # The worker appends them to the request's block tables, which are empty if the request is
    # started in this step. An empty tuple means no new blocks in any group of layers.
    new_block_ids: BlockIds
    # How many of its last positions choose a token. 0: more of its tokens follow in later steps.
    # 1: the step computes its last token. Drafts behind it, which are not planned yet, add to it.
    num_sampled: int
    encoder_inputs: tuple[EncoderInput, ...] = ()
    # The unique number of the request's run, by which the scheduler recognises results of an
    # earlier run, before a preemption.
    run: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRequest:
    """A request that the worker does not hold yet, and that begins in this step.

    It is new, was preempted, or has grown beyond `Limits.long_after` tokens.
    """

    request: EngineCoreRequest
    output_token_ids: tuple[int, ...] = ()  # tokens that it had generated before
    # Until it stops, the model computes it as a request of more than `Limits.long_after` tokens.
    is_long: bool = False
    # Its blocks for cross-attention already hold the keys and values of its media.
    has_media: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """The plan of a step: everything that the worker has to do in it.

    The worker first drops the stopped requests and the freed encoder outputs, then adds the started
    requests, then computes the scheduled ones.
    """

    scheduled: tuple[ScheduledRequest, ...] = ()
    started: tuple[StartedRequest, ...] = ()
    stopped_request_ids: tuple[str, ...] = ()  # finished, aborted or preempted since the last step
    freed_encoder_keys: tuple[str, ...] = ()  # encoder outputs to drop
    # (request id, number): the request drops this many first tokens, and renumbers the others.
    dropped_tokens: tuple[tuple[str, int], ...] = ()
    num_scheduled_tokens: int = 0

    @property
    def is_empty(self) -> bool:
        return not self.scheduled

    @property
    def has_first_tokens(self) -> bool:
        """Whether the step prefills a request and also chooses a token for it."""
        if not self.started and self.num_scheduled_tokens == len(self.scheduled):
            return False  # most steps: all requests decode
        started = {entry.request.request_id for entry in self.started}
        return any(
            entry.num_sampled and (entry.num_new_tokens > 1 or entry.request_id in started)
            for entry in self.scheduled
        )


class StepMode(str, Enum):
    """The way in which a step was computed: with CUDA graphs, or without and for which reason."""

    DECODE_GRAPH = "decode_graph"  # one graph
    SEGMENT_GRAPHS = "segment_graphs"  # graphs with attention between them
    EAGER_NO_GRAPHS = "eager_no_graphs"  # there are none on this device, for this model, or at all
    EAGER_LARGE_BATCH = "eager_large_batch"  # more requests or tokens than in the largest graph
    EAGER_SPANS = "eager_spans"  # tokens of an item see each other in both directions
    EAGER_INPUTS = "eager_inputs"  # the decoder gets more than embeddings (DeepStack)

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """The results of a step from the worker: the chosen tokens, and what failed."""

    # Request id -> its next tokens: one, or several where drafts were accepted or where a rule
    # leaves no choice. Exactly one if another step that runs meanwhile also chooses a token for it.
    token_ids: Mapping[str, tuple[int, ...]]
    logprobs: Mapping[str, tuple[TokenLogprobs, ...]]  # request id -> one for each of its tokens
    failed_encodes: Mapping[str, str]  # encoder key -> reason
    loaded_encodes: frozenset[str] = frozenset()  # keys of items that needed no encoder
    # request id -> why it was left out of the step, or has no usable result
    failed_requests: Mapping[str, RequestError] = field(default_factory=dict)
    # request id -> one entry for each token of the step with a next token in the prompt, for
    # requests that ask for these
    prompt_logprobs: Mapping[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    results: Mapping[str, Results] = field(default_factory=dict)  # by request id
    encode_s: float = 0.0  # how long the encoders took, measured by the host
    mode: StepMode | None = None  # None: nothing was computed
    # Requests that could not choose a token, because their grammar has not computed yet which are
    # allowed. They have to compute their last token once more.
    late_request_ids: frozenset[str] = frozenset()
    completed_request_ids: frozenset[str] = frozenset()  # their grammar allows nothing after this


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroup:
    """A group of layers that share a table of KV blocks: they attend to the same positions."""

    num_blocks: int
    window: int | None = None  # how many of the last positions they attend to; None: all
    # They attend to the encoded media of a request, which take all their blocks at its start.
    is_cross: bool = False


def find_cross_group(groups: Sequence[KVCacheGroup]) -> int | None:
    return next((index for index, group in enumerate(groups) if group.is_cross), None)
