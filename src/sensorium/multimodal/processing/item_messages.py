"""An item's job and its result as bytes, for the pool: msgpack beside blocks of raw memory."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image

from sensorium.multimodal.item_codec import as_bytes, decode_block, encode_header
from sensorium.multimodal.media_bytes import MediaBytes
from sensorium.multimodal.processing.item_worker import ItemJob
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.types.errors import InvariantError, RequestError
from sensorium.types.multimodal import ItemLayout
from sensorium.types.transfer import ShmReference


class _ItemMessage(msgspec.Struct, frozen=True, kw_only=True):
    """`form`: what the block is: the "bytes" of a file, or the pixels or samples of a "pil" image,
    a "numpy" array or a "torch" tensor. `keep`: put the result into shared memory.
    """

    job: ItemJob
    keep: bool
    form: str
    header: bytes = b""
    metadata: dict[str, Any] | None = None


class ItemReply(msgspec.Struct, frozen=True, kw_only=True):
    """`reference`: where the tensors are, if they don't come with the reply. `times`: how long the
    stages took.
    """

    layout: ItemLayout
    reference: ShmReference | None = None
    times: dict[str, float] = {}


def _as_plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no plain value")


_encoder = msgspec.msgpack.Encoder(enc_hook=_as_plain)
_message_decoder = msgspec.msgpack.Decoder(_ItemMessage)
_reply_decoder = msgspec.msgpack.Decoder(ItemReply)


def encode_job(
    job: ItemJob, media: object, *, processor: MultiModalProcessor, keep: bool
) -> tuple[bytes, list[Any]]:
    """The message, and the blocks that go with it. A `RequestError` for media in process that no
    processor understands.
    """
    if isinstance(media, MediaBytes):
        return encode_plain(_ItemMessage(job=job, keep=keep, form="bytes")), [media.data]
    checked, metadata = processor.check_media(job.modality, media, job.processor_kwargs)
    form, tensor = _as_tensor(checked)
    message = _ItemMessage(
        job=job,
        keep=keep,
        form=form,
        header=encode_header({"media": tensor}),
        metadata=metadata,
    )
    return encode_plain(message), [as_bytes(tensor).numpy().data]


def encode_plain(message: msgspec.Struct) -> bytes:
    """Return the bytes of a message, or raise a `RequestError` if an option in it is an object."""
    try:
        return _encoder.encode(message)
    except (TypeError, UnicodeEncodeError, OverflowError) as error:
        raise RequestError("options of media are plain numbers, texts, lists and maps") from error


def _as_tensor(media: object) -> tuple[str, torch.Tensor]:
    if isinstance(media, torch.Tensor):
        return "torch", media
    if isinstance(media, np.ndarray):
        return "numpy", torch.from_numpy(media)
    if isinstance(media, Image.Image):
        return "pil", torch.from_numpy(np.array(media))
    raise InvariantError(f"checked media can't be a {type(media).__name__}")


def decode_job(message: bytes, block: memoryview) -> tuple[ItemJob, object, bool]:
    """The job, its media, and whether to keep the result."""
    decoded = _message_decoder.decode(message)
    if decoded.form == "bytes":
        return decoded.job, bytes(block), decoded.keep
    tensor = decode_block(decoded.header, block)["media"]
    media: object = tensor
    if decoded.form == "numpy":
        media = tensor.numpy()
    elif decoded.form == "pil":
        media = Image.fromarray(tensor.numpy())
    if decoded.metadata is not None:
        media = media, decoded.metadata
    return decoded.job, media, decoded.keep


def encode_reply(reply: ItemReply) -> bytes:
    return _encoder.encode(reply)


def decode_reply(reply: bytes) -> ItemReply:
    return _reply_decoder.decode(reply)
