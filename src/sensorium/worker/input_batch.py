"""Turns the schedule of a step into tensors.

A step is a flat batch of the tokens of all requests. Requests that compute one token come first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sensorium.layers.attention.backend import NO_SLOT, GroupTables, StepLayout
from sensorium.layers.attention.cross import CrossRow, CrossTables
from sensorium.types.multimodal import MultiModalFeatureSpec, get_mm_features_in_window
from sensorium.types.scheduling import KVCacheGroup, ScheduledRequest, find_cross_group
from sensorium.utils.arrays import IntArray, StagingBuffer
from sensorium.worker.audio_queues import AudioQueue
from sensorium.worker.encoder_runner import EncoderCache
from sensorium.worker.request_states import RequestState, RequestTable

Row = tuple[ScheduledRequest, RequestState]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """The input tensors of one step of the model, in which it computes N tokens."""

    rows: tuple[Row, ...]
    input_ids: torch.Tensor  # [N]
    positions: torch.Tensor  # [N], or [3, N] with M-RoPE
    delays: torch.Tensor | None  # [N], in tokens, for models that take streaming audio
    # bool [N]: the tokens of long requests. None if the model treats all lengths alike.
    is_long: torch.Tensor | None
    layout: StepLayout
    cross: CrossTables | None  # of layers with cross-attention; None if the model has none
    # Indices of the tokens that are replaced by embeddings, and one row for each of them. With
    # cross-attention there are no such tokens, and a row for each new position of media.
    mm_index: torch.Tensor | None
    mm_embeds: torch.Tensor | None
    sampled: tuple[RequestState, ...]  # the requests that choose a next token
    logits_index: torch.Tensor  # for each of these requests, the index of its last token
    partial_blocks: tuple[torch.Tensor, ...]  # per group: new blocks that the step doesn't fill


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatch:
    """A builder of a step's input tensors, from the schedule and the state of requests."""

    groups: Sequence[KVCacheGroup]
    block_size: int
    bidirectional_modalities: frozenset[str]  # their items' tokens attend in both directions
    has_causal_full_layers: bool = False
    has_long_factors: bool = False  # the model uses other rotary factors for long requests
    has_mrope: bool = False
    encoder_cache: EncoderCache
    table: RequestTable
    staging: StagingBuffer
    # For models that take streaming audio: the audio of all requests, by request id.
    audios: Mapping[str, AudioQueue] | None = None

    def prepare(self, rows: Sequence[Row], unread: torch.Tensor | None = None) -> StepInputs:
        """Return a step's inputs; `unread` has the previous step's tokens, still on the device."""
        ordered = tuple(sorted(rows, key=_get_place))
        query_lens = tuple(scheduled.num_new_tokens for scheduled, _ in ordered)
        seq_lens = tuple(_end(scheduled) for scheduled, _ in ordered)
        starts = np.concatenate([[0], np.cumsum(query_lens)])
        cross = find_cross_group(self.groups)
        mm_index, mm_embeds = self._gather(ordered, starts, cross)
        arrays = self._make_token_arrays(ordered) | {"mm_index": mm_index}
        arrays["logits_index"] = np.array(
            [starts[i + 1] - 1 for i, (s, _) in enumerate(ordered) if s.num_sampled], dtype=np.int64
        )
        if self.audios is not None:
            at = [state.row for _, state in ordered]
            arrays["delays"] = np.repeat(self.table.delays[at], query_lens)
        if self.has_long_factors:
            at = [state.row for _, state in ordered]
            arrays["is_long"] = np.repeat(self.table.is_long[at], query_lens)
        until = self._make_attend_until(ordered, starts)
        if until is not None:
            arrays["attend_until"] = until
        num_blocks = -(-max(seq_lens) // self.block_size)
        for index, block_ids in enumerate(self.table.block_ids):
            if index == cross:
                arrays |= self._make_cross_arrays(ordered, index)
                continue
            arrays[f"partial{index}"] = get_partial_blocks(ordered, index, self.block_size)
            arrays[f"tables{index}"] = block_ids[[state.row for _, state in ordered], :num_blocks]
        arrays |= get_unread_places(ordered, (starts[1:] - 1).tolist())
        tensors = self.staging.upload(arrays)
        pass_tokens(unread, tensors)
        return StepInputs(
            rows=ordered,
            input_ids=tensors["input_ids"],
            positions=tensors["positions"],
            is_long=tensors["is_long"].bool() if self.has_long_factors else None,
            delays=tensors.get("delays"),
            layout=StepLayout(
                query_lens=query_lens,
                seq_lens=seq_lens,
                attend_until=tensors.get("attend_until"),
                groups=self._make_group_tables(tensors),
            ),
            cross=None
            if cross is None
            else self._make_cross_tables(ordered, starts, tensors, cross),
            mm_index=tensors["mm_index"] if len(mm_index) else None,
            mm_embeds=torch.cat(mm_embeds) if mm_embeds else None,
            sampled=tuple(state for s, state in ordered if s.num_sampled),
            logits_index=tensors["logits_index"],
            partial_blocks=tuple(tensors[f"partial{index}"] for index in range(len(self.groups))),
        )

    def _make_group_tables(self, tensors: Mapping[str, torch.Tensor]) -> tuple[GroupTables, ...]:
        return tuple(
            GroupTables(
                window=group.window,
                slot_mapping=tensors[f"slots{index}"],
                block_tables=tensors[f"tables{index}"],
                is_causal=self.has_causal_full_layers and group.window is None,
            )
            for index, group in enumerate(self.groups)
            if not group.is_cross
        )

    def take_audios(self, rows: Sequence[Row]) -> torch.Tensor | None:
        """Return each token's embedding of streaming audio, or `None` if the model takes none."""
        if self.audios is None:
            return None
        parts = [
            self.audios[scheduled.request_id].take(scheduled.num_computed_tokens, _end(scheduled))
            for scheduled, _ in rows
        ]
        return torch.cat(parts)

    def _gather(
        self, rows: Sequence[Row], starts: IntArray, cross: int | None
    ) -> tuple[IntArray, list[torch.Tensor]]:
        """Return the indices of the tokens that get media embeddings, and these embeddings."""
        audios = self.take_audios(rows)
        if audios is not None:
            return np.arange(starts[-1], dtype=np.int64), [audios]
        if cross is None:
            return self._gather_mm_embeds(rows, starts)
        return np.empty(0, dtype=np.int64), self._gather_new_audios(rows)

    def _gather_new_audios(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Return the encoder outputs of the media that this step stores, in the rows' order."""
        return [
            self.encoder_cache[state.get_encoder_key(mm_index)]
            for scheduled, state in rows
            if state.stores_media(scheduled.num_computed_tokens)
            for mm_index in range(len(state.request.mm_features))
        ]

    def _make_cross_arrays(
        self, rows: Sequence[Row], group_index: int
    ) -> dict[str, npt.NDArray[np.generic]]:
        """Return the block ids of all media, and the slots of those that this step stores."""
        block_ids = [self.table.get_blocks(state.row, group_index) for _, state in rows]
        at = np.repeat(
            [state.row for _, state in rows], [entry.num_new_tokens for entry, _ in rows]
        )
        width = max(map(len, block_ids))
        slots = [
            state.get_slots(group_index, 0, state.num_cross_positions, self.block_size)
            for scheduled, state in rows
            if state.stores_media(scheduled.num_computed_tokens)
        ]
        empty = np.empty(0, dtype=np.int64)
        partial = [
            ids[-1]
            for ids, (scheduled, state) in zip(block_ids, rows, strict=True)
            if state.stores_media(scheduled.num_computed_tokens)
            and state.num_cross_positions % self.block_size
        ]
        return {
            f"partial{group_index}": np.array(partial, dtype=np.int64),
            "cross_blocks": np.concatenate([empty, *block_ids]),
            "cross_slots": np.concatenate([empty, *slots]),
            "cross_tables": self.table.block_ids[group_index][at, :width],
            "cross_lens": self.table.num_cross_positions[at],
        }

    def _make_cross_tables(
        self,
        rows: Sequence[Row],
        starts: IntArray,
        tensors: Mapping[str, torch.Tensor],
        group_index: int,
    ) -> CrossTables:
        cross_rows = []
        first = 0
        for index, (_, state) in enumerate(rows):
            block_ids = self.table.get_blocks(state.row, group_index)
            is_run = len(block_ids) > 0 and bool((np.diff(block_ids) == 1).all())
            cross_rows.append(
                CrossRow(
                    start=int(starts[index]),
                    end=int(starts[index + 1]),
                    num_positions=state.num_cross_positions,
                    first_block=int(block_ids[0]) if is_run else None,
                    block_ids=tensors["cross_blocks"][first : first + len(block_ids)],
                )
            )
            first += len(block_ids)
        return CrossTables(
            rows=cross_rows,
            slot_mapping=tensors["cross_slots"],
            block_tables=tensors["cross_tables"],
            num_positions=tensors["cross_lens"],
        )

    def _make_token_arrays(self, rows: Sequence[Row]) -> dict[str, npt.NDArray[np.generic]]:
        """Return the arrays with an entry for each token; all rows that decode are made at once."""
        num_decoding = sum(map(is_decoding, rows))
        decoded = get_decode_columns(rows[:num_decoding], self.table, self.block_size)
        windows = [(state, s.num_computed_tokens, _end(s)) for s, state in rows[num_decoding:]]
        token_ids = [state.get_token_ids(start, end) for state, start, end in windows]
        positions = [state.get_positions(start, end) for state, start, end in windows]
        first = decoded.positions if self.has_mrope else decoded.positions[0]
        arrays: dict[str, npt.NDArray[np.generic]] = {
            "input_ids": np.concatenate([decoded.input_ids, *token_ids]),
            "positions": np.concatenate([first, *positions], axis=-1),
        }
        for index, slots in enumerate(decoded.slots):
            if self.groups[index].is_cross:
                continue
            others = [
                state.get_slots(index, start, end, self.block_size) for state, start, end in windows
            ]
            arrays[f"slots{index}"] = np.concatenate([slots, *others])
        return arrays

    def _gather_mm_embeds(
        self, rows: Sequence[Row], starts: IntArray
    ) -> tuple[IntArray, list[torch.Tensor]]:
        index: list[IntArray] = []
        embeds: list[torch.Tensor] = []
        for (scheduled, state), start in zip(rows, starts, strict=False):
            first = scheduled.num_computed_tokens
            if first >= state.num_prompt_tokens:
                continue
            for part in get_gather_slices(state.request.mm_features, first, _end(scheduled)):
                embeds.append(
                    self.encoder_cache[state.get_encoder_key(part.mm_index)][part.start : part.end]
                )
                index.append(part.positions + (start - first))
        return (np.concatenate(index) if index else np.empty(0, dtype=np.int64)), embeds

    def _make_attend_until(self, rows: Sequence[Row], starts: IntArray) -> IntArray | None:
        """Return for each token of the step the exclusive end of the positions it attends to.

        This is the end of the token's media span with attention in both directions, or else the
        position after its own. Return `None` if no token of the step belongs to such a span.
        """
        if not self.bidirectional_modalities:
            return None
        until = np.concatenate([np.arange(s.num_computed_tokens, _end(s)) + 1 for s, _ in rows])
        has_span = False
        for (scheduled, state), start in zip(rows, starts, strict=False):
            first = scheduled.num_computed_tokens
            features = state.request.mm_features
            for part in get_gather_slices(features, first, _end(scheduled)):
                if features[part.mm_index].modality not in self.bidirectional_modalities:
                    continue
                has_span = True
                position = features[part.mm_index].mm_position
                for span_start, span_end in position.extract_embeds_range():
                    a, b = max(span_start, first), min(span_end, _end(scheduled))
                    if a < b:
                        until[start + a - first : start + b - first] = span_end
        return until if has_span else None


def is_decoding(row: Row) -> bool:
    """Return whether a request only computes one token of its output, and samples the next."""
    scheduled, state = row
    return (
        scheduled.num_new_tokens == 1
        and scheduled.num_sampled == 1
        and scheduled.num_computed_tokens >= state.num_prompt_tokens
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeColumns:
    """Inputs of the requests of a step that decode one token each, as arrays over the requests."""

    rows: IntArray  # rows of the requests in the `RequestTable`
    input_ids: IntArray  # any number in place of a token that the host has not read yet
    index: IntArray  # of the token among the request's tokens
    positions: IntArray  # [3, requests], with M-RoPE
    slots: tuple[IntArray, ...]  # for each group of layers


def get_decode_columns(rows: Sequence[Row], table: RequestTable, block_size: int) -> DecodeColumns:
    """Return the inputs of requests that all decode, computed for all of them together."""
    index = np.array([scheduled.num_computed_tokens for scheduled, _ in rows], dtype=np.int64)
    at = np.array([state.row for _, state in rows], dtype=np.int64)
    blocks, offsets = np.divmod(index, block_size)
    return DecodeColumns(
        rows=at,
        input_ids=np.array([state.last_token_id for _, state in rows], dtype=np.int64),
        index=index,
        positions=index + table.offsets[:, at],
        slots=tuple(
            np.full_like(index, NO_SLOT)
            if group == table.cross_group
            else ids[at, blocks] * block_size + offsets
            for group, ids in enumerate(table.block_ids)
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherSlice:
    """A range of the embeddings of a media item, and the prompt tokens that they replace."""

    mm_index: int  # the item's index in the request
    start: int  # the embeddings [start, end) of the item
    end: int
    positions: IntArray  # the index in the prompt of each of these embeddings


def get_gather_slices(
    features: Sequence[MultiModalFeatureSpec], window_start: int, window_end: int
) -> list[GatherSlice]:
    """Return which media embeddings replace the prompt tokens `[window_start, window_end)`.

    There is a slice for each item with embeddings in this range, in order. This takes O(log n) time
    for n items of the request, plus the length of the range.
    """
    slices = []
    lo, hi = get_mm_features_in_window(features, window_start, window_end)
    for mm_index in range(lo, hi):
        position = features[mm_index].mm_position
        first = max(0, window_start - position.offset)
        last = min(position.length, window_end - position.offset)
        start, end = position.get_embeds_indices_in_range(first, last)
        if start == end:
            continue
        if position.is_embed is None:
            positions = np.arange(position.offset + first, position.offset + last)
        else:
            mask = np.array(position.is_embed[first:last], dtype=bool)
            positions = np.flatnonzero(mask) + (position.offset + first)
        slices.append(GatherSlice(mm_index=mm_index, start=start, end=end, positions=positions))
    return slices


def get_unread_places(rows: Sequence[Row], places: Sequence[int]) -> dict[str, IntArray]:
    """Return which input tokens of a step the host has not read yet, and where they are.

    The token at index `unread_at` of the step's input is in row `unread_rows` of the tokens that
    the last step has chosen. `places` has the index of the last token of each of this step's rows.
    """
    unread = [
        (place, state.unread_row)
        for place, (scheduled, state) in zip(places, rows, strict=True)
        if state.num_unread_tokens and not state.has_read(_end(scheduled) - 1)
    ]
    at, from_rows = zip(*unread, strict=True) if unread else ((), ())
    return {
        "unread_at": np.array(at, dtype=np.int64),
        "unread_rows": np.array(from_rows, dtype=np.int64),
    }


def pass_tokens(unread: torch.Tensor | None, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy the tokens that the last step has chosen to `input_ids`, on the device.

    A number below 0, which marks a failure, becomes token 0: the result of such a row is dropped.
    """
    at = tensors["unread_at"]
    if unread is not None and len(at):
        token_ids = unread.index_select(0, tensors["unread_rows"]).clamp_min_(0)
        tensors["input_ids"].index_copy_(0, at, token_ids)


def get_partial_blocks(rows: Sequence[Row], group_index: int, block_size: int) -> IntArray:
    """Return the ids of the new KV cache blocks of a group that a step fills only in part."""
    block_ids = [
        entry.new_block_ids[group_index][-1]
        for entry, _ in rows
        if entry.new_block_ids and entry.new_block_ids[group_index] and _end(entry) % block_size
    ]
    return np.array(block_ids, dtype=np.int64)


def _get_place(row: Row) -> int:
    """Return a sort key for a step's rows: decoding ones first, then other single tokens."""
    return 0 if is_decoding(row) else 1 + (row[0].num_new_tokens > 1)


def _end(scheduled: ScheduledRequest) -> int:
    return scheduled.num_computed_tokens + scheduled.num_new_tokens
