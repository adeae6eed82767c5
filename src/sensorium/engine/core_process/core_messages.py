"""What a frontend and a core in another process say to each other: msgpack, and tensors as frames.

A message is a list of frames. The first is one of the types below. Behind an `AddRequest` come the
request itself and the raw memory of tensors, in the order of `AddRequest.tensors`. Nothing here is
pickle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from sensorium.engine.core_process.core_info import CoreInfo as CoreInfo
from sensorium.multimodal.item_codec import as_frames, decode_frames, encode_header
from sensorium.types.errors import ErrorRecord, RequestError
from sensorium.types.multimodal import (
    MultiModalFeatureSpec,
    PlaceholderRange,
    as_mask,
    as_runs,
)
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest
from sensorium.types.transfer import MirrorUpdate, MissingItems, Payload, ShmReference, Transfer

Frame = bytes | memoryview


class Feature(msgspec.Struct, frozen=True, array_like=True):
    """`runs`: the lengths of the runs of `is_embed`, beginning with one of False."""

    modality: str
    mm_hash: str
    offset: int
    length: int
    runs: tuple[int, ...] | None


class ItemTensors(msgspec.Struct, frozen=True, array_like=True):
    """One item whose tensors come as frames: `header` is that of `item_codec`."""

    mm_hash: str
    header: bytes
    num_frames: int


class AddRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Everything about a request but itself."""

    features: tuple[Feature, ...] = ()
    update: MirrorUpdate | None = None
    references: dict[str, ShmReference] = {}
    tensors: tuple[ItemTensors, ...] = ()


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A frontend is there, and wants to hear of what concerns all of them."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_ids: tuple[str, ...]


class UpdateCache(msgspec.Struct, frozen=True, tag=True):
    """Evictions that an idle frontend has not told yet."""

    update: MirrorUpdate


class ResetCache(msgspec.Struct, frozen=True, tag=True):
    """`level`: "mm", "encoder" or "prefix". Answered by `ResetDone` of the same number."""

    number: int
    level: str


ToCore = Hello | AddRequest | Abort | UpdateCache | ResetCache


class Answer(msgspec.Struct, frozen=True):
    """To an `AddRequest`: taken, or what has to be sent, or refused."""

    request_id: str
    missing: MissingItems | None = None
    refusal: ErrorRecord | None = None


class News(msgspec.Struct, frozen=True, tag=True):
    """Answers come before outputs: a request is taken before there is news of it."""

    answers: tuple[Answer, ...] = ()
    outputs: tuple[EngineCoreOutput, ...] = ()


class ResetDone(msgspec.Struct, frozen=True, tag=True):
    number: int


class ForgetMedia(msgspec.Struct, frozen=True, tag=True):
    """Another frontend has reset the cache of media. The core has emptied its own, or the one that
    all share.
    """


FromCore = News | ResetDone | ForgetMedia


_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(EngineCoreRequest)
_to_core_decoder: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
_from_core_decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)


def encode_message(message: ToCore | FromCore) -> bytes:
    return _encoder.encode(message)


def decode_to_core(frame: Frame) -> ToCore:
    return _to_core_decoder.decode(frame)


def decode_from_core(frame: Frame) -> FromCore:
    return _from_core_decoder.decode(frame)


def encode_request(request: EngineCoreRequest) -> bytes:
    """Without its features. A `RequestError` for what no message can hold."""
    try:
        return _encoder.encode(replace(request, mm_features=()))
    except (UnicodeEncodeError, OverflowError) as error:
        raise RequestError(
            "the request holds half a character, or a number beyond 64 bits"
        ) from error


def encode_transfer(
    request: EngineCoreRequest, transfer: Transfer
) -> tuple[AddRequest, list[memoryview]]:
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
        features=_encode_features(request.mm_features),
        update=transfer.update,
        references=references,
        tensors=tuple(tensors),
    )
    return message, frames


def decode_request(
    message: AddRequest, frame: Frame, tensor_frames: Sequence[memoryview]
) -> tuple[EngineCoreRequest, Transfer]:
    """`tensor_frames` must be writable; the tensors are views of them."""
    payloads: dict[str, Payload] = dict(message.references)
    start = 0
    for entry in message.tensors:
        end = start + entry.num_frames
        payloads[entry.mm_hash] = decode_frames(entry.header, tensor_frames[start:end])
        start = end
    request = _request_decoder.decode(frame)
    if message.features:
        request = replace(request, mm_features=_decode_features(message.features))
    return request, Transfer(payloads=payloads, update=message.update)


def _encode_features(features: Sequence[MultiModalFeatureSpec]) -> tuple[Feature, ...]:
    return tuple(
        Feature(
            feature.modality,
            feature.mm_hash,
            feature.mm_position.offset,
            feature.mm_position.length,
            as_runs(feature.mm_position.is_embed),
        )
        for feature in features
    )


def _decode_features(features: Sequence[Feature]) -> tuple[MultiModalFeatureSpec, ...]:
    return tuple(
        MultiModalFeatureSpec(
            modality=feature.modality,
            mm_hash=feature.mm_hash,
            mm_position=PlaceholderRange(feature.offset, feature.length, as_mask(feature.runs)),
        )
        for feature in features
    )
