"""The order of a streamed answer: chunks with news, then usage and trace where they were asked for.

What the chunks look like is the routes' matter.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from sensorium.server.http.calls import Call
from sensorium.server.http.openai.usage import make_running_usage, make_usage
from sensorium.server.http.protocol.answers import ChatCompletionChunk, Completion, Usage
from sensorium.server.http.protocol.generating import GeneratingRequest, StreamOptions
from sensorium.server.http.protocol.token_wire import GenerateRequest, GenerateResponse
from sensorium.server.http.streaming.sse import make_frame
from sensorium.types.outputs import RequestDelta

_Chunk = TypeVar("_Chunk", bound=ChatCompletionChunk | Completion | GenerateResponse)


class ChunkMaker(Protocol[_Chunk]):
    """Keeps what one stream has to remember between chunks."""

    def make_chunks(self, prompt_index: int, delta: RequestDelta) -> list[_Chunk]: ...

    def make_empty_chunk(self) -> _Chunk: ...


class RunningUsage:
    """Tokens so far, over all prompts."""

    def __init__(self) -> None:
        self._prompts: dict[int, int] = {}
        self._num_completion_tokens = 0

    def add(self, prompt_index: int, delta: RequestDelta) -> None:
        self._prompts[prompt_index] = len(delta.prompt_token_ids)
        self._num_completion_tokens += sum(len(entry.token_ids) for entry in delta.deltas)

    def make(self) -> Usage:
        return make_running_usage(sum(self._prompts.values()), self._num_completion_tokens)


class SseChunks(Generic[_Chunk]):
    def __init__(self, call: Call[Any], maker: ChunkMaker[_Chunk]) -> None:
        request: GeneratingRequest | GenerateRequest = call.request
        options = request.stream_options or StreamOptions()
        self._call = call
        self._maker = maker
        self._has_usage = bool(options.include_usage)
        self._is_continuous = self._has_usage and bool(options.continuous_usage_stats)
        self._usage = RunningUsage()

    async def run(self) -> AsyncGenerator[bytes, None]:
        news = self._call.generation.run()
        try:
            async for prompt_index, delta in news:
                self._usage.add(prompt_index, delta)
                chunks = self._maker.make_chunks(prompt_index, delta)
                for chunk in self._add_trace(chunks):
                    yield make_frame(msgspec.structs.replace(chunk, usage=self._get_usage()))
        finally:
            await news.aclose()
        if self._has_usage:
            yield make_frame(self._make_last_chunk())

    def _get_usage(self) -> Usage | UnsetType | None:
        if self._is_continuous:
            return self._usage.make()
        return None if self._has_usage else UNSET

    def _add_trace(self, chunks: list[_Chunk]) -> list[_Chunk]:
        """To the last chunk of all, unless usage follows."""
        generation = self._call.generation
        is_end = len(generation.outputs) == len(generation.prompts)
        if not is_end or self._has_usage or not self._call.has_trace:
            return chunks
        *before, last = chunks or [self._maker.make_empty_chunk()]
        trace = self._call.make_trace()
        return [*before, msgspec.structs.replace(last, sensorium_trace=trace)]

    def _make_last_chunk(self) -> _Chunk:
        return msgspec.structs.replace(
            self._maker.make_empty_chunk(),
            usage=make_usage(self._call.generation.get_outputs()),
            sensorium_trace=self._call.make_trace() if self._call.has_trace else UNSET,
        )
