"""Adapts Qwen3-VL, which also gives media embeddings to the decoder's first layers (DeepStack)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sensorium.models.adapter import ModelAdapter
from sensorium.types.multimodal import MultiModalKwargsItem


class Qwen3VLAdapter(ModelAdapter):
    """An adapter that appends the DeepStack embeddings to an item's own, as more columns."""

    def split(
        self, output: Any, items: Sequence[MultiModalKwargsItem], num_embeds: Sequence[int]
    ) -> list[torch.Tensor]:
        embeds = torch.cat(super().split(output, items, num_embeds))
        layers = [
            # A list has one tensor per item. Older versions of Transformers give a single tensor.
            layer if isinstance(layer, torch.Tensor) else torch.cat(layer)
            for layer in output.deepstack_features
        ]
        return list(torch.cat([embeds, *layers], dim=-1).split(list(num_embeds)))

    def embed(
        self, input_ids: torch.Tensor, mm_index: torch.Tensor | None, mm_embeds: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        if mm_index is None or mm_embeds is None:
            return super().embed(input_ids, None, None)
        own, *layers = mm_embeds.split(int(self.text_config.hidden_size), dim=-1)
        embeds, extra = super().embed(input_ids, mm_index, own)
        is_visual = torch.zeros_like(input_ids, dtype=torch.bool).index_fill(0, mm_index, True)
        deepstack = {"visual_pos_masks": is_visual[None], "deepstack_visual_embeds": layers}
        return embeds, {**extra, **deepstack}
