"""Loads a model from a checkpoint's directory, or raises a `ModelError` with the reason."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils.logging import set_tqdm_hook

from sensorium.checkpoints.files import read_json
from sensorium.checkpoints.first_look import check_config
from sensorium.models.checkpoint import BAR_DELAY_S
from sensorium.models.families import KNOWN_MODELS, find_model_class
from sensorium.models.hf_model import HfModel
from sensorium.models.towers import make_towers_class
from sensorium.types.errors import ModelError
from sensorium.types.multimodal import MODALITIES

logger = logging.getLogger(__name__)
_NEEDS_TRUST = (
    "{!r} has code of its own: it runs only with trust_remote_code=True (--trust-remote-code)"
)
# The keys of a checkpoint's `auto_map` that name a class that generates text.
_AUTO_MODELS = (
    "AutoModelForMultimodalLM",
    "AutoModelForImageTextToText",
    "AutoModelForVision2Seq",
    "AutoModelForCausalLM",
)
# Types of checkpoints that contain several models -> config and class of the one that writes text.
_PARTS = {"qwen2_5_omni": ("thinker_config", "Qwen2_5OmniThinkerForConditionalGeneration")}
# Ends of the names of weights that only training uses. Checkpoints of wav2vec2 leave them out.
_TRAINING_WEIGHTS = ("masked_spec_embed",)
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# The types of weights that are searched for NaN. Other types have none, or no `isnan`.
_CHECKED_DTYPES = frozenset({*_DTYPES.values(), torch.float64})
# The kinds of layers that can be run, and why other kinds can't.
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention"})
_REASONS = {
    "linear_attention": "it has linear attention, with a state that can't be kept in KV blocks",
    "chunked_attention": "it attends in chunks, which no attention backend supports",
    "conv": "it has convolutions, with a state that can't be kept in KV blocks",
}


def load_config(directory: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return a checkpoint's config; of several models, the config of the one that generates text.

    Raise `ModelError` if it can't be loaded, or needs its own code without `trust_remote_code`.
    """
    # Raise an error if this file is broken: Transformers would silently continue without it.
    read_json(Path(directory) / "generation_config.json")
    content = check_config(Path(directory))
    is_known = content.get("model_type") in CONFIG_MAPPING
    if "AutoConfig" in content.get("auto_map", ()) and not is_known and not trust_remote_code:
        raise ModelError(_NEEDS_TRUST.format(directory))
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:
        # Transformers raises many kinds of errors for one fault: there is no such model.
        raise ModelError(f"no model can be loaded from {directory!r}: {error}") from error
    if config.model_type in _PARTS:
        name, architecture = _PARTS[config.model_type]
        config = getattr(config, name)
        config.architectures = [architecture]
    return config


def find_unserved(
    model_class: type[PreTrainedModel], modalities: Collection[str]
) -> dict[str, str]:
    """Return the modalities that a model class declares, but this engine can't serve, and why.

    `modalities` are those that were found in the checkpoint: in its config and its processor.
    """
    declared = model_class.input_modalities
    names = (declared,) if isinstance(declared, str) else tuple(declared)
    return {
        modality: f"{model_class.__name__} takes it, but the checkpoint names no placeholder token "
        "or no processor for it in the way of most models, so that this engine can't give it any"
        for modality in MODALITIES
        if modality in names and modality not in modalities
    }


def resolve_device(device: str) -> torch.device:
    """Return the device of a name ("auto": CUDA if possible), or raise a `ModelError`."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        raise ModelError(f"unknown device {device!r}: use auto, cpu, cuda or cuda:N")
    resolved = torch.device(device)
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {device!r} can't be used: torch finds no CUDA device")
    return resolved


def resolve_dtype(dtype: str, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """Return the torch dtype of this name, or raise a `ModelError` if it is unknown.

    On a GPU "auto" is the dtype of the checkpoint. On a CPU it is float32, except for checkpoints
    in bfloat16 if the CPU has instructions for it: without these, bfloat16 is 100 times slower.
    """
    if dtype in _DTYPES:
        return _DTYPES[dtype]
    if dtype != "auto":
        raise ModelError(f"unknown dtype {dtype!r}: use auto, {', '.join(_DTYPES)}")
    stored = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    if isinstance(stored, str):
        stored = _DTYPES.get(stored)
    if device.type == "cpu" and (stored is not torch.bfloat16 or not _has_fast_bfloat16()):
        return torch.float32
    return stored or (torch.bfloat16 if device.type == "cuda" else torch.float32)


def _has_fast_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def load_tokenizer(directory: str, *, trust_remote_code: bool = False) -> Any:
    """Return a checkpoint's tokenizer, without the media processor that contains it."""
    return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)


def load_model(
    directory: str,
    config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    use_tqdm: bool = False,
    towers_only: bool = False,
) -> HfModel:
    """Load a model's weights onto a device, and return the model as the `HfModel` of its family.

    With `towers_only` it has its encoders but no decoder. Raise `ModelError` if the model is not
    supported, or if its weights can't be loaded.
    """
    model_class = get_model_class(directory, config, trust_remote_code=trust_remote_code)
    if towers_only:
        model_class = make_towers_class(model_class)
    try:
        with _loading_bar(use_tqdm):
            loaded, report = model_class.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
            )
    except ModelError:
        raise
    except Exception as error:
        # As above, missing or broken weights raise many kinds of errors.
        raise ModelError(f"the weights of {directory!r} can't be loaded: {error}") from error
    _check_weights(directory, report)
    loaded.to(device).eval()
    _check_numbers(directory, loaded)
    return find_model_class(config)(loaded)


@contextmanager
def _loading_bar(use_tqdm: bool) -> Iterator[None]:
    """Show Transformers' progress bar only on a terminal if loading takes long, inside a `with`."""

    def make_bar(bar: Any, arguments: Any, options: Any) -> Any:
        return bar(
            *arguments, **{**options, "disable": None if use_tqdm else True, "delay": BAR_DELAY_S}
        )

    previous = set_tqdm_hook(make_bar)
    try:
        yield
    finally:
        set_tqdm_hook(previous)


def _check_weights(model: str, report: Mapping[str, Any]) -> None:
    """Raise `ModelError` if weights are missing or misshapen, and warn of those that are unused."""
    # Transformers would fill missing weights with random numbers, and only log a warning.
    if mismatched := sorted(report["mismatched_keys"]):
        name, found, needed = mismatched[0]
        others = f" ({len(mismatched)} tensors differ)" if len(mismatched) > 1 else ""
        raise ModelError(
            f"the weights of {model!r} do not belong to its config.json: the tensor {name} has the "
            f"shape {list(found)} where the config asks for {list(needed)}{others}"
        )
    missing = sorted(key for key in report["missing_keys"] if not key.endswith(_TRAINING_WEIGHTS))
    if missing:
        raise ModelError(
            f"the weights of {model!r} lack {len(missing)} tensors of the model, "
            f"for example {missing[0]}"
        )
    unexpected = sorted(report["unexpected_keys"])
    if unexpected:
        names = ", ".join(unexpected[:3])
        logger.warning(
            "the model does not use %d tensors of the checkpoint, for example %s",
            len(unexpected),
            names,
        )


def _check_numbers(model: str, loaded: torch.nn.Module) -> None:
    """Raise `ModelError` for weights with NaN: answers would be senseless, without an error."""
    names, sums = [], []
    for name, tensor in loaded.named_parameters():
        if tensor.dtype in _CHECKED_DTYPES and tensor.numel() and not tensor.is_meta:
            names.append(name)
            sums.append(tensor.detach().amax().float())  # the largest is NaN if any value is
    bad = [] if not sums else torch.stack(sums).isnan().nonzero().flatten().tolist()
    if bad:
        others = f", and in {len(bad) - 1} other tensors" if len(bad) > 1 else ""
        raise ModelError(
            f"the weights of {model!r} are damaged: there are values that are not numbers (NaN) in "
            f"the tensor {names[bad[0]]}{others}. Download or convert them again"
        )


def get_model_class(
    directory: str, config: PretrainedConfig, *, trust_remote_code: bool = False
) -> Any:
    """Return the model class that a config names, or raise `ModelError` if it is not supported."""
    name = (config.architectures or [""])[0]
    remote_classes = getattr(config, "auto_map", None) or {}
    references = [remote_classes[auto] for auto in _AUTO_MODELS if auto in remote_classes]
    model_class = getattr(transformers, name, None)
    if references and trust_remote_code:
        model_class = _get_remote_class(directory, references[0])
    if model_class is None and references:
        raise ModelError(_NEEDS_TRUST.format(directory))
    if model_class is None:
        raise ModelError(f"{name or config.model_type!r} is not an architecture of Transformers")
    if (reason := find_refusal(model_class, config)) is not None:
        raise ModelError(f"{name} {reason}")
    return model_class


def _get_remote_class(directory: str, reference: str) -> Any:
    try:
        return get_class_from_dynamic_module(reference, directory)
    except Exception as error:  # the checkpoint's code and its imports may raise anything
        raise ModelError(f"the code of {directory!r} can't be loaded: {error}") from error


def find_refusal(model_class: Any, config: PretrainedConfig) -> str | None:
    """Return why a model is not supported, as a phrase that follows its name, or else None."""
    wrapper = find_model_class(config)
    kind = wrapper.kind
    if kind.decoder == "none":
        return None
    text_config = config.get_text_config(decoder=True)
    if kind.decoder == "cross" and KNOWN_MODELS.get(config.model_type) is not wrapper:
        return "is an encoder-decoder model of an unknown family"
    if not hasattr(model_class, "generate"):
        return "can't be run: it does not generate text"
    if (unknown := _find_unknown_layer(text_config)) is not None:
        reason = _REASONS.get(unknown, f"its layers of the kind {unknown!r} are not supported")
        return f"can't be run: {reason}"
    if getattr(text_config, "cross_attention_layers", None):
        return "can't be run: it has cross-attention inside its decoder"
    if kind.decoder != "cross" and not _supports_attention(model_class, config):
        return "can't be run: its decoder doesn't use Transformers' attention interface"
    return None


def _find_unknown_layer(text_config: PretrainedConfig) -> str | None:
    kinds = getattr(text_config, "layer_types", None) or ()
    return next((kind for kind in kinds if kind not in _KNOWN_LAYERS), None)


def _supports_attention(model_class: Any, config: PretrainedConfig) -> bool:
    """Return whether a model's decoder calls Transformers' attention interface."""
    if getattr(model_class, "_supports_attention_backend", False):
        return True
    # Some classes don't declare it, but their decoders do. On "meta" weights take no memory.
    with torch.device("meta"):
        decoder = model_class(config).get_decoder()
    return bool(getattr(decoder, "_supports_attention_backend", False))
