"""The media of a rendered request as it goes over the wire. Encodes megabytes: not on the loop."""

from __future__ import annotations

import base64

from sensorium.engine.inputs.input_processor import ProcessedRequest
from sensorium.multimodal.cache.interface import ItemHandle
from sensorium.multimodal.item_codec import encode_item
from sensorium.server.http.protocol.token_wire import Features, Placeholder
from sensorium.types.errors import InvariantError
from sensorium.types.multimodal import MultiModalFeatureSpec, as_runs

_Entry = str | bytes | None


def make_features(
    processed: ProcessedRequest, *, is_msgpack: bool, has_kwargs: bool
) -> Features | None:
    """`None` for a request without media. Its items must be held until this has ended. Without
    `has_kwargs` there are names and places alone.
    """
    specs = processed.request.mm_features
    if not specs:
        return None
    groups: dict[str, list[MultiModalFeatureSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.modality, []).append(spec)
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
    processed: ProcessedRequest,
    groups: dict[str, list[MultiModalFeatureSpec]],
    *,
    is_msgpack: bool,
) -> dict[str, list[_Entry]]:
    """An item that stands in the prompt twice is encoded once."""
    handles = {item.handle.mm_hash: item.handle for item in processed.items}
    encoded = {
        mm_hash: _encode_item(handle, is_msgpack=is_msgpack) for mm_hash, handle in handles.items()
    }
    return {
        modality: [encoded[spec.mm_hash] for spec in group] for modality, group in groups.items()
    }


def _encode_item(handle: ItemHandle, *, is_msgpack: bool) -> str | bytes:
    if handle.kwargs is None:
        raise InvariantError(f"{handle.modality} {handle.mm_hash} was rendered without tensors")
    data = encode_item(handle.kwargs, handle.layout)
    return data if is_msgpack else base64.b64encode(data).decode("ascii")
