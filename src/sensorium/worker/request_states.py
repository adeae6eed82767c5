"""Holds what the worker keeps for each running request: tokens, block tables, positions.

The model runner owns these states, and updates them from `SchedulerOutput`s and sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sensorium.types.errors import RequestError
from sensorium.types.request import EngineCoreRequest
from sensorium.types.sampling import NO_BANS
from sensorium.types.scheduling import BlockIds
from sensorium.utils.arrays import GrowingArray, IntArray
from sensorium.worker.sampling.sampling_row import (
    SamplingRow,
    SequenceBans,
    TokenCounts,
    find_banned_times,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPositions:
    """The positions of a request's tokens in time, height and width, for a model with M-RoPE."""

    positions: IntArray  # [3, prompt]
    delta: IntArray  # [3, 1], added to the index of a token after the prompt


class RequestTable:
    """A table with a row for each running request, from which the arrays of a step are made.

    A step of many requests reads whole columns instead of asking one request after the other. A row
    is used again when its request has stopped.
    """

    def __init__(self, num_groups: int, cross_group: int | None = None) -> None:
        num_rows = width = 16  # both grow
        # The group with cross-attention: its blocks are those of media, not of tokens.
        self.cross_group = cross_group
        self.num_cross_positions = np.zeros(num_rows, dtype=np.int64)  # of the media
        # For each group of layers: block ids [rows, blocks], with zeros after those of a request.
        self.block_ids = [np.zeros((num_rows, width), dtype=np.int64) for _ in range(num_groups)]
        # What is added to the index of an output token to get its positions: with M-RoPE, or after
        # the first tokens of a request were dropped.
        self.offsets = np.zeros((3, num_rows), dtype=np.int64)
        self.is_long = np.zeros(num_rows, dtype=np.int64)
        self.delays = np.zeros(num_rows, dtype=np.int64)  # in tokens, of streaming audio
        self._num_blocks = [[0] * num_groups for _ in range(num_rows)]
        self._free = list(range(num_rows))

    def take_row(self) -> int:
        if not self._free:
            num_rows = len(self._num_blocks)
            self.block_ids = [np.pad(ids, ((0, num_rows), (0, 0))) for ids in self.block_ids]
            self.offsets = np.pad(self.offsets, ((0, 0), (0, num_rows)))
            self.is_long = np.pad(self.is_long, (0, num_rows))
            self.delays = np.pad(self.delays, (0, num_rows))
            self.num_cross_positions = np.pad(self.num_cross_positions, (0, num_rows))
            self._num_blocks += [[0] * len(self.block_ids) for _ in range(num_rows)]
            self._free = list(range(num_rows, 2 * num_rows))
        return self._free.pop()

    def release_row(self, row: int) -> None:
        for group_index, ids in enumerate(self.block_ids):
            ids[row] = 0
            self._num_blocks[row][group_index] = 0
        self._free.append(row)

    def get_blocks(self, row: int, group_index: int) -> IntArray:
        """Return the block ids of a request, as a view that is valid until blocks are added."""
        return self.block_ids[group_index][row, : self._num_blocks[row][group_index]]

    def drop_blocks(self, row: int, count: int) -> None:
        for group_index, ids in enumerate(self.block_ids):
            kept = self.get_blocks(row, group_index)[count:].copy()
            ids[row] = 0
            ids[row, : len(kept)] = kept
            self._num_blocks[row][group_index] = len(kept)

    def add_blocks(self, row: int, new_block_ids: BlockIds) -> None:
        counts = self._num_blocks[row]
        for group_index, block_ids in enumerate(new_block_ids):
            start = counts[group_index]
            end = counts[group_index] = start + len(block_ids)
            width = self.block_ids[group_index].shape[1]
            if end > width:
                more = ((0, 0), (0, max(width, end - width)))
                self.block_ids[group_index] = np.pad(self.block_ids[group_index], more)
            self.block_ids[group_index][row, start:end] = block_ids


class RequestState:
    """The state of one running request in the worker: its tokens, KV cache blocks and positions."""

    def __init__(
        self,
        request: EngineCoreRequest,
        output_token_ids: tuple[int, ...],  # generated before, if it resumes
        *,
        table: RequestTable,
        mrope: PromptPositions | None,
        is_long: bool = False,  # the model uses its rotary factors for long requests
        has_media: bool = False,  # its blocks already hold the keys and values of its media
    ) -> None:
        self.request = request
        self.params = request.sampling_params
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.token_ids = GrowingArray((*request.prompt_token_ids, *output_token_ids))
        # Tokens that steps have chosen, but that the host has not read yet. They are on the device.
        self.num_unread_tokens = 0
        self.unread_row = 0  # the last unread token is in this row of the tokens of its step
        self.last_token_id = int(self.token_ids.values[-1])  # of those that were read
        self.failure: RequestError | None = None  # why it has no place in later steps
        # Results for a transcript (see `worker.alignment`), until its first token is chosen.
        self.attention: dict[int, list[torch.Tensor]] = {}  # by the index of a layer
        self.scored_logprob: torch.Tensor | None = None
        # The number of media positions that layers with cross-attention attend to.
        features = () if table.cross_group is None else request.mm_features
        self.num_cross_positions = sum(f.mm_position.get_num_embeds() for f in features)
        self._has_media = has_media
        self.row = table.take_row()
        table.num_cross_positions[self.row] = self.num_cross_positions
        self._table = table
        table.offsets[:, self.row] = 0 if mrope is None else np.reshape(mrope.delta, -1)
        table.is_long[self.row] = is_long
        table.delays[self.row] = 0 if request.stream is None else request.stream.num_delay_tokens
        self._mrope = mrope
        self._bans = SequenceBans(request.bans) if request.bans != NO_BANS else None
        self._counts = TokenCounts(request, output_token_ids) if self.params.has_penalties else None
        self._encoder_key_suffix = request.encoder_key_suffix
        self._timestamps = None if self.params.speech is None else self.params.speech.timestamps
        self._sampling_row = SamplingRow(params=self.params, counts=self._counts)

    def release(self) -> None:
        """Give back the row of the table when the request has stopped."""
        self._table.release_row(self.row)

    @property
    def num_output_tokens(self) -> int:
        """The number of output tokens, including those that the host has not read yet."""
        return len(self.token_ids) + self.num_unread_tokens - self.num_prompt_tokens

    def get_token_ids(self, start: int, end: int) -> IntArray:
        """Return the tokens `[start, end)`, with 0 for the last one if it is not read yet."""
        token_ids = self.token_ids.values[start:end]
        return token_ids if len(token_ids) == end - start else np.append(token_ids, 0)

    def has_read(self, index: int) -> bool:
        return index < len(self.token_ids)

    def note_unread(self, row: int) -> None:
        """Record that a step chooses the next token, in this row of the step's tokens."""
        self.num_unread_tokens += 1
        self.unread_row = row

    def append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.last_token_id = token_id
        if self._counts is not None:
            self._counts.add(token_id)

    def get_sampling_row(self, mask: IntArray | None = None) -> SamplingRow:
        """Return what the sampler needs to choose the next token, in the same object each time.

        With a grammar's `mask`, end-of-sequence tokens are not banned before `min_tokens`, because
        the mask already leaves them out.
        """
        row = self._sampling_row
        row.num_output_tokens = num_output_tokens = self.num_output_tokens
        row.mask = mask
        banned: tuple[int, ...] = ()
        if self._bans is not None:
            banned = self._bans.get_banned(
                self.token_ids.values, num_output_tokens=num_output_tokens
            )
        if num_output_tokens < self.params.min_tokens:
            is_free = self.params.ignore_eos or mask is not None
            eos = () if is_free else self.request.eos_token_ids
            banned += (*eos, *self.params.stop_token_ids)
        row.banned_token_ids = banned
        if self._timestamps is not None:
            output = self.token_ids.values[self.num_prompt_tokens :]
            row.banned_ranges = find_banned_times(self._timestamps, output)
        return row

    def drop_tokens(self, count: int, block_size: int) -> None:
        """Forget the first tokens, which no layer attends to any more, and renumber the others."""
        self.token_ids.drop(count)
        self.num_prompt_tokens -= count
        self._table.drop_blocks(self.row, count // block_size)
        self._table.offsets[:, self.row] += count

    def stores_media(self, start: int) -> bool:
        """Return whether a step from token `start` on stores the keys and values of the media."""
        # Only the first step stores them, and not if another request has stored the same.
        return start == 0 and not self._has_media

    def add_blocks(self, new_block_ids: BlockIds) -> None:
        self._table.add_blocks(self.row, new_block_ids)

    def get_encoder_key(self, mm_index: int) -> str:
        return self.request.mm_features[mm_index].mm_hash + self._encoder_key_suffix

    def get_positions(self, start: int, end: int) -> IntArray:
        """Return the positions of the tokens `[start, end)`: [N], or [3, N] with M-RoPE."""
        indices = np.arange(start, end)
        if self._mrope is None:
            positions: IntArray = indices + self._table.offsets[0, self.row]
            return positions
        num_prompt = min(max(self.num_prompt_tokens - start, 0), end - start)
        positions = np.empty((3, end - start), dtype=np.int64)
        positions[:, :num_prompt] = self._mrope.positions[:, start : start + num_prompt]
        positions[:, num_prompt:] = indices[num_prompt:] + self._mrope.delta
        return positions

    def get_slots(self, group_index: int, start: int, end: int, block_size: int) -> IntArray:
        """Return the slots of the tokens `[start, end)` in the KV cache of one group of layers."""
        indices = np.arange(start, end)
        block_ids = self._table.get_blocks(self.row, group_index)
        slots: IntArray = block_ids[indices // block_size] * block_size
        return slots + indices % block_size
