"""Adapts Qwen2-Audio, in which the model has no function that only encodes sounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.masking_utils import create_bidirectional_mask

from sensorium.models.adapter import ModelAdapter, collate
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import MultiModalKwargsItem


class Qwen2AudioAdapter(ModelAdapter):
    def encode(
        self, modality: str, items: Sequence[MultiModalKwargsItem], num_embeds: Sequence[int]
    ) -> list[torch.Tensor]:
        del modality  # audio is the only one
        tensors = {name: self.to_model(tensor) for name, tensor in collate(items).items()}
        tower = self._base.audio_tower
        features = tensors["input_features"]
        num_frames = tensors["feature_attention_mask"].sum(-1)
        lengths, output_lengths = tower._get_feat_extract_output_lengths(num_frames)
        if output_lengths.tolist() != list(num_embeds):
            raise RequestError(
                f"the encoder gives {output_lengths.tolist()} embeddings "
                f"for placeholders of {list(num_embeds)}"
            )
        hidden = tower(
            features, attention_mask=self._make_mask(lengths, (features.shape[-1] - 2) // 2 + 1)
        ).last_hidden_state
        embeds = self._base.multi_modal_projector(hidden)
        return [row[:length] for row, length in zip(embeds, num_embeds, strict=True)]

    def _make_mask(self, lengths: torch.Tensor, size: int) -> torch.Tensor | None:
        """Return a mask that lets tokens attend to sound, and not to padding."""
        is_sound = torch.arange(size, device=self.device) < lengths[:, None]
        return create_bidirectional_mask(
            config=self._base.audio_tower.config,
            inputs_embeds=torch.zeros(len(lengths), size, 1, dtype=self.dtype, device=self.device),
            attention_mask=is_sound.long(),
        )
