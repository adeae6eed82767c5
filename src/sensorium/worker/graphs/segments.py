"""Steps with tokens of prompts, replayed as CUDA graphs that are broken at attention.

Of all that a decoder computes, only attention depends on which requests a step has. So what lies
between two attention layers is captured for a number of tokens, storing of keys and values
included, and attention runs between the replays as it does without graphs. Steps are padded to the
next number of tokens that was captured. Padding has no slot, and no row looks at another one
outside of attention, so padding touches nobody.

Tensors that cross a break lie in fixed memory that all layers and sizes share. Nothing else of a
capture is kept, so that the next one can use its memory again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sensorium.layers.attention.backend import NO_SLOT, LayerCache
from sensorium.models.adapter import ModelAdapter
from sensorium.types.scheduling import StepMode
from sensorium.worker.graphs.recorder import capture_sizes
from sensorium.worker.graphs.sizes import find_size
from sensorium.worker.kv_cache import KVCache


class StoreKernel(Protocol):
    def store(
        self, cache: LayerCache, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Put keys and values [1, K, N, D] into slots; those below 0 are left out."""


class SegmentRecording(Protocol):
    """The segments of a function that was recorded."""

    def replay(self, attend: Callable[[int], None]) -> None:
        """Do the work again. `attend` is called at each break with its number."""


class SegmentRecorder(Protocol):
    def record(self, function: Callable[[Callable[[int], None]], None]) -> SegmentRecording:
        """Record a function that is handed what it has to call at each break."""


class CudaSegmentRecorder:
    """Captures one CUDA graph for each stretch between two breaks."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, function: Callable[[Callable[[int], None]], None]) -> SegmentRecording:
        graphs = [torch.cuda.CUDAGraph()]

        def break_here(index: int) -> None:
            del index
            graphs[-1].capture_end()
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self._pool)

        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            graphs[0].capture_begin(pool=self._pool)
            try:
                function(break_here)
            finally:
                graphs[-1].capture_end()
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return _CudaSegments(graphs)


class _CudaSegments:
    def __init__(self, graphs: Sequence[torch.cuda.CUDAGraph]) -> None:
        self._graphs = graphs

    def replay(self, attend: Callable[[int], None]) -> None:
        *others, last = self._graphs
        for index, graph in enumerate(others):
            graph.replay()
            attend(index)
        last.replay()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Crossing:
    """The tensors that cross breaks. All layers of one shape share them."""

    query: torch.Tensor  # [1, H, n, D]
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor  # [1, n, H, D of values]

    def get_front(self, num_tokens: int) -> _Crossing:
        return _Crossing(
            query=self.query[:, :, :num_tokens],
            key=self.key[:, :, :num_tokens],
            value=self.value[:, :, :num_tokens],
            output=self.output[:, :num_tokens],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Break:
    layer_index: int
    scaling: float | None
    crossing: _Crossing  # as long as the size that was captured


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    breaks: Sequence[_Break]
    recording: SegmentRecording


class Attend(Protocol):
    """The attention of a step, without graphs. The new keys and values are stored already."""

    def __call__(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
    ) -> torch.Tensor: ...


class SegmentGraphs:
    def __init__(
        self,
        adapter: ModelAdapter,
        *,
        kv_cache: KVCache,
        num_groups: int,
        kernels: StoreKernel,
        recorder: SegmentRecorder,
        sizes: Sequence[int],
    ) -> None:
        self._adapter = adapter
        self._kv_cache = kv_cache
        self._num_groups = num_groups
        self._kernels = kernels
        self._recorder = recorder
        self._sizes = tuple(sizes)  # ascending
        self._memory = _FixedMemory(self._sizes[-1])
        self._captured: dict[int, _Captured] = {}
        self._extra_shapes: dict[str, tuple[int, ...]] = {}

    # ---- at start

    @torch.inference_mode()
    def capture(self, *, use_tqdm: bool = False) -> str | None:
        """Capture all sizes; return why that is not possible, or `None` if it was done."""
        reason = capture_sizes(
            self._sizes, self._capture_size, what="graphs of prompts", use_tqdm=use_tqdm
        )
        if reason is not None:
            self._captured.clear()
        return reason

    def _capture_size(self, size: int) -> str | None:
        adapter, device = self._adapter, self._adapter.device
        token_ids = torch.arange(size, device=device) % adapter.vocab_size
        embeds, extra = adapter.embed(token_ids, None, None)
        self._extra_shapes = {name: tensor.shape[2:] for name, tensor in extra.items()}
        positions = torch.arange(size, device=device)
        is_long = torch.zeros(size, dtype=torch.bool, device=device)
        self._fill(
            size,
            embeds,
            positions.expand(3, -1) if adapter.has_mrope else positions,
            extra,
            is_long=None if adapter.long_after is None else is_long,
            slots=[positions[:0]] * self._num_groups,  # so nothing is stored
        )
        breaks: list[_Break] = []

        def compute(break_here: Callable[[int], None]) -> None:
            breaks.clear()
            self._compute(size, breaks, break_here)

        def attend(index: int) -> None:  # stands for attention: something of every query
            crossing = breaks[index].crossing
            queries = crossing.query.mean(-1).transpose(1, 2)[..., None]
            crossing.output.copy_(queries.expand_as(crossing.output))

        compute(attend)  # also the first use of kernels and workspaces
        hidden = self._memory.get("hidden", size)
        expected = hidden.clone()
        recording = self._recorder.record(compute)
        recording.replay(attend)
        scale = max(float(expected.abs().max()), 1.0)
        distance = float((hidden - expected).abs().max())
        if not distance <= 64 * torch.finfo(adapter.dtype).eps * scale:
            return f"a replay of {size} tokens is off by {distance:.3g}"
        self._captured[size] = _Captured(breaks=tuple(breaks), recording=recording)
        return None

    def _compute(self, size: int, breaks: list[_Break], break_here: Callable[[int], None]) -> None:
        """The decoder, from embeddings to hidden states, all in fixed memory."""
        adapter, memory = self._adapter, self._memory
        extra = {name: memory.get(name, size)[None] for name in self._extra_shapes}
        positions = memory.get("positions", size)
        has_long = adapter.long_after is not None
        call = _SegmentCall(memory, self._kv_cache, self._kernels, breaks, break_here)
        with adapter.choosing_factors(memory.get("is_long", size) if has_long else None):
            hidden = adapter.forward(
                memory.get("embeds", size)[None],
                positions.transpose(0, 1) if adapter.has_mrope else positions,
                call,
                extra,
            )
        memory.put("hidden", hidden)

    # ---- in a step

    def find_size(self, num_tokens: int, extra: Mapping[str, Any]) -> int | StepMode:
        """Return the captured size that fits a step, or the reason to run it without graphs."""
        shapes = {
            name: tensor.shape[2:] if isinstance(tensor, torch.Tensor) else None
            for name, tensor in extra.items()
        }
        if shapes != self._extra_shapes:
            return StepMode.EAGER_INPUTS
        return find_size(self._sizes, num_tokens) or StepMode.EAGER_LARGE_BATCH

    def replay(
        self,
        size: int,
        embeds: torch.Tensor,  # [1, N, hidden]
        positions: torch.Tensor,  # [N], or [3, N]
        extra: Mapping[str, torch.Tensor],
        *,
        is_long: torch.Tensor | None,
        slots: Sequence[torch.Tensor],  # per group: [N]
        attend: Attend,
    ) -> torch.Tensor:
        """Return the hidden states [N, hidden] of a step, valid until the next one."""
        num_tokens = embeds.shape[1]
        self._fill(size, embeds, positions, extra, is_long=is_long, slots=slots)
        captured = self._captured[size]
        fronts: dict[_Crossing, _Crossing] = {}  # made once for a step: this loop bounds small ones

        def attend_at(index: int) -> None:
            at = captured.breaks[index]
            front = fronts.get(at.crossing)
            if front is None:
                front = fronts[at.crossing] = at.crossing.get_front(num_tokens)
            output = attend(at.layer_index, front.query, front.key, front.value, scaling=at.scaling)
            front.output.copy_(output)

        captured.recording.replay(attend_at)
        return self._memory.get("hidden", num_tokens)

    def _fill(
        self,
        size: int,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        extra: Mapping[str, torch.Tensor],
        *,
        is_long: torch.Tensor | None,
        slots: Sequence[torch.Tensor],
    ) -> None:
        memory = self._memory
        memory.put("embeds", embeds[0])
        memory.put("positions", positions.transpose(0, 1) if positions.ndim > 1 else positions)
        if is_long is not None:
            memory.put("is_long", is_long)
        for name, tensor in extra.items():
            memory.put(name, tensor[0])
        for index, group_slots in enumerate(slots):
            memory.put(_name_slots(index), group_slots)
            # Behind them lie those of an earlier step.
            memory.get(_name_slots(index), size)[len(group_slots) :].fill_(NO_SLOT)


def _name_slots(group_index: int) -> str:
    return f"slots {group_index}"


class _FixedMemory:
    """Tensors by name, each with a row for every token of the largest size."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._tensors: dict[str, torch.Tensor] = {}

    def put(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Copy rows to the front of a tensor, and return them there."""
        return self.make(name, rows).copy_(rows)

    def make(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return the first rows of the tensor of this name. The first call allocates it."""
        if name not in self._tensors:
            shape = (self._num_rows, *like.shape[1:])
            self._tensors[name] = torch.zeros(shape, dtype=like.dtype, device=like.device)
        return self._tensors[name][: len(like)]

    def get(self, name: str, num_rows: int) -> torch.Tensor:
        return self._tensors[name][:num_rows]


class _SegmentCall:
    """Runs in place of the decoder's attention, stores keys and values, and breaks there."""

    def __init__(
        self,
        memory: _FixedMemory,
        kv_cache: KVCache,
        kernels: StoreKernel,
        breaks: list[_Break],
        break_here: Callable[[int], None],
    ) -> None:
        self._memory = memory
        self._kv_cache = kv_cache
        self._kernels = kernels
        self._breaks = breaks
        self._break_here = break_here
        self._crossings: dict[str, _Crossing] = {}

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        del window  # that of the layer's group
        cache = self._kv_cache[layer_index]
        if not cache.is_shared:
            slots = self._memory.get(_name_slots(cache.group_index), query.shape[2])
            self._kernels.store(cache, slots, key, value)
        # Layers of different shapes have their own memory.
        kind = str((query.shape[1], key.shape[1], query.shape[3], value.shape[3]))
        query, key, value = (
            self._memory.put(f"{name} {kind}", tensor[0].transpose(0, 1)).transpose(0, 1)[None]
            for name, tensor in (("query", query), ("key", key), ("value", value))
        )
        crossing = self._crossings.get(kind)
        if crossing is None:
            shape = (query.shape[2], query.shape[1], value.shape[3])
            output = self._memory.make(f"output {kind}", query.new_empty(shape))[None]
            crossing = _Crossing(query=query, key=key, value=value, output=output)
            self._crossings[kind] = crossing
        self._breaks.append(_Break(layer_index=layer_index, scaling=scaling, crossing=crossing))
        self._break_here(len(self._breaks) - 1)
        return crossing.output
