"""A request while it runs, which only the scheduler changes, and the names of its full KV blocks.

Equal names mean equal keys and values. A name chains over everything that these depend on: the
adapter and salt, whether they were computed for a long request, all tokens up to the block's end,
and the part of a media item that stands at each place.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from enum import Enum, auto

from sensorium.types.multimodal import MultiModalFeatureSpec, get_mm_features_in_window
from sensorium.types.request import CoreTimes, EngineCoreRequest, FinishReason, TokenLogprobs
from sensorium.types.sampling import SamplingParams

# The order of service: the priority, then the arrival. Smaller comes first, and all are different.
Rank = tuple[int, int]
# Sorted, disjoint ranges of positions that must each be computed within one step.
Spans = tuple[tuple[int, int], ...]
_VERSION = b"sensorium-kv-1"  # of the names of blocks


class RequestStatus(Enum):
    """The states WAITING → RUNNING → FINISHED; a preemption leads from RUNNING to WAITING."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """A request with its tokens, and how far they are computed.

    Times are in seconds of the scheduler's clock. For `long_after` see `Limits`.
    """

    def __init__(
        self,
        core_request: EngineCoreRequest,
        *,
        rank: Rank,
        block_size: int,
        spans: Spans = (),
        arrived: float = 0.0,
        long_after: int | None = None,
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
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.num_cached_tokens: int | None = None  # None: never scheduled
        self.encoder_hits: list[int] = []  # items with an encoder output in the cache
        self.arrived = arrived
        self.scheduled: float | None = None  # for the first time
        self.first_token: float | None = None
        self.encode_s = 0.0
        # Prompt positions with log-probabilities so far; None: the caller doesn't want them.
        has_scores = self.sampling_params.prompt_logprobs is not None
        self.num_scored_tokens: int | None = 0 if has_scores else None
        self._num_items_counted = 0
        self._block_size = block_size
        self._long_after = long_after
        self._block_hashes: list[bytes] = []
        self._hash_root = self._make_hash_root()
        self._encoder_key_suffix = core_request.encoder_key_suffix

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_long(self) -> bool:
        """Whether the request is computed differently, because of more than `long_after` tokens."""
        return self._long_after is not None and self.num_tokens > self._long_after

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        return tuple(self.token_ids[self.num_prompt_tokens :])

    @property
    def max_cached_tokens(self) -> int:
        """The tokens that may come from the prefix cache.

        At least one is computed, and so is every token with logits that are still needed.
        """
        if self.num_scored_tokens is None or self.num_scored_tokens >= self.num_prompt_tokens - 1:
            return self.num_tokens - 1
        return self.num_scored_tokens

    def take_unscored(
        self, entries: tuple[TokenLogprobs, ...], start: int
    ) -> tuple[TokenLogprobs, ...]:
        """Return those of the prompt's log-probabilities from `start` on that are new.

        A preempted request computes some of them again.
        """
        if self.num_scored_tokens is None:
            return ()
        new = entries[max(0, self.num_scored_tokens - start) :]
        self.num_scored_tokens += len(new)
        return new

    def get_encoder_key(self, mm_index: int) -> str:
        """Return the key of an item's encoder output: its hash, separated by salt and adapter."""
        return self.mm_features[mm_index].mm_hash + self._encoder_key_suffix

    def count_encoder_items(self, *, encoded: tuple[int, ...], shared: tuple[int, ...]) -> None:
        """Count items once, although a preempted request needs them again."""
        self.encoder_hits += [i for i in shared if i >= self._num_items_counted]
        self._num_items_counted = max((self._num_items_counted - 1, *encoded, *shared)) + 1

    def make_times(self, finished: float) -> CoreTimes:
        return CoreTimes(
            arrived=self.arrived,
            scheduled=self.scheduled,
            first_token=self.first_token,
            finished=finished,
            encode_s=self.encode_s,
        )

    def get_split_span(self, position: int) -> tuple[int, int] | None:
        """Return the unsplittable span that a border before `position` would split, if any."""
        # The last span that begins before `position`.
        index = bisect_left(self.spans, (position,)) - 1
        if index >= 0 and position < self.spans[index][1]:
            return self.spans[index]
        return None

    def get_stop(
        self, *, max_model_len: int, is_complete: bool = False
    ) -> tuple[FinishReason, int | None] | None:
        """Return why the request ends with its newest token, or `None` if it goes on.

        The second value is the token id if a stop token of the caller ended it. With `is_complete`
        its grammar allows nothing more, so that it ends in spite of `min_tokens` and `ignore_eos`.
        The frontend looks for stop strings.
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
        max_tokens = max_model_len if params.max_tokens is None else params.max_tokens
        if self.num_output_tokens >= max_tokens or self.num_tokens >= max_model_len:
            return FinishReason.LENGTH, None
        return None

    def append_token(self, token_id: int) -> None:
        was_long = self.is_long
        self.token_ids.append(token_id)
        if self.is_long != was_long:
            # Blocks of the shorter request hold other keys for the same tokens.
            self._block_hashes.clear()
            self._hash_root = self._make_hash_root()

    def _make_hash_root(self) -> bytes:
        request = self.core_request
        return hash_root(request.adapter, request.cache_salt, is_long=self.is_long)

    def block_hash(self, index: int) -> bytes:
        """Return the name of the block at `index`, which must be full.

        Names are made once, in order.
        """
        while len(self._block_hashes) <= index:
            self._block_hashes.append(self._make_block_hash(len(self._block_hashes)))
        return self._block_hashes[index]

    def _make_block_hash(self, index: int) -> bytes:
        start = index * self._block_size
        end = start + self._block_size
        parent = self._block_hashes[index - 1] if index else self._hash_root
        lo, hi = get_mm_features_in_window(self.mm_features, start, end)
        items = [(f.mm_hash, f.mm_position.offset - start) for f in self.mm_features[lo:hi]]
        return hash_block(parent, self.token_ids[start:end], items)


def hash_root(adapter: str | None, cache_salt: str | None, *, is_long: bool = False) -> bytes:
    """Return the parent of a request's first block.

    With `is_long` the request is computed as one of more than `Limits.long_after` tokens.
    """
    variant = b"long" if is_long else b""
    return hashlib.sha256(_VERSION + _framed(adapter) + _framed(cache_salt) + variant).digest()


def hash_block(
    parent: bytes, token_ids: Sequence[int], mm_items: Sequence[tuple[str, int]]
) -> bytes:
    """Return the name of the block that follows `parent`.

    `mm_items` has `(mm_hash, offset relative to the block)` for each item that overlaps the block.
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
