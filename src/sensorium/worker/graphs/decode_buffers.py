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
from sensorium.utils.arrays import StagingBuffer
from sensorium.worker.input_batch import (
    Row,
    get_block_tables,
    get_unread_places,
    pass_tokens,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """A set of input tensors that the CUDA graph of one batch size B reads.

    The tensors are views of the fixed memory of `DecodeBuffers`. The slots (where to store new keys
    and values) and the block tables have one tensor for each group of layers with the same window.
    """

    input_ids: torch.Tensor  # [B]
    positions: torch.Tensor  # [B], or [3, B] with M-RoPE
    seq_lens: torch.Tensor  # [B]
    # [B], nonzero for long requests. None if the model treats all lengths alike.
    is_long: torch.Tensor | None
    slots: tuple[torch.Tensor, ...]  # per group: [B]
    block_tables: tuple[torch.Tensor, ...]  # per group: int32 [B, blocks of the longest request]


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
        has_mrope: bool,
        has_long_factors: bool,
        device: torch.device,
    ) -> None:
        self._num_groups = len(groups)
        self._block_size = block_size
        self._has_mrope = has_mrope
        self._has_long_factors = has_long_factors
        width = -(-max_model_len // block_size) + 1
        num_words_per_row = 8 + len(groups) * (2 + width)
        self._staging = StagingBuffer(device=device, num_words=max_batch * num_words_per_row)
        self._address = self._staging.address
        self._tables = [
            torch.zeros(max_batch, width, dtype=torch.int32, device=device) for _ in groups
        ]

    def fill(
        self, rows: Sequence[Row], size: int, unread: torch.Tensor | None = None
    ) -> DecodeInputs:
        """Copy the rows of a step to the device, padded to `size` rows, and return their tensors.

        A row is one request of the step. `unread` are the tokens that the step before has chosen.
        For the same `size`, the tensors have the same addresses
        each time, as a CUDA graph requires.
        """
        arrays = self._make_arrays(rows, size)
        for index in range(self._num_groups):
            arrays[f"tables{index}"] = get_block_tables(rows, index)
        arrays |= get_unread_places(rows, np.arange(len(rows)))
        tensors = self._staging.upload(arrays)
        pass_tokens(unread, tensors)
        if self._staging.address != self._address:
            raise InvariantError(
                "the input buffers of the captured CUDA graphs have moved in memory"
            )
        for index, static in enumerate(self._tables):
            table = tensors[f"tables{index}"]
            if table.numel():
                static[: table.shape[0], : table.shape[1]].copy_(table)
            static[len(rows) : size, :1].zero_()  # padding reads the null block
        return DecodeInputs(
            input_ids=tensors["input_ids"],
            positions=tensors["positions"],
            seq_lens=tensors["seq_lens"],
            is_long=tensors.get("is_long"),
            slots=tuple(tensors[f"slots{index}"] for index in range(self._num_groups)),
            block_tables=tuple(static[:size] for static in self._tables),
        )

    def _make_arrays(self, rows: Sequence[Row], size: int) -> dict[str, npt.NDArray[np.generic]]:
        num_rows = len(rows)
        input_ids = np.zeros(size, dtype=np.int64)
        seq_lens = np.ones(size, dtype=np.int64)
        positions = np.zeros((3, size) if self._has_mrope else size, dtype=np.int64)
        slots = np.full((self._num_groups, size), NO_SLOT, dtype=np.int64)
        for row, (scheduled, state) in enumerate(rows):
            index = scheduled.num_computed_tokens
            input_ids[row] = state.get_token_ids(index, index + 1)[0]
            seq_lens[row] = index + 1
            positions[..., row] = state.get_positions(index, index + 1)[..., 0]
            for group_index in range(self._num_groups):
                block = state.block_ids[group_index].values[index // self._block_size]
                slots[group_index, row] = block * self._block_size + index % self._block_size
        arrays: dict[str, npt.NDArray[np.generic]] = {
            "input_ids": input_ids,
            "positions": positions,
            "seq_lens": seq_lens,
        }
        if self._has_long_factors:
            is_long = np.zeros(size, dtype=np.int64)
            is_long[:num_rows] = [state.is_long for _, state in rows]
            arrays["is_long"] = is_long
        return arrays | {f"slots{index}": slots[index] for index in range(self._num_groups)}
