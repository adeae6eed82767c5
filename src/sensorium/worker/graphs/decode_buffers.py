"""Holds the inputs of captured decode steps in fixed memory, which is filled anew for each step.

A batch is padded to the batch size of its CUDA graph. A padding row has a slot (an index into the
KV cache) below 0, so nothing is stored for it. It attends to one key of the null block, an unused
block of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sensorium.layers.attention.backend import NO_SLOT
from sensorium.types.errors import InvariantError
from sensorium.types.scheduling import KVCacheGroup
from sensorium.utils.arrays import IntArray, StagingBuffer
from sensorium.worker.input_batch import (
    DecodeColumns,
    Row,
    get_decode_columns,
    get_unread_places,
    pass_tokens,
)
from sensorium.worker.request_states import RequestTable


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """The input tensors of the CUDA graph of one batch size B, as views of `DecodeBuffers`."""

    input_ids: torch.Tensor  # [B]
    positions: torch.Tensor  # [B], or [3, B] with M-RoPE
    seq_lens: torch.Tensor  # [B]
    # [B], nonzero for long requests. None if the model treats all lengths alike.
    is_long: torch.Tensor | None
    cross_lens: torch.Tensor | None  # [B], of media; None if the model has no cross-attention
    # Embeddings [B, hidden], delays [B] in tokens. None: the model takes no streaming audio.
    audios: torch.Tensor | None
    delays: torch.Tensor | None
    slots: tuple[torch.Tensor, ...]  # per group: [B], where new keys and values are stored
    block_tables: tuple[torch.Tensor, ...]  # per group: int32 [B, blocks of the longest request]

    def get_lengths(self, *, is_cross: bool) -> torch.Tensor:
        """Return how many positions each request attends to, of its media or of its tokens."""
        if not is_cross:
            return self.seq_lens
        if self.cross_lens is None:
            raise InvariantError("a layer with cross-attention has no lengths of media")
        return self.cross_lens


class DecodeBuffers:
    """An owner of the fixed device memory from which captured decode steps read their inputs.

    All batch sizes share this memory, because only one step runs at a time.
    """

    def __init__(
        self,
        *,
        groups: Sequence[KVCacheGroup],
        block_size: int,
        max_batch: int,
        max_model_len: int,
        max_cross_positions: int = 0,
        has_mrope: bool,
        has_long_factors: bool,
        audios: torch.Tensor | None = None,  # [B, hidden], for models that take streaming audio
        device: torch.device,
    ) -> None:
        self._audios = audios
        self._num_groups = len(groups)
        self._block_size = block_size
        self._has_mrope = has_mrope
        self._has_long_factors = has_long_factors
        lengths = [max_cross_positions if group.is_cross else max_model_len for group in groups]
        widths = [-(-length // block_size) + 1 for length in lengths]
        num_words_per_row = 11 + sum(2 + width for width in widths)
        self._staging = StagingBuffer(device=device, num_words=max_batch * num_words_per_row)
        self._address = self._staging.address
        self._tables = [
            torch.zeros(max_batch, width, dtype=torch.int32, device=device) for width in widths
        ]

    def fill(
        self,
        rows: Sequence[Row],
        size: int,
        table: RequestTable,
        unread: torch.Tensor | None = None,
        audios: torch.Tensor | None = None,
    ) -> DecodeInputs:
        """Copy the rows of a step to the device, padded to `size` rows, and return their tensors.

        `unread` has the tokens that the previous step chose, if the host may not have read them,
        and `audios` the audio's embedding for each row. For the same `size`, the tensors have the
        same addresses each time, as a CUDA graph requires.
        """
        columns = get_decode_columns(rows, table, self._block_size)
        arrays = self._make_arrays(columns, table, size)
        arrays |= get_unread_places(rows, range(len(rows)))
        tensors = self._staging.upload(arrays)
        pass_tokens(unread, tensors)
        if self._staging.address != self._address:
            raise InvariantError(
                "the input buffers of the captured CUDA graphs have moved in memory"
            )
        for index, static in enumerate(self._tables):
            uploaded = tensors[f"tables{index}"]
            if uploaded.numel():
                static[: uploaded.shape[0], : uploaded.shape[1]].copy_(uploaded)
            static[len(rows) : size, :1].zero_()  # padding reads the null block
        if self._audios is not None and audios is not None:
            self._audios[: len(rows)].copy_(audios)
        return DecodeInputs(
            input_ids=tensors["input_ids"],
            positions=tensors["positions"],
            seq_lens=tensors["seq_lens"],
            is_long=tensors.get("is_long"),
            cross_lens=tensors.get("cross_lens"),
            audios=None if self._audios is None else self._audios[:size],
            delays=tensors.get("delays"),
            slots=tuple(tensors[f"slots{index}"] for index in range(self._num_groups)),
            block_tables=tuple(static[:size] for static in self._tables),
        )

    def _make_arrays(
        self, columns: DecodeColumns, table: RequestTable, size: int
    ) -> dict[str, npt.NDArray[np.generic]]:
        """Return the arrays of a step, padded to `size` requests except for the block tables."""
        positions = columns.positions if self._has_mrope else columns.positions[0]
        arrays: dict[str, npt.NDArray[np.generic]] = {
            "input_ids": _pad(columns.input_ids, size, 0),
            "positions": _pad(positions, size, 0),
            "seq_lens": _pad(columns.index + 1, size, 1),
        }
        if self._has_long_factors:
            arrays["is_long"] = _pad(table.is_long[columns.rows], size, 0)
        if self._audios is not None:
            arrays["delays"] = _pad(table.delays[columns.rows], size, 0)
        if table.cross_group is not None:
            cross_lens = table.num_cross_positions[columns.rows]
            arrays["cross_lens"] = _pad(cross_lens, size, 1)
        for index, slots in enumerate(columns.slots):
            arrays[f"slots{index}"] = _pad(slots, size, NO_SLOT)
        num_blocks = int(columns.index.max(initial=-1)) // self._block_size + 1
        for index, block_ids in enumerate(table.block_ids):
            if index == table.cross_group:
                num_used = -(-int(cross_lens.max(initial=0)) // self._block_size)
                arrays[f"tables{index}"] = block_ids[columns.rows, :num_used]
            else:
                arrays[f"tables{index}"] = block_ids[columns.rows, :num_blocks]
        return arrays


def _pad(values: IntArray, size: int, padding: int) -> IntArray:
    padded = np.full((*values.shape[:-1], size), padding, dtype=np.int64)
    padded[..., : values.shape[-1]] = values
    return padded
