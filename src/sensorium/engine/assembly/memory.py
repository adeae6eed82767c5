"""Computes how much memory an engine needs, before anything is loaded.

The size of the weights is read from the headers of their files. The size of keys and values is
computed from the config before the model is loaded, and from its layers afterwards. The other
tensors of a step are estimated from the widths in the config. Only the tensors of one layer are
counted, because there is no backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from sensorium.core.admission import Limits
from sensorium.engine.assembly.options import EngineOptions
from sensorium.models.ctc_transducer import NUM_COLUMNS
from sensorium.types.errors import ModelError
from sensorium.types.model_kind import ModelKind
from sensorium.utils.system_memory import get_free_system_bytes

# The number of tensors that exist at the same time inside a layer. With the hidden width: residual,
# norm, query, key, value and output. With the inner width, in the feed-forward part: gate, up and
# their product.
_NUM_HIDDEN_TENSORS = 6
_NUM_INNER_TENSORS = 3
# For each logit: the logit itself in float32, and the tensors of sampling, which are the sorted
# values, their order (int64), sums and masks.
_BYTES_PER_LOGIT = 6 * 4
_NUM_CONV_TENSORS = 3  # a convolution's output, the next layer's, and a mask or norm between them
_GRAPH_OBJECTS_BYTES = 384 << 20  # a few thousand graphs; 1,300 took 270 MiB on an H200
_MAX_ENCODER_GRAPH_BYTES = 1 << 30
_WIDTH_NAMES = ("hidden_size", "embed_dim", "d_model", "width")
_INNER_NAMES = ("intermediate_size", "encoder_ffn_dim", "ffn_dim")
_DEPTH_NAMES = ("num_hidden_layers", "depth", "encoder_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory that an engine needs on its device, in bytes, split by purpose."""

    weights_bytes: int
    kv_cache_bytes: int
    encoder_cache_bytes: int
    encoder_peak_bytes: int  # the tensors inside the largest encoder while it runs; an estimate
    step_bytes: int  # the tensors of one step of the decoder; an estimate
    graph_bytes: int = 0  # CUDA graphs of the decoder; an estimate
    encoder_graph_bytes: int = 0  # the most for CUDA graphs of encoders; 0: there are none

    @property
    def reserve_bytes(self) -> int:
        """Return how many bytes must stay free for everything except weights and KV cache."""
        return (
            self.encoder_cache_bytes
            + self.encoder_peak_bytes
            + self.step_bytes
            + self.graph_bytes
            + self.encoder_graph_bytes
        )

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_cache_bytes + self.reserve_bytes

    def __str__(self) -> str:
        parts = (
            ("weights", self.weights_bytes),
            ("KV cache", self.kv_cache_bytes),
            ("encoder outputs", self.encoder_cache_bytes),
            ("encoders at work", self.encoder_peak_bytes),
            ("a step's tensors", self.step_bytes),
            ("CUDA graphs", self.graph_bytes + self.encoder_graph_bytes),
        )
        return " + ".join(f"{name} {format_bytes(value)}" for name, value in parts if value)


def format_bytes(num_bytes: int) -> str:
    """Return a number of bytes as text with one decimal and a unit, such as "1.5 GiB"."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 2**power:
            return f"{num_bytes / 2**power:.1f} {unit}"
    return f"{num_bytes} bytes"


def get_free_bytes(device: torch.device, gpu_memory_utilization: float) -> int:
    """Return how many bytes of the device's memory the engine may still use.

    On CUDA, the share `1 - gpu_memory_utilization` of the whole device is left to other programs.
    """
    if device.type != "cuda":
        return get_free_system_bytes()
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(free - (1 - gpu_memory_utilization) * total))


def plan_memory(
    config: PretrainedConfig,
    options: EngineOptions,
    *,
    kind: ModelKind,
    limits: Limits,
    weights_bytes: int,
    element_size: int,
    device: torch.device,
    captures_encoders: bool = False,
) -> MemoryPlan:
    """Return the least memory that an engine needs, computed before the model is loaded.

    `element_size` is the number of bytes of one element of the model's dtype. The KV cache has the
    size that the user asked for, or else holds the context that the user asked for, or else one
    full step. With `captures_encoders` there is also memory for CUDA graphs of encoders.
    """
    if kind.decoder == "none":
        return _plan_ctc_transducer(config, limits, weights_bytes, element_size)
    text_config = config.get_text_config(decoder=True)
    kv_cache_bytes = options.kv_cache_memory_bytes
    if kv_cache_bytes is None:
        # A context that the user did not ask for is cut to what fits, but one step must fit.
        shortest = min(limits.max_model_len, limits.max_num_batched_tokens)
        num_kv_tokens = options.max_model_len or shortest
        kv_cache_bytes = num_kv_tokens * get_num_kv_bytes_per_token(text_config, element_size)
    has_graphs = device.type == "cuda" and not options.enforce_eager
    encoder_peaks = [
        limits.max_num_encoder_embeds
        * _get_num_patches_per_embed(config, encoder)
        * _get_num_layer_elements(encoder, keeps_layers=hasattr(config, "vision_feature_layer"))
        * element_size
        for encoder in _get_encoders(config)
    ]
    width = _get_number(text_config, _WIDTH_NAMES, 0)
    encoder_cache_bytes = limits.encoder_cache_size * width * element_size
    # A graph serves one item. The largest items gain nothing from one: launches don't bound them.
    encoder_graph_bytes = 0
    if has_graphs and captures_encoders and encoder_peaks:
        encoder_graph_bytes = min(max(encoder_peaks), _MAX_ENCODER_GRAPH_BYTES)
    return MemoryPlan(
        graph_bytes=_plan_graphs(text_config, limits, element_size) if has_graphs else 0,
        encoder_graph_bytes=encoder_graph_bytes,
        weights_bytes=weights_bytes,
        kv_cache_bytes=kv_cache_bytes,
        encoder_cache_bytes=encoder_cache_bytes if encoder_peaks else 0,
        encoder_peak_bytes=max(encoder_peaks, default=0),
        step_bytes=limits.max_num_batched_tokens
        * _get_num_layer_elements(text_config, keeps_layers=False)
        * element_size
        + limits.max_num_seqs * int(text_config.vocab_size) * _BYTES_PER_LOGIT,
    )


def _plan_ctc_transducer(
    config: PretrainedConfig, limits: Limits, weights_bytes: int, element_size: int
) -> MemoryPlan:
    """Return the memory of a model that only encodes audio, and keeps small tables of it.

    The first layers of its encoder have many more frames than the later ones, and take the most
    memory. Logits exist once in the model's dtype and twice in float32.
    """
    encoder = getattr(config, "encoder_config", config)
    num_elements = max(
        _get_num_layer_elements(encoder, keeps_layers=False), _count_first_elements(encoder)
    )
    logit_bytes = int(config.vocab_size) * (element_size + 2 * 4)
    return MemoryPlan(
        weights_bytes=weights_bytes,
        kv_cache_bytes=0,
        encoder_cache_bytes=limits.encoder_cache_size * NUM_COLUMNS * torch.float32.itemsize,
        encoder_peak_bytes=limits.max_num_encoder_embeds
        * (num_elements * element_size + logit_bytes),
        step_bytes=0,
    )


def _count_first_elements(encoder: PretrainedConfig) -> int:
    """Return how many tensor elements an encoder's first convolutions have per frame of its output.

    They are convolutions over samples, or over spectrograms, where each halves both dimensions.
    """
    if strides := getattr(encoder, "conv_stride", None):
        return int(_NUM_CONV_TENSORS * encoder.conv_dim[0] * math.prod(strides[1:]))
    channels = _get_number(encoder, ("subsampling_conv_channels",), 0)
    factor = _get_number(encoder, ("subsampling_factor",), 1)
    num_bins = _get_number(encoder, ("num_mel_bins",), 0)
    return _NUM_CONV_TENSORS * channels * factor * num_bins // 4


def _plan_graphs(text_config: PretrainedConfig, limits: Limits, element_size: int) -> int:
    """Return an estimate of the memory that CUDA graphs take, in bytes.

    All graphs share the memory of the largest one, except for tensors that one graph writes and the
    next one reads.
    """
    num_elements = _get_num_layer_elements(text_config, keeps_layers=False)
    num_crossing = _get_num_crossing_elements(text_config)
    token_bytes = (num_elements + num_crossing) * element_size
    # There are three copies of the logits: as the model's head returns them, in float32, and in the
    # buffer to which the graphs of all sizes copy them.
    row_bytes = num_elements * element_size + int(text_config.vocab_size) * (element_size + 2 * 4)
    return (
        limits.max_num_seqs * row_bytes
        + limits.max_num_batched_tokens * token_bytes
        + _GRAPH_OBJECTS_BYTES
    )


def _get_num_crossing_elements(text_config: PretrainedConfig) -> int:
    """Return how many tensor elements per token are passed from one CUDA graph to the next.

    They are the token's embedding and hidden state, the inputs of single layers, and the query,
    key, value and output of attention, once for each attention shape.
    """
    layers = _get_layers(text_config)
    num_inputs = len(layers) * _get_number(text_config, ("hidden_size_per_layer_input",), 0)
    shapes = set(map(_get_attention_sizes, layers))
    width = _get_number(text_config, _WIDTH_NAMES, 0)
    return 2 * width + num_inputs + sum(2 * query + kv for query, kv in shapes)


def check_memory(plan: MemoryPlan, *, free_bytes: int, device: torch.device) -> None:
    """Raise a `ModelError` with the plan's parts and advice if the plan exceeds the free memory."""
    if plan.total_bytes <= free_bytes:
        return
    advice = "a smaller max_model_len, max_num_batched_tokens or kv_cache_memory_bytes"
    if plan.weights_bytes > free_bytes:
        advice = "a smaller model, a shorter dtype or a larger device"
    if device.type == "cuda":
        advice += ", or a higher gpu_memory_utilization"
    raise ModelError(
        f"the model does not fit on {device}: {plan} = {format_bytes(plan.total_bytes)}, "
        f"but {format_bytes(free_bytes)} are free. What helps: {advice}"
    )


def get_num_kv_bytes_per_token(text_config: PretrainedConfig, element_size: int) -> int:
    """Return how many bytes the keys and values of one token take in all layers, at most.

    Layers with sliding windows and layers that share keys and values need less. The result is 0 for
    a config without attention heads: then only the loaded model tells the size.
    """
    return sum(_get_attention_sizes(layer)[1] for layer in _get_layers(text_config)) * element_size


def _get_attention_sizes(layer: PretrainedConfig) -> tuple[int, int]:
    """Return the number of elements of one token's query, and of its key and value together."""
    num_heads = _get_number(layer, ("num_attention_heads",), 0)
    num_kv_heads = _get_number(layer, ("num_key_value_heads",), num_heads)
    width = _get_number(layer, _WIDTH_NAMES, 0)
    head_dim = _get_number(layer, ("head_dim",), width // max(1, num_heads))
    return num_heads * head_dim, 2 * num_kv_heads * head_dim


def _get_encoders(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yield the configs of a model's encoders and of its other parts, except for the decoder."""
    text_config = config.get_text_config(decoder=True)
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if not isinstance(part, PretrainedConfig) or part is text_config:
            continue
        if part.sub_configs:
            yield from _get_encoders(part)
        else:
            yield part


def _get_num_patches_per_embed(config: PretrainedConfig, encoder: PretrainedConfig) -> int:
    """Return how many encoder patches are merged into one embedding, or 1 if that is unknown."""
    if merge_size := getattr(encoder, "spatial_merge_size", None):
        return int(merge_size) ** 2
    if ratio := getattr(config, "downsample_ratio", None):
        return round(1 / float(ratio) ** 2)
    num_embeds = _get_number(config, ("mm_tokens_per_image",), 0)
    patch_size = _get_number(encoder, ("patch_size",), 0)
    if num_embeds and patch_size:
        num_patches = (_get_number(encoder, ("image_size",), 0) // patch_size) ** 2
        return max(1, num_patches // num_embeds)
    return 1


def _get_num_layer_elements(config: PretrainedConfig, *, keeps_layers: bool) -> int:
    """Return how many tensor elements of the widest layer exist at once, per token or patch.

    With `keeps_layers` the outputs of all layers are added, because the model uses some of them.
    """
    widest = sum_of_widths = 0
    for layer in _get_layers(config):
        width = _get_number(layer, _WIDTH_NAMES, 0)
        inner = _get_number(layer, _INNER_NAMES, 4 * width)
        widest = max(widest, _NUM_HIDDEN_TENSORS * width + _NUM_INNER_TENSORS * inner)
        sum_of_widths += width
    return widest + sum_of_widths * keeps_layers


def _get_layers(config: PretrainedConfig) -> tuple[PretrainedConfig, ...]:
    """Return one config per layer; they differ only in a heterogeneous model."""
    if config.is_heterogeneous:
        return tuple(config.per_layer_config)
    return (config,) * _get_number(config, _DEPTH_NAMES, 1)


def _get_number(config: PretrainedConfig, names: tuple[str, ...], default: int) -> int:
    """Return the first attribute among `names` that is an integer, or `default` if none is."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), default)
