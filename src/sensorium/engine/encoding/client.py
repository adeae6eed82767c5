"""An engine's connections to a remote encoder on the same machine.

Connections are made when they are needed, and used again. An encoder that can't be reached is not
tried for a growing pause, so that requests don't wait for it. Thread-safe.

Invariants:
  1. Every future ends: a call has a deadline, and so has the time that it waits for a thread.
  2. A connection that failed in any way is closed and never used again.
  3. An answer is accepted only if it fits its item.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from sensorium.engine.encoding.service import EncoderCounts
from sensorium.engine.encoding.wire import (
    PROTOCOL,
    SCHEME,
    AskCounts,
    Counted,
    Encode,
    Encoded,
    Failed,
    FromEncoder,
    Hello,
    Identity,
    Refused,
    ToEncoder,
    check_path,
    decode_answer,
    encode_message,
    is_trusted,
)
from sensorium.multimodal.item_codec import decode_block
from sensorium.multimodal.pool.channel import Buffer, Channel, ChannelError
from sensorium.multimodal.pool.process import map_for_long
from sensorium.multimodal.processing.item_backend import FinishedItem, encode_job
from sensorium.multimodal.processing.item_worker import ItemJob
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.types.errors import CapacityError, EncoderLostError, ModelError, RequestError
from sensorium.types.multimodal import ENCODED, ProcessedItem

logger = logging.getLogger(__name__)
_NUM_CONNECTIONS = 8
_CONNECT_S = 5.0  # for an encoder that runs to accept a connection and introduce itself
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 30.0
_Answer = tuple[FromEncoder, memoryview]


class _WrongEncoderError(Exception):
    """The encoder answers, but not what this engine can use."""


@dataclass(slots=True)
class _Pause:
    """The growing pause after which an encoder that can't be reached is tried again."""

    until: float = 0.0  # of `time.monotonic`; nothing is tried before
    length_s: float = 0.0  # 0: the encoder was reached the last time
    changed: float = 0.0  # when the last failure was noted
    lock: threading.Lock = field(default_factory=threading.Lock)

    def may_try(self) -> bool:
        """Return whether this caller may try now. If so, other callers wait for the next time."""
        with self.lock:
            now = time.monotonic()
            if not self.length_s:
                return True
            if now < self.until:
                return False
            self.until = now + self.length_s
            return True

    def note_success(self) -> bool:
        """End the pause, and return whether there was one."""
        with self.lock:
            was_lost, self.length_s = bool(self.length_s), 0.0
            return was_lost

    def note_failure(self, began: float) -> bool:
        """Make the pause longer, and return whether the encoder could be reached before."""
        with self.lock:
            was_there = not self.length_s
            # Attempts that had begun before the last failure was noted have failed with it.
            if was_there or began >= self.changed:
                self.length_s = min(max(_FIRST_PAUSE_S, 2 * self.length_s), _MAX_PAUSE_S)
                self.changed = time.monotonic()
                self.until = self.changed + self.length_s
            return was_there


class WrongAnswerError(Exception):
    """The answer of an encoder does not fit its item."""


def read_item(job: ItemJob, answer: Encoded, block: memoryview, *, began: float) -> FinishedItem:
    """Return the item in an encoder's answer, or raise `WrongAnswerError` if it does not fit.

    The tensors are views of the block, which must be writable. `began` is when the work began, by
    `time.monotonic`.
    """
    try:
        tensors = dict(decode_block(answer.header, block))
    except RequestError as error:
        raise WrongAnswerError(f"its answer can't be read: {error}") from error
    encoded = tensors.get(ENCODED)
    if encoded is None or len(encoded) != answer.layout.num_embeds:
        raise WrongAnswerError("its answer does not have as many embeddings as the item")
    item = ProcessedItem(
        modality=job.modality, mm_hash=job.mm_hash, kwargs=tensors, layout=answer.layout
    )
    times = {"apart": time.monotonic() - began}
    return FinishedItem(result=item, times=times, is_stored=True)


class SocketEncoder:
    """An `EncoderService` over the Unix socket at `address` ("unix:PATH") of this machine."""

    def __init__(
        self,
        address: str,
        identity: Identity,
        processor: MultiModalProcessor | None,
        *,
        timeout_s: float,  # of an answer, and also of the wait before the question is sent
        num_connections: int = _NUM_CONNECTIONS,
    ) -> None:
        if not address.startswith(SCHEME):
            raise ModelError(f"encoder must be unix:PATH, not {address[:200]!r}")
        self._path = check_path(address.removeprefix(SCHEME))
        self._identity = identity
        self._processor = processor
        self._timeout_s = timeout_s
        self._pause = _Pause()
        self._lock = threading.Lock()  # of the fields below
        self._idle: list[Channel] = []
        self._sockets: set[socket.socket] = set()
        self._is_closed = False
        self._threads = ThreadPoolExecutor(num_connections, thread_name_prefix="encoder")

    def check(self) -> None:
        """Try to reach the encoder. Raise `ModelError` if its identity is not this engine's."""
        try:
            self._give_back(self._connect())
        except _WrongEncoderError as error:
            raise ModelError(f"the encoder at {self._path!r} can't be used: {error}") from error
        except CapacityError:
            pass  # the log has it; the encoder may be started later

    def encode(self, job: ItemJob, media: object) -> Future[FinishedItem]:
        try:
            return self._threads.submit(self._encode, job, media, time.monotonic())
        except RuntimeError:  # it was closed
            future: Future[FinishedItem] = Future()
            future.set_exception(EncoderLostError("the engine is closed"))
            return future

    def get_counts(self) -> EncoderCounts:
        """Return the numbers of items that the encoder has worked on, for all engines."""
        answer, _ = self._ask(AskCounts(), [])
        if not isinstance(answer, Counted):
            raise EncoderLostError("the encoder did not answer what it was asked")
        self._note_answer()
        return answer.counts

    def close(self) -> None:
        """Close all connections and end the threads. Items that still wait fail."""
        with self._lock:
            self._is_closed = True
            for each in self._sockets:
                try:
                    each.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for an answer
                except OSError:
                    continue
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _encode(self, job: ItemJob, media: object, asked: float) -> FinishedItem:
        began = time.monotonic()
        if began - asked > self._timeout_s:
            raise CapacityError("too many media items wait for the encoder: try again later")
        message, blocks = encode_job(job, media, processor=self._get_processor(), keep=False)
        answer, block = self._ask(Encode(message), blocks)
        if isinstance(answer, Failed):
            self._note_answer()
            raise answer.error.make_error()
        if not isinstance(answer, Encoded):
            raise self._lose("its answer is of the wrong kind", began)
        try:
            finished = read_item(job, answer, block, began=began)
        except WrongAnswerError as error:
            raise self._lose(str(error), began) from error
        self._note_answer()
        return finished

    def _get_processor(self) -> MultiModalProcessor:
        if self._processor is None:
            raise ModelError("this connection was made for questions only")
        return self._processor

    # ---- questions and answers

    def _ask(self, question: ToEncoder, blocks: list[Buffer]) -> _Answer:
        """Send a question, and return the answer. Raise `EncoderLostError` if there is none."""
        began = time.monotonic()
        channel = self._take()
        deadline = time.monotonic() + self._timeout_s
        try:
            channel.send(encode_message(question), blocks, deadline=deadline)
            frame, block = channel.receive(deadline=deadline, map_block=map_for_long)
            answer = decode_answer(frame)
        except (OSError, ChannelError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._drop(channel)
            raise self._lose(_describe(error), began) from error
        except BaseException:
            self._drop(channel)
            raise
        self._give_back(channel)
        return answer, block

    def _take(self) -> Channel:
        """Return a connection: one that was used before and is still open, or a new one."""
        while True:
            with self._lock:
                channel = self._idle.pop() if self._idle else None
            if channel is None:
                break
            if not channel.is_readable(0.0):
                return channel
            self._drop(channel)  # the encoder has closed it, since nothing was asked
        began = time.monotonic()
        try:
            return self._connect()
        except _WrongEncoderError as error:
            raise self._lose(str(error), began) from error

    def _connect(self) -> Channel:
        """Return a new connection to an encoder that introduced itself as one for this model.

        Raise `_WrongEncoderError` if it did not, and `CapacityError` if it is full or unreachable.
        """
        if not self._pause.may_try():
            raise EncoderLostError(f"the encoder at {self._path!r} can't be reached")
        began = time.monotonic()
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:  # the process has no more descriptors
            raise self._lose(_describe(error), began) from error
        channel = Channel(connection)
        with self._lock:
            self._sockets.add(connection)
            is_closed = self._is_closed
        try:
            if is_closed:
                raise EncoderLostError("the engine is closed")
            connection.settimeout(_CONNECT_S)
            connection.connect(self._path)
            if not is_trusted(connection):
                raise _WrongEncoderError("it belongs to another user")
            frame, _ = channel.receive(deadline=time.monotonic() + _CONNECT_S)
            self._check_hello(frame)
        except (OSError, ChannelError) as error:
            self._drop(channel)
            raise self._lose(_describe(error), began) from error
        except BaseException:
            self._drop(channel)
            raise
        return channel

    def _check_hello(self, frame: bytes) -> None:
        try:
            hello = decode_answer(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _WrongEncoderError("it is of another version of Sensorium") from error
        if isinstance(hello, Refused):
            raise hello.error.make_error()
        if not isinstance(hello, Hello) or hello.protocol != PROTOCOL:
            raise _WrongEncoderError("it is of another version of Sensorium")
        difference = self._identity.find_difference(hello.identity)
        if difference is not None:
            raise _WrongEncoderError(difference)

    def _give_back(self, channel: Channel) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(channel)
                return
        self._drop(channel)

    def _drop(self, channel: Channel) -> None:
        with self._lock:
            self._sockets.discard(channel.connection)
        channel.close()

    def _note_answer(self) -> None:
        """Note that the encoder can be used; a connection that it accepts does not show that."""
        if self._pause.note_success():
            logger.info("the encoder at %s is used again", self._path)

    def _lose(self, reason: str, began: float) -> EncoderLostError:
        """Note that an attempt that began at `began` has failed, and return its error."""
        # Each idle connection would wait once more for an encoder that hangs.
        with self._lock:
            idle, self._idle = self._idle, []
        for channel in idle:
            self._drop(channel)
        if self._pause.note_failure(began) and not self._is_closed:
            logger.warning(
                "the encoder at %s can't be used: %s; it is tried again after a pause. "
                "This engine encodes by itself until it is back, unless that is turned off.",
                self._path,
                reason,
            )
        return EncoderLostError(f"the encoder at {self._path!r} can't be used: {reason}")


def _describe(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error)
