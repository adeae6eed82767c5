"""The life of a request in a frontend, without I/O.

A `RequestDriver` follows each request from its start to its end: it splits the request into `n`
completions, decides what is sent to the core and what is sent again, and turns the core's outputs
into text. The driver never sends anything and never waits. It returns what the engine has to do:
completions that the core must abort, outputs for callers, and deliveries.

A `Delivery` is a generator of the steps that send completions to the core. The engine performs each
step and sends its result back into the generator: `LLM` at once, `AsyncEngine` in a task.

The core may lack an item that the frontend expects it to have, because it was restarted or lost the
item. The core answers with the missing hashes, and a delivery sends the request again: with tensors
that the frontend still has, or with an item that was processed again. The caller gets a slower
answer and no error, unless it left out the media itself.

Invariants:
  1. Handles of media are released exactly once: when the core has taken all completions of their
     request, or when it never will. For this, a delivery that is not finished must be closed.
  2. A transfer is made right before it is sent, so that transfers arrive in the order of the cache
     operations that they describe.
  3. A request that was started ends exactly once: with an output, a failure or an abort.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sensorium.engine.inputs.renderer import Prepared
from sensorium.engine.outputs.completions import ParallelSampling
from sensorium.engine.outputs.output_processor import OutputProcessor
from sensorium.multimodal.cache.interface import SenderCache
from sensorium.multimodal.pipeline import CachedItem
from sensorium.types.errors import CapacityError, RequestError, SensoriumError
from sensorium.types.model_kind import CAUSAL, ModelKind
from sensorium.types.multimodal import ItemTimes, ShmReference, Transfer
from sensorium.types.outputs import MediaItemReport, RequestOutput
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest

_MAX_ATTEMPTS = 4  # how often one completion is sent before a core that keeps losing media fails it


@dataclass(frozen=True, slots=True)
class Send:
    """A step that sends one completion of a request to the core.

    Its result is `None` if the core accepted the completion, and a `MissingItems` if it did not,
    because it lacks media items. Then the engine must call `handle_missing` of the sender cache
    before it resumes the delivery.
    """

    request: EngineCoreRequest
    make_transfer: Callable[[], Transfer]  # called once, right before the request is sent


@dataclass(frozen=True, slots=True)
class ProcessAgain:
    """A step that processes a media item again; its result is the new item."""

    item: CachedItem  # neither the core nor the frontend has its tensors


Step = Send | ProcessAgain
Delivery = Generator[Step, Any, None]
_BEGIN: Any = None  # what a delivery yields before its first step; `_begin` takes it


def advance(delivery: Delivery, answer: object = None) -> Step | None:
    """Resume a delivery with its last step's result; return its next step, or `None` at the end."""
    try:
        return delivery.send(answer)
    except StopIteration:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The things that the engine must do after the core's outputs were processed."""

    finished: Sequence[RequestOutput]  # requests that ended and are not streamed
    stopped_ids: Sequence[str]  # completions that the core must abort
    # Pairs of a request's id and the delivery of its other completions.
    deliveries: Sequence[tuple[str, Delivery]] = ()


class RequestDriver:
    """The state of all requests of one frontend, from their start to their end. Not thread-safe."""

    def __init__(self, tokenizer: Any, sender: SenderCache, *, kind: ModelKind = CAUSAL) -> None:
        self.outputs = OutputProcessor(tokenizer, kind=kind)
        # Not `self.release`: that would make a reference cycle, and only the garbage collector
        # would free the sender's memory.
        self.parallel_sampling = ParallelSampling(partial(_release, sender))
        self._sender = sender

    def start(
        self, prepared: Prepared, *, is_streamed: bool = False, group: str | None = None
    ) -> Delivery:
        """Register a request, and return a delivery that sends its first completion to the core.

        `group` is explained at `AsyncEngine.stream`. If the request can't be registered, its media
        items are released and the error is raised.
        """
        processed = prepared.processed
        request, items = replace(processed.request, group=group), processed.items
        try:
            self.outputs.add_request(request, processed.prompt, is_streamed=is_streamed)
        except BaseException:
            self.release(items)
            raise
        first, is_kept = self.parallel_sampling.add(request, items)
        return _begin(
            self._deliver(request.request_id, (first,), items, prepared.stages, is_kept=is_kept)
        )

    def process(self, outputs: Sequence[EngineCoreOutput]) -> Progress:
        """Turn the core's outputs into text, and return what the engine must do next."""
        finished, stopped = self.outputs.process(outputs)
        ready = self.parallel_sampling.take_ready(outputs)
        deliveries = [
            (entry.request_id, _begin(self._deliver(entry.request_id, entry.children, entry.items)))
            for entry in ready
        ]
        return Progress(finished=finished, stopped_ids=stopped, deliveries=deliveries)

    def fail(self, request_id: str, error: SensoriumError) -> Progress:
        """Fail a request because one of its completions could not be sent to the core."""
        self.parallel_sampling.drop(self.outputs.get_child_ids((request_id,)))
        reason = error if isinstance(error, RequestError) else RequestError(str(error))
        finished, stopped = self.outputs.fail(request_id, reason)
        return Progress(finished=finished, stopped_ids=stopped)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Forget requests that exist, and return the ids of completions to abort in the core."""
        request_ids = tuple(request_ids)
        child_ids = self.outputs.get_child_ids(request_ids)
        self.parallel_sampling.drop(child_ids)
        self.outputs.forget(request_ids)
        return child_ids

    def release(self, items: Sequence[CachedItem]) -> None:
        """Release the cache handles of media items that a request no longer needs."""
        _release(self._sender, items)

    def _deliver(
        self,
        request_id: str,
        children: Sequence[EngineCoreRequest],
        items: Sequence[CachedItem],
        stages: ItemTimes | None = None,
        *,
        is_kept: bool = False,
    ) -> Delivery:
        """Yield the steps that send these completions of a request to the core.

        `stages`, the seconds of each stage of the preparation, is given only for the first
        completion; then the driver also records how each media item was sent. At the end the media
        items are released, unless `is_kept`: completions that start later still need them.
        """
        try:
            yield _BEGIN
            for child in children:
                yield from self._deliver_one(request_id, child, items, stages)
        finally:
            if not is_kept:
                self.release(items)

    def _deliver_one(
        self,
        request_id: str,
        child: EngineCoreRequest,
        items: Sequence[CachedItem],
        stages: ItemTimes | None,
    ) -> Delivery:
        current = list(items)  # items that are processed again replace the old ones here
        try:
            for _ in range(_MAX_ATTEMPTS):
                if not self.outputs.has_request(request_id):
                    return  # the request ended or failed, so its items may be released already
                make_transfer = partial(self._make_transfer, request_id, items, current, stages)
                missing = yield Send(child, make_transfer)
                if missing is None:
                    return
                yield from self._replace_lost(current, items, frozenset(missing.mm_hashes))
            raise CapacityError(
                f"the media cache lost items of this request {_MAX_ATTEMPTS} times: try again later"
            )
        finally:
            self.release([new for new, old in zip(current, items, strict=True) if new is not old])

    def _make_transfer(
        self,
        request_id: str,
        items: Sequence[CachedItem],
        current: Sequence[CachedItem],
        stages: ItemTimes | None,
    ) -> Transfer:
        transfer = self._sender.make_transfer([item.handle for item in current])
        if stages is not None:
            # Reported now, because a short request may end in the same message as the core's
            # answer.
            reports = _make_reports(items, current, transfer)
            self.outputs.add_reports(request_id, reports, stages, sent=time.monotonic())
        return transfer

    def _replace_lost(
        self, current: list[CachedItem], items: Sequence[CachedItem], lost: frozenset[str]
    ) -> Delivery:
        """Yield steps that process lost items again, unless this frontend has their tensors.

        The new items replace the old ones in `current`. The request's original `items` are not
        released here.
        """
        for index, item in enumerate(current):
            if item.handle.mm_hash in lost and item.handle.kwargs is None:
                current[index] = yield ProcessAgain(item)
                if item is not items[index]:
                    self.release([item])


def _begin(delivery: Delivery) -> Delivery:
    """Advance a new delivery to the point right before its first step, and return it.

    Python runs the `finally` block of a generator only if the generator has begun, so closing one
    that has not begun would release nothing.
    """
    next(delivery)
    return delivery


def _release(sender: SenderCache, items: Sequence[CachedItem]) -> None:
    sender.release([item.handle for item in items])


def _make_reports(
    items: Sequence[CachedItem], sent: Sequence[CachedItem], transfer: Transfer
) -> tuple[MediaItemReport, ...]:
    """Return one report per item: whether it was cached at first, and how it was sent at last."""
    return tuple(
        MediaItemReport(
            modality=item.handle.modality,
            mm_hash=item.handle.mm_hash,
            is_processor_hit=item.handle.is_hit,
            transfer=_describe(transfer, item.handle.mm_hash),
            times=new.times,
        )
        for item, new in zip(items, sent, strict=True)
    )


def _describe(transfer: Transfer, mm_hash: str) -> str:
    payload = transfer.payloads.get(mm_hash)
    if payload is None:
        return "none"
    return "shared" if isinstance(payload, ShmReference) else "tensors"
