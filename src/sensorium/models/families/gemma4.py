"""Adapts Gemma 4, in which each layer of the decoder has inputs that are looked up by token.

If its config asks for it, layers with a window attend to images and videos in both directions.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from sensorium.models.adapter import ModelAdapter
from sensorium.types.multimodal import MODALITIES


class Gemma4Adapter(ModelAdapter):
    has_causal_full_layers = True

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        if self.text_config.use_bidirectional_attention == "vision":
            self.bidirectional_modalities = frozenset({"image", "video"})
        ids = [getattr(self.config, f"{modality}_token_id", None) for modality in MODALITIES]
        self._placeholder_ids = torch.tensor(
            [token_id for token_id in ids if token_id is not None], device=self.device
        )

    def embed(
        self, input_ids: torch.Tensor, mm_index: torch.Tensor | None, mm_embeds: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the embeddings of tokens, and the inputs of each layer.

        As in Transformers, every placeholder is looked up as padding here, even one that the model
        itself generated.
        """
        is_placeholder = torch.isin(input_ids, self._placeholder_ids)
        token_ids = input_ids.masked_fill(is_placeholder, self.text_config.pad_token_id)
        embeds, extra = super().embed(token_ids, mm_index, mm_embeds)
        if self.text_config.hidden_size_per_layer_input:
            per_layer = self._decoder.get_per_layer_inputs(token_ids[None], None)
            extra = {**extra, "per_layer_inputs": per_layer}
        return embeds, extra
