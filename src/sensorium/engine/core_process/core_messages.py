"""The messages between a frontend and a core in another process: msgpack, and tensors as frames.

A message is a list of frames. The first is one of the types below. An `AddRequest` is followed by
the request itself and the raw memory of tensors, in the order of `AddRequest.tensors`. Pickle is
not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch

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
    """A compact form of `MultiModalFeatureSpec`: one media item of a request, without tensors."""

    modality: str
    mm_hash: str
    offset: int  # of its positions in the prompt
    length: int
    runs: tuple[int, ...] | None  # which positions get an embedding, see `as_runs`
    has_content_hash: bool


class ItemTensors(msgspec.Struct, frozen=True, array_like=True):
    """A media item with tensors that follow the message as `num_frames` raw frames."""

    mm_hash: str
    header: bytes  # describes the tensors, see `item_codec`
    num_frames: int


class AddRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A message to the core that adds a request, with the media of the request."""

    features: tuple[Feature, ...] = ()
    update: MirrorUpdate | None = None  # what the core's media cache must insert or evict
    references: dict[str, ShmReference] = {}  # mm_hash -> its place in shared memory
    tensors: tuple[ItemTensors, ...] = ()


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a frontend, by which the core learns its identity."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """A message to the core to end requests without sending further outputs for them."""

    request_ids: tuple[str, ...]


class AppendAudio(msgspec.Struct, frozen=True, tag=True):
    """A message to the core with more audio for a request.

    The features follow as one raw frame of float32 numbers, a row for each of the `num_bins`. There
    is no frame if no features are left.
    """

    request_id: str
    num_bins: int = 0
    is_last: bool = False  # the audio ends with this


class Rehearse(msgspec.Struct, frozen=True, tag=True):
    """A message to the core to compute a dummy request; the frames of an `AddRequest` follow."""

    subject: str  # a modality, or "text"
    request: AddRequest


class UpdateCache(msgspec.Struct, frozen=True, tag=True):
    """A message to the core with items to evict, sent if no request carries the list."""

    update: MirrorUpdate


class ResetCache(msgspec.Struct, frozen=True, tag=True):
    """A message to the core to empty a cache. The `ResetDone` has the same number."""

    number: int  # chosen by the frontend
    level: str  # "mm", "encoder" or "prefix"


ToCore = Hello | AddRequest | AppendAudio | Abort | Rehearse | UpdateCache | ResetCache


class Answer(msgspec.Struct, frozen=True):
    """The core's answer to an `AddRequest`: accepted, if the other fields are `None`."""

    request_id: str
    missing: MissingItems | None = None  # the request has to be sent again, with these items
    refusal: ErrorRecord | None = None  # the request has failed


class CoreOutputs(msgspec.Struct, frozen=True, tag=True):
    """A message to a frontend: the outputs of a step, and answers to earlier `AddRequest`s.

    The frontend must handle the answers first, because a request is accepted before it has outputs.
    """

    answers: tuple[Answer, ...] = ()
    outputs: tuple[EngineCoreOutput, ...] = ()


class ResetDone(msgspec.Struct, frozen=True, tag=True):
    """A message to a frontend that the cache of its `ResetCache` is empty now."""

    number: int  # that of the `ResetCache`


class ForgetMedia(msgspec.Struct, frozen=True, tag=True):
    """A message to a frontend that another frontend has reset the media cache.

    The core has already emptied its own media cache, or the one in shared memory.
    """


class Rehearsed(msgspec.Struct, frozen=True, tag=True):
    """A message to a frontend that the core is done with its `Rehearse`."""

    subject: str  # that of the `Rehearse`
    error: ErrorRecord | None = None  # also None if the core skipped the dummy


FromCore = CoreOutputs | Rehearsed | ResetDone | ForgetMedia

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(EngineCoreRequest)
_to_core_decoder: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
_from_core_decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)
encode_message = _encoder.encode
decode_to_core = _to_core_decoder.decode
decode_from_core = _from_core_decoder.decode


def encode_request(request: EngineCoreRequest) -> bytes:
    """Return a request as msgpack, without its media items, which `encode_transfer` encodes."""
    try:
        return _encoder.encode(replace(request, mm_features=()))
    except (UnicodeEncodeError, OverflowError) as error:
        raise RequestError(
            "the request can't be sent to the engine: a text in it has half a character (a lone "
            "surrogate), or a number in it has more than 64 bits"
        ) from error


def encode_transfer(
    request: EngineCoreRequest, transfer: Transfer
) -> tuple[AddRequest, list[memoryview]]:
    """Return the `AddRequest` message of a request, and its tensors as frames to send after it."""
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
    """Rebuild a request and its media from the frames of an `AddRequest` message.

    The tensors are views of `tensor_frames`, which must be writable.
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


def decode_audio(message: AppendAudio, frames: Sequence[memoryview]) -> torch.Tensor | None:
    """Return the features [bins, frames] after an `AppendAudio` as a view, or None without any."""
    if not frames:
        return None
    return torch.frombuffer(frames[0], dtype=torch.float32).view(message.num_bins, -1)


def _encode_feature(feature: MultiModalFeatureSpec) -> Feature:
    position = feature.mm_position
    runs = as_runs(position.is_embed)
    return Feature(
        feature.modality,
        feature.mm_hash,
        position.offset,
        position.length,
        runs,
        feature.has_content_hash,
    )


def _decode_feature(feature: Feature) -> MultiModalFeatureSpec:
    position = PlaceholderRange(feature.offset, feature.length, as_mask(feature.runs))
    return MultiModalFeatureSpec(
        modality=feature.modality,
        mm_hash=feature.mm_hash,
        mm_position=position,
        has_content_hash=feature.has_content_hash,
    )
