"""Defines a request in the scheduler, and the names by which full KV cache blocks are reused.

Blocks with equal names have equal keys and values. A name is a hash of everything that these depend
on: the adapter and salt, whether they were computed for a long request, all tokens up to the end of
the block, and which part of a media item stands at each position.
"""

from __future__ import annotations

import hashlib
import math
import struct
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from sensorium.types.errors import RequestError, make_record
from sensorium.types.multimodal import MultiModalFeatureSpec, get_mm_features_in_window
from sensorium.types.request import (
    NO_RESULTS,
    CoreTimes,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    Results,
    TokenLogprobs,
)
from sensorium.types.sampling import SamplingParams
from sensorium.types.scheduling import EncoderInput, ModelRunnerOutput, StepMode

# The priority, then the number of the arrival. The smallest is served first; all are different.
Rank = tuple[int, int]
# Sorted, disjoint ranges of positions that must each be computed within one step.
Spans = tuple[tuple[int, int], ...]
_VERSION = b"sensorium-kv-1"  # of the names of blocks
_MEDIA_ROOT = hashlib.sha256(_VERSION + b"media").digest()


class RequestStatus(Enum):
    """The state of a request: WAITING, RUNNING, FINISHED, or WAITING again if it is preempted."""

    HELD = auto()  # before WAITING, while the engine looks for encoder outputs of its media
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """A request in the scheduler, with its tokens and how many of them are computed."""

    def __init__(
        self,
        core_request: EngineCoreRequest,
        *,
        rank: Rank,
        block_size: int,
        spans: Spans = (),
        arrived: float = 0.0,  # in seconds of the scheduler's clock, as all times
        long_after: int | None = None,  # as in `Limits`
    ) -> None:
        self.core_request = core_request
        self.request_id: str = core_request.request_id
        self.group: str = core_request.group or core_request.request_id
        self.mm_features: tuple[MultiModalFeatureSpec, ...] = core_request.mm_features
        self.sampling_params: SamplingParams = core_request.sampling_params
        self.rank = rank
        self.spans = spans
        self.status = RequestStatus.WAITING
        self.token_ids = list(core_request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.run = 0  # the unique number of its present or last run; 0: it has not run yet
        self.num_computed_tokens = 0  # in the steps that have ended
        self.num_scheduled_tokens = 0  # including the steps under way
        self.num_due_tokens = 0  # sampled in steps under way, and not read yet
        self.num_dropped = 0  # first tokens that were removed from `token_ids`
        self._dropped: list[int] = []  # these tokens, if the request may be computed again
        self._num_restored = 0  # first tokens that were dropped, and then were needed again
        self.num_preemptions = 0
        self.num_cached_tokens: int | None = None  # None: never scheduled
        # The KV cache has the cross-attention keys and values of its media, so no encoder runs.
        self.has_media = False
        self.encoder_hits: list[int] = []  # items found in the encoder cache
        self._encoder_loads: set[int] = set()  # items that arrived with their encoder output
        self.arrived = arrived
        self.scheduled: float | None = None  # for the first time
        self.first_token: float | None = None
        self.encode_s = 0.0
        # Prompt positions with log-probabilities so far; None: the caller doesn't want them.
        has_scores = self.sampling_params.prompt_logprobs is not None
        self.num_scored_tokens: int | None = 0 if has_scores else None
        stream = core_request.stream
        # How many positions have their part of the streaming audio; infinite without such audio.
        self.num_received: float = math.inf if stream is None else stream.num_received
        self.is_open = stream is not None and stream.is_open  # more audio may arrive
        self._num_items_counted = 0
        self._block_size = block_size
        self._long_after = long_after
        self._block_hashes: list[bytes] = []
        self._media_hash: bytes | None = None
        self._hash_root = self._make_hash_root()
        self._encoder_key_suffix = core_request.encoder_key_suffix
        max_tokens = self.sampling_params.max_tokens
        self._max_num_tokens = (
            math.inf if max_tokens is None else self.num_prompt_tokens + max_tokens
        )
        self._is_token_read = _is_token_read(core_request)

    @property
    def num_cross_positions(self) -> int:
        """The number of positions that layers with cross-attention attend to."""
        return self.count_embeds(range(len(self.mm_features)))

    def count_embeds(self, mm_indices: Iterable[int]) -> int:
        return sum(self.mm_features[i].mm_position.get_num_embeds() for i in mm_indices)

    @property
    def is_stream(self) -> bool:
        """Whether the request takes streaming audio."""
        return self.core_request.stream is not None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_ready_tokens(self) -> int:
        """The number of tokens that can be computed, as their part of the audio has arrived."""
        return int(min(len(self.token_ids) + self.num_due_tokens, self.num_received))

    @property
    def is_waiting_for_audio(self) -> bool:
        """Whether all audio received so far is computed, and the request waits for more."""
        is_idle = not self.num_due_tokens and self.num_computed_tokens >= self.num_received
        return self.is_open and is_idle

    @property
    def has_received_all(self) -> bool:
        """Whether the audio has ended, and a token for each of its positions is known."""
        is_over = not self.is_open and len(self.token_ids) >= self.num_received
        return is_over and not self.num_due_tokens

    def drop_tokens(self, count: int) -> None:
        """Forget the first tokens, which no layer attends to any more, and renumber the others."""
        # Names of a stream's blocks are never used, because they would depend on the audio.
        if self.mm_features:  # all of its audio is here, so it may be preempted
            self._dropped += self.token_ids[:count]
        del self.token_ids[:count]
        self.num_computed_tokens -= count
        self.num_scheduled_tokens -= count
        self._renumber(count)
        self._num_restored = max(0, self._num_restored - count)

    def set_back(self) -> None:
        """Let all tokens be computed again, also those that were dropped."""
        self.num_computed_tokens = self.num_scheduled_tokens = self.num_due_tokens = 0
        if self.num_dropped:
            self.token_ids[:0] = self._dropped
            self._dropped = []
            self._num_restored += self.num_dropped
            self._renumber(-self.num_dropped)

    def _renumber(self, count: int) -> None:
        self.num_prompt_tokens -= count
        self.num_received -= count
        self.num_dropped += count

    def must_wait(self, max_model_len: int) -> bool:
        """Return whether no step may include the request before the host has read its due token.

        That is so if the sampler needs the token, if it is the last one, or if it makes the request
        long. Otherwise the worker passes the token on to the next step on the device.
        """
        num_tokens = len(self.token_ids) + self.num_due_tokens
        return (
            self._is_token_read
            or num_tokens + self.num_dropped >= self._max_num_tokens
            or num_tokens >= max_model_len
            or (self._long_after is not None and self._has_long(num_tokens) != self.is_long)
        )

    @property
    def waits_for_token(self) -> bool:
        """Whether the host has to read a token of the step under way before the next one."""
        return self._is_token_read and self.num_due_tokens > 0

    @property
    def is_decoding(self) -> bool:
        """Whether all tokens but the last one are computed, or are in the step under way."""
        num_tokens = len(self.token_ids) + self.num_due_tokens
        is_ready = num_tokens <= self.num_received
        return is_ready and self.num_scheduled_tokens == num_tokens - 1 >= self.num_prompt_tokens

    @property
    def is_long(self) -> bool:
        """Whether the model computes the request with its rotary factors for long requests."""
        return self._has_long(self.num_tokens)

    def _has_long(self, num_tokens: int) -> bool:
        return self._long_after is not None and num_tokens > self._long_after

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        return tuple(self.token_ids[self.num_prompt_tokens :])

    @property
    def max_cached_tokens(self) -> int:
        """The most leading tokens that may be taken from the prefix cache.

        The last token is always computed, and so is each prompt token with a log-probability that
        is still to be returned. The blocks of a stream depend on its audio, and are never reused.
        """
        if self.is_stream:
            return 0
        if self.num_scored_tokens is None or self.num_scored_tokens >= self.num_prompt_tokens - 1:
            return self.num_tokens - 1
        return self.num_scored_tokens

    def take_unscored(
        self, entries: tuple[TokenLogprobs, ...], start: int
    ) -> tuple[TokenLogprobs, ...]:
        """Return those of a step's prompt log-probabilities that were not returned before."""
        if self.num_scored_tokens is None:
            return ()
        # After a preemption some are computed for a second time.
        new = entries[max(0, self.num_scored_tokens - start) :]
        self.num_scored_tokens += len(new)
        return new

    def get_encoder_key(self, mm_index: int) -> str:
        """Return the key of an item in the encoder cache: its hash, then the salt and adapter."""
        return self.mm_features[mm_index].mm_hash + self._encoder_key_suffix

    def count_encoder_items(self, *, encoded: tuple[int, ...], shared: tuple[int, ...]) -> None:
        """Record which items of a step were found in the encoder cache (`shared`)."""
        # Items that were recorded before a preemption are not recorded again.
        self.encoder_hits += [i for i in shared if i >= self._num_items_counted]
        self._num_items_counted = max((self._num_items_counted - 1, *encoded, *shared)) + 1

    def note_encoded(self, items: Iterable[EncoderInput], result: ModelRunnerOutput) -> None:
        """Record how long a step took to encode items, and which items needed no encoder."""
        self.encode_s += result.encode_s
        if result.loaded_encodes:
            self._encoder_loads |= {i.mm_index for i in items if i.key in result.loaded_encodes}

    def make_output(
        self,
        reason: FinishReason | None,  # None: it continues
        now: float,
        *,
        stop_token_id: int | None = None,
        error: RequestError | None = None,
        new_token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
        results: Results = NO_RESULTS,
    ) -> EngineCoreOutput:
        """Return an output; only if it may be the last, it describes the whole request."""
        # A stop string, which the frontend looks for, may make any output the last one.
        may_be_last = reason is not None or bool(self.sampling_params.stop)
        return EngineCoreOutput(
            request_id=self.request_id,
            new_token_ids=new_token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            results=dict(results),
            finish_reason=reason,
            stop_token_id=stop_token_id,
            error=None if error is None else make_record(error),
            num_cached_tokens=self.num_cached_tokens or 0,
            num_encoder_hits=len(self.encoder_hits),
            encoder_hits=tuple(sorted(self.encoder_hits)) if may_be_last else (),
            encoder_loads=tuple(sorted(self._encoder_loads)) if may_be_last else (),
            times=self._make_times(now) if may_be_last else None,
        )

    def _make_times(self, finished: float) -> CoreTimes:
        return CoreTimes(
            arrived=self.arrived,
            scheduled=self.scheduled,
            first_token=self.first_token,
            finished=finished,
            encode_s=self.encode_s,
        )

    def get_split_span(self, position: int) -> tuple[int, int] | None:
        """Return the unsplittable span that a step ending before `position` splits, or `None`."""
        # The last span that begins before `position`.
        index = bisect_left(self.spans, (position,)) - 1
        if index >= 0 and position < self.spans[index][1]:
            return self.spans[index]
        return None

    def get_stop(
        self, *, max_model_len: int, is_complete: bool = False
    ) -> tuple[FinishReason, int | None] | None:
        """Return why the request ends after its newest token, or `None` if it continues.

        The second value is the stop token if one of the client's `stop_token_ids` ended it. With
        `is_complete` the grammar allows no further token, and the request ends in spite of
        `min_tokens` and `ignore_eos`. The frontend checks stop strings.
        """
        params = self.sampling_params
        token_id = self.token_ids[-1]
        if self.num_output_tokens >= params.min_tokens:
            if token_id in self.core_request.eos_token_ids and not params.ignore_eos:
                return FinishReason.STOP, None
            if token_id in params.stop_token_ids:
                return FinishReason.STOP, token_id
        if is_complete:
            return FinishReason.STOP, None
        if not self.is_open and len(self.token_ids) >= self.num_received:
            return FinishReason.STOP, None
        if len(self.token_ids) + self.num_dropped >= self._max_num_tokens:
            return FinishReason.LENGTH, None
        if len(self.token_ids) - self._num_restored >= max_model_len:
            return FinishReason.LENGTH, None
        return None

    def append_token(self, token_id: int) -> bool:
        """Append a token to the output, and return whether it makes the request long."""
        self.token_ids.append(token_id)
        if self._long_after is None or len(self.token_ids) != self._long_after + 1:
            return False
        # Blocks of the shorter request hold other keys for the same tokens.
        self._block_hashes.clear()
        self._hash_root = self._make_hash_root()
        return True

    def _make_hash_root(self) -> bytes:
        request = self.core_request
        return hash_root(request.lora_id, request.cache_salt, is_long=self.is_long)

    def block_hash(self, index: int) -> bytes:
        """Return the name of the full KV cache block at `index`; each name is computed once."""
        while len(self._block_hashes) <= index:
            self._block_hashes.append(self._make_block_hash(len(self._block_hashes)))
        return self._block_hashes[index]

    def media_block_hash(self, index: int) -> bytes:
        """Return the name of a cross-attention block, which depends on the media alone."""
        # The number of positions is part of the name, because the last block may not be full.
        if self._media_hash is None:
            keys = [(self.get_encoder_key(i), 0) for i in range(len(self.mm_features))]
            self._media_hash = hash_block(_MEDIA_ROOT, (self.num_cross_positions,), keys)
        return self._media_hash + struct.pack("<q", index)

    def _make_block_hash(self, index: int) -> bytes:
        start = index * self._block_size
        end = start + self._block_size
        parent = self._block_hashes[index - 1] if index else self._hash_root
        lo, hi = get_mm_features_in_window(self.mm_features, start, end)
        items = [(f.mm_hash, f.mm_position.offset - start) for f in self.mm_features[lo:hi]]
        return hash_block(parent, self.token_ids[start:end], items)


@dataclass(slots=True)
class SchedulerCounters:
    """Counters of what a scheduler has done for its requests since its start."""

    num_scheduled_tokens: int = 0
    # Each completion that a client asks for is a separate request in the core. Prompt tokens are
    # counted with the first completion only, when its first token was sampled.
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_sampled_tokens: int = 0
    # Tokens that were looked up in the prefix cache when a request was first scheduled.
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_preemptions: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)
    steps: Counter[StepMode] = field(default_factory=Counter)

    def add_lookup(self, request: Request) -> None:
        """Count that the prompt of a request was looked up in the prefix cache."""
        self.num_prefix_queries += request.num_prompt_tokens
        self.num_prefix_hits += request.num_cached_tokens or 0

    def add_token(self, request: Request) -> None:
        """Count a new output token of a request, and with the first one its prompt tokens."""
        self.num_sampled_tokens += 1
        if request.num_output_tokens == 1 and request.core_request.completion_index == 0:
            self.num_prompt_tokens += request.num_prompt_tokens
            self.num_cached_prompt_tokens += request.num_cached_tokens or 0


def _is_token_read(request: EngineCoreRequest) -> bool:
    """Return whether the host has to read each token before the next one can be sampled."""
    params, speech = request.sampling_params, request.sampling_params.speech
    return (
        params.has_penalties
        or params.structured_outputs is not None
        or (speech is not None and speech.timestamps is not None)
        or any(len(sequence) > 1 for sequence in request.bans.sequences)
    )


def hash_root(lora_id: str | None, cache_salt: str | None, *, is_long: bool = False) -> bytes:
    """Return the hash with which the chain of a request's KV cache block names begins.

    Requests with different adapters or cache salts share no blocks, nor do long and short requests.
    """
    variant = b"long" if is_long else b""
    return hashlib.sha256(_VERSION + _framed(lora_id) + _framed(cache_salt) + variant).digest()


def hash_block(
    parent: bytes, token_ids: Sequence[int], mm_items: Sequence[tuple[str, int]]
) -> bytes:
    """Return the name of a KV cache block, a hash of its tokens and of all blocks before it.

    `mm_items` has the `mm_hash` of each item that overlaps the block, and its offset in the block.
    """
    digest = hashlib.sha256(parent)
    digest.update(struct.pack("<q", len(token_ids)))
    digest.update(array("q", token_ids).tobytes())
    for mm_hash, offset in mm_items:
        digest.update(_framed(mm_hash) + struct.pack("<q", offset))
    return digest.digest()


def _framed(text: str | None) -> bytes:
    if text is None:
        return b"\x00"
    encoded = text.encode(errors="surrogatepass")  # JSON allows lone surrogates
    return b"\x01" + struct.pack("<q", len(encoded)) + encoded
