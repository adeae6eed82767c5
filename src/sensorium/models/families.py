"""Holds code for single families (the models of one `model_type`), with a section for each.

A family gets code here, 150 lines at most, only for what can't be read from its models. Models of a
`model_type` that is not in `KNOWN_MODELS` run as `HfModel`, if they pass a trial.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling

from sensorium.models.ctc_transducer import CtcTransducerModel, is_ctc_transducer
from sensorium.models.encoder_decoder import EncoderDecoderModel
from sensorium.models.hf_model import HfModel
from sensorium.models.media_batches import gather_arguments
from sensorium.models.streaming import StreamingModel
from sensorium.types.families import FAMILIES
from sensorium.types.multimodal import MODALITIES, MultiModalKwargsItem

# ---- Gemma 3


class HfGemma3(HfModel):
    """A Gemma 3, in which an image's embeddings attend to each other in both directions."""

    bidirectional_modalities = frozenset({"image"})


# ---- Gemma 4


class HfGemma4(HfModel):
    """A Gemma 4, in which decoder layers get an extra input that is looked up by token id."""

    has_causal_full_layers = True

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        # Then layers with a window attend to images and videos in both directions.
        if self.text_config.use_bidirectional_attention == "vision":
            self.bidirectional_modalities = frozenset({"image", "video"})
        ids = [getattr(self.config, f"{modality}_token_id", None) for modality in MODALITIES]
        self._placeholder_ids = torch.tensor(
            [token_id for token_id in ids if token_id is not None], device=self.device
        )

    def embed(
        self, input_ids: torch.Tensor, mm_index: torch.Tensor | None, mm_embeds: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the result of `HfModel.embed` with `per_layer_inputs`, if the model has them."""
        # As in Transformers, each id of a media placeholder is replaced with the padding id before
        # the lookup, even if the model itself generated that token.
        is_placeholder = torch.isin(input_ids, self._placeholder_ids)
        token_ids = input_ids.masked_fill(is_placeholder, self.text_config.pad_token_id)
        embeds, extra = super().embed(token_ids, mm_index, mm_embeds)
        if self.text_config.hidden_size_per_layer_input:
            extra["per_layer_inputs"] = self.decoder.get_per_layer_inputs(token_ids[None], None)
        return embeds, extra


# ---- Qwen2-Audio


class HfQwen2Audio(HfModel):
    """A Qwen2-Audio, a model without a function that only encodes audio."""

    def _get_encoder(self, _modality: str) -> Any:
        return self._encode_audios

    def _encode_audios(
        self,
        input_features: torch.Tensor,
        feature_attention_mask: torch.Tensor,
        *,
        return_dict: bool = True,
    ) -> BaseModelOutputWithPooling:
        """Encode audio like `get_audio_features` elsewhere, but return a list of embeddings."""
        del return_dict
        tower = self._base.audio_tower
        num_frames = feature_attention_mask.sum(-1)
        lengths, output_lengths = tower._get_feat_extract_output_lengths(num_frames)
        mask = self._make_mask(lengths, (input_features.shape[-1] - 2) // 2 + 1)
        hidden = tower(input_features, attention_mask=mask).last_hidden_state
        embeds = self._base.multi_modal_projector(hidden)
        rows = zip(embeds, output_lengths.tolist(), strict=True)
        return BaseModelOutputWithPooling(pooler_output=[row[:length] for row, length in rows])

    def _make_mask(self, lengths: torch.Tensor, size: int) -> torch.Tensor | None:
        """Return a mask that hides the padding up to `size` frames, or None if none is needed."""
        is_audio = torch.arange(size, device=self.device) < lengths[:, None]
        return create_bidirectional_mask(
            config=self._base.audio_tower.config,
            inputs_embeds=torch.zeros(len(lengths), size, 1, dtype=self.dtype, device=self.device),
            attention_mask=is_audio.long(),
        )


# ---- Qwen2.5-Omni


class HfQwen25Omni(HfModel):
    """The thinker of a Qwen2.5-Omni: the part of the model that generates text."""

    # The function for M-RoPE positions takes other arguments than those of other models.
    def _get_rope_index(
        self,
        input_ids: torch.Tensor,
        _token_types: torch.Tensor,  # the model finds the placeholders itself
        items: Sequence[MultiModalKwargsItem],
    ) -> torch.Tensor:
        arguments = gather_arguments(items, ("image_grid_thw", "video_grid_thw"))
        masks = gather_arguments(items, ("feature_attention_mask",))
        seconds = gather_arguments(items, ("video_second_per_grid",))
        positions: torch.Tensor = self._base.get_rope_index(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            audio_seqlens=masks["feature_attention_mask"].sum(-1) if masks else None,
            second_per_grids=seconds.get("video_second_per_grid"),
            **arguments,
        )[0]
        return positions


# ---- Qwen3-VL


class HfQwen3VL(HfModel):
    """A Qwen3-VL, which also feeds media embeddings to its first decoder layers (DeepStack)."""

    def split(
        self, output: Any, items: Sequence[MultiModalKwargsItem], num_embeds: Sequence[int]
    ) -> list[torch.Tensor]:
        embeds = torch.cat(super().split(output, items, num_embeds))
        layers = [
            # A list has one tensor per item. Older versions of Transformers give a single tensor.
            layer if isinstance(layer, torch.Tensor) else torch.cat(layer)
            for layer in output.deepstack_features
        ]
        # The embeddings for the first layers are appended as columns to those for the input.
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


# ---- the class of each family

OWN_MODELS: dict[str, type[HfModel]] = {
    "whisper": EncoderDecoderModel,
    "moonshine": EncoderDecoderModel,
    "parakeet_ctc": CtcTransducerModel,
    "parakeet_rnnt": CtcTransducerModel,
    "parakeet_tdt": CtcTransducerModel,
    "wav2vec2": CtcTransducerModel,
    "wav2vec2-bert": CtcTransducerModel,
    "wav2vec2-conformer": CtcTransducerModel,
    "hubert": CtcTransducerModel,
    "wavlm": CtcTransducerModel,
    "data2vec-audio": CtcTransducerModel,
    "unispeech": CtcTransducerModel,
    "unispeech-sat": CtcTransducerModel,
    "sew": CtcTransducerModel,
    "voxtral_realtime": StreamingModel,
    "gemma3": HfGemma3,
    "gemma4": HfGemma4,
    "qwen2_5_omni_thinker": HfQwen25Omni,
    "qwen2_audio": HfQwen2Audio,
    "qwen3_vl": HfQwen3VL,
    "qwen3_vl_moe": HfQwen3VL,
}
# model_type -> class, for every known family.
KNOWN_MODELS: dict[str, type[HfModel]] = {
    family.model_type: OWN_MODELS.get(family.model_type, HfModel) for family in FAMILIES
}


def find_model_class(config: PretrainedConfig) -> type[HfModel]:
    """Return the `HfModel` class for the model of a config; its `kind` describes the model."""
    if is_ctc_transducer(config):
        return CtcTransducerModel
    if config.is_encoder_decoder:
        return EncoderDecoderModel
    known = KNOWN_MODELS.get(config.model_type, HfModel)
    # Checkpoints of the same type may lack a head for text: nothing can be read from their frames.
    return HfModel if known is CtcTransducerModel else known
