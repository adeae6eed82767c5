"""The life of a request in a frontend, without I/O.

A `RequestDriver` follows each request from its start to its end: it splits it into `n` completions,
decides what is sent to the core and what is sent again, and turns the core's outputs into text. It
never sends anything and never waits. It returns what has to be done: completions that the core must
abort, outputs for callers, and deliveries.

A `Delivery` is a generator that sends completions to the core. It yields one step after the other.
The engine performs each step and sends the answer back into the generator: `LLM` at once,
`AsyncEngine` in a task.

The core may lack an item that the frontend expects it to have, because it was restarted or lost the
item. It answers with the missing hashes, and a delivery sends the request again: with tensors that
the frontend still has, or with an item that was perceived again. A caller notices a slower answer
and no error, unless the caller itself left out the media.

Invariants:
  1. Handles of media are released exactly once: when the core has taken all completions of their
     request, or when it never will. For this, a delivery must be closed if it is not finished.
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
from sensorium.multimodal.pipeline import PerceivedItem
from sensorium.types.errors import CapacityError, RequestError, SensoriumError
from sensorium.types.multimodal import ItemTimes, ShmReference, Transfer
from sensorium.types.outputs import MediaItemReport, RequestOutput
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest

_MAX_ATTEMPTS = 4  # how often one completion is sent before a core that keeps losing media fails it


@dataclass(frozen=True, slots=True)
class Send:
    """A step of a delivery that sends one completion to the core.

    The answer is `None` if the core has taken it, otherwise the `MissingItems` that it lacks. The
    sender cache must have handled these before the delivery goes on.
    """

    request: EngineCoreRequest
    make_transfer: Callable[[], Transfer]  # called once, right before the request is sent


@dataclass(frozen=True, slots=True)
class PerceiveAgain:
    """A step of a delivery that makes the tensors of an item anew. The answer is the new item."""

    item: PerceivedItem


Step = Send | PerceiveAgain
Delivery = Generator[Step, Any, None]
_BEGIN: Any = None  # what a delivery yields before its first step; `_begin` takes it


def advance(delivery: Delivery, answer: object = None) -> Step | None:
    """Return the next step of a delivery, given the answer to the last one; `None` at its end."""
    try:
        return delivery.send(answer)
    except StopIteration:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The work that remains after the core's outputs were processed."""

    finished: Sequence[RequestOutput]  # requests that ended and are not streamed
    stopped_ids: Sequence[str]  # completions that the core must abort
    # Pairs of a request's id and the delivery of its other completions.
    deliveries: Sequence[tuple[str, Delivery]] = ()


class RequestDriver:
    """The requests of one frontend and their completions. Not thread-safe."""

    def __init__(self, tokenizer: Any, sender: SenderCache) -> None:
        self.outputs = OutputProcessor(tokenizer)
        # Not `self.release`: that would make a reference cycle, and only the garbage collector
        # would free the sender's memory.
        self.parallel_sampling = ParallelSampling(partial(_release, sender))
        self._sender = sender

    def start(
        self, prepared: Prepared, *, is_streamed: bool = False, group: str | None = None
    ) -> Delivery:
        """Register a request, and return the delivery of its first completion.

        `group` names the call that the request belongs to together with others.
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
        """Take the core's outputs, and return what has to be done about them."""
        finished, stopped = self.outputs.process(outputs)
        ready = self.parallel_sampling.take_ready(outputs)
        deliveries = [
            (entry.request_id, _begin(self._deliver(entry.request_id, entry.children, entry.items)))
            for entry in ready
        ]
        return Progress(finished=finished, stopped_ids=stopped, deliveries=deliveries)

    def fail(self, request_id: str, error: SensoriumError) -> Progress:
        """Fail a request because one of its completions could not be delivered."""
        self.parallel_sampling.drop(self.outputs.get_child_ids((request_id,)))
        reason = error if isinstance(error, RequestError) else RequestError(str(error))
        finished, stopped = self.outputs.fail(request_id, reason)
        return Progress(finished=finished, stopped_ids=stopped)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Forget requests that ended, failed or are no longer wanted.

        Return the ids of their completions, which the core must abort.
        """
        request_ids = tuple(request_ids)
        child_ids = self.outputs.get_child_ids(request_ids)
        self.parallel_sampling.drop(child_ids)
        self.outputs.forget(request_ids)
        return child_ids

    def release(self, items: Sequence[PerceivedItem]) -> None:
        """Let the cache evict items of a request that no longer needs them."""
        _release(self._sender, items)

    def _deliver(
        self,
        request_id: str,
        children: Sequence[EngineCoreRequest],
        items: Sequence[PerceivedItem],
        stages: ItemTimes | None = None,
        *,
        is_kept: bool = False,
    ) -> Delivery:
        """Return the delivery of some completions of a request.

        The first delivery has `stages`, and reports how the request and its items were sent. The
        items are released afterwards unless they are kept for completions that start later.
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
        items: Sequence[PerceivedItem],
        stages: ItemTimes | None,
    ) -> Delivery:
        current = list(items)  # items are replaced in it if they are perceived again
        try:
            for _ in range(_MAX_ATTEMPTS):
                if not self.outputs.has_request(request_id):
                    return  # it ended or failed meanwhile, and its items may be released already
                make_transfer = partial(self._make_transfer, request_id, items, current, stages)
                missing = yield Send(child, make_transfer)
                if missing is None:
                    return
                yield from self._replace_lost(current, items, frozenset(missing.mm_hashes))
            raise CapacityError("the engine loses media faster than it can be sent")
        finally:
            self.release([new for new, old in zip(current, items, strict=True) if new is not old])

    def _make_transfer(
        self,
        request_id: str,
        items: Sequence[PerceivedItem],
        current: Sequence[PerceivedItem],
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
        self, current: list[PerceivedItem], items: Sequence[PerceivedItem], lost: frozenset[str]
    ) -> Delivery:
        """Replace the lost items that have no tensors here by items that were perceived again."""
        for index, item in enumerate(current):
            if item.handle.mm_hash in lost and item.handle.kwargs is None:
                current[index] = yield PerceiveAgain(item)
                if item is not items[index]:
                    self.release([item])


def _begin(delivery: Delivery) -> Delivery:
    """Run a delivery to its first step.

    A generator that never began would not release its items when it is closed.
    """
    next(delivery)
    return delivery


def _release(sender: SenderCache, items: Sequence[PerceivedItem]) -> None:
    sender.release([item.handle for item in items])


def _make_reports(
    items: Sequence[PerceivedItem], sent: Sequence[PerceivedItem], transfer: Transfer
) -> tuple[MediaItemReport, ...]:
    """Return reports of how each item was found at first, and how it was sent in the end."""
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
