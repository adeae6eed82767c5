"""Computes steps: the scheduler plans, the worker computes, the scheduler takes the result.

While the worker computes one step, the next one is planned. Owns the scheduler, the worker and the
processed tensors of requests in flight. A request that is refused at `add_request` leaves nothing
behind; one that is accepted gets exactly one output with a finish reason.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from sensorium.core.scheduler import Scheduler
from sensorium.multimodal.cache.interface import ReceiverCache
from sensorium.types.errors import InvariantError, RequestError
from sensorium.types.multimodal import (
    ENCODED,
    PRECOMPUTED,
    MissingItems,
    MultiModalKwargsItem,
    Transfer,
)
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest
from sensorium.types.scheduling import SchedulerOutput
from sensorium.worker.streaming_runner import StreamingRunner

if TYPE_CHECKING:
    import torch

    from sensorium.engine.core_process.output_loader import OutputLoader
    from sensorium.worker.model_runner import LaunchedStep, ModelRunner

logger = logging.getLogger(__name__)
_MAX_IDLE_STEPS = 8  # one step may be empty, but after so many in a row no request can ever run
_MAX_OUTPUT_BYTES = 2**30  # of encoder outputs found in a store; then no more are looked up
_FIRST_TOKEN_S = 0.0005  # how long a first token is awaited before the next step is launched


class PayloadStore(Mapping[str, MultiModalKwargsItem]):
    """The processed tensors of all media items in unfinished requests, as a mapping by `mm_hash`.

    The core adds and releases items, and the worker reads them. `receiver` is the core's side of
    the media cache, which also has items that a frontend need not send again.

    Invariant: the tensors that are read for an item belong to a request that has not ended. Two
    requests may have received equal tensors in different memory; each holds its own.
    """

    def __init__(self, receiver: ReceiverCache) -> None:
        self.receiver = receiver
        # mm_hash -> request id -> tensors
        self._items: dict[str, dict[str, MultiModalKwargsItem]] = {}
        self._hashes_of: dict[str, tuple[str, ...]] = {}  # request id -> mm_hashes
        self._outputs: dict[str, torch.Tensor] = {}  # mm_hash -> its encoder output
        self.num_output_bytes = 0

    def __getitem__(self, mm_hash: str) -> MultiModalKwargsItem:
        item = next(iter(self._items[mm_hash].values()))
        output = self._outputs.get(mm_hash)
        return item if output is None else {**item, ENCODED: output}

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, request: EngineCoreRequest, transfer: Transfer) -> MissingItems | None:
        """Keep the tensors of a request's media items until `release`, and return `None`.

        If the core lacks some items, nothing is kept, and the items that the frontend has to send
        are returned. Raise an `InvariantError` if the request was already added.
        """
        if request.request_id in self._hashes_of:
            raise InvariantError(f"media of request {request.request_id!r} was added twice")
        hashes = tuple(dict.fromkeys(feature.mm_hash for feature in request.mm_features))
        received = self.receiver.receive(hashes, transfer)
        if isinstance(received, MissingItems):
            return received
        for mm_hash in hashes:
            self._items.setdefault(mm_hash, {})[request.request_id] = received[mm_hash]
        self._hashes_of[request.request_id] = hashes
        return None

    def add_output(self, mm_hash: str, output: torch.Tensor) -> None:
        """Keep an item's encoder output next to its tensors, until it is used or released."""
        if mm_hash in self._items and mm_hash not in self._outputs:
            self._outputs[mm_hash] = output
            self.num_output_bytes += output.nbytes

    def drop_output(self, mm_hash: str) -> None:
        """Drop the encoder output of an item, if there is one."""
        if (output := self._outputs.pop(mm_hash, None)) is not None:
            self.num_output_bytes -= output.nbytes

    def release(self, request_id: str) -> None:
        """Drop the tensors of a request's media items. An unknown request id is ignored."""
        hashes = self._hashes_of.pop(request_id, ())
        for mm_hash in hashes:
            del self._items[mm_hash][request_id]
            if not self._items[mm_hash]:
                del self._items[mm_hash]
                self.drop_output(mm_hash)
        self.receiver.release(hashes)


class EngineCore:
    """A scheduler and a worker that compute all requests together, one step after another.

    With `overlap`, a step is planned and launched before the results of the previous step are read,
    so that the device always has work. At most one step is under way between two calls. With a
    `loader`, a new request is held while encoder outputs of its media are looked up in a store.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        payloads: PayloadStore,
        *,
        overlap: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.payloads = payloads
        self.loader: OutputLoader | None = None  # set when the engine is built and tried
        self._overlap = overlap
        self._under_way: tuple[SchedulerOutput, LaunchedStep] | None = None
        self._kept: list[EngineCoreOutput] = []  # outputs of a call that was interrupted
        self._num_idle_steps = 0

    @property
    def has_requests(self) -> bool:
        """Return whether `step` has something to do: there are requests, or a step is under way."""
        if self.scheduler.has_requests or self._under_way is not None or self._kept:
            return True
        return self.loader is not None and self.loader.has_answers

    @property
    def is_busy(self) -> bool:
        """Return whether there is something to do, now or after the look-ups of held requests."""
        return self.has_requests or bool(self.scheduler.held)

    def wait(self) -> None:
        """Wait until `step` has something to do, if all requests are held."""
        if self.loader is not None and not self.has_requests:
            self.loader.wait()

    def add_request(self, request: EngineCoreRequest, transfer: Transfer) -> MissingItems | None:
        """Accept a request together with its media, and return `None`.

        If the core lacks media items, the request is not accepted, and the items that the frontend
        has to send are returned. Raise a `RequestError` if the request can't be served. In every
        case `transfer` is passed to the core's media cache, which must receive all transfers in
        order.
        """
        if request.request_id in self.scheduler.requests:
            self.payloads.receiver.receive((), transfer)
            raise RequestError(f"request id {request.request_id!r} is in use: choose another one")
        try:
            missing = self.payloads.add(request, transfer)
            if missing is not None:
                return missing
            self.runner.add_request(request)
            self.scheduler.add_request(request)
        except BaseException:  # a refusal, a bug or an interruption: nothing is left behind
            self._forget(request.request_id)
            raise
        if self.loader is not None and request.mm_features:
            self._look_up(self.loader, request)
        return None

    def _look_up(self, loader: OutputLoader, request: EngineCoreRequest) -> None:
        """Look up the encoder outputs that a new request needs, and hold the request meanwhile."""
        if self.payloads.num_output_bytes > _MAX_OUTPUT_BYTES:
            return
        wanted = {}
        for mm_index in self.scheduler.get_missing_items(request.request_id):
            feature = request.mm_features[mm_index]
            item = self.payloads[feature.mm_hash]
            if feature.has_content_hash and PRECOMPUTED not in item and ENCODED not in item:
                wanted[feature.mm_hash] = feature.mm_position.get_num_embeds()
        if loader.begin(request.request_id, wanted):
            self.scheduler.hold(request.request_id)

    def _take_loaded(self) -> None:
        """Release held requests to the scheduler, if their look-ups are answered."""
        if self.loader is None:
            return
        for request_id, found in self.loader.take_answered():
            for mm_hash, output in found.items():
                self.payloads.add_output(mm_hash, output)
            self.scheduler.release(request_id)

    def abort_requests(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """End requests that are no longer wanted, if they exist, and return their last outputs."""
        aborted = [self.scheduler.abort_request(request_id) for request_id in request_ids]
        outputs = [output for output in aborted if output is not None]
        self._forget_finished(outputs)
        return outputs

    def append_audio(
        self, request_id: str, features: torch.Tensor | None, *, is_last: bool = False
    ) -> list[EngineCoreOutput]:
        """Give a request more audio, as features [bins, frames]; return its last output if it ends.

        It ends with this call if the audio has ended, and all of it was transcribed before.
        Otherwise the list is empty. Audio for an unknown or ended request is dropped.
        """
        if request_id not in self.scheduler.requests:
            return []
        if not isinstance(self.runner, StreamingRunner):
            raise InvariantError(f"request {request_id!r} takes no streaming audio")
        num_positions = 0 if features is None else self.runner.append_audio(request_id, features)
        output = self.scheduler.append_audio(request_id, num_positions, is_last=is_last)
        outputs = [] if output is None else [output]
        self._forget_finished(outputs)
        return outputs

    def step(self) -> list[EngineCoreOutput]:
        """Compute one step for the running requests, and return new outputs.

        With overlap these are the outputs of the previous step. If the worker fails, the requests
        of the step that failed end with an error. Raise an `InvariantError` if no request could run
        for several steps.
        """
        if self._num_idle_steps >= _MAX_IDLE_STEPS:
            raise InvariantError(
                f"none of {len(self.scheduler.requests)} requests ran in {_MAX_IDLE_STEPS} steps"
            )
        self._take_loaded()
        if self._under_way is not None and self._is_held_up():
            self._kept += self._finish_last()
        plan = self.scheduler.schedule()
        is_idle = plan.is_empty and self.has_requests and self._under_way is None
        self._num_idle_steps = self._num_idle_steps + 1 if is_idle else 0
        try:
            launched = self.runner.launch(plan)
        except BaseException as error:
            outputs = self._take_kept() + self._finish_last()
            failed = self._fail(plan, error)
            if not isinstance(error, Exception):
                ended = {output.request_id for output in failed}
                self._kept = [output for output in outputs if output.request_id not in ended]
                raise
            return outputs + failed
        outputs = self._take_kept() + self._finish_last((plan, launched))
        try:
            is_finished_now = not self._overlap or plan.is_empty or self._is_short(plan, launched)
        except BaseException:
            self._kept = outputs
            raise
        return outputs + self._finish_last() if is_finished_now else outputs

    def _is_held_up(self) -> bool:
        """Return whether at least half of the running requests wait for the step under way.

        Without these requests the next step would be half empty. And both halves would stay in
        separate steps, because each would wait while the other one's step is computed.
        """
        running = self.scheduler.running
        num_waiting = sum(request.waits_for_token for request in running)
        return num_waiting > 0 and 2 * num_waiting >= len(running)

    def _is_short(self, plan: SchedulerOutput, launched: LaunchedStep) -> bool:
        """Return whether a step with first tokens is done a moment after its launch.

        Launching the next step takes longer than a short prompt needs on the device. So its token
        is awaited for a moment, in which the device has work anyway.
        """
        if not plan.has_first_tokens:
            return False
        try:
            return self.runner.is_done_within(_FIRST_TOKEN_S, launched)
        except Exception:  # an error of the device, which is raised again when the step is finished
            logger.debug("the device can't be asked whether a step is done", exc_info=True)
            return False

    def _take_kept(self) -> list[EngineCoreOutput]:
        kept, self._kept = self._kept, []
        return kept

    def _finish_last(
        self, following: tuple[SchedulerOutput, LaunchedStep] | None = None
    ) -> list[EngineCoreOutput]:
        """Finish the step under way, if any, and return its outputs; `following` is the next."""
        last, self._under_way = self._under_way, following
        if last is None:
            return []
        plan, launched = last
        try:
            result = self.runner.finish(launched)
        except BaseException as error:
            outputs = self._fail(plan, error)
            if not isinstance(error, Exception):
                raise
            return outputs
        if result.mode is not None:
            self.scheduler.counters.steps[result.mode] += 1
        self._drop_used_outputs(plan)
        outputs = self.scheduler.update_from_output(plan, result)
        self._forget_finished(outputs)
        return outputs

    def _drop_used_outputs(self, plan: SchedulerOutput) -> None:
        if not self.payloads.num_output_bytes:
            return
        for entry in plan.scheduled:
            request = self.scheduler.requests.get(entry.request_id)
            if request is not None:
                for encoder_input in entry.encoder_inputs:
                    self.payloads.drop_output(request.mm_features[encoder_input.mm_index].mm_hash)

    def _fail(self, plan: SchedulerOutput, error: BaseException) -> list[EngineCoreOutput]:
        """End the requests of a step that failed, and return their last outputs.

        A bug, a lack of memory or an interruption must not affect requests of later steps.
        """
        if isinstance(error, Exception):
            words = "a step failed, so its %d request(s) fail"
            logger.error(words, len(plan.scheduled), exc_info=error)
        reason = f"internal error: {type(error).__name__}: {error}"
        outputs = self.scheduler.fail_step(plan, reason)
        self._forget_finished(outputs)
        return outputs

    def _forget_finished(self, outputs: Iterable[EngineCoreOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._forget(output.request_id)

    def _forget(self, request_id: str) -> None:
        if self.loader is not None:
            self.loader.forget(request_id)
        self.payloads.release(request_id)
        self.runner.forget_request(request_id)
