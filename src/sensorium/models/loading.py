"""From a path or hub id to a model that is ready to run, or to one sentence that says why not."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PretrainedConfig

from sensorium.models.adapter import ModelAdapter
from sensorium.models.families import ADAPTERS
from sensorium.types.errors import ModelError

logger = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_config(model: str) -> PretrainedConfig:
    # A hub id is "name" or "owner/name".
    is_path = model.startswith(("/", ".", "~")) or model.count("/") > 1
    if is_path and not Path(model).is_dir():
        raise ModelError(f"there is no directory {model!r}")
    _check_generation_config(Path(model) / "generation_config.json")
    try:
        return AutoConfig.from_pretrained(model)
    except Exception as error:
        # Transformers raises many kinds for what is one fault: there is no such model.
        raise ModelError(f"no model can be loaded from {model!r}: {error}") from error


def _check_generation_config(path: Path) -> None:
    """Transformers goes on without a file that it can't read."""
    if not path.is_file():
        return
    try:
        json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error


def resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        raise ModelError(f"unknown device {device!r}: use auto, cpu or cuda")
    resolved = torch.device(device)
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {device!r} was asked for, but torch finds no CUDA device")
    return resolved


def resolve_dtype(dtype: str, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """`auto`: the checkpoint's, but float32 on a CPU that has no bfloat16 instructions (it would
    be 100 times slower).
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


def load_model(
    model: str, config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device
) -> ModelAdapter:
    model_class = _get_model_class(config)
    try:
        loaded, report = model_class.from_pretrained(model, dtype=dtype, output_loading_info=True)
    except Exception as error:
        # As above: missing or broken weights are told in many ways.
        raise ModelError(f"the weights of {model!r} can't be loaded: {error}") from error
    _check_weights(model, report)
    loaded.to(device).eval()
    adapter_class = ADAPTERS.get(config.model_type, ModelAdapter)
    return adapter_class(loaded)


def _check_weights(model: str, report: Mapping[str, Any]) -> None:
    """Transformers fills what is missing with random numbers and says so in a log."""
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"the weights of {model!r} lack {len(missing)} tensors of the model, first {missing[0]}"
        )
    unexpected = sorted(report["unexpected_keys"])
    if unexpected:
        logger.warning("%d tensors of the checkpoint are not used: %s", len(unexpected), unexpected)


def _get_model_class(config: PretrainedConfig) -> Any:
    """The Transformers class that the checkpoint names, if its decoder lets us in."""
    name = (config.architectures or [""])[0]
    model_class = getattr(transformers, name, None)
    if model_class is None:
        raise ModelError(
            f"{name or config.model_type!r} is not an architecture that Transformers knows"
        )
    if config.is_encoder_decoder:
        raise ModelError(f"{name} is an encoder-decoder model: not supported yet")
    if not hasattr(model_class, "generate") or not _supports_attention(model_class, config):
        raise ModelError(
            f"{name} can't be run: it does not generate through Transformers' attention interface"
        )
    return model_class


def _supports_attention(model_class: Any, config: PretrainedConfig) -> bool:
    """Some classes don't say it of themselves, but their decoders do."""
    if getattr(model_class, "_supports_attention_backend", False):
        return True
    with torch.device("meta"):
        decoder = model_class(config).get_decoder()
    return bool(getattr(decoder, "_supports_attention_backend", False))
