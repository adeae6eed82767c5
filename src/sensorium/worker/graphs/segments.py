"""Replays steps that contain prompt tokens as CUDA graphs that are split at attention.

Of all that a decoder computes, only attention depends on which requests a step has. So the work
between two attention layers is captured for a number of tokens, including the storing of keys and
values. Attention runs between the replays as it does without graphs.

Steps are padded to the next number of tokens that was captured. Padding changes no result: its
slots (indices into the KV cache) are below 0, so nothing is stored for it, and outside of attention
no row depends on another one.

Tensors that are passed from a graph to attention, or back, lie in fixed memory that all layers and
sizes share. Nothing else of a capture is kept, so that the next capture can use its memory again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from sensorium.layers.attention.backend import NO_SLOT, LayerCache
from sensorium.models.hf_model import HfModel
from sensorium.types.scheduling import StepMode
from sensorium.worker.graphs.recorder import (
    Break,
    Recorder,
    Recording,
    capture_sizes,
    find_distance,
    find_size,
)
from sensorium.worker.kv_cache import KVCache


class StoreKernel(Protocol):
    """An interface of the kernel that stores new keys and values in the KV cache."""

    def store(
        self, cache: LayerCache, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store the keys and values of N new tokens in the KV cache of a layer.

        Keys and values are [1, K, N, D], with K key heads of size D. `slots` [N] has the index in
        the cache for each token. Slots below 0 are padding, and are skipped.
        """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Crossing:
    """A set of fixed tensors that a CUDA graph and the attention after it exchange.

    The graph writes query, key and value. Attention writes the output, which the next graph reads.
    All layers of one shape share these tensors.
    """

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
    """A point where a capture is split, because attention runs outside of the graphs."""

    layer_index: int
    scaling: float | None
    crossing: _Crossing  # for as many tokens as were captured


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """The captured CUDA graphs for one number of tokens, and the points where they are split."""

    breaks: Sequence[_Break]
    recording: Recording


class Attend(Protocol):
    """A function that computes a layer's attention with keys and values that are already stored."""

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
    """A set of CUDA graphs, with a series of segments for each captured number of tokens."""

    def __init__(
        self,
        hf_model: HfModel,
        *,
        kv_cache: KVCache,
        num_groups: int,
        kernels: StoreKernel,
        recorder: Recorder,
        sizes: Sequence[int],
    ) -> None:
        self._hf_model = hf_model
        self._kv_cache = kv_cache
        self._num_groups = num_groups
        self._kernels = kernels
        self._recorder = recorder
        self._sizes = tuple(sizes)  # ascending
        self._memory = _FixedMemory(self._sizes[-1])
        self._captured: dict[int, _Captured] = {}
        # The decoder's extra inputs: name -> shape without batch and tokens.
        self._extra_shapes: dict[str, tuple[int, ...]] = {}

    # ---- at start

    @torch.inference_mode()
    def capture(self, *, use_tqdm: bool = False) -> str | None:
        """Capture graphs for each number of tokens; if one fails, keep none and return why."""
        reason = capture_sizes(
            self._sizes, self._capture_size, what="graphs of prompts", use_tqdm=use_tqdm
        )
        if reason is not None:
            self._captured.clear()
        return reason

    def _capture_size(self, size: int) -> str | None:
        hf_model, device = self._hf_model, self._hf_model.device
        token_ids = torch.arange(size, device=device) % hf_model.vocab_size
        embeds, extra = hf_model.embed(token_ids, None, None)
        self._extra_shapes = {name: tensor.shape[2:] for name, tensor in extra.items()}
        positions = torch.arange(size, device=device)
        is_long = torch.zeros(size, dtype=torch.bool, device=device)
        self._fill(
            size,
            embeds,
            positions.expand(3, -1) if hf_model.has_mrope else positions,
            extra,
            is_long=None if hf_model.long_after is None else is_long,
            slots=[positions[:0]] * self._num_groups,  # no slots, so nothing is stored
        )
        breaks: list[_Break] = []

        def compute(break_here: Break) -> None:
            breaks.clear()
            self._compute(size, breaks, break_here)

        # A stand-in for attention. Its output depends on every query, so that the comparison below
        # covers the segments on both sides of a break.
        def attend(index: int) -> None:
            crossing = breaks[index].crossing
            queries = crossing.query.mean(-1).transpose(1, 2)[..., None]
            crossing.output.copy_(queries.expand_as(crossing.output))

        # This run also compiles kernels and allocates workspaces, which a capture must not do.
        compute(attend)
        hidden = self._memory.get("hidden", size)
        expected = hidden.clone()
        recording = self._recorder.record(compute)
        recording.replay(attend)
        distance = find_distance(hidden, expected, hf_model.dtype)
        if distance is not None:
            return f"a replay of {size} tokens is off by {distance}"
        self._captured[size] = _Captured(breaks=tuple(breaks), recording=recording)
        return None

    def _compute(self, size: int, breaks: list[_Break], break_here: Break) -> None:
        """Run the decoder on the first `size` rows of fixed memory, and store the hidden states."""
        hf_model, memory = self._hf_model, self._memory
        extra = {name: memory.get(name, size)[None] for name in self._extra_shapes}
        positions = memory.get("positions", size)
        has_long = hf_model.long_after is not None
        call = _SegmentCall(memory, self._kv_cache, self._kernels, breaks, break_here)
        with hf_model.choosing_factors(memory.get("is_long", size) if has_long else None):
            hidden = hf_model.forward(
                memory.get("embeds", size)[None],
                positions.transpose(0, 1) if hf_model.has_mrope else positions,
                call,
                extra,
            )
        memory.put("hidden", hidden)

    # ---- in a step

    def find_size(self, num_tokens: int, extra: Mapping[str, Any]) -> int | StepMode:
        """Return the smallest captured number of tokens that fits a step, or why none does."""
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
        is_long: torch.Tensor | None,  # bool [N]; None: the model treats all lengths alike
        slots: Sequence[torch.Tensor],  # per group: [N], where new keys and values are stored
        attend: Attend,
    ) -> torch.Tensor:
        """Replay the graphs of `size` tokens for a step, and return its hidden states [N, hidden].

        `attend` runs between two graphs. The next replay overwrites the result.
        """
        num_tokens = embeds.shape[1]
        self._fill(size, embeds, positions, extra, is_long=is_long, slots=slots)
        captured = self._captured[size]
        # Slices are made once a step and not once a layer: on the host this loop is what limits
        # the speed of small steps.
        fronts: dict[_Crossing, _Crossing] = {}

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
            # The slots of an earlier step lie after these, and must not be written.
            memory.get(_name_slots(index), size)[len(group_slots) :].fill_(NO_SLOT)


def _name_slots(group_index: int) -> str:
    return f"slots {group_index}"


class _FixedMemory:
    """A set of named tensors that stay at fixed addresses, as CUDA graphs require."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._tensors: dict[str, torch.Tensor] = {}

    def put(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Copy rows to the beginning of the named tensor, and return that part of it."""
        return self.make(name, rows).copy_(rows)

    def make(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return as many first rows of the named tensor as `like` has, without writing to them."""
        if name not in self._tensors:
            shape = (self._num_rows, *like.shape[1:])
            self._tensors[name] = torch.zeros(shape, dtype=like.dtype, device=like.device)
        return self._tensors[name][: len(like)]

    def get(self, name: str, num_rows: int) -> torch.Tensor:
        return self._tensors[name][:num_rows]


@dataclass(frozen=True, slots=True)
class _SegmentCall:
    """An implementation of `AttentionCall`, which the decoder calls in a captured segment.

    It stores the new keys and values, ends the present graph with `break_here`, and returns the
    fixed tensor into which attention will write its output.
    """

    memory: _FixedMemory
    kv_cache: KVCache
    kernels: StoreKernel
    breaks: list[_Break]
    break_here: Break
    crossings: dict[str, _Crossing] = field(default_factory=dict)  # shapes -> tensors

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
        if not cache.is_shared:
            slots = self.memory.get(_name_slots(cache.group_index), query.shape[2])
            self.kernels.store(cache, slots, key, value)
        # Layers of different shapes have their own memory.
        kind = str((query.shape[1], key.shape[1], query.shape[3], value.shape[3]))
        query, key, value = (
            self.memory.put(f"{name} {kind}", tensor[0].transpose(0, 1)).transpose(0, 1)[None]
            for name, tensor in (("query", query), ("key", key), ("value", value))
        )
        crossing = self.crossings.get(kind)
        if crossing is None:
            shape = (query.shape[2], query.shape[1], value.shape[3])
            output = self.memory.make(f"output {kind}", query.new_empty(shape))[None]
            crossing = _Crossing(query=query, key=key, value=value, output=output)
            self.crossings[kind] = crossing
        self.breaks.append(_Break(layer_index=layer_index, scaling=scaling, crossing=crossing))
        self.break_here(len(self.breaks) - 1)
        return crossing.output
