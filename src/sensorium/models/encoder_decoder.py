"""Runs models with an audio encoder and a decoder with cross-attention, such as Whisper.

In each decoder layer the tokens attend to each other, and then to the encoded audio of their
request. The keys and values of the audio are computed in the request's first step and kept like
those of tokens. So a decoder of n layers has 2n for the engine: layer n + i is the cross-attention
of layer i.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

from sensorium.layers.kv_layout import LayerSpec
from sensorium.models.hf_model import HfModel
from sensorium.models.probes import KVProbe
from sensorium.models.seams.paged_attention import AttentionCall, attending
from sensorium.types.errors import ModelError
from sensorium.types.model_kind import CROSS

WINDOW_S = 30
_SAMPLING_RATE = 16_000
_NUM_PROBE_POSITIONS = 3  # another number than the tokens of the probes


def count_positions(model_class: Any, num_inputs: int) -> int:
    """Return how many positions an encoder makes of `num_inputs` spectrogram frames or samples."""
    # The class's function for this uses no model.
    return int(model_class._get_feat_extract_output_lengths(None, num_inputs))


def get_max_positions(model_class: Any, config: PretrainedConfig) -> int:
    """Return the number of positions of the longest audio that the model takes."""
    # A model without a limit in its config takes samples, and gets windows of 30 seconds.
    most: int | None = getattr(config, "max_source_positions", None)
    return most or count_positions(model_class, WINDOW_S * _SAMPLING_RATE)


class EncoderDecoderModel(HfModel):
    """A model in which every decoder layer attends to encoded audio."""

    kind = CROSS

    def __init__(self, model: PreTrainedModel) -> None:
        # Encoder and decoder share a config, but only the decoder uses our attention.
        self._decoder_config = copy.copy(model.config)
        for module in model.get_decoder().modules():
            if getattr(module, "config", None) is model.config:
                module.config = self._decoder_config
        super().__init__(model)
        self.num_decoder_layers = int(self.text_config.num_hidden_layers)
        self.max_cross_positions = get_max_positions(type(model), model.config)
        self._number_cross_layers()
        self.alignment_heads = self._get_alignment_heads()

    def _get_alignment_heads(self) -> dict[int, list[int]]:
        """Return the heads that align text with audio, by the index of their layer."""
        # A Whisper's generation config may list them. Otherwise these are all heads of the second
        # half of the layers, as in OpenAI's code.
        num_layers, num_heads = self.num_decoder_layers, self.text_config.num_attention_heads
        later = range(num_layers // 2, num_layers)
        given = getattr(self.model.generation_config, "alignment_heads", None)
        heads: dict[int, list[int]] = {}
        for layer, head in given or [(i, head) for i in later for head in range(num_heads)]:
            heads.setdefault(num_layers + layer, []).append(head)
        return heads

    def _set_attention(self, name: str) -> None:
        self._decoder_config._attn_implementation = name

    def _number_cross_layers(self) -> None:
        """Give each cross-attention module, found by a run, its own layer index."""
        found: list[Any] = []

        def note(module: torch.nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
            # Only cross-attention gets separate states for its keys and values.
            if kwargs.get("key_value_states") is not None:
                found.append(module)

        modules = [m for m in self.decoder.modules() if hasattr(m, "layer_idx")]
        handles = [m.register_forward_pre_hook(note, with_kwargs=True) for m in modules]
        try:
            with torch.inference_mode():
                self._run_two_tokens(_Zeros())
        finally:
            for handle in handles:
                handle.remove()
        if len(found) != self.num_decoder_layers:
            raise ModelError(
                f"{len(found)} of the {self.num_decoder_layers} layers of the decoder attend to "
                "encoder outputs, and other kinds of layers are not supported"
            )
        for module in found:
            module.layer_idx += self.num_decoder_layers

    # ---- the decoder

    def embed(
        self,
        input_ids: torch.Tensor,
        _mm_index: torch.Tensor | None,
        mm_embeds: torch.Tensor | None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return embeddings [1, N, hidden] of token ids, and the audio of requests that start."""
        embeds = self.embedding(input_ids)[None]
        # If no request starts, the decoder gets a single row that no token attends to.
        states = embeds.new_zeros(1, embeds.shape[-1]) if mm_embeds is None else mm_embeds
        return embeds, {"encoder_hidden_states": states.to(embeds.dtype)[None]}

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        positions: torch.Tensor,
        attention_call: AttentionCall,
        extra: dict[str, Any],
    ) -> torch.Tensor:
        # Not every decoder passes keyword arguments on to its cross-attention.
        with attending(attention_call):
            return super().forward(inputs_embeds, positions, attention_call, extra)

    def _run_two_tokens(self, call: Any) -> torch.Tensor:
        tokens = torch.arange(2, device=self.device)
        embeds, _ = self.embed(tokens, None, None)
        states = embeds.new_ones(1, _NUM_PROBE_POSITIONS, embeds.shape[-1])
        return self.forward(embeds, tokens, call, {"encoder_hidden_states": states})

    def _probe_layers(self) -> tuple[LayerSpec, ...]:
        probe = KVProbe()
        hidden = self._run_two_tokens(probe)
        self._probe_logits(hidden)
        num_layers, expected = len(probe.layers), 2 * self.num_decoder_layers
        if num_layers != expected:
            raise ModelError(
                f"{num_layers} of its {expected} attention layers use Transformers' attention "
                "interface, and other kinds of layers are not supported"
            )
        return tuple(
            replace(layer, is_cross=layer.layer_index >= self.num_decoder_layers)
            for layer in probe.layers
        )

    def _compute_whole(self, tokens: torch.Tensor) -> torch.Tensor:
        width = self.embedding.weight.shape[1]
        states = torch.ones(1, _NUM_PROBE_POSITIONS, width, dtype=self.dtype, device=self.device)
        encoded: Any = BaseModelOutput(last_hidden_state=states)
        encoded.attention_mask = None  # Moonshine asks its encoder's output for one
        with attending(KVProbe()):
            output = self.model(
                encoder_outputs=encoded,
                decoder_input_ids=tokens[None],
                use_cache=False,
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    def fuse(self) -> None:
        """Leave the model unchanged: the kernels are made for decoders without cross-attention."""

    # ---- the encoder

    def _get_encoder(self, _modality: str) -> Any:
        return self._encode_audios

    def _get_encoder_names(self, _modality: str) -> Collection[str]:
        return (self.model.main_input_name, "attention_mask")

    def _encode_audios(self, *, return_dict: bool, **inputs: torch.Tensor) -> Any:
        output = self.model.get_encoder()(**inputs, return_dict=return_dict)
        return BaseModelOutputWithPooling(pooler_output=output.last_hidden_state)


class _Zeros:
    """A stand-in for attention that returns zeros, for runs that only find out the layers."""

    def attend(
        self,
        layer_index: int,  # noqa: ARG002
        query: torch.Tensor,
        key: torch.Tensor,  # noqa: ARG002
        value: torch.Tensor,
        *,
        scaling: float | None,  # noqa: ARG002
    ) -> torch.Tensor:
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
