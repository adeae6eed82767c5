"""What a worker of the pool runs: made once by a factory in the worker, called once per job.

What the parent and a worker of the pool say to each other. Blocks of bytes go beside these.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import msgspec

from sensorium.types.errors import CapacityError, ErrorRecord, RequestError, make_record

if TYPE_CHECKING:
    from sensorium.types.multimodal import MultiModalKwargsItem


class CostlyJobError(Exception):
    """A job is more work than it was given time for: it is to be run as a long one."""

    def __init__(self, cost_s: float) -> None:
        super().__init__(f"about {cost_s:.1f} s of work")
        self.cost_s = cost_s


class Handler(Protocol):
    """Made by `factory(settings: bytes)`. Called from one thread."""

    def __call__(
        self, job: bytes, block: memoryview, *, max_cost_s: float
    ) -> tuple[bytes, MultiModalKwargsItem]:
        """A reply and tensors, which may be none. `block` is writable, the worker's own, and not
        kept after the call. The message of a `RequestError` or a `CapacityError` reaches the
        caller; of any other error only that there was one. A handler that sees that the job is
        more than `max_cost_s` of work raises `CostlyJobError` instead of doing it.
        """
        ...

    def close(self) -> None:
        """The worker ends. Not called when it is killed."""
        ...


NOT_PROCESSED = "it could not be processed: the server failed, and its log has the reason"
NO_MEMORY = "it needs more memory to be processed than an item may take"
_MAX_MESSAGE_LENGTH = 2000


class Start(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the worker, first of all. `handler` is "package.module:factory"."""

    handler: str
    settings: bytes


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From the worker: the handler was made, jobs may come."""


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From the worker, its last word: the handler could not be made."""

    reason: str


class Job(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To the worker; its input is the block beside it."""

    job: bytes
    max_cost_s: float  # a job that is more work is answered by `Costly`; infinite: any may be
    is_long: bool  # whether it is known to be long work, which is done at a low priority


class Reply(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From the worker. `header` describes the tensors in the block beside it; empty: none."""

    reply: bytes
    header: bytes


class Failure(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From the worker: the job failed alone."""

    error: ErrorRecord


class Costly(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From the worker: the job was not done, since it is about `cost_s` seconds of work."""

    cost_s: float


Message = Start | Ready | StartFailed | Job | Reply | Failure | Costly

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_message(frame: bytes) -> Message:
    return _decoder.decode(frame)


def make_failure(error: RequestError | CapacityError) -> Failure:
    """Return the message about an error, cut to a length that a frame can hold."""
    record = make_record(error)
    return Failure(replace(record, message=record.message[:_MAX_MESSAGE_LENGTH]))
