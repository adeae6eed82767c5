"""What can be run: the families that are known, and what can be said of one model without loading
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sensorium.engine.memory import format_bytes
from sensorium.models.adapter import ModelAdapter
from sensorium.models.checkpoint import find_checkpoint
from sensorium.models.families import FAMILIES, Family
from sensorium.models.loading import get_model_class, load_config
from sensorium.models.safetensors_header import get_num_weight_bytes
from sensorium.multimodal.families import PROCESSOR_CALLS
from sensorium.multimodal.processor import MultiModalProcessor

HEADER = ("family", "model_type", "besides text", "code of its own", "what is special", "limits")
OTHERS = (
    "Models of other types run through the same generic code, if their decoder uses Transformers'\n"
    "attention interface and a trial at start agrees with the model on its own. A sound that such\n"
    "a model would not hear to its end is refused."
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


def describe_model(
    model: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> str:
    """What the engine would do with a model; a `ModelError` with the reason if it would refuse it
    before loading.
    """
    checkpoint = find_checkpoint(
        model, revision=revision, trust_remote_code=trust_remote_code, use_tqdm=True
    )
    config = load_config(str(checkpoint), trust_remote_code=trust_remote_code)
    model_class = get_model_class(str(checkpoint), config, trust_remote_code=trust_remote_code)
    processor = MultiModalProcessor(str(checkpoint), config, trust_remote_code=trust_remote_code)
    family = next((f for f in FAMILIES if f.model_type == config.model_type), None)
    context = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    lines = {
        "architecture": model_class.__name__,
        "family": "not known: a trial at start decides" if family is None else family.name,
        "besides text": ", ".join(processor.modalities) or "-",
        "markers": ", ".join(map(processor.get_marker, processor.modalities)) or "-",
        "sounds": f"{processor.sampling_rate} samples a second"
        if "audio" in processor.modalities
        else "-",
        "context": "not named in its config" if context is None else f"{context} tokens",
        "weights": _describe_weights(checkpoint),
        "limits": "-" if family is None else family.limits or "-",
    }
    return "\n".join(f"{name + ':':14}{value}" for name, value in lines.items())


def _describe_weights(checkpoint: Path) -> str:
    files = sorted(checkpoint.glob("*.safetensors"))
    if not files:
        return "not here yet"
    sizes = (get_num_weight_bytes(files, element_size=size) for size in (4, 2))
    full, half = map(format_bytes, sizes)
    return f"{full} in float32, {half} in bfloat16"
