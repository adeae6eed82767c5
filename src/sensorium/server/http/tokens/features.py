"""Processed media as it comes over the wire: its fields, checked and decoded, as a prompt that was
rendered elsewhere.

What can be known without the model is checked here, by the names that the client wrote: lists that
go together, ranges, masks, encodings. Masks are made only of ranges that don't overlap, so that
they are no longer than the prompt. `engine.rendered_prompt` holds the rest against the model.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import pybase64

from sensorium.multimodal.item_codec import decode_item
from sensorium.server.http.protocol.fields import as_integer
from sensorium.server.http.protocol.token_wire import WireFeatures, WirePlaceholder
from sensorium.types.errors import RequestError, at, map_at
from sensorium.types.multimodal import PlaceholderRange, as_mask
from sensorium.types.prompts import RenderedPrompt

_Item = tuple[Any, Any]  # tensors and layout


def read_features(features: WireFeatures, token_ids: Sequence[int]) -> RenderedPrompt:
    """Return the features as a rendered prompt, or raise a `RequestError` with a field's path."""
    with at("features"):
        return _read(features, token_ids)


def _read(features: WireFeatures, token_ids: Sequence[int]) -> RenderedPrompt:
    hashes = features.mm_hashes
    data = features.kwargs_data
    _check_modalities("mm_placeholders", features.mm_placeholders, hashes)
    if data is not None:
        _check_modalities("kwargs_data", data, hashes)
    ranges: dict[str, list[PlaceholderRange]] = {}
    for modality, entries in features.mm_placeholders.items():
        with at("mm_placeholders", modality):
            ranges[modality] = _read_ranges(entries, len(token_ids))
    items: dict[str, list[_Item]] = {}
    for modality, encoded in (data or {}).items():
        with at("kwargs_data", modality):
            items[modality] = map_at(_read_item, encoded)
    return {
        "prompt_token_ids": token_ids,
        "mm_hashes": hashes,
        "mm_placeholders": ranges,
        "mm_kwargs": {name: [kwargs for kwargs, _ in entries] for name, entries in items.items()},
        "mm_layouts": {name: [layout for _, layout in entries] for name, entries in items.items()},
        "is_external": True,
    }


def _check_modalities(
    field: str, given: Mapping[str, Sequence[Any]], hashes: Mapping[str, Sequence[str]]
) -> None:
    """Raise a `RequestError` unless each modality has as many entries as hashes."""
    for modality in {**hashes, **given}:
        own, expected = given.get(modality), hashes.get(modality)
        if own is None or expected is None:
            there, lacking = ("mm_hashes", field) if own is None else (field, "mm_hashes")
            raise RequestError(f"has no {modality[:50]!r}, which {there} has", path=(lacking,))
        if len(own) != len(expected):
            raise RequestError(
                f"has {len(own)} entries for {len(expected)} hashes", path=(field, modality)
            )


def _read_ranges(entries: Sequence[WirePlaceholder], num_tokens: int) -> list[PlaceholderRange]:
    ranges: list[PlaceholderRange] = []
    previous_offset = previous_end = 0
    for index, entry in enumerate(entries):
        end = entry.offset + entry.length
        if entry.length == 0:
            raise RequestError("must be at least 1", path=(index, "length"))
        if end > num_tokens:
            raise RequestError(
                f"ends at {end}, beyond the prompt's {num_tokens} tokens", path=(index,)
            )
        if entry.offset < previous_offset:
            raise RequestError(
                f"is {entry.offset}: entries must be sorted by it", path=(index, "offset")
            )
        if entry.offset < previous_end:
            raise RequestError(
                f"is {entry.offset}, where the item before has not ended ({previous_end})",
                path=(index, "offset"),
            )
        previous_offset, previous_end = entry.offset, end
        with at(index, "is_embed"):
            mask = as_mask(_read_runs(entry.is_embed, entry.length))
        ranges.append(PlaceholderRange(entry.offset, entry.length, mask))
    return ranges


def _read_runs(runs: Sequence[Any] | None, length: int) -> list[int] | None:
    """Return the lengths of a mask's runs. Some clients write empty runs behind the first."""
    if runs is None:
        return None
    if len(runs) > 2 * length + 1:
        raise RequestError(f"has {len(runs)} runs for {length} positions")
    lengths = [as_integer(entry) for entry in runs]
    if any(type(entry) is not int or entry < 0 for entry in lengths):
        raise RequestError("must hold the lengths of runs: integers >= 0")
    own: list[int] = lengths  # type: ignore[assignment]
    if sum(own) != length:
        raise RequestError(f"has runs of {sum(own)} positions, not {length}")
    if sum(own[1::2]) == 0:
        raise RequestError("leaves no position for an embedding")
    return own


def _read_item(entry: str | bytes | None) -> _Item:
    if entry is None:
        return None, None
    if isinstance(entry, str):
        try:
            entry = pybase64.b64decode(entry, validate=True)
        except (binascii.Error, ValueError) as error:
            raise RequestError("is not base64") from error
    return decode_item(entry)
