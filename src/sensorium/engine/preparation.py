"""Makes requests of prompts in threads: rendering, loading, perceiving and tokenising block.

Owns the threads. What has media gets others than what has none; what has a grammar, or may get
one, others again; and so has a long text. A slow host, a grammar that takes long to compile or a
text that takes long to tokenise holds up no request that has a few words of text. How many wait is
bounded by what the server admits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from sensorium.engine.chat import Chat
from sensorium.engine.input_processor import ProcessedRequest
from sensorium.engine.renderer import Prepared, Renderer
from sensorium.types.errors import CapacityError
from sensorium.types.prompts import Prompt
from sensorium.types.sampling import SamplingParams

_NUM_TEXT_THREADS = 4
_NUM_LONG_THREADS = 2  # tokenising takes memory for each character
_NUM_GRAMMAR_THREADS = 4
_NUM_MEDIA_THREADS = 32
_LONG_CHARACTERS = 2**13  # tokenised in some ten milliseconds
_MESSAGE_CHARACTERS = 16  # the work that a message or a part is, however short it is
_STOPPING = "the server is stopping"


class Preparation:
    """`release` gets what was made for somebody who no longer waits for it. `draw_seed`: for
    requests that have none.
    """

    def __init__(
        self,
        renderer: Renderer,
        *,
        draw_seed: Callable[[], int],
        release: Callable[[ProcessedRequest], None],
    ) -> None:
        self._renderer = renderer
        self._draw_seed = draw_seed
        self._release = release
        self._text_threads = ThreadPoolExecutor(_NUM_TEXT_THREADS, "prepare-text")
        self._long_threads = ThreadPoolExecutor(_NUM_LONG_THREADS, "prepare-long")
        self._grammar_threads = ThreadPoolExecutor(_NUM_GRAMMAR_THREADS, "prepare-grammar")
        self._media_threads = ThreadPoolExecutor(_NUM_MEDIA_THREADS, "prepare-media")
        self._waiting: set[asyncio.Future[None]] = set()  # for a thread's work

    async def prepare(
        self,
        request_id: str,
        prompt: Prompt | Chat,
        params: SamplingParams,
        *,
        skip_mm_cache: bool = False,
        needs_tensors: bool = True,
    ) -> Prepared:
        """Raises a `RequestError` that names what is wrong with the prompt. When it is cancelled,
        so is the work, as soon as it can be. `skip_mm_cache`, `needs_tensors`: see `Renderer`.
        """
        seed = self._draw_seed()
        cancelled: Future[None] = Future()
        submitted = time.monotonic()

        def run() -> Prepared:
            wait_s = time.monotonic() - submitted
            options: dict[str, Any] = {
                "request_id": request_id,
                "seed": seed,
                "skip_mm_cache": skip_mm_cache,
                "needs_tensors": needs_tensors,
                "cancelled": cancelled,
            }
            if isinstance(prompt, Chat):
                prepared = self._renderer.render_chat(prompt, params, **options)
            else:
                prepared = self._renderer.render_completion(prompt, params, **options)
            return replace(prepared, stages={**prepared.stages, "wait_thread": wait_s})

        try:
            future = self._choose_threads(prompt, params).submit(run)
        except RuntimeError as error:  # the executor's word for being shut down
            raise CapacityError(_STOPPING) from error
        try:
            await self._wait(future)
        except BaseException:  # the caller has left, or all of it stops
            cancelled.set_result(None)
            future.cancel()
            future.add_done_callback(self._give_back)
            raise
        return future.result()

    def close(self) -> None:
        """Doesn't wait for threads that are at work; who waits for them does no longer."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(CapacityError(_STOPPING))
        self._text_threads.shutdown(wait=False, cancel_futures=True)
        self._long_threads.shutdown(wait=False, cancel_futures=True)
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)
        self._media_threads.shutdown(wait=False, cancel_futures=True)

    def _choose_threads(self, prompt: Prompt | Chat, params: SamplingParams) -> ThreadPoolExecutor:
        if _has_media(prompt):
            return self._media_threads
        may_call = isinstance(prompt, Chat) and bool(prompt.options.tools)
        if params.structured_outputs is not None or may_call:
            return self._grammar_threads
        return self._long_threads if _is_long(prompt) else self._text_threads

    async def _wait(self, future: Future[Prepared]) -> None:
        """Until it has ended, however. Raises a `CapacityError` when this is closed."""
        loop = asyncio.get_running_loop()
        waiting = loop.create_future()

        def settle() -> None:
            if not waiting.done():
                waiting.set_result(None)

        def wake(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended: nobody waits
                loop.call_soon_threadsafe(settle)

        self._waiting.add(waiting)
        try:
            future.add_done_callback(wake)
            await waiting
        finally:
            self._waiting.discard(waiting)

    def _give_back(self, future: Future[Prepared]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._release(future.result().processed)


def _is_long(prompt: Prompt | Chat) -> bool:
    """Return whether the text takes long to tokenise, at a glance at the first of it."""
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


def _has_media(prompt: Prompt | Chat) -> bool:
    """Whether it looks so; what is malformed is refused elsewhere."""
    if isinstance(prompt, Chat):
        contents = (c for c in _iterate_contents(prompt) if isinstance(c, list))
        parts = (part for content in contents for part in content)
        return any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)
    return isinstance(prompt, Mapping) and bool(
        prompt.get("multi_modal_data") or prompt.get("multi_modal_uuids") or prompt.get("mm_hashes")
    )
