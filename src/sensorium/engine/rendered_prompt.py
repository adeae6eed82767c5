"""Prompts that were expanded before they came here, with media that was processed already.

Everything is checked against the model before it reaches a cache: the tensors against what its
processor makes, the placeholders against the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from sensorium.multimodal.item_spec import ItemSpecs
from sensorium.multimodal.processor import MultiModalProcessor
from sensorium.types.errors import RequestError, add_label
from sensorium.types.multimodal import (
    ItemLayout,
    MultiModalFeatureSpec,
    PlaceholderRange,
    ProcessedItem,
)

MAX_HASH_LENGTH = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedItem:
    """`item` is `None` for what the caller believes to be cached."""

    label: str
    feature: MultiModalFeatureSpec
    item: ProcessedItem | None


def read_items(
    fields: Mapping[str, Any], processor: MultiModalProcessor, specs: ItemSpecs
) -> list[RenderedItem]:
    """Sorted by offset. A `RequestError` names the field that is wrong."""
    hashes, placeholders = fields.get("mm_hashes") or {}, fields.get("mm_placeholders") or {}
    kwargs, layouts = fields.get("mm_kwargs") or {}, fields.get("mm_layouts") or {}
    for name, given in (
        ("mm_placeholders", placeholders),
        ("mm_kwargs", kwargs),
        ("mm_layouts", layouts),
    ):
        stray = sorted(map(str, set(given) - set(hashes)))
        if stray:
            raise RequestError(f"{name} has {', '.join(stray)}, which mm_hashes has not")
    items: list[RenderedItem] = []
    for modality, names in hashes.items():
        if modality not in processor.modalities:
            raise RequestError(f"this model takes no {modality}")
        columns = (
            _as_column("mm_hashes", modality, names, None),
            _as_column("mm_placeholders", modality, placeholders.get(modality), len(names)),
            _as_column("mm_kwargs", modality, kwargs.get(modality), len(names), is_optional=True),
            _as_column("mm_layouts", modality, layouts.get(modality), len(names), is_optional=True),
        )
        for index, row in enumerate(zip(*columns, strict=True)):
            label = f"{modality} {index}"
            try:
                items.append(_read_row(label, modality, *row, processor=processor, specs=specs))
            except RequestError as error:
                raise add_label(error, label) from error
    items.sort(key=lambda entry: entry.feature.mm_position.offset)
    _check_tokens(items, fields["prompt_token_ids"], processor)
    return items


def _as_column(
    name: str, modality: str, values: Any, count: int | None, *, is_optional: bool = False
) -> Sequence[Any]:
    if values is None and is_optional:
        return [None] * (count or 0)
    if not isinstance(values, list | tuple):
        raise RequestError(f"{name} of {modality} must be a list, not {type(values).__name__}")
    if count is not None and len(values) != count:
        raise RequestError(f"{name} of {modality} has {len(values)} entries for {count} mm_hashes")
    return values


def _read_row(
    label: str,
    modality: str,
    mm_hash: Any,
    placeholder: Any,
    kwargs: Any,
    layout: Any,
    *,
    processor: MultiModalProcessor,
    specs: ItemSpecs,
) -> RenderedItem:
    item = None
    if kwargs is not None:
        item = read_item(modality, mm_hash, kwargs, layout, processor, specs)
    feature = MultiModalFeatureSpec(
        modality=modality, mm_hash=_check_hash(mm_hash), mm_position=_as_range(placeholder)
    )
    return RenderedItem(label=label, feature=feature, item=item)


def read_item(
    modality: str,
    mm_hash: Any,
    kwargs: Any,
    layout: Any,
    processor: MultiModalProcessor,
    specs: ItemSpecs,
) -> ProcessedItem:
    """An item that was processed elsewhere. A `RequestError` says why it can't be ours."""
    specs.check(modality, kwargs)
    own_layout = _as_layout(layout)
    if own_layout is not None:
        processor.check_layout(modality, own_layout)
    return ProcessedItem(
        modality=modality, mm_hash=_check_hash(mm_hash), kwargs=dict(kwargs), layout=own_layout
    )


def _check_hash(mm_hash: object) -> str:
    if not _is_unicode(mm_hash) or not 0 < len(mm_hash) <= MAX_HASH_LENGTH:  # type: ignore[arg-type]
        raise RequestError(f"a hash is a text of 1 to {MAX_HASH_LENGTH} characters")
    return str(mm_hash)


def _is_unicode(text: object) -> bool:
    return isinstance(text, str) and not any("\ud800" <= c <= "\udfff" for c in text)


def _as_layout(layout: object) -> ItemLayout | None:
    if layout is None:
        return None
    if isinstance(layout, ItemLayout):
        layout = asdict(layout)
    if not isinstance(layout, Mapping) or set(layout) != {"text", "token_id", "num_embeds"}:
        raise RequestError("a layout has text, token_id and num_embeds")
    text, token_id, num_embeds = layout["text"], layout["token_id"], layout["num_embeds"]
    if not _is_unicode(text) or not _is_count(token_id) or not _is_count(num_embeds):
        raise RequestError("a layout's text is text, its token_id and num_embeds are integers >= 0")
    return ItemLayout(text=text, token_id=token_id, num_embeds=num_embeds)


def _as_range(placeholder: Any) -> PlaceholderRange:
    if isinstance(placeholder, PlaceholderRange):
        if not _is_count(placeholder.offset) or not _is_count(placeholder.length):
            raise RequestError("a placeholder's offset and length are integers >= 0")
        return placeholder
    if not isinstance(placeholder, Mapping) or not {"offset", "length"} <= set(placeholder):
        raise RequestError("a placeholder has offset, length and is_embed")
    offset, length = placeholder["offset"], placeholder["length"]
    mask = placeholder.get("is_embed")
    if not _is_count(offset) or not _is_count(length):
        raise RequestError("a placeholder's offset and length are integers >= 0")
    if isinstance(mask, np.ndarray | torch.Tensor):
        mask = mask.tolist()
    is_mask = isinstance(mask, list | tuple) and all(type(entry) is bool for entry in mask)
    if mask is not None and not is_mask:
        raise RequestError("a placeholder's is_embed is a list of true and false, or nothing")
    return PlaceholderRange(offset, length, None if mask is None else tuple(map(bool, mask)))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_tokens(
    items: Sequence[RenderedItem], token_ids: Sequence[int], processor: MultiModalProcessor
) -> None:
    """An item's embeddings replace the tokens that stand for it, and no others stand alone."""
    expected = sum(entry.feature.mm_position.get_num_embeds() for entry in items)
    previous_end = 0
    for entry in items:
        position = entry.feature.mm_position
        if position.offset < previous_end:
            raise RequestError(
                f"{entry.label} begins at {position.offset}, where the item ahead of it has not "
                f"ended ({previous_end}): mm_placeholders must not overlap"
            )
        previous_end = position.end
        if position.end > len(token_ids):
            raise RequestError(
                f"{entry.label} ends at {position.end}, beyond the prompt's {len(token_ids)} tokens"
            )
        own_ids = processor.get_token_ids(entry.feature.modality)
        for start, end in position.extract_embeds_range():
            if not set(token_ids[start:end]) <= set(own_ids):
                raise RequestError(
                    f"{entry.label} has embeddings at {start} to {end}, where the prompt has other "
                    "tokens than its placeholder"
                )
    every_id = {i for modality in processor.modalities for i in processor.get_token_ids(modality)}
    found = sum(token_id in every_id for token_id in token_ids)
    if found != expected:
        raise RequestError(
            f"the prompt has {found} placeholder tokens, but mm_placeholders cover {expected}"
        )
