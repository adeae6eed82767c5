"""What a request's tokens so far mean for its next one: which are penalised, which are banned.

Kept per request and changed token by token, so that a step costs nothing in proportion to the
text. Knows no tensors of the device: `worker.logits_edits` does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sensorium.types.request import EngineCoreRequest
from sensorium.types.sampling import TokenBans
from sensorium.utils.arrays import GrowingArray, IntArray


class TokenCounts:
    """The distinct tokens of a request, and how often the output has each.

    With a repetition penalty those of the prompt belong to them, placeholders of media too.
    """

    def __init__(self, request: EngineCoreRequest, output_token_ids: Sequence[int]) -> None:
        has_prompt = request.sampling_params.repetition_penalty not in (None, 1.0)
        prompt = np.unique(np.array(request.prompt_token_ids if has_prompt else (), dtype=np.int64))
        self._token_ids = GrowingArray(prompt.tolist())
        self._num_in_output = GrowingArray([0] * len(prompt))
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
        """The output has one more token."""
        place = self._place_of.setdefault(token_id, len(self._token_ids))
        if place == len(self._token_ids):
            self._token_ids.extend((token_id,))
            self._num_in_output.extend((0,))
        self._num_in_output.values[place] += 1


class SequenceBans:
    """Finds the tokens that would complete a banned sequence."""

    def __init__(self, bans: TokenBans) -> None:
        self._first = bans.first_token_ids
        self._always = tuple(sequence[0] for sequence in bans.sequences if len(sequence) == 1)
        # Longer ones by the token before their last.
        self._after: dict[int, list[tuple[IntArray, int]]] = {}
        for sequence in bans.sequences:
            if len(sequence) > 1:
                entry = np.array(sequence[:-1], dtype=np.int64), sequence[-1]
                self._after.setdefault(sequence[-2], []).append(entry)

    def get_banned(self, token_ids: IntArray, *, num_output_tokens: int) -> tuple[int, ...]:
        """`token_ids`: prompt and output so far."""
        banned = self._always
        if num_output_tokens == 0:
            banned += self._first
        for prefix, last in self._after.get(int(token_ids[-1]), ()):
            if np.array_equal(token_ids[-len(prefix) :], prefix):
                banned += (last,)
        return banned
