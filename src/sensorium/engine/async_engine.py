"""The engine of a server, which answers prompts with a core in another process.

It prepares requests in threads, carries out the decisions of the `RequestDriver` over the
connection to the core, and wakes the callers that wait. All methods are called on one event loop.
The core may end and be replaced: its requests fail at once, and later requests go to the new core.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from sensorium.engine.assembly.frontend import MediaParts
from sensorium.engine.audio_request import AudioRequest
from sensorium.engine.core_process import CoreInfo
from sensorium.engine.core_process.core_client import CoreClient
from sensorium.engine.driver import Delivery, ProcessAgain, RequestDriver, Step, advance
from sensorium.engine.inputs.input_processor import InputProcessor, ProcessedRequest
from sensorium.engine.inputs.preparation import BeginProcessing, Preparation
from sensorium.engine.inputs.renderer import AnyPrompt, Renderer
from sensorium.engine.inputs.warmup import TEXT, Dummy
from sensorium.multimodal.cache.mirror import MirrorSender
from sensorium.types.errors import (
    CapacityError,
    EngineLostError,
    InvariantError,
    ModelError,
    SensoriumError,
    StoppingError,
)
from sensorium.types.multimodal import MissingItems
from sensorium.types.outputs import RequestDelta, RequestOutput
from sensorium.types.request import EngineCoreOutput
from sensorium.types.sampling import SamplingParams

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
logger = logging.getLogger(__name__)
_FLUSH_S = 1.0  # how long an idle core may keep items that this frontend has evicted


class _Reader:
    """A caller that waits for the result of one request.

    New deltas stay in the driver until the caller takes them, so that for a slow caller the text is
    kept once and not as a queue of deltas.
    """

    def __init__(self) -> None:
        self.is_changed = asyncio.Event()  # there is a new delta, or the request has ended
        self.output: RequestOutput | None = None  # the result of a request that is not streamed
        self.last: RequestDelta | None = None  # the delta that was waiting when the request failed
        self.error: Exception | None = None

    async def wait(self) -> None:
        """Wait until the request has a new delta or has ended, and reset the event."""
        await self.is_changed.wait()
        self.is_changed.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """The number of unfinished requests of a frontend, by state."""

    num_preparing: int  # requests that are not sent to the core yet
    num_running: int


class AsyncEngine:
    """The engine of one frontend, which sends requests to the core.

    `identity` names this frontend to the core and must be unique among all frontends that the core
    ever has. `chat_template` is a text that replaces the model's own template.
    """

    def __init__(
        self,
        inputs: InputProcessor,
        media_parts: MediaParts,
        *,
        identity: str,
        chat_template: str | None = None,
    ) -> None:
        self.info: CoreInfo | None = None
        self.is_stalled = False  # whether the core is connected but makes no progress
        self._inputs = inputs
        self._caches = media_parts.caches
        self._sender = media_parts.caches.sender
        self._identity = identity
        self._ids = count()
        self.renderer = Renderer(inputs, chat_template=chat_template)
        self._preparation = Preparation(self.renderer)
        self.tokenizer = inputs.processor.tokenizer
        self._driver = RequestDriver(self.tokenizer, self._sender, kind=inputs.processor.kind)
        self._client: CoreClient | None = None
        self._readers: dict[str, _Reader] = {}  # request id -> its caller
        self._num_preparing = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_flushing = False
        self._is_alone = False  # whether this frontend runs without a core
        self._is_closed = False

    # ---- connecting and disconnecting the core

    @property
    def is_connected(self) -> bool:
        """Return whether a core is connected, or no core is needed (`run_alone`)."""
        return self._client is not None or self._is_alone

    @property
    def modalities(self) -> tuple[str, ...]:
        """Return the modalities besides text that a prompt may contain, such as "image"."""
        return self._inputs.allowed_modalities

    @property
    def switched_off(self) -> dict[str, str]:
        """Return the modalities of the model that this server refuses, each with the reason."""
        return self._inputs.switched_off.reasons

    @property
    def only_one(self) -> dict[str, str]:
        """Return the modalities that are limited to one item a prompt, each with the reason."""
        return self._inputs.switched_off.only_one

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._inputs.defaults.eos_token_ids

    async def connect(self, info: CoreInfo) -> None:
        """Connect to a core. If an earlier core is still connected, its requests fail first."""
        self.disconnect("the engine was replaced by a new one: send the request again")
        self._take_info(info)
        self._client = CoreClient(
            info.endpoint,
            self._identity,
            on_outputs=self._take_outputs,
            on_missing=self._sender.handle_missing,
            on_forget=self._forget_own_media,
        )
        if info.epoch is not None:  # the new core has none of the media of an earlier one
            self._sender.handle_missing(MissingItems(mm_hashes=(), epoch=info.epoch))
        if isinstance(self._sender, MirrorSender) and not self._is_flushing:
            self._is_flushing = True
            self._spawn(self._flush_evictions(self._sender))

    async def rehearse(self, dummies: Sequence[Dummy]) -> None:
        """Let the core compute dummy requests, so that the first requests find the model warm.

        The dummy requests change no cache or counter, here or in the core. A modality is switched
        off if its dummy fails in the model. Nothing more is computed if the core is lost. Raise a
        `ModelError` if not even text can be computed.
        """
        started, subjects = time.monotonic(), []
        for dummy in dummies:
            subject = dummy.subject
            if self._client is None or subject in self.switched_off:
                continue
            try:
                error = await self._client.rehearse(subject, dummy.request, dummy.transfer)
            except EngineLostError:
                return
            if error is None:
                subjects.append(subject)
            elif subject == TEXT:
                raise ModelError(f"the model can't even compute a prompt of text: {error}")
            else:
                reason = f"the model could not compute a small {subject} at start: {error}"
                self._inputs.switched_off.add(subject, reason)
        if subjects:
            elapsed_s = time.monotonic() - started
            logger.info("Model warmup completed in %.3fs (%s)", elapsed_s, ", ".join(subjects))

    def run_alone(self, info: CoreInfo) -> None:
        """Make this frontend render requests without a core; `info` has what a core would send."""
        self._take_info(info)
        self._is_alone = True

    def _take_info(self, info: CoreInfo) -> None:
        self.info = info
        self._inputs.defaults = info.defaults
        self._inputs.max_model_len = info.max_model_len
        self._inputs.switched_off.take_core(info.restrictions)

    def disconnect(self, reason: str) -> None:
        """Disconnect the core, if any, and fail its requests with an `EngineLostError`."""
        client, self._client = self._client, None
        self.is_stalled = False  # the next core may make progress
        if client is None:
            return
        for request_id in list(self._readers):
            self._fail(request_id, EngineLostError(reason))
        client.close(reason)

    async def close(self) -> None:
        self._is_closed = True
        self.disconnect("the server is stopping: try again later")
        self._preparation.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- requests

    async def generate(
        self,
        prompt: AnyPrompt,
        params: SamplingParams,
        *,
        request_id: str,
        group: str | None = None,
    ) -> RequestOutput:
        """Run one request, and return its whole output under the caller's `request_id`.

        `group` is explained at `stream`. If the caller's task is cancelled, the request is aborted.
        Raise the request's error if it fails.
        """
        async with self._run(prompt, params, is_streamed=False, group=group) as (_, reader):
            await reader.wait()
            if reader.output is not None:
                return _finish(reader.output, request_id)
            raise reader.error or InvariantError(f"request {request_id} ended without a result")

    async def stream(
        self,
        prompt: AnyPrompt,
        params: SamplingParams,
        *,
        request_id: str,
        group: str | None = None,
        may_repeat: bool = False,  # noqa: ARG002
    ) -> AsyncGenerator[RequestDelta, None]:
        """Run one request, and yield its answer in deltas; the last one has `final` set.

        A delta has everything that was generated since the caller took the previous one. `group` is
        an id that all prompts of one client request share; None means that there is only one.
        Closing the generator aborts the request. Raise the request's error if it fails.
        `may_repeat` says that the caller has passed no delta on, so that the answer may begin anew
        after some deltas; an engine with one core never does that.
        """
        async with self._run(prompt, params, is_streamed=True, group=group) as (core_id, reader):
            async for delta in self._read_deltas(core_id, reader, request_id):
                yield delta

    async def _read_deltas(
        self, core_id: str, reader: _Reader, request_id: str
    ) -> AsyncIterator[RequestDelta]:
        """Yield the deltas of a running request until its last one, or raise its error."""
        while True:
            await reader.wait()
            delta = reader.last or self._driver.outputs.take_delta(core_id)
            if delta is not None:
                final = None if delta.final is None else _finish(delta.final, request_id)
                yield replace(delta, request_id=request_id, final=final)
                if final is not None:
                    return
            if reader.error is not None:
                raise reader.error

    async def open_audio(
        self, params: SamplingParams, *, request_id: str, delay_ms: int | None = None
    ) -> AudioRequest:
        """Start a request for streaming audio, and return it when the core has accepted it.

        The text is `delay_ms` behind the audio (`None`: the model's own delay). The caller has to
        close the request.
        """
        self._get_client()
        core_id = f"{self._identity}.{next(self._ids)}"
        prepared, stream = self.renderer.begin_stream(params, request_id=core_id, delay_ms=delay_ms)
        delivery = self._driver.start(prepared, is_streamed=True)
        reader = self._readers[core_id] = _Reader()
        try:
            # The core must have the request before its audio arrives.
            await self._carry_out(core_id, delivery)
            if reader.error is not None:
                raise reader.error
        except BaseException:
            self._abort(core_id)
            raise
        return AudioRequest(
            stream,
            send=partial(self._append_audio, core_id),
            deltas=self._read_deltas(core_id, reader, request_id),
            abort=partial(self._abort, core_id),
        )

    def _append_audio(self, core_id: str, features: torch.Tensor | None, is_last: bool) -> None:
        """Send more features to the core, unless the request has ended."""
        if self._client is not None and self._driver.outputs.has_request(core_id):
            array = None if features is None else features.numpy()
            self._client.append_audio(core_id, array, is_last=is_last)

    @asynccontextmanager
    async def render(
        self,
        prompt: AnyPrompt,
        params: SamplingParams,
        *,
        request_id: str,
        needs_tensors: bool = True,
    ) -> AsyncIterator[ProcessedRequest]:
        """Turn a prompt into a request without running it, and yield the request.

        When the block ends, its media items are released. Neither the core nor the media cache that
        the core shares with this frontend is used. Without `needs_tensors`, items may come without
        processed tensors.
        """
        prepared = await self._preparation.prepare(
            request_id, prompt, params, skip_mm_cache=True, needs_tensors=needs_tensors
        )
        try:
            yield prepared.processed
        finally:
            self._inputs.release(prepared.processed)

    async def process_media(
        self, modality: str, begin: BeginProcessing[T], *, drop: Callable[[T], None]
    ) -> T:
        """Run work on media without a prompt, as `Preparation.process_media` does."""
        return await self._preparation.process_media(modality, begin, drop=drop)

    async def reset_cache(self, level: str) -> None:
        """Empty one cache, here and in the core, and wait until the core has done so.

        `level` is "mm" (processed media), "encoder" (outputs of the encoders) or "prefix" (KV
        blocks of earlier prompts). A frontend without a core empties only its own media caches.
        Raise an `EngineLostError` if a core is expected but not connected.
        """
        if level == "mm":
            self._sender.clear_cache()
            self._caches.readonly.clear_cache()
        if not self._is_alone:
            await self._get_client().reset_cache(level)

    def get_statistics(self) -> EngineStatistics:
        return EngineStatistics(
            num_preparing=self._num_preparing, num_running=len(self._driver.outputs.request_ids)
        )

    @asynccontextmanager
    async def _run(
        self, prompt: AnyPrompt, params: SamplingParams, *, is_streamed: bool, group: str | None
    ) -> AsyncIterator[tuple[str, _Reader]]:
        """Start a request, yield its id in the core and its `_Reader`, and abort it at the end.

        If the core refuses the request, the error is in the reader, and is not raised here.
        """
        self._get_client()
        request_id = f"{self._identity}.{next(self._ids)}"
        self._num_preparing += 1
        try:
            prepared = await self._preparation.prepare(request_id, prompt, params)
        finally:
            self._num_preparing -= 1
        try:
            self._get_client()
        except CapacityError:
            self._driver.release(prepared.processed.items)
            raise
        delivery = self._driver.start(prepared, is_streamed=is_streamed, group=group)
        reader = self._readers[request_id] = _Reader()
        self._spawn(self._carry_out(request_id, delivery))
        try:
            yield request_id, reader
        finally:
            self._abort(request_id)

    async def _carry_out(self, request_id: str, delivery: Delivery) -> None:
        """Perform all steps of a delivery. If one raises an error, the request fails with it."""
        try:
            with closing(delivery):
                step = advance(delivery)
                while step is not None:
                    step = advance(delivery, await self._perform(step))
        except SensoriumError as error:
            self._fail(request_id, error)
        except Exception as error:  # a bug; the request must not wait forever
            logger.exception("request %s fails: it can't be sent to the core process", request_id)
            self._fail(request_id, error)

    async def _perform(self, step: Step) -> object:
        if isinstance(step, ProcessAgain):
            return await self._preparation.process_again(step.item)
        return await self._get_client().add(step.request, step.make_transfer)

    def _take_outputs(self, outputs: Sequence[EngineCoreOutput]) -> None:
        progress = self._driver.process(outputs)
        if self._client is not None:
            self._client.abort(progress.stopped_ids)
        for request_id, delivery in progress.deliveries:
            self._spawn(self._carry_out(request_id, delivery))
        for output in progress.finished:
            reader = self._readers.get(output.request_id)
            if reader is not None:
                reader.output = output
                reader.is_changed.set()
        for request_id in self._driver.outputs.changed_ids:
            if request_id in self._readers:
                self._readers[request_id].is_changed.set()

    def _fail(self, request_id: str, error: Exception) -> None:
        """Fail a request: its caller gets the delta that was waiting, and then the error."""
        reader = self._readers.get(request_id)
        if reader is not None:
            reader.last, reader.error = self._driver.outputs.take_delta(request_id), error
            reader.is_changed.set()
        self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        """Forget a request that ended, failed or is no longer wanted, and abort it in the core."""
        self._readers.pop(request_id, None)
        child_ids = self._driver.abort((request_id,))
        if self._client is not None:
            self._client.abort(child_ids)

    # ---- the connection and the caches

    def _get_client(self) -> CoreClient:
        if self._is_closed:
            raise StoppingError("the server is stopping: try again later")
        if self._client is None:
            raise EngineLostError(
                "the engine is not running: it is being started, so try again later"
            )
        return self._client

    def _forget_own_media(self) -> None:
        """Empty this frontend's media caches after another frontend has reset the cache.

        A cache in shared memory is not emptied: the core emptied it before it sent the message, so
        all of its items were added since then.
        """
        if self._caches.store is None:
            self._sender.clear_cache()
        self._caches.readonly.clear_cache()

    async def _flush_evictions(self, sender: MirrorSender) -> None:
        """Send pending evictions to the core once a second, until this task is cancelled.

        Evictions usually travel with requests. Without this task an idle frontend would never send
        them, and the core would keep the evicted media in memory.
        """
        while True:
            await asyncio.sleep(_FLUSH_S)
            if self._client is not None and sender.has_pending_evictions:
                update = sender.make_transfer(()).update
                if update is not None:
                    self._client.update_cache(update)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _finish(output: RequestOutput, request_id: str) -> RequestOutput:
    """Return a copy of the output with the caller's `request_id`, or raise the output's error."""
    if output.error is not None:
        raise output.error
    return replace(output, request_id=request_id)
