"""The messages between a frontend and a core in another process: msgpack, and tensors as frames.

A message is a list of frames. The first is one of the types below. An `AddRequest` is followed by
the request itself and the raw memory of tensors, in the order of `AddRequest.tensors`. Pickle is
not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from sensorium.multimodal.item_codec import as_frames, decode_frames, encode_header
from sensorium.types.errors import ErrorRecord, RequestError
from sensorium.types.multimodal import (
    MirrorUpdate,
    MissingItems,
    MultiModalFeatureSpec,
    Payload,
    PlaceholderRange,
    ShmReference,
    Transfer,
    as_mask,
    as_runs,
)
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest

Frame = bytes | memoryview


class Feature(msgspec.Struct, frozen=True, array_like=True):
    """One media item of a request: a `MultiModalFeatureSpec` with a short form of its mask."""

    modality: str
    mm_hash: str
    offset: int
    length: int
    runs: tuple[int, ...] | None  # see `as_runs`


class ItemTensors(msgspec.Struct, frozen=True, array_like=True):
    """One item with tensors that are sent as frames."""

    mm_hash: str
    header: bytes  # see `item_codec`
    num_frames: int


class AddRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A new request: its media, and the changes of the core's half of the cache."""

    features: tuple[Feature, ...] = ()
    update: MirrorUpdate | None = None
    references: dict[str, ShmReference] = {}  # mm_hash -> its place in shared memory
    tensors: tuple[ItemTensors, ...] = ()


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a frontend, which makes it known to the core."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """An order to end requests, without further outputs."""

    request_ids: tuple[str, ...]


class UpdateCache(msgspec.Struct, frozen=True, tag=True):
    """Evictions of a frontend that sends no requests."""

    update: MirrorUpdate


class ResetCache(msgspec.Struct, frozen=True, tag=True):
    """An order to empty a cache. The answer is a `ResetDone` with the same number."""

    number: int
    level: str  # "mm", "encoder" or "prefix"


ToCore = Hello | AddRequest | Abort | UpdateCache | ResetCache


class Answer(msgspec.Struct, frozen=True):
    """The answer to an `AddRequest`. The request was taken if nothing is missing or refused."""

    request_id: str
    missing: MissingItems | None = None
    refusal: ErrorRecord | None = None


class CoreOutputs(msgspec.Struct, frozen=True, tag=True):
    """The outputs of a step, and answers to the requests that came before it.

    Answers are read before outputs, because a request is accepted before it has outputs.
    """

    answers: tuple[Answer, ...] = ()
    outputs: tuple[EngineCoreOutput, ...] = ()


class ResetDone(msgspec.Struct, frozen=True, tag=True):
    """The answer to the `ResetCache` with the same number."""

    number: int


class ForgetMedia(msgspec.Struct, frozen=True, tag=True):
    """A note that another frontend has reset the media cache.

    Before, the core has emptied its own cache, or the one that all processes share.
    """


FromCore = CoreOutputs | ResetDone | ForgetMedia

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(EngineCoreRequest)
_to_core_decoder: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
_from_core_decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)
encode_message = _encoder.encode
decode_to_core = _to_core_decoder.decode
decode_from_core = _from_core_decoder.decode


def encode_request(request: EngineCoreRequest) -> bytes:
    """Encode a request without its features; raise a `RequestError` if no message can hold it."""
    try:
        return _encoder.encode(replace(request, mm_features=()))
    except (UnicodeEncodeError, OverflowError) as error:
        raise RequestError(
            "the request has half a character (a lone surrogate), or a number beyond 64 bits"
        ) from error


def encode_transfer(
    request: EngineCoreRequest, transfer: Transfer
) -> tuple[AddRequest, list[memoryview]]:
    """Return the message of a request with its media, and the frames of its tensors."""
    references: dict[str, ShmReference] = {}
    tensors: list[ItemTensors] = []
    frames: list[memoryview] = []
    for mm_hash, payload in transfer.payloads.items():
        if isinstance(payload, ShmReference):
            references[mm_hash] = payload
        else:
            item_frames = as_frames(payload)
            tensors.append(ItemTensors(mm_hash, encode_header(payload), len(item_frames)))
            frames += item_frames
    message = AddRequest(
        features=tuple(map(_encode_feature, request.mm_features)),
        update=transfer.update,
        references=references,
        tensors=tuple(tensors),
    )
    return message, frames


def decode_request(
    message: AddRequest, frame: Frame, tensor_frames: Sequence[memoryview]
) -> tuple[EngineCoreRequest, Transfer]:
    """Return a request and its transfer, with tensors that are views of the frames.

    The frames must be writable.
    """
    payloads: dict[str, Payload] = dict(message.references)
    start = 0
    for entry in message.tensors:
        end = start + entry.num_frames
        payloads[entry.mm_hash] = decode_frames(entry.header, tensor_frames[start:end])
        start = end
    request = _request_decoder.decode(frame)
    if message.features:
        request = replace(request, mm_features=tuple(map(_decode_feature, message.features)))
    return request, Transfer(payloads=payloads, update=message.update)


def _encode_feature(feature: MultiModalFeatureSpec) -> Feature:
    position = feature.mm_position
    runs = as_runs(position.is_embed)
    return Feature(feature.modality, feature.mm_hash, position.offset, position.length, runs)


def _decode_feature(feature: Feature) -> MultiModalFeatureSpec:
    position = PlaceholderRange(feature.offset, feature.length, as_mask(feature.runs))
    return MultiModalFeatureSpec(
        modality=feature.modality, mm_hash=feature.mm_hash, mm_position=position
    )
