"""The messages between engines and an encoder on the same machine, over a Unix socket.

First the encoder sends its identity. Then the engine asks and the encoder answers, one question at
a time. A message is msgpack, and its large block is memory that the receiver maps without a copy
(`multimodal.pool.channel`). Only processes of the same user or of root are trusted.
"""

from __future__ import annotations

import os
import socket
import struct

import msgspec

from sensorium.engine.encoding.service import EncoderCounts
from sensorium.types.errors import ErrorRecord, ModelError
from sensorium.types.multimodal import ItemLayout, ItemTimes

PROTOCOL = 2  # changes with the messages
SCHEME = "unix:"
_MAX_PATH_BYTES = 107  # man 7 unix
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides what an encoder makes of a media item.

    An engine takes encoder outputs only from an encoder with an equal identity.
    """

    weights: str
    dtype: str
    versions: tuple[str, ...]  # of libraries
    processing: tuple[str, ...]  # the options and limits of media
    processor: str = ""  # the fingerprint of the model's processor; empty: it does not matter

    def find_difference(self, other: Identity) -> str | None:
        """Return in words how another identity differs, or None if both are equal."""
        if self.weights != other.weights:
            return "it has other weights"
        if self.dtype != other.dtype:
            return f"its weights are {other.dtype}, not {self.dtype} (--dtype)"
        if self.versions != other.versions:
            pairs = zip(self.versions, other.versions, strict=False)
            first = next((f"{b} instead of {a}" for a, b in pairs if a != b), "others")
            return f"it runs with other versions of libraries: {first}"
        if self.processing != other.processing:
            pairs = zip(self.processing, other.processing, strict=False)
            first = next((f"{b} instead of {a}" for a, b in pairs if a != b), "others")
            return f"it was started with other options of media: {first}"
        if self.processor != other.processor:
            return "its processor of media has other settings, from files of the checkpoint"
        return None


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message of an encoder on every connection."""

    protocol: int
    identity: Identity


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first and last message of an encoder that has too many connections."""

    error: ErrorRecord


class Encode(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An engine's question for an encoder output. The media is in the message's block."""

    job: bytes  # as `item_backend.encode_job` makes it


class AskCounts(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A question for the numbers of items that the encoder has worked on."""


class Encoded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to `Encode`. The tensors are in the message's block, as `header` describes."""

    layout: ItemLayout
    header: bytes
    times: ItemTimes


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to an `Encode` that failed."""

    error: ErrorRecord


class Counted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    counts: EncoderCounts


FromEncoder = Hello | Refused | Encoded | Failed | Counted
ToEncoder = Encode | AskCounts
_from_encoder: msgspec.msgpack.Decoder[FromEncoder] = msgspec.msgpack.Decoder(FromEncoder)
_to_encoder: msgspec.msgpack.Decoder[ToEncoder] = msgspec.msgpack.Decoder(ToEncoder)
encode_message = msgspec.msgpack.Encoder().encode
decode_answer = _from_encoder.decode
decode_question = _to_encoder.decode


def check_path(path: str) -> str:
    """Return a path unchanged, or raise `ModelError` if the system can't have a socket there."""
    size = len(os.fsencode(path))
    if not path or size > _MAX_PATH_BYTES:
        raise ModelError(
            f"the path of a socket must have 1 to {_MAX_PATH_BYTES} bytes, but {path[:200]!r} has "
            f"{size}"
        )
    return path


def is_trusted(connection: socket.socket) -> bool:
    """Return whether the process at the other end belongs to this user or to root."""
    content = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(content)
    return user in (0, os.geteuid())
