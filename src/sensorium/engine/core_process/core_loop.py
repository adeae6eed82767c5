"""The core in a process of its own: messages in, steps, news out.

Owns the socket, and which frontend each request belongs to. One thread; `stop` and
`forget_frontend` may be called from others. A frontend that is gone, as the parent says or the
socket notices, leaves no request behind.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import zmq

from sensorium.engine.core_process.core_messages import (
    Abort,
    AddRequest,
    Answer,
    ForgetMedia,
    FromCore,
    News,
    ResetCache,
    ResetDone,
    UpdateCache,
    decode_request,
    decode_to_core,
    encode_message,
)
from sensorium.engine.core_process.engine_core import EngineCore
from sensorium.types.errors import (
    CapacityError,
    FailedRequestError,
    InvariantError,
    RequestError,
    make_record,
)
from sensorium.types.request import EngineCoreOutput
from sensorium.types.transfer import Transfer

logger = logging.getLogger(__name__)
OnStep = Callable[[EngineCore, Sequence[EngineCoreOutput]], None]
_MAX_MESSAGES = 64  # taken between two steps, so that a crowd of new requests doesn't stop the rest
# A device that has failed fails every step from then on; a fresh process may not.
_MAX_FAILED_STEPS = 8
_IDLE_S = 1.0


def _ignore(core: EngineCore, outputs: Sequence[EngineCoreOutput]) -> None:
    del core, outputs


def _note_nothing() -> None:
    """A loop that is not watched."""


class CoreLoop:
    """`on_step` is called after each step, before its news is sent, and when messages have changed
    something without one. `on_progress` is called by the thread that computes, between the things
    that it does, and at least every `idle_s` seconds while there is nothing to do.
    """

    def __init__(
        self,
        core: EngineCore,
        endpoint: str,
        *,
        on_step: OnStep = _ignore,
        on_progress: Callable[[], None] = _note_nothing,
        idle_s: float = _IDLE_S,
    ) -> None:
        self._core = core
        self._on_step = on_step
        self._on_progress = on_progress
        self._idle_ms = max(1, round(1000 * idle_s))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # A router drops what it can't deliver; here it says so, and nothing is too much: what is
        # under way is bounded by the requests that frontends admit.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.bind(endpoint)
        self._frontends: set[bytes] = set()
        self._gone: set[bytes] = set()  # some of their messages may still come
        self._owners: dict[str, bytes] = {}  # of the requests that have not ended
        self._answers: dict[bytes, list[Answer]] = {}  # that were not sent yet
        self._num_failed_steps = 0
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_stopped = False

    def stop(self) -> None:
        """From any thread: `run` returns after the step that it is in."""
        self._call(self._stop)

    def forget_frontend(self, identity: str) -> None:
        """From any thread: this frontend has ended, and so do its requests."""
        self._call(lambda: self._forget_frontend(identity.encode()))

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        try:
            while not self._is_stopped:
                poller.poll(0 if self._core.has_requests else self._idle_ms)
                self._on_progress()
                self._run_calls()
                self._receive()
                self._send_news(self._step())
        finally:
            self._socket.close()
            self._context.term()
            os.close(self._wake_fd)

    def _call(self, function: Callable[[], None]) -> None:
        self._calls.put(function)
        os.eventfd_write(self._wake_fd, 1)

    def _run_calls(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return
        while not self._calls.empty():
            self._calls.get()()

    def _stop(self) -> None:
        self._is_stopped = True

    def _forget_frontend(self, frontend: bytes) -> None:
        self._frontends.discard(frontend)
        self._gone.add(frontend)
        self._answers.pop(frontend, None)
        self._abort([key for key, owner in self._owners.items() if owner == frontend])

    def _receive(self) -> None:
        for _ in range(_MAX_MESSAGES):
            try:
                frontend, first, *rest = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if frontend.bytes in self._gone:
                continue
            self._frontends.add(frontend.bytes)
            self._handle(frontend.bytes, first.buffer, [frame.buffer for frame in rest])
            self._on_progress()

    def _handle(self, frontend: bytes, first: memoryview, rest: list[memoryview]) -> None:
        message = decode_to_core(first)
        if isinstance(message, AddRequest):
            answer = self._add(frontend, message, rest)
            self._answers.setdefault(frontend, []).append(answer)
        elif isinstance(message, Abort):
            self._abort(message.request_ids)
        elif isinstance(message, UpdateCache):
            self._core.payloads.receiver.receive((), Transfer(update=message.update))
        elif isinstance(message, ResetCache):
            self._reset(frontend, message)

    def _add(self, frontend: bytes, message: AddRequest, rest: list[memoryview]) -> Answer:
        request, transfer = decode_request(message, rest[0], rest[1:])
        request_id = request.request_id
        try:
            missing = self._core.add_request(request, transfer)
        except (RequestError, CapacityError) as error:
            return Answer(request_id, refusal=make_record(error))
        except Exception as error:  # the boundary at which one request fails and others don't
            logger.exception("request %s could not be added", request_id)
            reason = f"internal error: {type(error).__name__}: {error}"
            return Answer(request_id, refusal=make_record(FailedRequestError(reason)))
        if missing is None:
            self._owners[request_id] = frontend
        return Answer(request_id, missing=missing)

    def _abort(self, request_ids: Sequence[str]) -> None:
        """Nobody waits for the outputs."""
        self._core.abort_requests(request_ids)
        for request_id in request_ids:
            self._owners.pop(request_id, None)

    def _reset(self, frontend: bytes, message: ResetCache) -> None:
        core = self._core
        if message.level == "prefix":
            core.scheduler.kv_cache.clear_cache()
        elif message.level == "encoder":
            core.scheduler.encoder_cache.clear_cache()
            if not core.has_requests:
                core.step()  # the worker drops what is no longer there
        elif message.level == "mm":
            core.payloads.receiver.clear_cache()
            for other in self._frontends - {frontend}:
                self._send(other, ForgetMedia())
        else:
            raise InvariantError(f"there is no cache {message.level!r}")
        self._send(frontend, ResetDone(message.number))

    def _step(self) -> list[EngineCoreOutput]:
        outputs: list[EngineCoreOutput] = []
        if self._core.has_requests:
            outputs = self._core.step()
            self._count_failure(outputs)
        self._on_step(self._core, outputs)
        return outputs

    def _count_failure(self, outputs: Sequence[EngineCoreOutput]) -> None:
        errors = [output.error for output in outputs if output.error is not None]
        failures = [error for error in errors if error.kind == FailedRequestError.__name__]
        self._num_failed_steps = self._num_failed_steps + 1 if failures else 0
        if self._num_failed_steps >= _MAX_FAILED_STEPS:
            reason = failures[-1].message
            raise InvariantError(f"{_MAX_FAILED_STEPS} steps failed in a row: {reason}")

    def _send_news(self, outputs: Sequence[EngineCoreOutput]) -> None:
        if not outputs and not self._answers:
            return
        sorted_outputs: dict[bytes, list[EngineCoreOutput]] = {}
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if owner is None:
                continue
            sorted_outputs.setdefault(owner, []).append(output)
            if output.finish_reason is not None:
                del self._owners[output.request_id]
        answers, self._answers = self._answers, {}
        for frontend in answers.keys() | sorted_outputs.keys():
            own_answers = tuple(answers.get(frontend, ()))
            self._send(frontend, News(own_answers, tuple(sorted_outputs.get(frontend, ()))))

    def _send(self, frontend: bytes, message: FromCore) -> None:
        try:
            self._socket.send_multipart([frontend, encode_message(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            logger.warning("frontend %s is gone", frontend.decode(errors="replace"))
            self._forget_frontend(frontend)
