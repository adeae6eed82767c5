"""Gives all Transformers models one interface: encode, embed, run the decoder, compute logits.

By default the adapter reads what it needs from the model itself. A family overrides the rest.
Nothing here depends on requests, blocks or schedules.

The model is changed in few places: the attention functions of its decoder and of encoders that
pack sequences, the encoders' computation of lengths, the choice of rotary modules that have two
sets of factors, and the layers that `fuse` replaces.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from sensorium.layers.kv_layout import LayerSpec
from sensorium.models.context_limit import ContextLimit, find_context_limit
from sensorium.models.kv_probe import KVProbe
from sensorium.models.long_rope import LongRope
from sensorium.models.mask_probe import PROBE_ATTENTION, MaskProbe
from sensorium.models.seams import host_lengths
from sensorium.models.seams.comparing import CausalAttention, get_distance, is_many_roundings
from sensorium.models.seams.fusion import Fusion, fuse
from sensorium.models.seams.packed_attention import (
    DENSE_ATTENTION,
    PACKED_ATTENTION,
    find_packing_towers,
    set_attention,
)
from sensorium.models.seams.paged_attention import PAGED_ATTENTION, AttentionCall
from sensorium.types.errors import ModelError, RequestError
from sensorium.types.multimodal import MultiModalFeatureSpec, MultiModalKwargsItem
from sensorium.utils.arrays import to_device

logger = logging.getLogger(__name__)

# The values in Transformers' `mm_token_type_ids`. Text is 0.
_TOKEN_TYPES = {"image": 1, "video": 2, "audio": 3}


class ModelAdapter:
    """The adapter of every model that follows Transformers' conventions.

    Families that don't follow them derive their own class from it.
    """

    # The embeddings of an item of these modalities attend to each other in both directions.
    bidirectional_modalities: frozenset[str] = frozenset()
    # True: they do so only in layers with a window.
    has_causal_full_layers = False

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config: PretrainedConfig = model.config
        self.text_config: PretrainedConfig = model.config.get_text_config(decoder=True)
        self._own_attention: str = self.text_config._attn_implementation
        self._set_attention(PAGED_ATTENTION)
        self._base: Any = model.base_model
        self._decoder: Any = model.get_decoder()
        self._head: Any = model.get_output_embeddings()
        self._embedding: Any = model.get_input_embeddings()
        self._towers = find_packing_towers(model, self._decoder)
        set_attention(self._towers, PACKED_ATTENTION)
        host_lengths.compute_on_host(self._towers)
        self.fusion = Fusion()
        self._long_rope = LongRope(self._decoder)
        self.has_mrope = hasattr(self._base, "get_rope_index")
        # Whether logits have to be scaled as the config describes. `_probe` finds out.
        self._scales_logits = True
        self._vocab_size = int(self.text_config.vocab_size)

    def _set_attention(self, name: str) -> None:
        is_nested = self.text_config is not self.config
        self.model.set_attn_implementation({"text_config": name} if is_nested else name)

    @property
    def device(self) -> torch.device:
        return self._embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.weight.dtype

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def long_after(self) -> int | None:
        """Return the most tokens that a request may have to use the short rotary factors.

        It is `None` if the model has one set of factors only.
        """
        return self._long_rope.long_after

    # ---- the decoder

    def embed(
        self, input_ids: torch.Tensor, mm_index: torch.Tensor | None, mm_embeds: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the embeddings [1, N, hidden] of token ids [N], and extra decoder arguments.

        The tokens at `mm_index` get `mm_embeds`. Their ids are not looked up, because a placeholder
        may be outside the vocabulary.
        """
        if mm_index is None or mm_embeds is None:
            return self._embedding(input_ids)[None], {}
        embeds = self._embedding(input_ids.index_fill(0, mm_index, 0))
        return embeds.index_copy(0, mm_index, mm_embeds.to(embeds.dtype))[None], {}

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        positions: torch.Tensor,
        attention_call: AttentionCall,
        extra: dict[str, Any],
    ) -> torch.Tensor:
        """Run the decoder on embeddings [1, N, hidden]. Return its last hidden states [N, hidden].

        Positions are [3, N] with M-RoPE, and [N] otherwise.
        """
        position_ids = positions[:, None] if self.has_mrope else positions[None]
        output = self._decoder(
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            use_cache=False,
            attention_call=attention_call,
            **extra,
        )
        return output.last_hidden_state[0]

    def choosing_factors(self, is_long: torch.Tensor | None) -> AbstractContextManager[None]:
        """Return a context in which the tokens with `is_long` [N] use the long rotary factors."""
        return self._long_rope.choosing(is_long)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [B, vocabulary] of hidden states, scaled as the model does it."""
        logits = self._head(hidden).float()
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

        Raises a `ModelError` if these runs show that the model can't be run through this interface.
        """
        name = type(self.model).__name__
        if not hasattr(self._embedding, "weight"):
            raise ModelError(
                f"{name} can't be run: its tokens are embedded by "
                f"{type(self._embedding).__name__}, which is not a plain table"
            )
        try:
            windows = self._probe_masks()
            layers, is_equal = self._probe()
        except ModelError as error:
            raise ModelError(f"{name} can't be run: {error}") from error
        except Exception as error:
            # Any error means that the decoder does not work in the way that is expected here.
            raise ModelError(
                f"{name} can't be run: its decoder refused a trial: {error}"
            ) from error
        if not is_equal:
            raise ModelError(
                f"{name} can't be run: it does something between its decoder and its logits "
                "that is not known here"
            )
        expected = int(self.text_config.num_hidden_layers)
        if len(layers) != expected:
            raise ModelError(
                f"{name} has {expected} layers, of which {len(layers)} "
                "use the attention interface: models with other kinds of layers are not supported"
            )
        return tuple(replace(layer, window=windows[layer.layer_index]) for layer in layers)

    def find_context_limit(self, layers: Sequence[LayerSpec]) -> ContextLimit | None:
        """Return the longest sequence that can be computed, if the model has a limit of its own."""
        return find_context_limit(self.model, layers, self.long_after)

    def _probe_masks(self) -> dict[int, int | None]:
        """Return a map from the index of each layer to the window of its mask."""
        probe = MaskProbe()
        self._set_attention(PROBE_ATTENTION)
        try:
            self._run_two_tokens(probe)
        finally:
            self._set_attention(PAGED_ATTENTION)
        return probe.windows

    def _run_two_tokens(self, call: Any) -> torch.Tensor:
        positions = torch.arange(2, device=self.device)
        embeds, extra = self.embed(_get_probe_ids(self.device), None, None)
        return self.forward(
            embeds, positions.expand(3, 2) if self.has_mrope else positions, call, extra
        )

    def _probe(self) -> tuple[tuple[LayerSpec, ...], bool]:
        """Return the layers' shapes, and whether the adapter's logits agree with the model's own.

        Not every model scales its logits as its config describes. If they agree better without
        scaling, by more than rounding, the adapter does not scale them.
        """
        probe = KVProbe()
        hidden = self._run_two_tokens(probe)
        positions = torch.arange(2, device=self.device)
        whole = self.model(
            input_ids=_get_probe_ids(self.device)[None],
            position_ids=positions.expand(3, 1, 2) if self.has_mrope else positions[None],
            use_cache=False,
            attention_call=KVProbe(),
        )
        theirs = whole.logits[0].float()
        distances = {}
        for self._scales_logits in (False, True):
            distances[self._scales_logits] = float((self.logits(hidden) - theirs).abs().max())
        num_roundings = 32 if self.dtype == torch.float32 else 4
        rounding = num_roundings * torch.finfo(self.dtype).eps * float(theirs.abs().max())
        self._scales_logits = distances[True] <= max(distances[False], rounding)
        # Both ran the same operations except for the scaling, so they may differ by a few roundings
        # at most.
        return probe.layers, distances[self._scales_logits] <= 3 * rounding

    def fuse(self) -> None:
        """Fuse operations of the model's layers into fewer kernels if the results stay the same."""
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
            logger.warning("nothing is fused: with %s the model failed: %r", fusion, error)
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
            logger.warning("nothing is fused: %s would make a difference of %.2g", fusion, distance)

    @torch.inference_mode()
    def _compare_fused(self, fusion: Fusion) -> float:
        found = self._run_two_tokens(CausalAttention())
        with fusion.paused():
            expected = self._run_two_tokens(CausalAttention())
        return get_distance(found, expected)

    # ---- the model on its own

    @property
    def own_attention_name(self) -> str:
        """Return the name of the attention that Transformers chose for the decoder."""
        return self._own_attention

    @property
    def decoder(self) -> torch.nn.Module:
        return self._decoder

    @property
    def embedding(self) -> torch.nn.Module:
        return self._embedding

    @contextmanager
    def own_attention(self, name: str | None = None) -> Iterator[None]:
        """Let the model compute as Transformers wrote it, inside a `with`.

        The decoder uses its own attention, or the one of this name.
        """
        self._set_attention(name or self._own_attention)
        set_attention(self._towers, DENSE_ATTENTION)
        try:
            with self.fusion.paused():
                yield
        finally:
            self._set_attention(PAGED_ATTENTION)
            set_attention(self._towers, PACKED_ATTENTION)

    def forget_positions(self) -> None:
        """Delete what the model itself has stored about the positions of its last call."""
        if hasattr(self._base, "rope_deltas"):
            self._base.rope_deltas = None

    # ---- positions

    def get_mrope_positions(
        self,
        token_ids: Sequence[int],
        features: Sequence[MultiModalFeatureSpec],
        items: Sequence[MultiModalKwargsItem],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions [3, prompt] of a prompt on the CPU, and an offset [3, 1].

        The position of a token after the prompt is its index plus this offset. As in `generate`,
        positions continue from the last one of the prompt, which is not always the highest: in some
        families a text may begin before the time of the last frame.
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
        token_types: torch.Tensor,
        items: Sequence[MultiModalKwargsItem],
    ) -> torch.Tensor:
        """Return the positions [3, 1, prompt] that the model itself computes for a prompt."""
        function = self._base.get_rope_index
        arguments = gather_arguments(items, inspect.signature(function).parameters.keys())
        positions: torch.Tensor = function(input_ids, mm_token_type_ids=token_types, **arguments)[0]
        return positions

    # ---- encoders

    def encode(
        self, modality: str, items: Sequence[MultiModalKwargsItem], num_embeds: Sequence[int]
    ) -> list[torch.Tensor]:
        """Run the encoder of a modality. Return embeddings [num_embeds, width] for each item.

        The items may belong to different requests.
        """
        function = self._get_encoder(modality)
        names = inspect.signature(function).parameters.keys()
        given = {name: tensor for name, tensor in collate(items).items() if name in names}
        arguments = {name: self.to_model(tensor) for name, tensor in given.items()}
        pairs = [
            (arguments[name], tensor)
            for name, tensor in given.items()
            if not tensor.is_floating_point()
        ]
        with host_lengths.keeping(pairs):
            output = function(**arguments, return_dict=True)
        return self.split(output, items, num_embeds)

    def to_model(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the model's device, with floating-point numbers in its dtype.

        Not every encoder converts its inputs itself.
        """
        moved = to_device(tensor, self.device)
        return moved.to(self.dtype) if moved.is_floating_point() else moved

    def _get_encoder(self, modality: str) -> Any:
        """Return the function that encodes a modality.

        A family without an encoder for videos encodes their frames as images.
        """
        is_plain = modality == "video" and not hasattr(self._base, "get_video_features")
        return getattr(self._base, f"get_{'image' if is_plain else modality}_features")

    def split(
        self, output: Any, items: Sequence[MultiModalKwargsItem], num_embeds: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the embeddings of each item from the output of its encoder."""
        return _split(output, [_get_num_parts(item) for item in items], num_embeds)


def _get_probe_ids(device: torch.device) -> torch.Tensor:
    """Return two different tokens. The embedding of one may be zero and would show nothing."""
    return torch.arange(2, device=device)


def gather_arguments(
    items: Sequence[MultiModalKwargsItem], names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return the tensors with these names that some item has, each concatenated over all items."""
    found = {name: [item[name] for item in items if name in item] for name in names}
    return {name: torch.cat(tensors) for name, tensors in found.items() if tensors}


def _get_num_parts(item: MultiModalKwargsItem) -> int:
    """Return how many entries an item has in an encoder's batch: 1, or its chunks of sound.

    It is the smallest number of rows of its tensors: those with more rows hold patches.
    """
    return min((len(tensor) for tensor in item.values() if tensor.ndim), default=0)


def _split(output: Any, num_parts: Sequence[int], num_embeds: Sequence[int]) -> list[torch.Tensor]:
    """Return the embeddings of each item from an encoder's output.

    If the output has parts, they are counted for each item. So a wrong number of embeddings for one
    item raises an error, and can't shift the embeddings of the others.
    """
    embeds = output.pooler_output
    if embeds is None:
        embeds = output.last_hidden_state
    mask = getattr(output, "attention_mask", None)
    if isinstance(embeds, torch.Tensor) and embeds.ndim == 3 and mask is not None:
        embeds = [row[is_valid.bool()] for row, is_valid in zip(embeds, mask, strict=True)]
    elif isinstance(embeds, torch.Tensor) and embeds.ndim == 3:
        embeds = embeds.unbind()
    if isinstance(embeds, torch.Tensor):
        flat = embeds
        counts = [len(flat)]
        expected = [sum(num_embeds)]
    else:
        parts = [part.reshape(-1, part.shape[-1]) for part in embeds]
        flat = torch.cat(parts)
        is_by_item = len(parts) == sum(num_parts)
        ends = list(accumulate(num_parts)) if is_by_item else [len(parts)]
        starts = [0, *ends[:-1]]
        counts = [sum(map(len, parts[a:b])) for a, b in zip(starts, ends, strict=True)]
        expected = list(num_embeds) if is_by_item else [sum(num_embeds)]
    for num_given, num_expected in zip(counts, expected, strict=True):
        if num_given != num_expected:
            raise RequestError(
                f"the encoder gave {num_given} embeddings for placeholders of {num_expected}"
            )
    return list(flat.split(list(num_embeds)))


def collate(items: Sequence[MultiModalKwargsItem]) -> dict[str, torch.Tensor]:
    """Concatenate the tensors of items, which have equal shapes except for the first dimension."""
    names = items[0].keys()
    for item in items:
        if item.keys() != names:
            raise RequestError(
                f"items of one batch have different tensors: {sorted(names)}, {sorted(item)}"
            )
    return {name: torch.cat([item[name] for item in items]) for name in names}
