"""Replays a step in which every request decodes one token as a single CUDA graph.

A graph contains everything from token ids to logits and the likeliest token. It is captured once
for each batch size at start, with padding rows only, and its logits are compared with those of the
same computation without a graph. A model that can't be captured runs without graphs, and the reason
is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sensorium.layers.attention.backend import LayerCache
from sensorium.models.hf_model import HfModel
from sensorium.types.scheduling import KVCacheGroup, find_cross_group
from sensorium.worker.graphs.decode_buffers import DecodeBuffers, DecodeInputs
from sensorium.worker.graphs.recorder import (
    Break,
    Recorder,
    Recording,
    capture_sizes,
    find_distance,
    find_size,
)
from sensorium.worker.input_batch import Row, is_decoding
from sensorium.worker.kv_cache import KVCache
from sensorium.worker.request_states import RequestTable
from sensorium.worker.sampling.sampler import mark_likeliest


class DecodeKernels(Protocol):
    """An interface of the kernels for paged attention that can be captured in a CUDA graph.

    Everything that changes from step to step is passed in tensors.
    """

    def store(
        self, cache: LayerCache, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store the keys and values of one new token per request in the KV cache of a layer.

        Keys and values are [1, K, B, D], with K key heads of size D and B requests. `slots` [B] has
        the index in the cache for each request. Slots below 0 are padding, and are skipped.
        """

    def attend(
        self,
        cache: LayerCache,
        query: torch.Tensor,  # [B, H, D]
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Return the attention output [B, H, D of values] for B requests with one query token each.

        There are H query heads of size D. Request i attends to its first `seq_lens[i]` tokens, or
        only to the last `window` of them. Its keys and values are in the cache blocks of
        `block_tables[i]`. A `scaling` of None means one over the root of D.
        """


class TritonKernels:
    """An implementation of `DecodeKernels` with the Triton kernels of `layers.kernels`."""

    def __init__(self) -> None:
        from sensorium.layers.kernels.decoding import attend_decoding, store_new_tokens

        self._attend = attend_decoding
        self._store = store_new_tokens

    def store(
        self, cache: LayerCache, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self._store(cache.keys, cache.values, slots, key, value)

    def attend(
        self,
        cache: LayerCache,
        query: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        return self._attend(
            query, cache.keys, cache.values, block_tables, seq_lens, scaling=scaling, window=window
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeResult:
    """Views of the results of a replayed decode step, which the next replay overwrites."""

    logits: torch.Tensor  # float32 [rows, vocabulary]
    likeliest: torch.Tensor  # int64 [rows], the result of `mark_likeliest`

    def get_front(self, num_rows: int) -> DecodeResult:
        return DecodeResult(logits=self.logits[:num_rows], likeliest=self.likeliest[:num_rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """A captured CUDA graph of one batch size, with the tensors that hold its results."""

    recording: Recording
    results: DecodeResult  # the memory that a replay writes its results to


class DecodeGraphs:
    """A set of CUDA graphs for decode steps, one for each captured batch size."""

    def __init__(
        self,
        hf_model: HfModel,
        *,
        kv_cache: KVCache,
        groups: Sequence[KVCacheGroup],
        buffers: DecodeBuffers,
        kernels: DecodeKernels,
        recorder: Recorder,
        sizes: Sequence[int],  # ascending
    ) -> None:
        self._hf_model = hf_model
        self._kv_cache = kv_cache
        self._windows = tuple(group.window for group in groups)
        self._cross_group = find_cross_group(groups)
        self._buffers = buffers
        self._kernels = kernels
        self._recorder = recorder
        self._sizes = tuple(sizes)
        self._captured: dict[int, _Captured] = {}
        # All sizes share the memory of the largest one's results. It is captured first.
        self._results: DecodeResult | None = None

    @torch.inference_mode()
    def capture(self, *, use_tqdm: bool = False) -> str | None:
        """Capture a CUDA graph for each batch size; if one fails, keep none and return why."""
        reason = capture_sizes(self._sizes, self._capture_size, what="graphs", use_tqdm=use_tqdm)
        if reason is not None:
            self._captured.clear()
        return reason

    def _capture_size(self, size: int) -> str | None:
        inputs = self._buffers.fill([], size, self._make_table())
        # This run also compiles kernels and allocates workspaces, which a capture must not do.
        expected = self._compute(inputs)
        self._results = self._results or expected
        results = self._results.get_front(size)
        logits = expected.logits.clone()

        def compute(_: Break) -> None:
            computed = self._compute(inputs)
            results.logits.copy_(computed.logits)
            results.likeliest.copy_(computed.likeliest)

        recording = self._recorder.record(compute)
        results.logits.fill_(float("nan"))  # so that a replay that writes nothing is noticed
        recording.replay()
        distance = find_distance(results.logits, logits, self._hf_model.dtype)
        if distance is not None:
            return f"a replay of {size} rows gave logits that are off by {distance}"
        self._captured[size] = _Captured(recording=recording, results=results)
        return None

    def _make_table(self) -> RequestTable:
        return RequestTable(len(self._windows), self._cross_group)

    def find_size(self, rows: Sequence[Row]) -> int | None:
        """Return the smallest batch size for a step in which all requests decode, or None."""
        return find_size(self._sizes, len(rows)) if all(map(is_decoding, rows)) else None

    def replay(
        self,
        rows: Sequence[Row],
        size: int,
        table: RequestTable,
        unread: torch.Tensor | None = None,
        audios: torch.Tensor | None = None,
    ) -> DecodeResult:
        """Compute a step with the graph of `size` rows; `DecodeBuffers.fill` has the arguments."""
        self._buffers.fill(rows, size, table, unread, audios)
        captured = self._captured[size]
        captured.recording.replay()
        return captured.results.get_front(len(rows))

    def _compute(self, inputs: DecodeInputs) -> DecodeResult:
        hf_model = self._hf_model
        at = None
        if inputs.audios is not None:
            at = torch.arange(len(inputs.audios), device=hf_model.device)
        embeds, extra = hf_model.embed(inputs.input_ids, at, inputs.audios)
        extra |= hf_model.make_conditions(inputs.delays)
        is_long = None if inputs.is_long is None else inputs.is_long.bool()
        call = _DecodeCall(self._kv_cache, self._kernels, inputs, self._windows, self._cross_group)
        with hf_model.choosing_factors(is_long):
            hidden = hf_model.forward(embeds, inputs.positions, call, extra)
        logits = hf_model.logits(hidden)
        return DecodeResult(logits=logits, likeliest=mark_likeliest(logits))


@dataclass(frozen=True, slots=True)
class _DecodeCall:
    """An implementation of `AttentionCall`, which the decoder calls in a captured decode step."""

    kv_cache: KVCache
    kernels: DecodeKernels
    inputs: DecodeInputs
    windows: Sequence[int | None]  # per group
    cross_group: int | None  # the group with cross-attention, which stores nothing while decoding

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
    ) -> torch.Tensor:
        cache = self.kv_cache[layer_index]
        group = cache.group_index
        is_cross = group == self.cross_group
        if not cache.is_shared and not is_cross:
            self.kernels.store(cache, self.inputs.slots[group], key, value)
        output = self.kernels.attend(
            cache,
            query[0].transpose(0, 1),
            self.inputs.block_tables[group],
            self.inputs.get_lengths(is_cross=is_cross),
            scaling=scaling,
            window=self.windows[group],
        )
        return output[None]
