"""The engine for a server: prompts in, streams of news out, the core in another process.

Owns the requests of this frontend from their arrival to their end. One event loop; all methods are
called on it. The core may go away and come back: what it had fails at once, what comes later finds
the new one.

Invariants:
  1. A request that was started gets its end, an error, or its caller's abort: exactly one of them.
  2. Handles of media are released exactly once, when the core has taken the request or never will.
  3. What is sent to the core is in the order in which transfers are made.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from sensorium.engine.build.perception import Perception
from sensorium.engine.core_process.core_client import CoreClient
from sensorium.engine.core_process.core_info import CoreInfo
from sensorium.engine.delivery import MAX_ATTEMPTS, make_reports
from sensorium.engine.inputs.chat_batch import Chat
from sensorium.engine.inputs.input_processor import InputProcessor, ProcessedRequest
from sensorium.engine.inputs.preparation import Preparation
from sensorium.engine.inputs.renderer import Prepared, Renderer
from sensorium.engine.outputs.output_processor import OutputProcessor
from sensorium.engine.outputs.parallel_sampling import ParallelSampling
from sensorium.multimodal.cache.mirror import MirrorSender
from sensorium.multimodal.pipeline import PerceivedItem
from sensorium.types.errors import (
    CapacityError,
    EngineLostError,
    InvariantError,
    SensoriumError,
)
from sensorium.types.outputs import RequestDelta, RequestOutput
from sensorium.types.prompts import Prompt
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest
from sensorium.types.sampling import SamplingParams
from sensorium.types.times import ItemTimes
from sensorium.types.transfer import MissingItems, Transfer

logger = logging.getLogger(__name__)
_FLUSH_S = 1.0  # how long the core may keep what is evicted, while nothing is sent
_SENT = "sent"  # among the stages of a request under way: when it was sent


class _Reader:
    """The one who waits for a request. What is new stays with `OutputProcessor` until it is taken,
    so that a reader that is slow, or reads nothing, makes nothing grow but the text itself.
    """

    def __init__(self) -> None:
        self._is_changed = asyncio.Event()
        self.output: RequestOutput | None = None  # of one that is not streamed
        self.last: RequestDelta | None = None  # what was new when it failed
        self.error: Exception | None = None

    def wake(self) -> None:
        self._is_changed.set()

    async def wait(self) -> None:
        """Until there is something new, or its end."""
        await self._is_changed.wait()
        self._is_changed.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """`num_preparing`: requests that the core has not taken yet; `num_running`: those it has."""

    num_preparing: int
    num_running: int


class AsyncEngine:
    """`identity` is this frontend's, unique among all that a core ever talks to. `chat_template`:
    the text of one to use instead of the model's.
    """

    def __init__(
        self,
        inputs: InputProcessor,
        perception: Perception,
        *,
        identity: str,
        chat_template: str | None = None,
    ) -> None:
        self.info: CoreInfo | None = None
        self.is_stalled = False  # whether the core is there and makes no progress
        self._inputs = inputs
        self._pipeline = perception.pipeline
        self._caches = perception.caches
        self._sender = perception.caches.sender
        self._identity = identity
        self._ids = count()
        self.renderer = Renderer(inputs, chat_template=chat_template)
        self._preparation = Preparation(
            self.renderer, draw_seed=inputs.draw_seed, release=inputs.release
        )
        self._outputs = OutputProcessor(inputs.processor.tokenizer)
        self._siblings = ParallelSampling(self._release)
        self._client: CoreClient | None = None
        self._readers: dict[str, _Reader] = {}  # by the request's id in the core
        self._num_preparing = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_flushing = False
        self._is_alone = False
        self._is_closed = False

    # ---- the core comes and goes

    @property
    def is_connected(self) -> bool:
        """Or needs nobody to be connected to."""
        return self._client is not None or self._is_alone

    @property
    def modalities(self) -> tuple[str, ...]:
        """What a prompt may have besides text."""
        return self._inputs.allowed_modalities

    @property
    def switched_off(self) -> dict[str, str]:
        """What the model takes besides text and this server does not: modality -> reason."""
        return self._inputs.switched_off.reasons

    @property
    def tokenizer(self) -> Any:
        return self._inputs.processor.tokenizer

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's own."""
        return self._inputs.defaults.eos_token_ids

    async def connect(self, info: CoreInfo) -> None:
        """A core is there, or there again."""
        self.disconnect("the engine was replaced")
        self._take_info(info)
        self._client = CoreClient(
            info.endpoint,
            self._identity,
            on_outputs=self._take_outputs,
            on_missing=self._sender.handle_missing,
            on_forget=self._forget_own_media,
        )
        if info.epoch is not None:  # nothing that an earlier core had is there
            self._sender.handle_missing(MissingItems(mm_hashes=(), epoch=info.epoch))
        if isinstance(self._sender, MirrorSender) and not self._is_flushing:
            self._is_flushing = True
            self._spawn(self._flush_evictions(self._sender))

    def run_alone(self, info: CoreInfo) -> None:
        """There is no core and there will be none: requests are rendered, and none is run."""
        self._take_info(info)
        self._is_alone = True

    def _take_info(self, info: CoreInfo) -> None:
        self.info = info
        self._inputs.defaults = info.defaults
        self._inputs.max_model_len = info.max_model_len
        self._inputs.switched_off.take_core(info.switched_off)

    def disconnect(self, reason: str) -> None:
        """The core is gone, with all that it had."""
        client, self._client = self._client, None
        self.is_stalled = False  # what is said of one core is not true of the next
        if client is None:
            return
        for request_id in list(self._readers):
            self._fail(request_id, EngineLostError(reason))
        client.close(reason)

    async def close(self) -> None:
        self._is_closed = True
        self.disconnect("the server is stopping")
        self._preparation.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- what callers want

    async def generate(
        self, prompt: Prompt | Chat, params: SamplingParams, *, request_id: str
    ) -> RequestOutput:
        """The whole answer. Cancelling it ends the request."""
        async with self._run(prompt, params, is_streamed=False, group=None) as (_, reader):
            await reader.wait()
            if reader.output is not None:
                return _finish(reader.output, request_id)
            raise reader.error or InvariantError("a request woke its reader before its end")

    async def stream(
        self,
        prompt: Prompt | Chat,
        params: SamplingParams,
        *,
        request_id: str,
        group: str | None = None,
    ) -> AsyncGenerator[RequestDelta, None]:
        """The answer as it grows, the last of it with `final`. Closing it ends the request.

        Each delta has all that came since the one before was taken. `group`: the call that this
        prompt belongs to with others, unique among all calls.
        """
        async with self._run(prompt, params, is_streamed=True, group=group) as (core_id, reader):
            while True:
                await reader.wait()
                delta = reader.last or self._outputs.take_delta(core_id)
                if delta is not None:
                    final = None if delta.final is None else _finish(delta.final, request_id)
                    yield replace(delta, request_id=request_id, final=final)
                    if final is not None:
                        return
                if reader.error is not None:
                    raise reader.error

    @asynccontextmanager
    async def render(
        self,
        prompt: Prompt | Chat,
        params: SamplingParams,
        *,
        request_id: str,
        needs_tensors: bool = True,
    ) -> AsyncIterator[ProcessedRequest]:
        """A request that is not run here. No core is needed, and what the one that is there has of
        media stays as it is. Its items are held until the end of the block.
        """
        prepared = await self._preparation.prepare(
            request_id, prompt, params, skip_mm_cache=True, needs_tensors=needs_tensors
        )
        try:
            yield prepared.processed
        finally:
            self._inputs.release(prepared.processed)

    async def reset_cache(self, level: str) -> None:
        """`level`: "mm", "encoder" or "prefix"."""
        if level == "mm":
            self._forget_media()
        if self._is_alone:
            return
        await self._get_client().reset_cache(level)

    def get_statistics(self) -> EngineStatistics:
        return EngineStatistics(
            num_preparing=self._num_preparing,
            num_running=len(self._outputs.request_ids),
        )

    # ---- the life of a request

    @asynccontextmanager
    async def _run(
        self,
        prompt: Prompt | Chat,
        params: SamplingParams,
        *,
        is_streamed: bool,
        group: str | None,
    ) -> AsyncIterator[tuple[str, _Reader]]:
        """A request with its id in the core."""
        self._get_client()
        request_id = f"{self._identity}.{next(self._ids)}"
        self._num_preparing += 1
        try:
            prepared = await self._preparation.prepare(request_id, prompt, params)
            reader = self._start(prepared, is_streamed=is_streamed, group=group)
        finally:
            self._num_preparing -= 1
        try:
            yield request_id, reader
        finally:
            self._abort(request_id)

    def _start(self, prepared: Prepared, *, is_streamed: bool, group: str | None) -> _Reader:
        """The request is on its way; a refusal comes to its reader, too."""
        request, items = prepared.processed.request, prepared.processed.items
        request = replace(request, group=group)
        request_id = request.request_id
        try:
            self._get_client()
            self._outputs.add_request(request, prepared.processed.prompt, is_streamed=is_streamed)
        except BaseException:
            self._release(items)
            raise
        reader = self._readers[request_id] = _Reader()
        first, has_siblings = self._siblings.add(request, items)
        self._spawn(self._bring(request_id, (first,), items, prepared.stages, is_kept=has_siblings))
        return reader

    async def _bring(
        self,
        request_id: str,
        children: Sequence[EngineCoreRequest],
        items: Sequence[PerceivedItem],
        stages: ItemTimes | None,
        *,
        is_kept: bool,
    ) -> None:
        """Bring children of a request to the core, and release its items unless others need them.
        `stages` of a first child: its reports are the request's.
        """
        try:
            for child in children:
                await self._deliver(request_id, child, items, stages)
        except SensoriumError as error:
            self._fail(request_id, error)
        except Exception as error:  # our bug; its request must not wait for ever
            logger.exception("request %s could not be sent", request_id)
            self._fail(request_id, error)
        finally:
            if not is_kept:
                self._release(items)

    async def _deliver(
        self,
        request_id: str,
        child: EngineCoreRequest,
        items: Sequence[PerceivedItem],
        stages: ItemTimes | None,
    ) -> None:
        """Sends again what the core has lost. As `Delivery`, for a core that answers later."""
        own = list(items)
        try:
            for _ in range(MAX_ATTEMPTS):
                if not self._outputs.has_request(request_id):
                    return  # it has ended, or a sibling failed; its items may be released
                missing = await self._send(request_id, child, own, items, stages)
                if missing is None:
                    return
                await self._recover(own, items, missing)
            raise CapacityError("the engine loses media faster than it can be sent")
        finally:
            self._release([new for new, old in zip(own, items, strict=True) if new is not old])

    async def _send(
        self,
        request_id: str,
        child: EngineCoreRequest,
        own: Sequence[PerceivedItem],
        items: Sequence[PerceivedItem],
        stages: ItemTimes | None,
    ) -> MissingItems | None:
        def make_transfer() -> Transfer:
            transfer = self._sender.make_transfer([item.handle for item in own])
            # Now: the end of a short request may come together with the answer.
            if stages is not None:
                sent = {**stages, _SENT: time.monotonic()}
                self._outputs.add_reports(request_id, make_reports(items, own, transfer), sent)
            return transfer

        return await self._get_client().add(child, make_transfer)

    async def _recover(
        self, own: list[PerceivedItem], items: Sequence[PerceivedItem], missing: MissingItems
    ) -> None:
        """Exchange the handles that lead nowhere."""
        lost = frozenset(missing.mm_hashes)
        for index, item in enumerate(own):
            if item.handle.mm_hash in lost and item.handle.kwargs is None:
                again = await self._preparation.perceive_again(self._pipeline, item)
                own[index] = again
                if item is not items[index]:
                    self._release([item])

    def _take_outputs(self, outputs: Sequence[EngineCoreOutput]) -> None:
        finished, stopped = self._outputs.process(outputs)
        if self._client is not None:
            self._client.abort(stopped)
        for children, items in self._siblings.take_ready(outputs):
            parent_id = children[0].request_id.rpartition("#")[0]
            self._spawn(self._bring(parent_id, children, items, None, is_kept=False))
        for output in finished:
            reader = self._readers.get(output.request_id)
            if reader is not None:
                reader.output = output
                reader.wake()
        for request_id in self._outputs.changed_ids:
            if request_id in self._readers:
                self._readers[request_id].wake()

    def _fail(self, request_id: str, error: Exception) -> None:
        """End a request with an error; what the core has of it is given up."""
        reader = self._readers.get(request_id)
        if reader is not None:
            reader.last, reader.error = self._outputs.take_delta(request_id), error
            reader.wake()
        self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        """Nobody waits any more: the request ended, failed, or its caller left."""
        self._readers.pop(request_id, None)
        child_ids = self._outputs.get_child_ids((request_id,))
        self._siblings.drop(child_ids)
        self._outputs.forget((request_id,))
        if self._client is not None:
            self._client.abort(child_ids)

    # ---- small things

    def _get_client(self) -> CoreClient:
        if self._is_closed:
            raise CapacityError("the server is stopping")
        if self._client is None:
            raise EngineLostError("the engine is not there: it is being started again")
        return self._client

    def _release(self, items: Sequence[PerceivedItem]) -> None:
        self._sender.release([item.handle for item in items])

    def _forget_media(self) -> None:
        self._sender.clear_cache()
        self._caches.readonly.clear_cache()

    def _forget_own_media(self) -> None:
        """What all share, the core has emptied before it said so: what is in it now is new."""
        if self._caches.store is None:
            self._sender.clear_cache()
        self._caches.readonly.clear_cache()

    async def _flush_evictions(self, sender: MirrorSender) -> None:
        """What the leader has evicted, the core forgets at the next message: here is one."""
        while True:
            await asyncio.sleep(_FLUSH_S)
            if self._client is not None and sender.has_pending_evictions:
                update = sender.make_transfer(()).update
                if update is not None:
                    self._client.update_cache(update)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _finish(output: RequestOutput, request_id: str) -> RequestOutput:
    """Under the caller's id. Raises what it failed with."""
    if output.error is not None:
        raise output.error
    stages = dict(output.stages)
    sent = stages.pop(_SENT, None)
    if sent is not None and output.times is not None:
        stages["transfer"] = max(0.0, output.times.arrived - sent)
    return replace(output, request_id=request_id, stages=stages)
