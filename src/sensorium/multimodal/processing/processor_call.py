"""One call of a Hugging Face processor for one item: its tensors, and the text in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sensorium.types.errors import ModelError, RequestError
from sensorium.types.multimodal import MultiModalKwargsItem

# What a processor returns about the text; all else belongs to the item.
_TEXT_KEYS = frozenset(
    {
        "input_ids",
        "attention_mask",
        "token_type_ids",
        "mm_token_type_ids",
        "text_replacement_offsets",
    }
)
_ARGUMENTS = {"image": "images", "video": "videos", "audio": "audio"}
ProcessorResult = tuple[MultiModalKwargsItem, str]
ProcessorCall = Callable[
    [Any, str, object, Mapping[str, object] | None, Mapping[str, object]], ProcessorResult
]


def call_processor(
    processor: Any,
    modality: str,
    media: object,
    metadata: Mapping[str, object] | None,
    processor_kwargs: Mapping[str, object],
) -> ProcessorResult:
    """The tensors for the item's encoder, and what its marker becomes in a prompt."""
    marker: str = getattr(processor, f"{modality}_token")
    options = {**processor_kwargs, "return_text_replacement_offsets": True}
    output = call_whole(processor, marker, modality, [media], [metadata], options)
    return get_tensors(output), _get_replacement(processor, modality, marker, output)


def call_whole(
    processor: Any,
    text: str,
    modality: str,
    media: Sequence[object],
    metadata: Sequence[Mapping[str, object] | None],
    processor_kwargs: Mapping[str, object],
) -> Mapping[str, Any]:
    """Return all that the processor makes of a prompt with some items of one modality."""
    output: Mapping[str, Any] = processor(
        text=[text],
        return_tensors="pt",
        **{_ARGUMENTS[modality]: [list(media)] if modality == "video" else list(media)},
        **_get_options(processor, modality, metadata, processor_kwargs),
    )
    return output


def _get_options(
    processor: Any,
    modality: str,
    metadata: Sequence[Mapping[str, object] | None],
    processor_kwargs: Mapping[str, object],
) -> dict[str, object]:
    options = dict(processor_kwargs)
    if modality == "audio":
        options.setdefault("sampling_rate", processor.feature_extractor.sampling_rate)
    if modality == "video":
        options.setdefault("do_sample_frames", False)  # frames that were given are those to use
        known = [dict(entry) for entry in metadata if entry is not None]
        if len(known) == len(metadata):
            options["video_metadata"] = [known]
    return options


def get_tensors(output: Mapping[str, object]) -> MultiModalKwargsItem:
    tensors = {}
    for name, value in output.items():
        if name in _TEXT_KEYS:
            continue
        if isinstance(value, list) and value and isinstance(value[0], int | float):
            value = torch.tensor(value)
        if isinstance(value, torch.Tensor):
            tensors[name] = value
    return tensors


def _get_replacement(processor: Any, modality: str, marker: str, output: Mapping[str, Any]) -> str:
    """Processors with a `__call__` of their own may not say it: then the prompt of nothing but the
    marker shows it, if it is the marker repeated.
    """
    if "text_replacement_offsets" in output:
        replacement: str = output["text_replacement_offsets"][0][0]["replacement"]
        return replacement
    token_id = processor.tokenizer.convert_tokens_to_ids(marker)
    expanded = output["input_ids"][0].tolist()
    if not expanded:
        raise RequestError(f"this {modality} is too short or too small: nothing is left of it")
    if set(expanded) != {token_id}:
        raise ModelError(
            f"{type(processor).__name__} does not tell what stands for a {modality} in a prompt"
        )
    return marker * len(expanded)
