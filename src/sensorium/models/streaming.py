"""Runs models that transcribe audio while it arrives, such as Voxtral-Realtime.

Each position of the decoder has a token and 80 ms of audio: the embedding of the audio is added to
that of the token. The encoder only looks back, so it continues from its last state, an
`AudioMemory`, of bounded size for audio of any length.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from sensorium.models.hf_model import HfModel
from sensorium.models.probes import KVProbe
from sensorium.types.errors import InvariantError
from sensorium.types.model_kind import STREAMING


class AudioMemory:
    """The encoder's state for one audio stream: keys, values, and the last columns of its input."""

    __slots__ = ("columns", "keys", "length", "values")

    def __init__(self) -> None:
        self.length = 0  # positions of the encoder so far
        # The encoder's layers have a window, so the keys and values before it are dropped.
        self.keys: list[torch.Tensor] = []  # for each layer: [1, heads, kept positions, D]
        self.values: list[torch.Tensor] = []
        self.columns: dict[str, torch.Tensor] = {}  # for each convolution: [1, channels, columns]

    @property
    def num_kept(self) -> int:
        return self.keys[0].shape[2] if self.keys else 0


class StreamingModel(HfModel):
    """A model that adds a part of the audio to every token."""

    kind = STREAMING

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.frames_per_token = int(self.config.audio_length_per_tok)
        self._padding = _get_padding(self._base.audio_tower)

    def embed(
        self,
        input_ids: torch.Tensor,
        mm_index: torch.Tensor | None,
        mm_embeds: torch.Tensor | None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the embeddings [1, N, hidden] of token ids, plus the embeddings of the audio."""
        embeds = self.embedding(input_ids)
        if mm_index is not None and mm_embeds is not None:
            embeds = embeds.index_add(0, mm_index, mm_embeds.to(embeds.dtype))
        delays = torch.full_like(input_ids, int(self.config.default_num_delay_tokens))
        return embeds[None], self.make_conditions(delays)

    def make_conditions(self, delays: torch.Tensor | None) -> dict[str, Any]:
        """Return the decoder's arguments for the delay [N] of each token, in tokens."""
        if delays is None:
            return {}
        module = self._base.time_embedding
        angles = delays.to(self.dtype)[:, None] * module.inv_freq.to(self.device, self.dtype)
        return {"t_cond": torch.cat((angles.cos(), angles.sin()), dim=-1)[None]}

    def _compute_whole(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the model's own logits [2, vocabulary] for two tokens without audio."""
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

    def encode_parts(
        self, memories: Sequence[AudioMemory], features: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Encode the next features [bins, frames] of streams, and return embeddings [N, hidden].

        All features have the same number of frames, enough for a whole number of tokens, and all
        memories the same number of positions. So they form one batch without padding. The memories
        are updated, unless an error is raised.
        """
        cache, padding = self._join(memories)
        frames = self.to_model(torch.stack(list(features)))
        num_new = frames.shape[-1] * int(self.config.downsample_factor) // self.frames_per_token
        starts = torch.tensor([memory.length for memory in memories], device=self.device)
        output = self._base.get_audio_features(
            input_features=frames,
            past_key_values=cache,
            padding_cache=padding,
            use_cache=True,
            return_dict=True,
            # If the audio is longer than the window, the cache has fewer positions than it had.
            position_ids=starts[:, None] + torch.arange(num_new, device=self.device),
        )
        embeds: torch.Tensor = output.pooler_output
        self._divide(memories, cache, padding, num_new)
        return list(embeds)

    def _join(self, memories: Sequence[AudioMemory]) -> tuple[DynamicCache, Any]:
        """Return Transformers' caches of several streams: keys, values, and columns of inputs."""
        cache = DynamicCache(config=self.config.audio_config)
        for index in range(len(memories[0].keys)):
            keys = torch.cat([memory.keys[index] for memory in memories])
            cache.update(keys, torch.cat([memory.values[index] for memory in memories]), index)
        padding = self._padding.cache()
        for name in memories[0].columns:
            columns = torch.cat([memory.columns[name] for memory in memories])
            layer = padding.layers[name] = self._padding.layer()
            layer.cache, layer.is_initialized = columns, True
            _, layer.in_channels, layer.left_pad = columns.shape
        return cache, padding

    def _divide(
        self, memories: Sequence[AudioMemory], cache: DynamicCache, padding: Any, num_new: int
    ) -> None:
        """Copy each stream's row of the caches, so that it does not keep the other rows alive."""
        for row, memory in enumerate(memories):
            memory.keys = [_copy_row(layer.keys, row) for layer in cache.layers]
            memory.values = [_copy_row(layer.values, row) for layer in cache.layers]
            memory.columns = {
                name: _copy_row(layer.cache, row) for name, layer in padding.layers.items()
            }
            memory.length += num_new


def _copy_row(tensor: torch.Tensor | None, row: int) -> torch.Tensor:
    if tensor is None:
        raise InvariantError("the encoder has computed nothing for one of its layers")
    return tensor if len(tensor) == 1 else tensor[row : row + 1].clone()


@dataclass(frozen=True, slots=True)
class _Padding:
    """The classes of the encoder's cache for convolutions, which its module defines."""

    cache: Any
    layer: Any


def _get_padding(tower: Any) -> _Padding:
    module = sys.modules[type(tower).__module__]
    return _Padding(
        module.VoxtralRealtimeConv1dPaddingCache, module.VoxtralRealtimeConv1dCacheLayer
    )
