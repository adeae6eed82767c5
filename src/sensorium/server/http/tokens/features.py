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
from sensorium.types.errors import RequestError, add_label
from sensorium.types.multimodal import PlaceholderRange, as_mask
from sensorium.types.prompts import RenderedPrompt

_Item = tuple[Any, Any]  # tensors and layout


def read_features(features: WireFeatures, token_ids: Sequence[int]) -> RenderedPrompt:
    """A `RequestError` begins with the path of the field that is wrong."""
    hashes = features.mm_hashes
    data = features.kwargs_data
    _check_modalities("mm_placeholders", features.mm_placeholders, hashes)
    if data is not None:
        _check_modalities("kwargs_data", data, hashes)
    ranges = {
        modality: _read_ranges(_name("mm_placeholders", modality), entries, len(token_ids))
        for modality, entries in features.mm_placeholders.items()
    }
    items = {
        modality: [_read_item(f"{_name('kwargs_data', modality)}[{i}]", e) for i, e in enumerate(e)]
        for modality, e in (data or {}).items()
    }
    return {
        "prompt_token_ids": token_ids,
        "mm_hashes": hashes,
        "mm_placeholders": ranges,
        "mm_kwargs": {name: [kwargs for kwargs, _ in entries] for name, entries in items.items()},
        "mm_layouts": {name: [layout for _, layout in entries] for name, entries in items.items()},
        "is_external": True,
    }


def _name(field: str, modality: str) -> str:
    return f"features.{field}.{modality[:50]}"


def _check_modalities(
    field: str, given: Mapping[str, Sequence[Any]], hashes: Mapping[str, Sequence[str]]
) -> None:
    """Each has as many entries as there are hashes."""
    for modality in {**hashes, **given}:
        own, expected = given.get(modality), hashes.get(modality)
        if own is None or expected is None:
            there, lacking = ("mm_hashes", field) if own is None else (field, "mm_hashes")
            raise RequestError(
                f"features.{lacking} has no {modality[:50]!r}, which features.{there} has"
            )
        if len(own) != len(expected):
            raise RequestError(
                f"{_name(field, modality)} has {len(own)} entries for {len(expected)} hashes"
            )


def _read_ranges(
    path: str, entries: Sequence[WirePlaceholder], num_tokens: int
) -> list[PlaceholderRange]:
    ranges: list[PlaceholderRange] = []
    previous_offset = previous_end = 0
    for index, entry in enumerate(entries):
        own = f"{path}[{index}]"
        end = entry.offset + entry.length
        if entry.length == 0:
            raise RequestError(f"{own}.length must be at least 1")
        if end > num_tokens:
            raise RequestError(f"{own} ends at {end}, beyond the prompt's {num_tokens} tokens")
        if entry.offset < previous_offset:
            raise RequestError(f"{own}.offset is {entry.offset}: entries must be sorted by it")
        if entry.offset < previous_end:
            raise RequestError(
                f"{own}.offset is {entry.offset}, where the item ahead has not ended "
                f"({previous_end})"
            )
        previous_offset, previous_end = entry.offset, end
        mask = as_mask(_read_runs(f"{own}.is_embed", entry.is_embed, entry.length))
        ranges.append(PlaceholderRange(entry.offset, entry.length, mask))
    return ranges


def _read_runs(path: str, runs: Sequence[Any] | None, length: int) -> list[int] | None:
    """None of the runs but the first is empty in a mask that was written with care; some are."""
    if runs is None:
        return None
    if len(runs) > 2 * length + 1:
        raise RequestError(f"{path} has {len(runs)} runs for {length} positions")
    lengths = [as_integer(entry) for entry in runs]
    if any(type(entry) is not int or entry < 0 for entry in lengths):
        raise RequestError(f"{path} must hold the lengths of runs: integers >= 0")
    own: list[int] = lengths  # type: ignore[assignment]
    if sum(own) != length:
        raise RequestError(f"{path} has runs of {sum(own)} positions, not {length}")
    if sum(own[1::2]) == 0:
        raise RequestError(f"{path} leaves no position for an embedding")
    return own


def _read_item(path: str, entry: str | bytes | None) -> _Item:
    if entry is None:
        return None, None
    if isinstance(entry, str):
        try:
            entry = pybase64.b64decode(entry, validate=True)
        except (binascii.Error, ValueError) as error:
            raise RequestError(f"{path} is not base64") from error
    try:
        return decode_item(entry)
    except RequestError as error:
        raise add_label(error, path) from error
