"""Runs the core in a process of its own: it receives messages, steps, and sends outputs.

Owns the socket, and the map from requests to their frontends. Runs in one thread; `stop` and
`forget_frontend` may be called from other threads. When a frontend is gone, because the parent
process reports it or the socket can't reach it, its requests are aborted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from math import ceil
from queue import SimpleQueue

import zmq

from sensorium.engine.core_process import core_messages as messages
from sensorium.engine.core_process.engine_core import EngineCore
from sensorium.types.errors import (
    CapacityError,
    ErrorRecord,
    FailedRequestError,
    InvariantError,
    RequestError,
    make_record,
)
from sensorium.types.multimodal import Transfer
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest

logger = logging.getLogger(__name__)
OnStep = Callable[[EngineCore, Sequence[EngineCoreOutput]], None]
Rehearse = Callable[[EngineCoreRequest, Transfer], ErrorRecord | None]
_MAX_MESSAGES = 64  # between two steps, so that many new requests don't stop the running ones
# After so many failed steps in a row the process ends: if the device has failed, every later step
# also fails, but a new process may work again.
_MAX_FAILED_STEPS = 8
_IDLE_S = 1.0


class CoreLoop:
    """The loop of the core's process: receive messages, compute a step, send the outputs.

    `rehearse` computes a dummy request and returns its error; if it is `None`, dummy requests are
    skipped. `on_step` is called in every round with the step's outputs, before these are sent.
    `on_progress` is called in the loop's thread after each message and before each step, at least
    every `idle_s` seconds while the core is idle.
    """

    def __init__(
        self,
        core: EngineCore,
        endpoint: str,
        *,
        rehearse: Rehearse | None = None,
        on_step: OnStep = lambda *_: None,
        on_progress: Callable[[], None] = lambda: None,
        idle_s: float = _IDLE_S,
    ) -> None:
        self._core = core
        self._rehearse = rehearse
        self._rehearsed: dict[str, ErrorRecord | None] = {}  # subject -> how its rehearsal ended
        self._on_step = on_step
        self._on_progress = on_progress
        self._idle_ms = max(1, round(1000 * idle_s))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # With this option a router raises an error for what it can't deliver, instead of dropping
        # it. Its queues need no limit: frontends limit the requests that are under way.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.bind(endpoint)
        self._frontends: set[bytes] = set()
        self._gone: set[bytes] = set()  # frontends that ended; their last messages may still come
        self._owners: dict[str, bytes] = {}  # id of a request that has not ended -> frontend
        # frontend -> answers that were not sent yet
        self._answers: dict[bytes, list[messages.Answer]] = {}
        self._ended: list[EngineCoreOutput] = []  # outputs of requests that ended between steps
        self._num_failed_steps = 0
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()  # from other threads
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_stopped = False

    def stop(self) -> None:
        """Make `run` return after its current step."""
        self._call(self._stop)

    def forget_frontend(self, identity: str) -> None:
        """Abort the requests of a frontend that has ended, and ignore its later messages."""
        self._call(lambda: self._forget_frontend(identity.encode()))

    def run(self) -> None:
        """Run until `stop` is called; raise an `InvariantError` if too many steps fail in a row."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        loader = self._core.loader
        if loader is not None:
            loader.listen(lambda: os.eventfd_write(self._wake_fd, 1))
        try:
            while not self._is_stopped:
                poller.poll(0 if self._core.has_requests else self._get_pause_ms())
                self._on_progress()
                self._run_calls()
                self._receive()
                self._send_outputs(self._step())
        finally:
            if loader is not None:
                loader.listen(None)  # its threads must not write to a closed descriptor
            self._socket.close()
            self._context.term()
            os.close(self._wake_fd)

    def _get_pause_ms(self) -> int:
        """Return how many milliseconds the loop may wait for a message or the end of a look-up."""
        loader = self._core.loader
        wait_s = None if loader is None else loader.wait_s
        return self._idle_ms if wait_s is None else min(self._idle_ms, ceil(1000 * wait_s))

    def _call(self, function: Callable[[], None]) -> None:
        """Queue a function to be called in the loop's thread, and wake the loop."""
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
        message = messages.decode_to_core(first)
        if isinstance(message, messages.AddRequest):
            answer = self._add(frontend, message, rest)
            self._answers.setdefault(frontend, []).append(answer)
        elif isinstance(message, messages.AppendAudio):
            features = messages.decode_audio(message, rest)
            ended = self._core.append_audio(message.request_id, features, is_last=message.is_last)
            self._ended += ended
        elif isinstance(message, messages.Abort):
            self._abort(message.request_ids)
        elif isinstance(message, messages.Rehearse):
            self._send(frontend, self._answer_rehearsal(message, rest))
        elif isinstance(message, messages.UpdateCache):
            self._core.payloads.receiver.receive((), Transfer(update=message.update))
        elif isinstance(message, messages.ResetCache):
            self._reset(frontend, message)

    def _add(
        self, frontend: bytes, message: messages.AddRequest, rest: list[memoryview]
    ) -> messages.Answer:
        request, transfer = messages.decode_request(message, rest[0], rest[1:])
        request_id = request.request_id
        try:
            missing = self._core.add_request(request, transfer)
        except (RequestError, CapacityError) as error:
            return messages.Answer(request_id, refusal=make_record(error))
        except Exception as error:  # the boundary at which one request fails and no other
            logger.exception("request %s fails: it can't be added to the core", request_id)
            reason = f"internal error: {type(error).__name__}: {error}"
            return messages.Answer(request_id, refusal=make_record(FailedRequestError(reason)))
        if missing is None:
            self._owners[request_id] = frontend
        return messages.Answer(request_id, missing=missing)

    def _answer_rehearsal(
        self, message: messages.Rehearse, rest: list[memoryview]
    ) -> messages.Rehearsed:
        """Compute a dummy request, unless one of its subject was computed before, and answer it.

        It is skipped while there are real requests, which warm up the model and should not wait.
        """
        subject = message.subject
        if self._rehearse is not None and subject not in self._rehearsed:
            if self._core.has_requests:
                return messages.Rehearsed(subject)
            request, transfer = messages.decode_request(message.request, rest[0], rest[1:])
            self._rehearsed[subject] = self._rehearse(request, transfer)
        return messages.Rehearsed(subject, self._rehearsed.get(subject))

    def _abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests in the core. Their frontends get no further outputs for them."""
        self._core.abort_requests(request_ids)
        for request_id in request_ids:
            self._owners.pop(request_id, None)

    def _reset(self, frontend: bytes, message: messages.ResetCache) -> None:
        core = self._core
        if message.level == "prefix":
            core.scheduler.kv_cache.clear_cache()
        elif message.level == "encoder":
            core.scheduler.encoder_cache.clear_cache()
            if not core.has_requests:
                core.step()  # an empty step, in which the worker drops its tensors
        elif message.level == "mm":
            core.payloads.receiver.clear_cache()
            for other in self._frontends - {frontend}:
                self._send(other, messages.ForgetMedia())
        else:
            raise InvariantError(
                f"there is no cache called {message.level!r}: use prefix, encoder or mm"
            )
        self._send(frontend, messages.ResetDone(message.number))

    def _step(self) -> list[EngineCoreOutput]:
        outputs, self._ended = self._ended, []
        if self._core.has_requests:
            outputs += self._core.step()
            self._count_failure(outputs)
        self._on_step(self._core, outputs)
        return outputs

    def _count_failure(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Count failed steps in a row. A step without outputs neither fails nor succeeds."""
        if not outputs:
            return
        errors = [output.error for output in outputs if output.error is not None]
        failures = [error for error in errors if error.kind == FailedRequestError.__name__]
        self._num_failed_steps = self._num_failed_steps + 1 if failures else 0
        if self._num_failed_steps >= _MAX_FAILED_STEPS:
            reason = failures[-1].message
            raise InvariantError(f"{_MAX_FAILED_STEPS} steps of the core failed in a row: {reason}")

    def _send_outputs(self, outputs: Sequence[EngineCoreOutput]) -> None:
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
            own_outputs = tuple(sorted_outputs.get(frontend, ()))
            self._send(frontend, messages.CoreOutputs(own_answers, own_outputs))

    def _send(self, frontend: bytes, message: messages.FromCore) -> None:
        try:
            self._socket.send_multipart([frontend, messages.encode_message(message)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            logger.warning(
                "the frontend process %s can't be reached: its requests are aborted",
                frontend.decode(errors="replace"),
            )
            self._forget_frontend(frontend)
