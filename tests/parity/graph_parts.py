"""Graphs without a GPU: a recorder that computes again, and attention in plain torch.

What is tested so is everything but CUDA itself: which steps are replayed, what they read from fixed
memory, how they are padded, and what they leave in the KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from sensorium.layers.attention.backend import LayerCache
from sensorium.worker.graphs import building
from sensorium.worker.graphs.building import GraphParts
from sensorium.worker.graphs.recorder import Break, ignore_break


class PlainKernels:
    def store(
        self, cache: LayerCache, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        is_stored = slots >= 0
        places = slots[is_stored]
        cache.keys.flatten(0, 1)[places] = key[0].transpose(0, 1)[is_stored]
        cache.values.flatten(0, 1)[places] = value[0].transpose(0, 1)[is_stored]

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
        block_size = cache.keys.shape[1]
        outputs = []
        for row, length in enumerate(seq_lens.tolist()):
            first = 0 if window is None else max(0, length - window)
            positions = torch.arange(first, length)
            slots = block_tables[row, positions // block_size].long() * block_size
            slots += positions % block_size
            keys = cache.keys.flatten(0, 1)[slots].transpose(0, 1)
            values = cache.values.flatten(0, 1)[slots].transpose(0, 1)
            outputs.append(
                torch.nn.functional.scaled_dot_product_attention(
                    query[row, :, None], keys, values, scale=scaling, enable_gqa=True
                )[:, 0]
            )
        return torch.stack(outputs)


class _Again:
    def __init__(self, function: Callable[[Break], None]) -> None:
        self._function = function
        self.num_replays = 0

    def replay(self, at_break: Break = ignore_break) -> None:
        self.num_replays += 1
        self._function(at_break)


class AgainRecorder:
    def __init__(self) -> None:
        self.recordings: list[_Again] = []

    def record(self, function: Callable[[Break], None]) -> _Again:
        function(ignore_break)  # a capture computes nothing, at breaks least of all
        self.recordings.append(_Again(function))
        return self.recordings[-1]

    @property
    def num_replays(self) -> int:
        """How often steps were replayed. Each recording is replayed once when it is made."""
        return sum(recording.num_replays - 1 for recording in self.recordings)


@dataclass(frozen=True)
class Recorders:
    decoding: AgainRecorder = field(default_factory=AgainRecorder)
    segments: AgainRecorder = field(default_factory=AgainRecorder)


def use_graphs(monkeypatch: pytest.MonkeyPatch, recorders: Recorders | None = None) -> Recorders:
    """Let engines that are built from now on use graphs, on any device."""
    recorders = recorders or Recorders()
    parts = GraphParts(
        kernels=PlainKernels(),
        recorder=recorders.decoding,
        segment_recorder=recorders.segments,
        encoder_recorder=AgainRecorder(),
    )
    monkeypatch.setattr(building, "find_graph_parts", lambda *_, **__: parts)
    return recorders
