"""What can be run: the families that are known, and what can be found out about one model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sensorium.engine.build.builder import (
    Frontend,
    Source,
    build_engine,
    build_frontend,
    load_source,
)
from sensorium.engine.build.config import EngineOptions
from sensorium.engine.build.media_options import MediaOptions
from sensorium.engine.build.memory import format_bytes
from sensorium.engine.build.perception import build_readonly_caches
from sensorium.engine.inputs.input_processor import InputProcessor
from sensorium.engine.inputs.renderer import Renderer
from sensorium.engine.inputs.warmup import warm_up
from sensorium.models.adapter import ModelAdapter
from sensorium.models.families import FAMILIES, Family
from sensorium.models.loading import get_model_class
from sensorium.models.safetensors_header import get_num_weight_bytes
from sensorium.multimodal.processing.processor import PROCESSOR_CALLS
from sensorium.types.sampling import GenerationDefaults

HEADER = ("family", "model_type", "besides text", "code of its own", "what is special", "limits")
OTHERS = (
    "Models of other types run through the same generic code, if their decoder uses Transformers'\n"
    "attention interface and a trial at start agrees with the model on its own: of text, or the\n"
    "start fails; of each modality, or that is switched off. A sound that such a model would not\n"
    "hear to its end is refused."
)


def get_rows(families: Sequence[Family] = FAMILIES) -> list[tuple[str, ...]]:
    return [
        (
            family.name,
            family.model_type,
            ", ".join(family.modalities) or "-",
            _get_own_code(family),
            family.special or "-",
            family.limits or "-",
        )
        for family in families
    ]


def _get_own_code(family: Family) -> str:
    parts = []
    if family.adapter is not ModelAdapter:
        parts.append("models")
    if family.model_type in PROCESSOR_CALLS:
        parts.append("multimodal")
    return ", ".join(f"{part}/families" for part in parts) or "none"


def format_table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Columns as wide as they need to be."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def describe_model(source: Source, *, is_tried: bool = False) -> str:
    """Return what the engine would do with a model.

    Each modality gets a small item through the model's processor, as at the start of a server. With
    `is_tried` the weights are loaded, and a model of an unknown family has its trial. Raises a
    `ModelError` with the reason if the model is refused.
    """
    loaded = load_source(source)
    config, directory = loaded.hf_config, str(loaded.checkpoint)
    model_class = get_model_class(directory, config, trust_remote_code=source.trust_remote_code)
    switched_off: dict[str, str] = {}
    if is_tried:
        engine = build_engine(source, options=EngineOptions(), media=MediaOptions())
        engine.perception.close()
        switched_off |= engine.switched_off
    frontend = build_frontend(source, loaded, MediaOptions(), build_readonly_caches(MediaOptions()))
    switched_off |= _find_switched_off(frontend)
    processor = frontend.processor
    family = next((f for f in FAMILIES if f.model_type == config.model_type), None)
    context = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    unknown = "passed its trial" if is_tried else "a trial at start decides (see --try)"
    lines = {
        "architecture": model_class.__name__,
        "family": f"not known: {unknown}" if family is None else family.name,
        "besides text": ", ".join(m for m in processor.modalities if m not in switched_off) or "-",
        "switched off": "; ".join(f"{m}: {why}" for m, why in switched_off.items()) or "-",
        "markers": ", ".join(map(processor.get_marker, processor.modalities)) or "-",
        "sounds": f"{processor.sampling_rate} samples a second"
        if "audio" in processor.modalities
        else "-",
        "context": "not named in its config" if context is None else f"{context} tokens",
        "weights": _describe_weights(loaded.checkpoint),
        "limits": "-" if family is None else family.limits or "-",
    }
    return "\n".join(f"{name + ':':14}{value}" for name, value in lines.items())


def _find_switched_off(frontend: Frontend) -> dict[str, str]:
    """Return what a frontend's warm-up would switch off: modality -> reason."""
    perception = frontend.perception
    inputs = InputProcessor(
        frontend.processor,
        pipeline=perception.pipeline,
        readonly=perception.readonly,
        defaults=GenerationDefaults(),
        limit_mm_per_prompt={},
        seed=0,
    )
    try:
        warm_up(Renderer(inputs))
    finally:
        perception.close()
    return inputs.switched_off.reasons


def _describe_weights(checkpoint: Path) -> str:
    files = sorted(checkpoint.glob("*.safetensors"))
    if not files:
        return "not here yet"
    sizes = (get_num_weight_bytes(files, element_size=size) for size in (4, 2))
    full, half = map(format_bytes, sizes)
    return f"{full} in float32, {half} in bfloat16"
