"""Describes how the next token of one request is to be chosen.

Which tokens are penalised and which are banned follows from the tokens of the request so far. That
state is updated token by token, so that a step does not read the whole text again. It lies in host
memory; `worker.sampling.logits_edits` makes tensors of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sensorium.types.request import EngineCoreRequest
from sensorium.types.sampling import SamplingParams, TimestampRules, TokenBans
from sensorium.utils.arrays import GrowingArray, IntArray

MAX_TOKEN_ID = 2**31 - 1


class TokenCounts:
    """A counter of how often each distinct token of a request occurs in its output.

    With a repetition penalty it also lists the tokens of the prompt, including media placeholders;
    one that occurs only there has the count 0.
    """

    def __init__(self, request: EngineCoreRequest, output_token_ids: Sequence[int]) -> None:
        has_prompt = request.sampling_params.repetition_penalty not in (None, 1.0)
        prompt = np.unique(np.array(request.prompt_token_ids if has_prompt else (), dtype=np.int64))
        self._token_ids = GrowingArray(prompt.tolist())
        self._num_in_output = GrowingArray([0] * len(prompt))
        # token id -> its index in both arrays
        self._place_of = {token_id: place for place, token_id in enumerate(prompt.tolist())}
        for token_id in output_token_ids:
            self.add(token_id)

    @property
    def token_ids(self) -> IntArray:
        return self._token_ids.values

    @property
    def num_in_output(self) -> IntArray:
        return self._num_in_output.values

    def add(self, token_id: int) -> None:
        place = self._place_of.setdefault(token_id, len(self._token_ids))
        if place == len(self._token_ids):
            self._token_ids.extend((token_id,))
            self._num_in_output.extend((0,))
        self._num_in_output.values[place] += 1


class SequenceBans:
    """A set of banned token sequences that finds the tokens that would complete one of them."""

    def __init__(self, bans: TokenBans) -> None:
        self._first = bans.first_token_ids  # banned as the first token of the output
        self._always = tuple(sequence[0] for sequence in bans.sequences if len(sequence) == 1)
        # Longer sequences: the token before the last -> (all tokens but the last, the last).
        self._after: dict[int, list[tuple[IntArray, int]]] = {}
        for sequence in bans.sequences:
            if len(sequence) > 1:
                entry = np.array(sequence[:-1], dtype=np.int64), sequence[-1]
                self._after.setdefault(sequence[-2], []).append(entry)

    def get_banned(self, token_ids: IntArray, *, num_output_tokens: int) -> tuple[int, ...]:
        """Return the tokens that may not follow those of the prompt and of the output so far."""
        banned = self._always
        if num_output_tokens == 0:
            banned += self._first
        for prefix, last in self._after.get(int(token_ids[-1]), ()):
            if np.array_equal(token_ids[-len(prefix) :], prefix):
                banned += (last,)
        return banned


def find_banned_times(
    rules: TimestampRules, output_token_ids: IntArray
) -> tuple[tuple[int, int], ...]:
    """Return the ranges of tokens [start, end) that may not come next in a text with timestamps.

    Timestamps come in pairs, which end one segment and begin the next, and they never go back. A
    segment takes some time: the time that ends it is later than the one that began it, and the next
    may begin at the same time.
    """
    first = rules.first_id
    ranges = [(rules.no_timestamps_id, rules.no_timestamps_id + 1)]
    if not len(output_token_ids):
        ranges.append((0, first))
        if rules.max_initial_index is not None:
            ranges.append((first + rules.max_initial_index + 1, MAX_TOKEN_ID))
        return tuple(ranges)
    is_time = output_token_ids >= first
    ends_segment = bool(is_time[-1]) and len(is_time) > 1 and not is_time[-2]
    if ends_segment:  # the next segment begins, or the text ends
        ranges.append((0, rules.eos_token_id))
    elif is_time[-1]:  # a segment has begun: text follows
        ranges.append((first, MAX_TOKEN_ID))
    if is_time.any():
        last = int(output_token_ids[is_time][-1])
        ranges.append((first, last if ends_segment else last + 1))
    return tuple(ranges)


@dataclass(slots=True, kw_only=True)
class SamplingRow:
    """The sampling parameters and state of one request, from which its next token is chosen."""

    params: SamplingParams
    num_output_tokens: int = 0
    # Tokens that would end the request before `min_tokens`, or complete a banned sequence.
    banned_token_ids: tuple[int, ...] = ()
    counts: TokenCounts | None = None  # None if the request has no penalties
    # Ranges of tokens [start, end) that Whisper's rules for timestamps ban here. None: no rules.
    banned_ranges: tuple[tuple[int, int], ...] | None = None
    # Bit i of word w is set if the request's grammar allows token 64 * w + i. None: no grammar.
    mask: IntArray | None = None

    @property
    def is_edited(self) -> bool:
        """Whether some logits of this row are changed before a token is chosen."""
        return bool(
            self.banned_token_ids
            or self.counts is not None
            or self.mask is not None
            or self.banned_ranges is not None
            or self.params.logit_bias
            or self.params.allowed_token_ids is not None
        )
