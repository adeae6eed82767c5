"""Finds what is wrong with a model's name or files, before anything heavy is imported.

It reads only names, JSON files and the headers of weights, and raises a `ModelError` of one
sentence that says what to do. A model that is refused here could not be run. A model that is
accepted may still be refused later, once its code is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sensorium.checkpoints.files import CONFIG, check_presence, get_weight_names, read_json
from sensorium.checkpoints.safetensors_header import read_tensors
from sensorium.types.errors import ModelError
from sensorium.types.families import FAMILIES

ADAPTER_CONFIG = "adapter_config.json"
# A hub id is "name" or "owner/name". These are the rules of the hub's library.
_HUB_ID = re.compile(r"(?:\b[\w.-]+\b/)?\b[\w.-]{1,96}\b")
_VOCABULARIES = (
    *("tokenizer*.json", "*.model", "*.model.v*", "*vocab*", "*.tiktoken", "*.spm"),
    "tekken.json",
)
_TOKENIZER_CONFIG = "tokenizer_config.json"
# Tokenizers with bytes or characters as tokens, and so without a vocabulary.
_WITHOUT_VOCABULARY = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
_PROCESSORS = ("processor_config.json", "preprocessor_config.json")
_MEDIA_TYPES = frozenset(family.model_type for family in FAMILIES if family.modalities)
_MARKERS = tuple(
    f"{modality}_token_{end}" for modality in ("image", "video", "audio") for end in ("id", "index")
)
# Types of checkpoints that contain several models -> the config of the model that writes text.
# These checkpoints name no architecture of their own.
_PARTS = {"qwen2_5_omni": "thinker_config"}
_DECODERS = ("text_config", "decoder", "generator")  # where a config may have its decoder's config
_CONTEXTS = ("max_target_positions", "max_position_embeddings")


def look_at(
    model: str, *, needs_weights: bool = False, max_model_len: int | None = None
) -> Path | None:
    """Check a directory or the name of a model, and return the directory.

    Return `None` for a hub id, which may not be downloaded yet. With `needs_weights`, all weights
    must be in the directory. Raise `ModelError` if the model can't be run, or not with a context of
    `max_model_len` tokens.
    """
    directory = find_directory(model)
    if directory is not None:
        look_into(directory, max_model_len=max_model_len)
        if needs_weights:
            names = get_weight_names(directory)
            check_presence(model, directory, names)
            for name in names:
                read_tensors(directory / name)
    return directory


def look_into(directory: Path, *, max_model_len: int | None = None) -> None:
    """Raise a `ModelError` if the small files of a checkpoint show that it can't be run.

    With `max_model_len`, also if the model's context is shorter.
    """
    config = check_config(directory)
    check_files(directory, needs_processor=_takes_media(config))
    if max_model_len is not None:
        check_context(max_model_len, find_context(config))


def find_directory(model: str) -> Path | None:
    """Return the directory that `model` names, or `None` if it may be a hub id.

    Raise `ModelError` if it can be neither.
    """
    if not model:  # an empty path would be the current directory
        raise ModelError("the name of the model is empty: give a directory or a hub id")
    try:
        path = Path(model).expanduser()
        is_directory, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # a name that is too long, or the ~ of an unknown user
        raise ModelError(f"{model[:200]!r} can't be the name of a model: {error}") from error
    if is_directory:
        return path
    if path.suffix == ".gguf":
        raise ModelError(
            f"{model!r} is a GGUF file, which can't be run: give the directory or the hub id of "
            "the model that it was made of, with weights as safetensors"
        )
    if is_file:
        raise ModelError(f"{model!r} is a file: give the directory with all files of the model")
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ModelError(f"there is no directory {model!r}: give a directory or a hub id")
    is_id = _HUB_ID.fullmatch(model) and "--" not in model and ".." not in model
    if not is_id or model.endswith(".git"):
        raise ModelError(
            f"{model[:200]!r} is neither a directory nor a hub id, which is like owner/name"
        )
    return None


def check_config(directory: Path) -> Mapping[str, Any]:
    """Return a checkpoint's `config.json`; raise `ModelError` if it shows that it can't be run."""
    _check_kind(directory)
    config = read_json(directory / CONFIG)
    if method := _find_quantization(config):
        raise ModelError(
            f"the weights of {str(directory)!r} are quantized ({method}), which is not supported: "
            "give the model that it was made of, in float32, bfloat16 or float16"
        )
    has_code, kind = bool(config.get("auto_map")), config.get("model_type")
    if not isinstance(kind, str) and not (kind is None and has_code):
        raise ModelError(
            f"{str(directory / CONFIG)!r} has no model_type: take the file of the original model"
        )
    if not (config.get("architectures") or has_code or kind in _PARTS):
        raise ModelError(
            f"{str(directory / CONFIG)!r} names no architectures: take the file of the original "
            'model, or add the class of Transformers, as in "architectures": ["LlamaForCausalLM"]'
        )
    return config


def _check_kind(directory: Path) -> None:
    """Raise a `ModelError` that says what a directory is if it is not a checkpoint."""
    adapter = read_json(directory / ADAPTER_CONFIG)
    has_weights = any(directory.glob("model*.safetensors*"))
    if adapter and not has_weights:
        base = adapter.get("base_model_name_or_path") or "its base model"
        raise ModelError(
            f"{str(directory)!r} is a LoRA adapter and not a model: merge it into {base} "
            "(`merge_and_unload` of PEFT, then `save_pretrained`), and give the result"
        )
    if (directory / CONFIG).is_file():
        return
    if found := sorted(directory.glob("*.gguf")):
        raise ModelError(
            f"{str(directory)!r} has no {CONFIG} but the GGUF file {found[0].name}, which can't be "
            "run: give the model that it was made of, with weights as safetensors"
        )
    if (directory / "model_index.json").is_file():
        raise ModelError(
            f"{str(directory)!r} is a pipeline of Diffusers, which can't be run: give a model that "
            "writes text"
        )
    if (directory / "params.json").is_file():
        raise ModelError(
            f"{str(directory)!r} has params.json but no {CONFIG}: give the model in the format of "
            "Transformers"
        )
    inner = sorted(path.parent for path in directory.glob(f"*/{CONFIG}"))
    inner += sorted(path.parent for path in directory.glob(f"snapshots/*/{CONFIG}"))
    hint = f"did you mean {str(inner[0])!r}?" if inner else "give the directory of a checkpoint"
    raise ModelError(f"there is no {CONFIG} in {str(directory)!r}: {hint}")


def _find_quantization(config: Mapping[str, Any]) -> str:
    """Return how the weights are quantized according to a config, or "" if they are not."""
    for part in (config, *_find_parts(config, _DECODERS)):
        for key in ("quantization_config", "compression_config"):
            if isinstance(found := part.get(key), Mapping) and found:
                return str(found.get("quant_method", "of an unknown kind"))
    return ""


def check_files(directory: str | Path, *, needs_processor: bool) -> None:
    """Raise a `ModelError` if a checkpoint has no tokenizer, or lacks a processor that it needs."""
    _check_vocabulary(Path(directory))
    if needs_processor and not _has_any(Path(directory), _PROCESSORS):
        raise ModelError(
            f"{str(directory)!r} has no processor for its media ({' or '.join(_PROCESSORS)}): copy "
            "these files of the original model into it"
        )


def _check_vocabulary(directory: Path) -> None:
    if _has_any(directory, _VOCABULARIES, besides=_TOKENIZER_CONFIG):
        return
    config = read_json(directory / _TOKENIZER_CONFIG)
    kind = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    if kind in _WITHOUT_VOCABULARY or config.get("auto_map"):
        return
    raise ModelError(
        f"{str(directory)!r} has no tokenizer (such as tokenizer.json, tokenizer.model or "
        "vocab.json): copy the files of the original model's tokenizer into it"
    )


def _has_any(directory: Path, patterns: Iterable[str], *, besides: str = "") -> bool:
    return any(path.name != besides for pattern in patterns for path in directory.glob(pattern))


def _takes_media(config: Mapping[str, Any]) -> bool:
    """Return whether a model with this config takes media, so that it needs a processor."""
    if config.get("model_type") in _MEDIA_TYPES:
        return True
    return any(config.get(marker) is not None for marker in _MARKERS)


def find_context(config: Mapping[str, Any]) -> int | None:
    """Return a model's context in tokens, or `None` if its `config.json` does not have it."""
    config = next(iter(_find_parts(config, _PARTS.values())), config)
    parts = _find_parts(config, _DECODERS)
    if len(parts) > 1:
        return None
    text = parts[0] if parts else config
    found = (parse_length(text.get(key)) for key in _CONTEXTS)
    return next((length for length in found if length is not None), None)


def parse_length(value: object) -> int | None:
    """Return a config's value for a length, or `None` if it is no positive integer."""
    return value if type(value) is int and value > 0 else None


def _find_parts(config: Mapping[str, Any], names: Iterable[str]) -> list[Mapping[str, Any]]:
    found = [config.get(name) for name in names]
    return [part for part in found if isinstance(part, Mapping)]


def check_context(max_model_len: int, context: int | None) -> None:
    """Raise `ModelError` if `max_model_len` exceeds the model's `context`; `None`: unknown."""
    if context is not None and max_model_len > context:
        raise ModelError(
            f"max_model_len={max_model_len} is more than the model's context of {context} tokens: "
            "give a smaller value"
        )
