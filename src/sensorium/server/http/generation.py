"""Runs requests of the engine with their clocks: the one place where they are measured."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from sensorium.engine.async_engine import AsyncEngine
from sensorium.engine.inputs.chat_batch import Chat
from sensorium.server.metrics.clock import RequestClock
from sensorium.server.metrics.frontend import FrontendMetrics
from sensorium.types.errors import (
    CapacityError,
    EngineLostError,
    FailedRequestError,
    InvariantError,
    RequestError,
)
from sensorium.types.outputs import RequestDelta, RequestOutput
from sensorium.types.prompts import Prompt
from sensorium.types.request import FinishReason
from sensorium.types.sampling import SamplingParams

_MAX_WAITING = 8  # deltas of one prompt that nobody has taken yet


@dataclass(slots=True, kw_only=True)
class Generation:
    """All prompts of one call. `outputs` and `clocks` are by prompt; an output is there when its
    prompt has ended.
    """

    engine: AsyncEngine
    metrics: FrontendMetrics
    request_id: str
    prompts: Sequence[Prompt | Chat]
    params: SamplingParams
    arrived: float
    # What all requests of this call have in common in the core; nobody else's have it.
    group: str = field(default_factory=lambda: uuid.uuid4().hex)
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    clocks: dict[int, RequestClock] = field(default_factory=dict)

    async def run(self) -> AsyncGenerator[tuple[int, RequestDelta], None]:
        """The news of all prompts, each with its prompt's index. Closing it aborts them all."""
        if len(self.prompts) == 1:
            single = self._run_prompt(0)
            try:
                async for delta in single:
                    yield 0, delta
            finally:
                await single.aclose()
            return
        merged = self._merge()
        try:
            async for news in merged:
                yield news
        finally:
            await merged.aclose()

    async def finish(self) -> list[RequestOutput]:
        """The whole answers, in the order of the prompts."""
        news = self.run()
        try:
            async for _ in news:
                pass
        finally:
            await news.aclose()
        return self.get_outputs()

    def get_outputs(self) -> list[RequestOutput]:
        return [self.outputs[index] for index in range(len(self.prompts))]

    async def _run_prompt(self, index: int) -> AsyncGenerator[RequestDelta, None]:
        clock = self.metrics.start_request(arrived=self.arrived, params=self.params)
        clock.mark("parse")
        self.clocks[index] = clock
        request_id = self.request_id if len(self.prompts) == 1 else f"{self.request_id}-{index}"
        news = self.engine.stream(
            self.prompts[index], self.params, request_id=request_id, group=self.group
        )
        end: FinishReason | None = FinishReason.ABORT  # of a request that is given up here
        try:
            async for delta in news:
                for entry in delta.deltas:
                    clock.on_tokens(entry.index, len(entry.token_ids))
                if delta.final is not None:
                    clock.on_finish(delta.final)
                    self.outputs[index] = delta.final
                yield delta
        except Exception as error:
            end = None if _is_refusal(error) else FinishReason.ERROR
            raise
        finally:
            if end is not None:
                clock.on_end(end)
            await news.aclose()
        if index not in self.outputs:
            raise InvariantError("the engine's stream ended without its final output")

    async def _merge(self) -> AsyncGenerator[tuple[int, RequestDelta], None]:
        queue: asyncio.Queue[tuple[int, RequestDelta | Exception | None]] = asyncio.Queue(
            _MAX_WAITING * len(self.prompts)
        )
        tasks = [
            asyncio.ensure_future(self._pump(index, queue)) for index in range(len(self.prompts))
        ]
        try:
            num_open = len(tasks)
            while num_open:
                index, news = await queue.get()
                if isinstance(news, Exception):
                    raise news
                if news is None:
                    num_open -= 1
                else:
                    yield index, news
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(
        self, index: int, queue: asyncio.Queue[tuple[int, RequestDelta | Exception | None]]
    ) -> None:
        news = self._run_prompt(index)
        try:
            async for delta in news:
                await queue.put((index, delta))
            await queue.put((index, None))
        except Exception as error:  # told to the one who merges, whatever it is
            await queue.put((index, error))
        finally:
            await news.aclose()


def _is_refusal(error: Exception) -> bool:
    """The request was not taken, as opposed to taken and not finished."""
    is_refusal = isinstance(error, RequestError | CapacityError)
    return is_refusal and not isinstance(error, FailedRequestError | EngineLostError)
