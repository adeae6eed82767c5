"""A frontend's connection to one process of a core.

Messages arrive in the order in which they are sent, in both directions. Owns the socket and the
futures of answers that have not come yet. Used on one event loop. When the core is gone, `close`
fails these futures, and the client can't be used any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq
import zmq.asyncio

from sensorium.engine.core_process import core_messages as messages
from sensorium.types.errors import EngineLostError, SensoriumError
from sensorium.types.multimodal import MirrorUpdate, MissingItems, Transfer
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest

logger = logging.getLogger(__name__)


class CoreClient:
    """A connection of one frontend to the core's process.

    The callbacks run on the event loop when a message arrives: `on_outputs` with new outputs,
    `on_missing` with the media items that the core lacks, before the future of `add` gets its
    result, and `on_forget` after another frontend has reset the media cache.
    """

    def __init__(
        self,
        endpoint: str,
        identity: str,
        *,
        on_outputs: Callable[[Sequence[EngineCoreOutput]], None],
        on_missing: Callable[[MissingItems], None],
        on_forget: Callable[[], None],
    ) -> None:
        self._on_outputs = on_outputs
        self._on_missing = on_missing
        self._on_forget = on_forget
        self._answers: dict[str, asyncio.Future[MissingItems | None]] = {}
        self._rehearsals: dict[str, asyncio.Future[SensoriumError | None]] = {}  # by subject
        self._resets: dict[int, asyncio.Future[None]] = {}
        self._numbers = count()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.connect(endpoint)
        self._send(messages.Hello())
        self._reader = asyncio.get_running_loop().create_task(self._read())

    def add(
        self, request: EngineCoreRequest, make_transfer: Callable[[], Transfer]
    ) -> asyncio.Future[MissingItems | None]:
        """Send a request to the core, and return a future for the core's answer.

        Its result is `None` if the core accepted the request, and a `MissingItems` if it did not,
        because it lacks media items. The future gets an exception if the core refuses the request,
        or if the connection is closed. `make_transfer` is called right before sending; if the
        request can't be encoded, it is not called and a `RequestError` is raised.
        """
        encoded = messages.encode_request(request)
        message, frames = messages.encode_transfer(request, make_transfer())
        answer: asyncio.Future[MissingItems | None] = asyncio.get_running_loop().create_future()
        self._answers[request.request_id] = answer
        self._send(message, encoded, *frames)
        return answer

    def abort(self, request_ids: Sequence[str]) -> None:
        if request_ids:
            self._send(messages.Abort(tuple(request_ids)))

    def append_audio(
        self, request_id: str, features: npt.NDArray[np.float32] | None, *, is_last: bool
    ) -> None:
        """Send more features [bins, frames] of a request's audio; `None` only ends it."""
        if features is None:
            self._send(messages.AppendAudio(request_id, is_last=is_last))
            return
        message = messages.AppendAudio(request_id, len(features), is_last)
        self._send(message, np.ascontiguousarray(features))

    async def rehearse(
        self, subject: str, request: EngineCoreRequest, transfer: Transfer
    ) -> SensoriumError | None:
        """Let the core compute a dummy request without keeping anything of it; return its error.

        The error is `None` if the request went well, or if the core skipped it. There may be one
        rehearsal of a subject (a modality, or "text") at a time.
        """
        message, frames = messages.encode_transfer(request, transfer)
        done: asyncio.Future[SensoriumError | None] = asyncio.get_running_loop().create_future()
        self._rehearsals[subject] = done
        self._send(messages.Rehearse(subject, message), messages.encode_request(request), *frames)
        return await done

    def update_cache(self, update: MirrorUpdate) -> None:
        self._send(messages.UpdateCache(update))

    async def reset_cache(self, level: str) -> None:
        number = next(self._numbers)
        done = self._resets[number] = asyncio.get_running_loop().create_future()
        self._send(messages.ResetCache(number, level))
        await done

    def close(self, reason: str) -> None:
        self._reader.cancel()
        waiting: list[asyncio.Future[Any]] = [
            *self._answers.values(),
            *self._rehearsals.values(),
            *self._resets.values(),
        ]
        for future in waiting:
            if not future.done():
                future.set_exception(EngineLostError(reason))
                future.exception()  # marks it as read, because no caller may be left to do so
        self._answers.clear()
        self._rehearsals.clear()
        self._resets.clear()
        self._socket.close()
        self._context.term()

    def _send(self, message: messages.ToCore, *frames: Any) -> None:
        # The queue has no limit, so the message is in the queue when this returns.
        sent: Any = self._socket.send_multipart(
            [messages.encode_message(message), *frames], copy=False
        )
        sent.add_done_callback(_log_failure)

    async def _read(self) -> None:
        while True:
            (frame,) = await self._socket.recv_multipart()
            try:
                self._handle(frame)
            except Exception:  # a bug; one message must not end the connection
                logger.exception("a message from the core process can't be handled and is lost")

    def _handle(self, frame: bytes) -> None:
        message = messages.decode_from_core(frame)
        if isinstance(message, messages.CoreOutputs):
            for answer in message.answers:
                self._take_answer(answer)
            if message.outputs:
                self._on_outputs(message.outputs)
        elif isinstance(message, messages.Rehearsed):
            error = None if message.error is None else message.error.make_error()
            done = self._rehearsals.pop(message.subject)
            if not done.done():  # its caller is gone
                done.set_result(error)
        elif isinstance(message, messages.ResetDone):
            self._resets.pop(message.number).set_result(None)
        elif isinstance(message, messages.ForgetMedia):
            self._on_forget()

    def _take_answer(self, answer: messages.Answer) -> None:
        if answer.missing is not None:
            self._on_missing(answer.missing)
        waiting = self._answers.pop(answer.request_id)
        if waiting.done():
            return
        if answer.refusal is not None:
            waiting.set_exception(answer.refusal.make_error())
        else:
            waiting.set_result(answer.missing)


def _log_failure(sent: asyncio.Future[Any]) -> None:
    if not sent.cancelled() and sent.exception() is not None:
        logger.error("a message to the core process could not be sent: %s", sent.exception())
