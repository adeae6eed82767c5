"""Adapts the thinker of Qwen2.5-Omni, which computes positions from its own set of arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sensorium.models.adapter import ModelAdapter, gather_arguments
from sensorium.types.multimodal import MultiModalKwargsItem


class Qwen25OmniAdapter(ModelAdapter):
    def _get_rope_index(
        self,
        input_ids: torch.Tensor,
        token_types: torch.Tensor,
        items: Sequence[MultiModalKwargsItem],
    ) -> torch.Tensor:
        del token_types  # the model finds the placeholders itself
        arguments = gather_arguments(items, ("image_grid_thw", "video_grid_thw"))
        masks = gather_arguments(items, ("feature_attention_mask",))
        seconds = gather_arguments(items, ("video_second_per_grid",))
        positions: torch.Tensor = self._base.get_rope_index(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            audio_seqlens=masks["feature_attention_mask"].sum(-1) if masks else None,
            second_per_grids=seconds["video_second_per_grid"] if seconds else None,
            **arguments,
        )[0]
        return positions
