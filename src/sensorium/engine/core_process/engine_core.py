"""The step loop: the scheduler decides, the worker obeys, the scheduler learns.

Owns the scheduler, the worker and the processed tensors of requests in flight. A request that is
refused at `add_request` leaves nothing behind; one that is accepted gets exactly one output with a
finish reason.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

from sensorium.core.scheduler import Scheduler
from sensorium.engine.core_process.payload_store import PayloadStore
from sensorium.types.errors import InvariantError, RequestError
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest
from sensorium.types.scheduling import ModelRunnerOutput, SchedulerOutput
from sensorium.types.transfer import MissingItems, Transfer

logger = logging.getLogger(__name__)
_MAX_IDLE_STEPS = 8  # a step may be empty once in a while; a row of them means that nobody can move


class Runner(Protocol):
    @property
    def num_encoder_bytes(self) -> int:
        """Of all encoder outputs that it holds."""
        ...

    def add_request(self, request: EngineCoreRequest) -> None: ...

    def forget_request(self, request_id: str) -> None: ...

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput: ...


class EngineCore:
    def __init__(self, scheduler: Scheduler, runner: Runner, payloads: PayloadStore) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.payloads = payloads
        self._num_idle_steps = 0

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_requests

    def add_request(self, request: EngineCoreRequest, transfer: Transfer) -> MissingItems | None:
        """Accept a request with the media that its transfer leads to; or say what has to be sent,
        or raise a `RequestError`. A transfer is applied to the cache whatever becomes of it.
        """
        if request.request_id in self.scheduler.requests:
            self.payloads.receiver.receive((), transfer)
            raise RequestError(f"request id {request.request_id!r} is in use")
        try:
            missing = self.payloads.add(request, transfer)
            if missing is not None:
                return missing
            self.runner.add_request(request)
            self.scheduler.add_request(request)
        except BaseException:  # a refusal, a bug or an interruption: nothing is left behind
            self._forget(request.request_id)
            raise
        return None

    def abort_requests(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """End requests at their callers' wish. Those that have ended already are passed over."""
        aborted = [self.scheduler.abort_request(request_id) for request_id in request_ids]
        outputs = [output for output in aborted if output is not None]
        self._forget_finished(outputs)
        return outputs

    def step(self) -> list[EngineCoreOutput]:
        """Compute one step; the news of its requests."""
        if self._num_idle_steps >= _MAX_IDLE_STEPS:
            raise InvariantError(
                f"{len(self.scheduler.requests)} requests, and none can be scheduled"
            )
        scheduled = self.scheduler.schedule()
        is_idle = scheduled.is_empty and self.has_requests
        self._num_idle_steps = self._num_idle_steps + 1 if is_idle else 0
        try:
            result = self.runner.execute(scheduled)
        except BaseException as error:
            # Our bug, no memory or an interruption: requests of later steps must not suffer.
            reason = f"internal error: {type(error).__name__}: {error}"
            outputs = self.scheduler.fail_step(scheduled, reason)
            self._forget_finished(outputs)
            if not isinstance(error, Exception):
                raise
            logger.exception("a step of %d requests failed", len(scheduled.scheduled))
            return outputs
        if result.mode is not None:
            self.scheduler.counters.steps[result.mode] += 1
        outputs = self.scheduler.update_from_output(scheduled, result)
        self._forget_finished(outputs)
        return outputs

    def _forget_finished(self, outputs: Iterable[EngineCoreOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._forget(output.request_id)

    def _forget(self, request_id: str) -> None:
        self.payloads.release(request_id)
        self.runner.forget_request(request_id)
