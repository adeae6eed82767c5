"""One call of `generate` or `chat`: feeds prompts as the engine takes them, so that media is not
processed far ahead, and gathers the outputs in order.

With a pool of processes several prompts are made ready at once, in threads, while the engine
steps; without one each is made ready when its turn comes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sensorium.engine.inputs.chat_batch import Chat
from sensorium.engine.inputs.input_processor import ProcessedRequest
from sensorium.types.errors import CapacityError, RequestError
from sensorium.types.outputs import CompletionOutput, RequestOutput
from sensorium.types.prompts import Prompt
from sensorium.types.request import FinishReason
from sensorium.types.sampling import SamplingParams

if TYPE_CHECKING:
    from tqdm import tqdm

    from sensorium.engine.llm import LLM

logger = logging.getLogger(__name__)
_Prepare = Callable[[], ProcessedRequest]


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A prompt that is being made ready."""

    index: int
    prompt: Prompt | Chat
    future: Future[ProcessedRequest]


class Run:
    """`num_threads`: prompts that are made ready ahead of their turn."""

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[Prompt | Chat],
        params: Sequence[SamplingParams],
        *,
        num_threads: int,
    ) -> None:
        self._llm = llm
        self._todo = deque(zip(range(len(prompts)), prompts, params, strict=True))
        self._outputs: list[RequestOutput | None] = [None] * len(prompts)
        self._index_of: dict[str, int] = {}  # requests in flight
        self._max_in_flight = 2 * llm.config.limits.max_num_seqs
        self._num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads, "prepare") if num_threads else None
        self._ahead: deque[_Ahead] = deque()
        self._cancelled: Future[None] = Future()

    def finish(self, bar: tqdm[Any]) -> list[RequestOutput]:
        num_tokens = 0
        while self._todo or self._ahead or self._index_of:
            self._feed(bar)
            for output in self._llm._step() if self._llm.core.has_requests else ():
                self._outputs[self._index_of.pop(output.request_id)] = output
                num_tokens += sum(len(entry.token_ids) for entry in output.outputs)
                bar.update()
                bar.set_postfix_str(f"{num_tokens} tokens", refresh=False)
        return [output for output in self._outputs if output is not None]

    def _feed(self, bar: tqdm[Any]) -> None:
        while len(self._llm.core.scheduler.requests) < self._max_in_flight:
            self._look_ahead()
            if not self._ahead:
                return
            if not self._ahead[0].future.done() and self._llm.core.has_requests:
                return  # there is something else to do meanwhile
            self._start(self._ahead[0], bar)

    def _start(self, entry: _Ahead, bar: tqdm[Any]) -> None:
        try:
            entry.future.exception()  # waits; an interruption here leaves the entry in its place
            self._ahead.popleft()
            self._index_of[self._llm._start(entry.future.result())] = entry.index
        except RequestError as error:
            self._refuse(entry, error)
            bar.update()
        except CapacityError as error:
            self._refuse(entry, RequestError(str(error)))
            bar.update()
        except Exception as error:
            # Our bug; the boundary at which one prompt fails and its neighbours don't.
            logger.exception("prompt %d could not be started", entry.index)
            reason = f"internal error: {type(error).__name__}: {error}"
            self._refuse(entry, RequestError(reason))
            bar.update()

    def _look_ahead(self) -> None:
        while self._todo and len(self._ahead) < max(1, 2 * self._num_threads):
            index, prompt, params = self._todo.popleft()
            prepare = self._llm._make_ready(prompt, params, cancelled=self._cancelled)
            future = _run(prepare) if self._executor is None else self._executor.submit(prepare)
            self._ahead.append(_Ahead(index, prompt, future))

    def _refuse(self, entry: _Ahead, error: RequestError) -> None:
        self._outputs[entry.index] = make_error_output(entry.index, entry.prompt, error)

    def close(self) -> None:
        """After the end or an interruption: leave nothing running but streams that others read."""
        self._cancelled.set_result(None)
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        for entry in self._ahead:
            if not entry.future.cancelled() and entry.future.exception() is None:
                self._llm._release(entry.future.result().items)
        llm = self._llm
        kept = {*llm._streams, *llm._outputs.get_child_ids(llm._streams)}
        request_ids = (*llm._outputs.request_ids, *llm.core.scheduler.requests)
        llm._abort([request_id for request_id in request_ids if request_id not in kept])


def _run(prepare: _Prepare) -> Future[ProcessedRequest]:
    future: Future[ProcessedRequest] = Future()
    try:
        future.set_result(prepare())
    except Exception as error:  # raised where the result is asked for
        future.set_exception(error)
    return future


def make_error_output(index: int, prompt: Prompt | Chat, error: RequestError) -> RequestOutput:
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    completion = CompletionOutput(index=0, text="", token_ids=(), finish_reason=FinishReason.ERROR)
    return RequestOutput(
        request_id=f"refused-{index}",
        prompt=text if isinstance(text, str) else None,
        prompt_token_ids=(),
        outputs=(completion,),
        finished=True,
        error=error,
    )
