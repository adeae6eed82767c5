"""Runs models that hear a sound while it goes on, such as Voxtral-Realtime.

Each position of the decoder has a token and 80 ms of the sound: the embedding of the sound is added
to that of the token. The encoder only looks back, so it can go on from where it stood. What it has
to remember of a sound is in a `SoundMemory`, whose size does not depend on the sound's length.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from sensorium.models.adapter import ModelAdapter
from sensorium.models.probes import KVProbe


class SoundMemory:
    """What the encoder remembers of one sound: keys and values, and the last columns of its input.

    The layers of the encoder have a window, so the keys and values before it are dropped.
    """

    __slots__ = ("key_values", "padding")

    def __init__(self, config: Any, padding: Any) -> None:
        self.key_values = DynamicCache(config=config)
        self.padding = padding


class StreamingAdapter(ModelAdapter):
    """An adapter for models that add a part of a sound to every token."""

    is_streaming = True

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.frames_per_token = int(self.config.audio_length_per_tok)

    def embed(
        self,
        input_ids: torch.Tensor,
        mm_index: torch.Tensor | None,
        mm_embeds: torch.Tensor | None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the embeddings [1, N, hidden] of token ids, with those of the sounds added."""
        embeds = self.embedding(input_ids)
        if mm_index is not None and mm_embeds is not None:
            embeds = embeds.index_add(0, mm_index, mm_embeds.to(embeds.dtype))
        delays = torch.full_like(input_ids, int(self.config.default_num_delay_tokens))
        return embeds[None], self.make_conditions(delays)

    def make_conditions(self, delays: torch.Tensor | None) -> dict[str, Any]:
        """Return what the decoder gets for the delay of each token, given in tokens [N]."""
        if delays is None:
            return {}
        module = self._base.time_embedding
        angles = delays.to(self.dtype)[:, None] * module.inv_freq.to(self.device, self.dtype)
        return {"t_cond": torch.cat((angles.cos(), angles.sin()), dim=-1)[None]}

    def _compute_whole(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits [2, vocabulary] that the model computes for two tokens in silence."""
        embeds, extra = self.embed(tokens, None, None)
        output = self.decoder(
            inputs_embeds=embeds,
            position_ids=tokens[None],
            use_cache=False,
            attention_call=KVProbe(),
            **extra,
        )
        logits: torch.Tensor = self.model.lm_head(output.last_hidden_state)[0]
        return logits

    # ---- the encoder

    def start_sound(self) -> SoundMemory:
        """Return the memory of a sound that begins."""
        padding = _get_padding_class(self._base.audio_tower)()
        return SoundMemory(self.config.audio_config, padding)

    def hear(self, memory: SoundMemory, features: torch.Tensor) -> torch.Tensor:
        """Encode the next features [bins, frames] of a sound, and return embeddings [N, hidden].

        There are as many frames as a whole number of tokens needs.
        """
        output = self._base.get_audio_features(
            input_features=self.to_model(features)[None],
            past_key_values=memory.key_values,
            padding_cache=memory.padding,
            use_cache=True,
            return_dict=True,
        )
        embeds: torch.Tensor = output.pooler_output[0]
        return embeds


def _get_padding_class(tower: Any) -> Any:
    """Return the class of the encoder's cache for convolutions, which its module defines."""
    import sys

    return sys.modules[type(tower).__module__].VoxtralRealtimeConv1dPaddingCache
