"""Gives all Transformers models one interface: encode, embed, run the decoder, compute logits.

`HfModel` reads what it needs from the model itself; subclasses for families override the rest.
Nothing here depends on requests, blocks or schedules.

The model is changed in few places: the attention functions of its decoder and of encoders that pack
sequences, the encoders' computation of lengths, the choice of rotary modules that have two sets of
factors, and the layers that `fuse` replaces.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from sensorium.layers.kv_layout import LayerSpec
from sensorium.models.long_context import ContextLimit, LongRope, find_context_limit
from sensorium.models.media_batches import (
    collate,
    gather_arguments,
    get_num_parts,
    split_output,
)
from sensorium.models.probes import PROBE_ATTENTION, KVProbe, MaskProbe
from sensorium.models.seams.comparing import CausalAttention, get_distance, is_many_roundings
from sensorium.models.seams.fusion import Fusion, fuse
from sensorium.models.seams.host_copies import HostCopies, keep_host_copies
from sensorium.models.seams.packed_encoders import (
    DENSE_ATTENTION,
    PACKED_ATTENTION,
    compute_on_host,
    find_packing_towers,
    set_attention,
)
from sensorium.models.seams.paged_attention import PAGED_ATTENTION, AttentionCall
from sensorium.models.towers import NoDecoder
from sensorium.types.errors import ModelError
from sensorium.types.model_kind import CAUSAL
from sensorium.types.multimodal import MultiModalFeatureSpec, MultiModalKwargsItem
from sensorium.utils.arrays import to_device

logger = logging.getLogger(__name__)

# The values in Transformers' `mm_token_type_ids`. Text is 0.
_TOKEN_TYPES = {"image": 1, "video": 2, "audio": 3}
# MKL multiplies so many rows by a large matrix up to three times slower than 16 rows.
_SLOW_NUM_ROWS = range(4, 16)
_HAS_MKL = torch.backends.mkl.is_available()


class HfModel:
    """A wrapper that gives the engine one interface to any model of Transformers."""

    kind = CAUSAL
    # The embeddings of a media item of these modalities attend to each other in both directions.
    bidirectional_modalities: frozenset[str] = frozenset()
    # True: they do so only in layers with a window; in all other layers attention is causal.
    has_causal_full_layers = False
    # The most media positions that a request attends to by cross-attention. 0: there is none.
    max_cross_positions = 0
    # Layer with cross-attention -> its heads that align the text with audio.
    alignment_heads: Mapping[int, Sequence[int]] = MappingProxyType({})

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config: PretrainedConfig = model.config
        self.text_config: PretrainedConfig = model.config.get_text_config(decoder=True)
        # The name of the attention that Transformers chose for the decoder.
        self.own_attention_name: str = self.text_config._attn_implementation
        self._base: Any = model.base_model
        self.decoder: Any = model.get_decoder()
        if not isinstance(self.decoder, NoDecoder):
            self._set_attention(PAGED_ATTENTION)
        self._head: Any = model.get_output_embeddings()
        self.embedding: Any = model.get_input_embeddings()
        self._towers = find_packing_towers(model, self.decoder)
        set_attention(self._towers, PACKED_ATTENTION)
        compute_on_host(self._towers)
        self.fusion = Fusion()
        self._long_rope = LongRope(self.decoder)
        # The most tokens of a request that uses the short rotary factors. None: there is one set.
        self.long_after = self._long_rope.long_after
        self.has_mrope = hasattr(self._base, "get_rope_index")
        # Whether logits have to be scaled as the config describes. `_probe_logits` finds out.
        self._scales_logits = True
        self.vocab_size = int(self.text_config.vocab_size)

    def _set_attention(self, name: str) -> None:
        is_nested = self.text_config is not self.config
        self.model.set_attn_implementation({"text_config": name} if is_nested else name)

    @property
    def device(self) -> torch.device:
        return self._any_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._any_weight.dtype

    @property
    def _any_weight(self) -> torch.Tensor:
        """The token embedding, or the first weight of a model that has only encoders."""
        weight: torch.Tensor | None = getattr(self.embedding, "weight", None)
        return next(self.model.parameters()) if weight is None else weight

    # ---- the decoder

    def embed(
        self, input_ids: torch.Tensor, mm_index: torch.Tensor | None, mm_embeds: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the embeddings [1, N, hidden] of token ids [N], and named decoder arguments.

        The tokens at the indices `mm_index` get the rows of `mm_embeds`, which an encoder computed
        from media. Both are None if the step has no media. The ids of these tokens are not looked
        up, because a placeholder may be outside the vocabulary.
        """
        if mm_index is None or mm_embeds is None:
            return self.embedding(input_ids)[None], {}
        embeds = self.embedding(input_ids.index_fill(0, mm_index, 0))
        return embeds.index_copy(0, mm_index, mm_embeds.to(embeds.dtype))[None], {}

    def make_conditions(self, delays: torch.Tensor | None) -> dict[str, Any]:  # noqa: ARG002
        """Return further decoder arguments; `delays` has how far each token is behind its audio."""
        return {}

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        positions: torch.Tensor,  # [N], or [3, N] for M-RoPE (rotary positions in three dimensions)
        attention_call: AttentionCall,
        extra: dict[str, Any],  # the extra arguments that `embed` returned
    ) -> torch.Tensor:
        """Run the decoder on embeddings [1, N, hidden], and return hidden states [N, hidden]."""
        position_ids = positions[:, None] if self.has_mrope else positions[None]
        output = self.decoder(
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            use_cache=False,
            attention_call=attention_call,
            **extra,
        )
        return output.last_hidden_state[0]

    def choosing_factors(self, is_long: torch.Tensor | None) -> AbstractContextManager[None]:
        """Return the context `LongRope.choosing` of this model's decoder."""
        return self._long_rope.choosing(is_long)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [B, vocabulary] of hidden states, scaled as the model does it."""
        num_rows = len(hidden)
        if num_rows in _SLOW_NUM_ROWS and hidden.device.type == "cpu" and _HAS_MKL:
            hidden = functional.pad(hidden, (0, 0, 0, _SLOW_NUM_ROWS.stop - num_rows))
        logits = self._head(hidden)[:num_rows].float()
        return self._scale(logits) if self._scales_logits else logits

    def _scale(self, logits: torch.Tensor) -> torch.Tensor:
        config = self.text_config
        if (scale := getattr(config, "logit_scale", None)) is not None:
            logits = logits * scale
        if (divisor := getattr(config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (softcap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return logits

    @torch.inference_mode()
    def probe_layers(self) -> tuple[LayerSpec, ...]:
        """Return the shape of each layer's keys and values, found by running two tokens.

        Raise `ModelError` if the model fails, or does something that this engine does not support.
        """
        name = type(self.model).__name__
        try:
            return self._probe_layers()
        except ModelError as error:
            raise ModelError(f"{name} can't be run: {error}") from error
        except Exception as error:
            # Any error means that the decoder does not work in the way that is expected here.
            reason = f"its decoder failed in a trial: {error}"
            raise ModelError(f"{name} can't be run: {reason}") from error

    def _probe_layers(self) -> tuple[LayerSpec, ...]:
        if not hasattr(self.embedding, "weight"):
            raise ModelError(
                f"its token embedding is a {type(self.embedding).__name__} without a weight matrix"
            )
        mask_probe, kv_probe = MaskProbe(), KVProbe()
        self._set_attention(PROBE_ATTENTION)
        try:
            self._run_two_tokens(mask_probe)
        finally:
            self._set_attention(PAGED_ATTENTION)
        self._probe_logits(self._run_two_tokens(kv_probe))
        layers, expected = kv_probe.layers, int(self.text_config.num_hidden_layers)
        if len(layers) != expected:
            raise ModelError(
                f"{len(layers)} of its {expected} layers use Transformers' attention interface, "
                "and other kinds of layers are not supported"
            )
        return tuple(
            replace(layer, window=mask_probe.windows[layer.layer_index]) for layer in layers
        )

    def find_context_limit(self, layers: Sequence[LayerSpec]) -> ContextLimit | None:
        """Return the longest context that is computed as the model would; None: no limit."""
        return find_context_limit(self.model, layers, self.long_after)

    def _run_two_tokens(self, call: Any) -> torch.Tensor:
        # Both the ids and the positions. The embedding of one token may be zero and show nothing.
        tokens = torch.arange(2, device=self.device)
        embeds, extra = self.embed(tokens, None, None)
        return self.forward(embeds, tokens.expand(3, 2) if self.has_mrope else tokens, call, extra)

    def _probe_logits(self, hidden: torch.Tensor) -> None:
        """Find out whether to scale logits; raise `ModelError` if they differ from the model's own.

        Not every model scales its logits as its config describes. They are not scaled if they agree
        better unscaled, by more than rounding. `hidden` comes from `_run_two_tokens`.
        """
        theirs = self._compute_whole(torch.arange(2, device=self.device)).float()
        distances = {}
        for self._scales_logits in (False, True):
            distances[self._scales_logits] = float((self.logits(hidden) - theirs).abs().max())
        num_roundings = 32 if self.dtype == torch.float32 else 4
        rounding = num_roundings * torch.finfo(self.dtype).eps * float(theirs.abs().max())
        self._scales_logits = distances[True] <= max(distances[False], rounding)
        # Both ran the same operations except for the scaling, so they may differ by a few roundings
        # at most. `not <=` is also true for NaN.
        if not distances[self._scales_logits] <= 3 * rounding:
            raise ModelError(
                "its logits are neither the output of its last layer nor that output scaled as its "
                "config describes"
            )

    def _compute_whole(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits [2, vocabulary] that the model itself computes for two tokens."""
        output = self.model(
            input_ids=tokens[None],
            position_ids=tokens.expand(3, 1, 2) if self.has_mrope else tokens[None],
            use_cache=False,
            attention_call=KVProbe(),
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def fuse(self) -> None:
        """Replace operations of the model's layers with fewer, fused kernels.

        If the fused model fails, or its results differ from the original's by more than rounding,
        the original is restored and a warning is logged.
        """
        logger.info(
            "comparing fused forms of the model's layers with the originals; at the first start on "
            "a machine their kernels are compiled, which takes some seconds"
        )
        fusion = fuse(self.model, self.device)
        try:
            distance = self._compare_fused(fusion)
        except Exception as error:  # models raise all kinds of errors: run them unfused
            logger.debug("the fused model failed", exc_info=True)
            fusion.turn_off()
            logger.warning(
                "nothing is fused, so the model may be slower: with %s it failed: %r", fusion, error
            )
            return
        finally:
            if self.device.type == "cuda":
                # Joined weights lie in new memory. Without this, torch would keep the old memory
                # for later tensors.
                torch.cuda.empty_cache()
        if is_many_roundings(distance, self.dtype):
            self.fusion = fusion
        else:
            fusion.turn_off()
            logger.warning(
                "nothing is fused, so the model may be slower: %s would change its results by %.2g",
                fusion,
                distance,
            )

    @torch.inference_mode()
    def _compare_fused(self, fusion: Fusion) -> float:
        found = self._run_two_tokens(CausalAttention())
        with fusion.paused():
            expected = self._run_two_tokens(CausalAttention())
        return get_distance(found, expected)

    # ---- the model on its own

    @contextmanager
    def own_attention(self, name: str | None = None) -> Iterator[None]:
        """Let the model compute as Transformers wrote it, without fused layers, inside a `with`.

        The decoder uses the attention `name`, or with None the one that Transformers chose for it.
        """
        self._set_attention(name or self.own_attention_name)
        set_attention(self._towers, DENSE_ATTENTION)
        try:
            with self.fusion.paused():
                yield
        finally:
            self._set_attention(PAGED_ATTENTION)
            set_attention(self._towers, PACKED_ATTENTION)

    def call_before_blocks(self, function: Callable[[], None]) -> int:
        """Call `function` before each run of a decoder or encoder layer; return the layer count.

        The calls show progress: on a CPU a pass over a long prompt or a large picture may take
        minutes, but one layer takes seconds at most.
        """
        blocks = list(find_blocks(self.model))
        for block in blocks:
            block.register_forward_pre_hook(lambda _module, _arguments: function())
        return len(blocks)

    def forget_positions(self) -> None:
        """Delete the last call's M-RoPE offset, which `generate` would use for another prompt."""
        if hasattr(self._base, "rope_deltas"):
            self._base.rope_deltas = None

    # ---- positions

    def get_mrope_positions(
        self,
        token_ids: Sequence[int],
        features: Sequence[MultiModalFeatureSpec],
        items: Sequence[MultiModalKwargsItem],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the M-RoPE positions [3, prompt] of a prompt on the CPU, and an offset [3, 1].

        The dimensions are time, height and width. A token after the prompt has its index plus the
        offset as its position. As in `generate`, positions continue from the last one of the
        prompt, which is not always the highest: in some model families a text may begin before the
        time of the last video frame. `features` have the places of the `items` in the prompt.
        """
        if not features:
            return torch.arange(len(token_ids)).expand(3, -1), torch.zeros(3, 1, dtype=torch.long)
        token_types = torch.zeros(1, len(token_ids), dtype=torch.int)
        for feature in features:
            for start, end in feature.mm_position.extract_embeds_range():
                token_types[0, start:end] = _TOKEN_TYPES[feature.modality]
        input_ids = torch.tensor([list(token_ids)])
        positions = self._get_rope_index(input_ids, token_types, items)[:, 0].long().cpu()
        return positions, positions[:, -1:] + 1 - len(token_ids)

    def _get_rope_index(
        self,
        input_ids: torch.Tensor,
        token_types: torch.Tensor,  # [1, prompt]: 0 for text, or a modality's number
        items: Sequence[MultiModalKwargsItem],
    ) -> torch.Tensor:
        """Return the M-RoPE positions [3, 1, prompt] that the model's own code computes."""
        function = self._base.get_rope_index
        arguments = gather_arguments(items, inspect.signature(function).parameters.keys())
        positions: torch.Tensor = function(input_ids, mm_token_type_ids=token_types, **arguments)[0]
        return positions

    # ---- encoders

    def encode(
        self, modality: str, items: Sequence[MultiModalKwargsItem], num_embeds: Sequence[int]
    ) -> list[torch.Tensor]:
        """Run a modality's encoder on items, and return the embeddings [N, width] of each item.

        The items may belong to different requests. Raise `RequestError` if an item does not get as
        many embeddings as it has placeholders (`num_embeds`).
        """
        batch = self.make_encoder_batch(modality, items)
        inputs = self.send_batch(batch)
        with self.keeping_host_copies(inputs, batch):
            return self.run_encoder(modality, inputs, items, num_embeds)

    def make_encoder_batch(
        self, modality: str, items: Sequence[MultiModalKwargsItem]
    ) -> dict[str, torch.Tensor]:
        """Return the tensors that the encoder of a modality gets for media items, on the host."""
        names = self._get_encoder_names(modality)
        # On a CPU a single item is also copied: a model may change its inputs, which are cached.
        batch = items[0] if len(items) == 1 and self.device.type == "cuda" else collate(items)
        return {name: tensor for name, tensor in batch.items() if name in names}

    def _get_encoder_names(self, modality: str) -> Collection[str]:
        return inspect.signature(self._get_encoder(modality)).parameters.keys()

    def send_batch(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: self.to_model(tensor) for name, tensor in batch.items()}

    def keeping_host_copies(
        self, inputs: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]
    ) -> AbstractContextManager[HostCopies]:
        """Return a context in which encoders read the integers of a sent batch on the host."""
        integers = [name for name, tensor in batch.items() if not tensor.is_floating_point()]
        return keep_host_copies([(inputs[name], batch[name]) for name in integers])

    def run_encoder(
        self,
        modality: str,
        inputs: Mapping[str, torch.Tensor],
        items: Sequence[MultiModalKwargsItem],
        num_embeds: Sequence[int],
    ) -> list[torch.Tensor]:
        """Run an encoder on sent inputs, within `keeping_host_copies`; see `encode`."""
        output = self._get_encoder(modality)(**inputs, return_dict=True)
        return self.split(output, items, num_embeds)

    def to_model(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the model's device, in the model's dtype if it is floating-point."""
        # Not every encoder converts its inputs itself.
        dtype = self.dtype if tensor.is_floating_point() else None
        return to_device(tensor, self.device, dtype)

    def _get_encoder(self, modality: str) -> Any:
        """Return the model's method that encodes a modality: "image", "video" or "audio"."""
        # A model without a method for videos encodes their frames as images.
        is_plain = modality == "video" and not hasattr(self._base, "get_video_features")
        return getattr(self._base, f"get_{'image' if is_plain else modality}_features")

    def split(
        self, output: Any, items: Sequence[MultiModalKwargsItem], num_embeds: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the embeddings of each item from an encoder's output, as `split_output` does."""
        return split_output(output, [get_num_parts(item) for item in items], num_embeds)


def find_blocks(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the layers of a model's decoder and encoders: the members of outer `ModuleList`s."""
    for child in model.children():
        if isinstance(child, torch.nn.ModuleList):
            yield from child
        else:
            yield from find_blocks(child)
