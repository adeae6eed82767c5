"""Describes a model as text: what it takes, how large it is, and which parts can't be used."""

from __future__ import annotations

from pathlib import Path

from sensorium.checkpoints.first_look import parse_length
from sensorium.checkpoints.safetensors_header import get_num_weight_bytes
from sensorium.engine.assembly.builder import build_engine
from sensorium.engine.assembly.frontend import (
    Frontend,
    build_frontend,
    build_readonly_caches,
    read_checkpoint,
)
from sensorium.engine.assembly.memory import format_bytes
from sensorium.engine.assembly.options import EngineOptions, LoadingOptions, MediaOptions
from sensorium.engine.inputs.input_processor import InputProcessor
from sensorium.engine.inputs.renderer import Renderer
from sensorium.engine.inputs.warmup import warm_up
from sensorium.models.loading import find_unserved, get_model_class
from sensorium.types.families import FAMILIES
from sensorium.types.restrictions import Restrictions
from sensorium.types.sampling import GenerationDefaults


def describe_model(loading: LoadingOptions, *, is_tried: bool = False) -> str:
    """Return a text of several lines that describes how the engine would run a model.

    A small dummy item of each modality is passed through the model's processor, as at the start of
    a server. With `is_tried` the weights are also loaded, and a model of an unknown family is
    compared with its own Transformers code. Raise a `ModelError` if the model can't be run.
    """
    checkpoint = read_checkpoint(loading)
    config, directory = checkpoint.hf_config, str(checkpoint.directory)
    model_class = get_model_class(directory, config, trust_remote_code=loading.trust_remote_code)
    media, restrictions = MediaOptions(), Restrictions()
    if is_tried:
        _, tried, restrictions = build_engine(loading, options=EngineOptions(), media=media)
        tried.media_parts.close()
    frontend = build_frontend(loading, checkpoint, media, build_readonly_caches(media))
    processor = frontend.processor
    family = next((f for f in FAMILIES if f.model_type == config.model_type), None)
    is_listed = family is not None or checkpoint.kind.decoder == "none"
    switched_off = {
        **({} if is_listed else find_unserved(model_class, processor.modalities)),
        **restrictions.switched_off,
        **_find_switched_off(frontend),
    }
    text_config = config.get_text_config(decoder=True)
    context = parse_length(getattr(text_config, "max_position_embeddings", None))
    named = "not named in its config" if context is None else f"{context} tokens"
    unknown = "passed its trial" if is_tried else "a trial at start decides (see --try)"
    if checkpoint.kind.decoder == "none":
        named = "none: it takes nothing but audio"
        unknown = "run by its own code, without a trial"
    lines = {
        "architecture": model_class.__name__,
        "family": f"not known: {unknown}" if family is None else family.name,
        "besides text": ", ".join(m for m in processor.modalities if m not in switched_off) or "-",
        "switched off": "; ".join(f"{m}: {why}" for m, why in switched_off.items()) or "-",
        "one a prompt": "; ".join(f"{m}: {why}" for m, why in restrictions.only_one.items()) or "-",
        "markers": ", ".join(processor.markers.values()) or "-",
        "audio": f"{processor.sampling_rate} samples a second"
        if "audio" in processor.modalities
        else "-",
        "context": named,
        "weights": _describe_weights(checkpoint.directory),
        "limits": "-" if family is None else family.limits or "-",
    }
    return "\n".join(f"{name + ':':14}{value}" for name, value in lines.items())


def _find_switched_off(frontend: Frontend) -> dict[str, str]:
    """Warm up and close a frontend, and return the modalities that failed, each with the reason."""
    media_parts = frontend.media_parts
    inputs = InputProcessor(
        frontend.processor,
        pipeline=media_parts.pipeline,
        readonly=media_parts.readonly,
        defaults=GenerationDefaults(),
        limit_mm_per_prompt={},
        seed=0,
    )
    try:
        warm_up(Renderer(inputs))
    finally:
        media_parts.close()
    return inputs.switched_off.reasons


def _describe_weights(checkpoint: Path) -> str:
    files = sorted(checkpoint.glob("*.safetensors"))
    if not files:
        return "not here yet"
    sizes = (get_num_weight_bytes(files, element_size=size) for size in (4, 2))
    full, half = map(format_bytes, sizes)
    return f"{full} in float32, {half} in bfloat16"
