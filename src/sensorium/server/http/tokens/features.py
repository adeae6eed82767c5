"""Reads processed media items from a request into a rendered prompt, and writes them to a response.

This module does the checks that need no model, with the names of the client's fields in errors;
`engine.inputs.rendered_prompt` does the others. Masks are expanded only for ranges that don't
overlap, so that all masks together are no longer than the prompt.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import pybase64

from sensorium.engine.inputs.input_processor import ProcessedRequest
from sensorium.multimodal.cache.interface import ItemHandle
from sensorium.multimodal.item_codec import decode_item, encode_item
from sensorium.server.http.protocol.answers import Features, Placeholder
from sensorium.server.http.protocol.tokens import WireFeatures, WirePlaceholder
from sensorium.types.errors import InvariantError, RequestError, at, map_at
from sensorium.types.multimodal import MultiModalFeatureSpec, PlaceholderRange, as_mask, as_runs
from sensorium.types.request import RenderedPrompt

_Item = tuple[Any, Any]  # tensors and layout


def read_features(features: WireFeatures, token_ids: Sequence[int]) -> RenderedPrompt:
    """Return a prompt for the engine, or raise a `RequestError` with the client's field."""
    ranges: dict[str, list[PlaceholderRange]] = {}
    items: dict[str, list[_Item]] = {}
    with at("features"):
        data, hashes = features.kwargs_data, features.mm_hashes
        _check_modalities("mm_placeholders", features.mm_placeholders, hashes)
        if data is not None:
            _check_modalities("kwargs_data", data, hashes)
        for modality, entries in features.mm_placeholders.items():
            with at("mm_placeholders", modality):
                ranges[modality] = _read_ranges(entries, len(token_ids))
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
    """Raise a `RequestError` unless each modality in `given` has one entry for each hash."""
    for modality in {**hashes, **given}:
        own, expected = given.get(modality), hashes.get(modality)
        if own is None or expected is None:
            there, lacking = ("mm_hashes", field) if own is None else (field, "mm_hashes")
            raise RequestError(f"has no {modality[:50]!r}, but {there} has it", path=(lacking,))
        if len(own) != len(expected):
            raise RequestError(
                f"has {len(own)} entries, but mm_hashes has {len(expected)}", path=(field, modality)
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
                f"is {entry.offset}, but entries must be sorted by offset", path=(index, "offset")
            )
        if entry.offset < previous_end:
            raise RequestError(
                f"is {entry.offset}, but the media item before it ends at {previous_end}",
                path=(index, "offset"),
            )
        previous_offset, previous_end = entry.offset, end
        with at(index, "is_embed"):
            mask = as_mask(_read_runs(entry.is_embed, entry.length))
        ranges.append(PlaceholderRange(entry.offset, entry.length, mask))
    return ranges


def _read_runs(runs: Sequence[int] | None, length: int) -> Sequence[int] | None:
    """Return the run lengths of an embedding mask, or raise a `RequestError` if they are wrong.

    Runs of positions without and with an embedding alternate. `None` means that every position has
    an embedding. Some clients send empty runs after the first one, so they are allowed.
    """
    if runs is None:
        return None
    if len(runs) > 2 * length + 1:
        raise RequestError(f"has {len(runs)} runs, which are too many for {length} positions")
    if sum(runs) != length:
        raise RequestError(
            f"has runs of {sum(runs)} positions together, but the placeholder's length is {length}"
        )
    if sum(runs[1::2]) == 0:
        raise RequestError("must leave at least one position for an embedding")
    return runs


def _read_item(entry: Any) -> _Item:
    if entry is None:
        return None, None
    if isinstance(entry, str):
        try:
            entry = pybase64.b64decode(entry, validate=True)
        except ValueError as error:
            raise RequestError("is not valid base64") from error
    if not isinstance(entry, bytes):
        raise RequestError("must be base64 text in JSON, or bytes in msgpack")
    return decode_item(entry)


def make_features(
    processed: ProcessedRequest, *, is_msgpack: bool, has_kwargs: bool
) -> Features | None:
    """Return the processed media items of a rendered request, or `None` if it has none.

    Without `has_kwargs` the items have no tensors. The caller must keep the media items in the
    cache until this returns. Encoding may take long, so it must not run on the event loop.
    """
    groups: dict[str, list[MultiModalFeatureSpec]] = {}
    for spec in processed.request.mm_features:
        groups.setdefault(spec.modality, []).append(spec)
    if not groups:
        return None
    return Features(
        mm_hashes={modality: [s.mm_hash for s in group] for modality, group in groups.items()},
        mm_placeholders={
            modality: [_make_placeholder(spec) for spec in group]
            for modality, group in groups.items()
        },
        kwargs_data=_encode_items(processed, groups, is_msgpack=is_msgpack) if has_kwargs else None,
    )


def _make_placeholder(spec: MultiModalFeatureSpec) -> Placeholder:
    position = spec.mm_position
    return Placeholder(
        offset=position.offset, length=position.length, is_embed=as_runs(position.is_embed)
    )


def _encode_items(
    processed: ProcessedRequest, groups: dict[str, list[MultiModalFeatureSpec]], *, is_msgpack: bool
) -> dict[str, list[str | bytes]]:
    """Return the encoded tensors by modality; an item that occurs several times is encoded once."""
    handles = {item.handle.mm_hash: item.handle for item in processed.items}
    encoded = {name: _encode_item(handle, is_msgpack) for name, handle in handles.items()}
    return {
        modality: [encoded[spec.mm_hash] for spec in group] for modality, group in groups.items()
    }


def _encode_item(handle: ItemHandle, is_msgpack: bool) -> str | bytes:
    if handle.kwargs is None:
        raise InvariantError(f"{handle.modality} {handle.mm_hash} was rendered without tensors")
    data = encode_item(handle.kwargs, handle.layout)
    return data if is_msgpack else base64.b64encode(data).decode("ascii")
