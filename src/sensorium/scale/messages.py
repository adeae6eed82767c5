"""The messages between the frontends and the engines of a cluster: msgpack, and nothing else.

Data from clients is sent only as bytes. A file of media is named by its digest, and travels in the
call's `files` if it is small, else in the object store, or not at all if the engine should have it.
Embeddings and tensors that a client sent are in the message itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import torch

from sensorium.engine.core_process import CoreInfo
from sensorium.multimodal.item_codec import (
    PrecomputedEmbeds,
    decode_embeds,
    decode_item,
    encode_item,
)
from sensorium.multimodal.media import DeferredBytes, MediaBytes, MediaItem
from sensorium.render.prompts import EnginePrompt, RenderedMedia
from sensorium.speech.options import SpeechOptions
from sensorium.speech.transcript import Segment, Transcript
from sensorium.types.errors import (
    ErrorRecord,
    InvariantError,
    RequestError,
    SensoriumError,
    make_record,
)
from sensorium.types.multimodal import PRECOMPUTED, ItemLayout, PlaceholderRange, as_mask, as_runs
from sensorium.types.outputs import RequestDelta
from sensorium.types.sampling import SamplingParams

LoadFile = Callable[[], bytes]
T = TypeVar("T")


class Place(msgspec.Struct, frozen=True, array_like=True):
    """The range of tokens that a media item takes in a prompt; see `PlaceholderRange`."""

    modality: str
    offset: int
    length: int
    runs: tuple[int, ...] | None = None  # see `as_runs`


class Media(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A media item of a prompt: exactly one of the last three fields is set, or only `uuid`."""

    modality: str
    path: tuple[str | int, ...]
    uuid: str | None = None
    digest: str | None = None  # of a file
    address: str | None = None  # the engine fetches it, unless it has the uuid
    embeds: bytes | None = None  # see `decode_embeds`


class Processed(msgspec.Struct, frozen=True, kw_only=True):
    """Media that a client has processed, by modality."""

    mm_hashes: dict[str, list[str]]
    places: dict[str, list[Place]]
    items: dict[str, list[bytes | None]]  # see `encode_item`
    layouts: dict[str, list[ItemLayout | None]]
    is_external: bool


class WirePrompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An `EnginePrompt`, without the files of its media."""

    text: str | None = None
    token_ids: tuple[int, ...] = ()
    media: tuple[Media, ...] = ()
    places: tuple[Place, ...] | None = None
    processed: Processed | None = None
    mm_processor_kwargs: dict[str, Any] = {}
    media_io_kwargs: dict[str, Any] = {}
    add_special_tokens: bool = True
    cache_salt: str | None = None
    uuid_scope: str | None = None
    priority: int = 0


class Generate(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A call that runs a prompt. The answer is a stream of `Delta`."""

    prompt: WirePrompt
    params: SamplingParams
    request_id: str
    group: str | None = None
    files: dict[str, bytes] = {}  # digest -> small files of media


class Transcribe(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A call that transcribes a file. The answer is a stream of `Part`."""

    digest: str  # of the file
    options: SpeechOptions
    request_id: str
    cache_salt: str | None = None
    files: dict[str, bytes] = {}


class OpenAudio(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A call that starts streaming audio. The answer is a stream of `Delta`.

    The audio follows in calls of `AppendAudio` to the same engine.
    """

    params: SamplingParams
    request_id: str
    delay_ms: int | None = None


class AppendAudio(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """More features, for the engine that has the streaming audio of this request."""

    request_id: str
    num_bins: int = 0
    features: bytes = b""  # float32, a row for each bin
    is_last: bool = False


Call = Generate | Transcribe | OpenAudio


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The first answer to each call: which engine has it. The call has not begun yet."""

    replica: str


class Opened(msgspec.Struct, frozen=True, tag=True):
    """An answer to `OpenAudio`: the engine accepts the audio from now on."""


class Delta(msgspec.Struct, frozen=True, tag=True):
    delta: RequestDelta  # only the first one has the tokens of the prompt


class Part(msgspec.Struct, frozen=True, tag=True):
    """A final segment of a transcript or, as the last answer, the whole transcript."""

    segment: Segment | None = None
    transcript: Transcript | None = None


class Failure(msgspec.Struct, frozen=True, tag=True):
    """The last answer to a call that has failed. `lacks` has digests of files that must be sent."""

    error: ErrorRecord
    lacks: tuple[str, ...] = ()


Answer = Accepted | Opened | Delta | Part | Failure


def is_last(answer: Answer) -> bool:
    """Return whether a call has ended with this answer, and has its whole result."""
    if isinstance(answer, Delta):
        return answer.delta.final is not None
    return isinstance(answer, Part) and answer.transcript is not None


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about an engine that a frontend needs."""

    info: CoreInfo


class UuidKey(msgspec.Struct, frozen=True, array_like=True):
    """A client's uuid for a media item, and the scope in which it is valid."""

    modality: str
    uuid: str
    client: str | None
    cache_salt: str | None


def _encode_other(value: object) -> object:
    if isinstance(value, SensoriumError):
        return msgspec.to_builtins(make_record(value))
    raise NotImplementedError(f"{type(value).__name__} can't be sent to another process")


def _decode_other(kind: type, value: Any) -> object:
    if issubclass(kind, SensoriumError):
        return msgspec.convert(value, ErrorRecord).make_error()
    raise NotImplementedError(f"{kind.__name__} can't come from another process")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
encode = _encoder.encode
_call_decoder: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(
    Answer, dec_hook=_decode_other
)
_append_decoder = msgspec.msgpack.Decoder(AppendAudio)
_description_decoder = msgspec.msgpack.Decoder(Description)
_uuids_decoder = msgspec.msgpack.Decoder(tuple[UuidKey, ...])
decode_call = _call_decoder.decode
decode_answer = _answer_decoder.decode
decode_append = _append_decoder.decode
decode_description = _description_decoder.decode
decode_uuids = _uuids_decoder.decode


def encode_call(call: Call) -> bytes:
    """Return a call as bytes. Raise a `RequestError` if a value in it can't be sent."""
    try:
        return encode(call)
    except (UnicodeEncodeError, OverflowError, TypeError, NotImplementedError) as error:
        raise RequestError(
            "the request can't be sent to the engine: a text in it has half a character (a lone "
            "surrogate), a number in it has more than 64 bits, or an option is no plain value"
        ) from error


# ---- prompts


def brings_tensors(prompt: EnginePrompt) -> bool:
    """Return whether a client sent tensors with a prompt, so that writing it copies much data."""
    has_embeds = any(isinstance(item.media, PrecomputedEmbeds) for item in prompt.media)
    return prompt.rendered is not None or has_embeds


def has_tensors(call: Call) -> bool:
    if not isinstance(call, Generate):
        return False
    has_embeds = any(media.embeds is not None for media in call.prompt.media)
    return call.prompt.processed is not None or has_embeds


async def run_long(is_long: bool, work: Callable[..., T], *arguments: object) -> T:
    """Call a function, in a thread if `is_long`, because it would block all other requests."""
    return await asyncio.to_thread(work, *arguments) if is_long else work(*arguments)


def write_prompt(prompt: EnginePrompt) -> tuple[WirePrompt, dict[str, MediaBytes]]:
    """Return a prompt as it is sent, and the files of its media by their digests."""
    files: dict[str, MediaBytes] = {}
    places = None
    if prompt.positions is not None:
        places = tuple(_write_place(modality, place) for modality, place in prompt.positions)
    wire = WirePrompt(
        text=prompt.text,
        token_ids=tuple(prompt.token_ids),
        media=tuple(_write_media(item, files) for item in prompt.media),
        places=places,
        processed=None if prompt.rendered is None else _write_processed(prompt.rendered),
        mm_processor_kwargs=dict(prompt.mm_processor_kwargs),
        media_io_kwargs=dict(prompt.media_io_kwargs),
        add_special_tokens=prompt.add_special_tokens,
        cache_salt=prompt.cache_salt,
        uuid_scope=prompt.uuid_scope,
        priority=prompt.priority,
    )
    return wire, files


def read_prompt(wire: WirePrompt, open_file: Callable[[str], LoadFile]) -> EnginePrompt:
    """Return the prompt that was sent; `open_file` makes a function that loads a digest's file."""
    positions = None
    if wire.places is not None:
        positions = tuple((place.modality, _read_place(place)) for place in wire.places)
    return EnginePrompt(
        text=wire.text,
        token_ids=wire.token_ids,
        media=tuple(_read_media(media, open_file) for media in wire.media),
        rendered=None if wire.processed is None else _read_processed(wire.processed),
        positions=positions,
        mm_processor_kwargs=wire.mm_processor_kwargs,
        media_io_kwargs=wire.media_io_kwargs,
        add_special_tokens=wire.add_special_tokens,
        cache_salt=wire.cache_salt,
        uuid_scope=wire.uuid_scope,
        priority=wire.priority,
    )


def _write_media(item: MediaItem, files: dict[str, MediaBytes]) -> Media:
    plain = Media(modality=item.modality, path=item.path, uuid=item.uuid)
    media = item.media
    if media is None:
        return plain
    if isinstance(media, MediaBytes):
        if media.digest is None:
            raise InvariantError("a file of media has no digest when it is sent to an engine")
        files[media.digest] = media
        return msgspec.structs.replace(plain, digest=media.digest)
    if isinstance(media, str):
        return msgspec.structs.replace(plain, address=media)
    if isinstance(media, PrecomputedEmbeds):
        encoded = encode_item({PRECOMPUTED: media.tensor}, None)
        return msgspec.structs.replace(plain, embeds=encoded)
    raise RequestError(f"media of the type {type(media).__name__} can't be sent to an engine")


def _read_media(wire: Media, open_file: Callable[[str], LoadFile]) -> MediaItem:
    media: object = wire.address
    if wire.digest is not None:
        media = DeferredBytes(wire.digest, open_file(wire.digest))
    elif wire.embeds is not None:
        media = decode_embeds(wire.embeds)
    return MediaItem(path=wire.path, modality=wire.modality, media=media, uuid=wire.uuid)


def _write_processed(rendered: RenderedMedia) -> Processed:
    def write(tensors: Any) -> bytes | None:
        return None if tensors is None else encode_item(tensors, None)

    return Processed(
        mm_hashes={m: list(hashes) for m, hashes in rendered.mm_hashes.items()},
        places={
            m: [_write_place(m, place) for place in places]
            for m, places in rendered.mm_placeholders.items()
        },
        items={m: list(map(write, items)) for m, items in rendered.mm_kwargs.items()},
        layouts={m: list(layouts) for m, layouts in rendered.mm_layouts.items()},
        is_external=rendered.is_external,
    )


def _read_processed(wire: Processed) -> RenderedMedia:
    def read(item: bytes | None) -> Any:
        return None if item is None else decode_item(item)[0]

    return RenderedMedia(
        mm_hashes=wire.mm_hashes,
        mm_placeholders={m: list(map(_read_place, places)) for m, places in wire.places.items()},
        mm_kwargs={m: list(map(read, items)) for m, items in wire.items.items()},
        mm_layouts=wire.layouts,
        is_external=wire.is_external,
    )


def _write_place(modality: str, place: PlaceholderRange) -> Place:
    return Place(modality, place.offset, place.length, as_runs(place.is_embed))


def _read_place(place: Place) -> PlaceholderRange:
    return PlaceholderRange(place.offset, place.length, as_mask(place.runs))


# ---- streaming audio


def write_audio(request_id: str, features: torch.Tensor | None, *, is_last: bool) -> AppendAudio:
    """Return a message with features [bins, frames], or without any if they are `None`."""
    if features is None:
        return AppendAudio(request_id=request_id, is_last=is_last)
    rows = features.contiguous().numpy()
    return AppendAudio(
        request_id=request_id, num_bins=len(rows), features=rows.tobytes(), is_last=is_last
    )


def read_audio(message: AppendAudio) -> torch.Tensor | None:
    """Return the features [bins, frames] in a message, or None without any."""
    if not message.num_bins:
        return None
    own = torch.frombuffer(bytearray(message.features), dtype=torch.float32)
    return own.view(message.num_bins, -1)


# ---- names


def list_uuids(prompt: EnginePrompt) -> tuple[UuidKey, ...]:
    """Return the uuids and hashes of media that the client named in a prompt but did not send."""
    scope = prompt.uuid_scope, prompt.cache_salt
    names = [
        UuidKey(item.modality, item.uuid, *scope)
        for item in prompt.media
        if item.uuid is not None and item.media is None
    ]
    if prompt.rendered is not None:
        for modality, hashes in prompt.rendered.mm_hashes.items():
            sent = prompt.rendered.mm_kwargs.get(modality) or [None] * len(hashes)
            pairs = zip(hashes, sent, strict=False)
            names += [UuidKey(modality, h, *scope) for h, item in pairs if item is None]
    return tuple(names)


# ---- output


def leave_out_prompt(delta: RequestDelta, *, is_first: bool) -> RequestDelta:
    """Return output without the prompt's tokens (maybe 100,000), which only the first part has."""
    final = delta.final
    if final is not None:
        final = replace(final, prompt=None, prompt_token_ids=())
    token_ids = delta.prompt_token_ids if is_first else ()
    return replace(delta, prompt_token_ids=token_ids, final=final)


def restore_prompt(
    delta: RequestDelta, *, text: str | None, token_ids: tuple[int, ...]
) -> RequestDelta:
    final = delta.final
    if final is not None:
        final = replace(final, prompt=text, prompt_token_ids=token_ids)
    return replace(delta, prompt_token_ids=token_ids, final=final)
