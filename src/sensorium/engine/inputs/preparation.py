"""Turns prompts into requests in threads, because rendering, processing and tokenising block.

Owns the threads, in four groups: for requests with media, with a grammar (or tools, which may need
one), with a long text, and with a short text. So a slow grammar or a slow tokenisation delays no
request of a few words. A request uses no thread while its media is being fetched. The number of
waiting requests is bounded by the server's limit of requests.

Invariants:
  1. If the caller has left, its request is released, no matter when it is finished.
  2. Work that pauses is resumed or closed, exactly once after each pause.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from sensorium.engine.inputs.input_processor import Outline
from sensorium.engine.inputs.renderer import AnyPrompt, Chat, Prepared, Renderer
from sensorium.multimodal.pipeline import CachedItem, MediaPipeline
from sensorium.render.prompts import EnginePrompt
from sensorium.types.errors import StoppingError
from sensorium.types.sampling import SamplingParams
from sensorium.utils.pausing import Pausing

T = TypeVar("T")
BeginProcessing = Callable[[MediaPipeline, Future[None]], Pausing[T]]
_NUM_THREADS = {
    "text": 4,
    "long": 2,  # few, because tokenising a long text takes much memory
    "grammar": 4,
    "media": 32,
}
_LONG_CHARACTERS = 2**13  # tokenised in some ten milliseconds
_MESSAGE_CHARACTERS = 16  # the least work for a message or a part, in characters
_STOPPING = "the server is stopping: try again later"


class Preparation:
    """The thread pools in which one frontend turns prompts into requests for the core."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._threads = {
            group: ThreadPoolExecutor(count, f"prepare-{group}")
            for group, count in _NUM_THREADS.items()
        }
        self._waiting: set[asyncio.Future[None]] = set()  # one for each caller that waits

    async def prepare(
        self,
        request_id: str,
        prompt: AnyPrompt,
        params: SamplingParams,
        *,
        skip_mm_cache: bool = False,
        needs_tensors: bool = True,
    ) -> Prepared:
        """Turn a prompt or a conversation into a request for the core, in a thread.

        Raise a `RequestError` with the path of the field that is wrong, or a `StoppingError` if the
        server is stopping. If this coroutine is cancelled, so is the work, as soon as possible.
        """
        inputs, cancelled = self._renderer.inputs, Future[None]()
        work = self._renderer.render_pausing(
            prompt,
            params,
            request_id=request_id,
            seed=inputs.draw_seed(),
            skip_mm_cache=skip_mm_cache,
            needs_tensors=needs_tensors,
            cancelled=cancelled,
        )
        prepared, wait_s = await self._run(
            work,
            self._threads[_choose_group(prompt, params)],
            cancelled,
            drop=lambda unwanted: inputs.release(unwanted.processed),
        )
        return replace(prepared, stages={**prepared.stages, "wait_thread": wait_s})

    async def outline(self, prompt: AnyPrompt, params: SamplingParams) -> Outline:
        """Do the work of `Renderer.outline_pausing` in a thread."""
        cancelled = Future[None]()

        def begin() -> Pausing[Outline]:
            return (yield from self._renderer.outline_pausing(prompt, params, cancelled=cancelled))

        threads = self._threads[_choose_group(prompt, params)]
        outline, _ = await self._run(begin(), threads, cancelled, drop=lambda _: None)
        return outline

    async def process_again(self, item: CachedItem) -> CachedItem:
        """Process a media item again that the core has lost, in the threads for media.

        Return it with a new handle, which the caller has to release. Raise a `MissingMediaError` if
        the item can't be had any more.
        """
        pipeline, cancelled = self._renderer.inputs.pipeline, Future[None]()
        again, _ = await self._run(
            pipeline.process_again_pausing(item, cancelled=cancelled),
            self._threads["media"],
            cancelled,
            drop=lambda unwanted: pipeline.release([unwanted]),
        )
        return again

    async def process_media(
        self, modality: str, begin: BeginProcessing[T], *, drop: Callable[[T], None]
    ) -> T:
        """Run work on media that several prompts share, as in a transcript, in the media threads.

        `begin` gets the read-only pipeline, and a future that completes if the result is no longer
        wanted. `drop` is called with a result that comes too late. Raise a `RequestError` if the
        modality is switched off.
        """
        inputs, cancelled = self._renderer.inputs, Future[None]()
        inputs.switched_off.check(modality)
        work = begin(inputs.readonly, cancelled)
        result, _ = await self._run(work, self._threads["media"], cancelled, drop=drop)
        return result

    async def _run(
        self,
        work: Pausing[T],
        threads: ThreadPoolExecutor,
        cancelled: Future[None],
        *,
        drop: Callable[[T], None],
    ) -> tuple[T, float]:
        """Run work in a thread pool, but hold no thread while the work pauses.

        Return the result, and how many seconds the work waited for a free thread. If the caller is
        cancelled or the server stops, `cancelled` is completed, and `drop` is called with a result
        that comes too late.
        """
        wait_s = 0.0
        while True:
            submitted = time.monotonic()
            try:
                future = threads.submit(_advance, work)
            except RuntimeError as error:  # the executor is shut down
                work.close()
                raise StoppingError(_STOPPING) from error
            try:
                await self._wait(future)
            except BaseException:  # the caller has left, or the server stops
                cancelled.set_result(None)
                future.cancel()
                future.add_done_callback(lambda ended: _clean_up(ended, work, drop))
                raise
            began, outcome = future.result()
            wait_s += began - submitted
            if isinstance(outcome, _Finished):
                return outcome.result, wait_s
            try:
                await self._wait(outcome)
            except BaseException:
                cancelled.set_result(None)
                work.close()
                raise

    def close(self) -> None:
        """Shut down the thread pools; callers that are still waiting get a `StoppingError`."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(StoppingError(_STOPPING))
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    async def _wait(self, future: Future[Any]) -> None:
        """Wait until a future has ended in any way; raise a `StoppingError` after `close`."""
        loop = asyncio.get_running_loop()
        waiting = loop.create_future()

        def settle() -> None:
            if not waiting.done():
                waiting.set_result(None)

        def wake(_: object) -> None:
            with suppress(RuntimeError):  # the event loop has ended, so no caller waits
                loop.call_soon_threadsafe(settle)

        self._waiting.add(waiting)
        try:
            future.add_done_callback(wake)
            await waiting
        finally:
            self._waiting.discard(waiting)


@dataclass(frozen=True, slots=True)
class _Finished(Generic[T]):
    result: T


_Step = tuple[float, Future[Any] | _Finished[T]]


def _advance(work: Pausing[T]) -> _Step[T]:
    """Run work to its next pause; return when it began, and its result or what it waits for."""
    began = time.monotonic()
    try:
        return began, next(work)
    except StopIteration as end:
        return began, _Finished(end.value)


def _clean_up(ended: Future[_Step[T]], work: Pausing[T], drop: Callable[[T], None]) -> None:
    """Drop the finished result of a caller that has left, or close its unfinished work."""
    if not ended.cancelled() and ended.exception() is None:
        _, outcome = ended.result()
        if isinstance(outcome, _Finished):
            drop(outcome.result)
            return
    work.close()


def _choose_group(prompt: AnyPrompt, params: SamplingParams) -> str:
    """Return the name of the thread pool for a prompt: "media", "grammar", "long" or "text"."""
    if _has_media(prompt):
        return "media"
    may_call = isinstance(prompt, Chat) and bool(prompt.options.tools)
    if params.structured_outputs is not None or may_call:
        return "grammar"
    return "long" if _is_long(prompt) else "text"


def _is_long(prompt: AnyPrompt) -> bool:
    """Return whether a prompt's text is so long that tokenising it takes much time."""
    if isinstance(prompt, Chat):
        num_characters = 0
        for content in _iterate_contents(prompt):
            for part in content if isinstance(content, list) else (content,):
                text = part.get("text") if isinstance(part, Mapping) else part
                num_characters += len(text) if isinstance(text, str) else 0
                num_characters += _MESSAGE_CHARACTERS
                if num_characters > _LONG_CHARACTERS:
                    return True
        return False
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return isinstance(text, str) and len(text) > _LONG_CHARACTERS


def _iterate_contents(chat: Chat) -> Iterator[object]:
    messages = chat.messages if isinstance(chat.messages, list | tuple) else ()
    return (m.get("content") for m in messages if isinstance(m, Mapping))


def _has_media(prompt: AnyPrompt) -> bool:
    """Return whether a prompt seems to have media; a malformed one is refused when it is read."""
    if isinstance(prompt, Chat):
        contents = (c for c in _iterate_contents(prompt) if isinstance(c, list))
        parts = (part for content in contents for part in content)
        return any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)
    if isinstance(prompt, EnginePrompt):
        return bool(prompt.media or prompt.rendered)
    return isinstance(prompt, Mapping) and bool(
        prompt.get("multi_modal_data") or prompt.get("multi_modal_uuids") or prompt.get("mm_hashes")
    )
