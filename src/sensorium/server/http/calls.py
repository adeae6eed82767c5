"""Reads the HTTP requests of clients, and runs the prompts of those that generate text.

Every handler of a request with a JSON or msgpack body begins with `read_call`. A `Call` is one
client's request that generates text. It may have several prompts, and each of them is a request of
the engine, measured by a `RequestClock` of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar, cast

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from sensorium.engine.async_engine import AsyncEngine
from sensorium.engine.inputs.renderer import Chat
from sensorium.render.answers.format import AnswerFormat
from sensorium.server.http.bodies.intake import BodyIntake
from sensorium.server.http.bodies.reading import read_body, read_request
from sensorium.server.http.errors import ApiError, FailureLog, WirePaths
from sensorium.server.http.protocol.requests import GeneratingRequest
from sensorium.server.http.protocol.tokens import GenerateRequest
from sensorium.server.metrics.clock import RequestClock, make_trace
from sensorium.server.metrics.frontend import FrontendMetrics
from sensorium.server.options import ServeOptions
from sensorium.speech.live.session import LiveSource
from sensorium.speech.options import SpeechOptions
from sensorium.speech.transcript import Segment, Transcript
from sensorium.types.errors import (
    CapacityError,
    EngineLostError,
    FailedRequestError,
    InvariantError,
    RequestError,
)
from sensorium.types.model_kind import PROMPT_TASKS, TASKS, Task
from sensorium.types.outputs import RequestDelta, RequestOutput
from sensorium.types.request import FinishReason, Prompt, TextPrompt
from sensorium.types.sampling import SamplingParams

logger = logging.getLogger(__name__)
TRACE_HEADER = "x-sensorium-trace"
_MAX_WAITING = 8  # deltas of one prompt in the queue of `Call._merge`
_PROMPT_FIELDS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "cache_salt",
    "priority",
    "add_special_tokens",
)


class WireRequest(Protocol):
    """A request body, with the model's name or `None`."""

    @property
    def model(self) -> str | None: ...


class Transcriber(Protocol):
    """The part of the engine that transcribes audio, and what it can do."""

    @property
    def can_translate(self) -> bool: ...  # into English

    @property
    def has_segments(self) -> bool: ...  # times of segments

    @property
    def has_words(self) -> bool: ...  # times of words

    def transcribe(
        self,
        media: bytes,
        options: SpeechOptions,
        *,
        request_id: str,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[Segment | Transcript, None]:
        """Return a generator of segments as they become final, and then of the whole transcript.

        `media` is an audio or video file. Closing the generator aborts the work.
        """
        ...


_Request = TypeVar("_Request", bound=WireRequest)
_Generating = TypeVar("_Generating", bound=GeneratingRequest | GenerateRequest)
_Prepared = TypeVar("_Prepared")
Work = tuple[Sequence[Prompt | Chat], SamplingParams]
_AUDIO = "audio"  # the modality that transcripts need
_IndexedDelta = tuple[int, RequestDelta]  # with the index of its prompt
# deltas of several prompts; `None`: one of them has ended
_Queue = asyncio.Queue[_IndexedDelta | Exception | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The engine, the options and the other objects of the server that every handler gets."""

    engine: AsyncEngine
    answers: AnswerFormat  # how the model writes reasoning and tool calls
    options: ServeOptions
    metrics: FrontendMetrics
    failures: FailureLog
    bodies: BodyIntake  # receives the bodies of all requests except uploads
    uploads: BodyIntake
    started: int  # seconds since 1970
    transcriber: Transcriber | None = None  # `None`: the model does not transcribe
    live: LiveSource | None = None  # opens live sessions, if the model transcribes
    tasks: frozenset[Task] = PROMPT_TASKS  # that the model can do

    @property
    def capabilities(self) -> list[str]:
        """Return what the server does with its model, in the words of `/v1/models`."""
        offered = set() if self.options.is_render_only else set(self.tasks)
        if _AUDIO not in self.engine.modalities:
            offered &= PROMPT_TASKS
        return [task for task in TASKS if task in offered]


Handler = Callable[[Request, Context], Awaitable[Response]]


async def read_call(
    http_request: Request,
    context: Context,
    kind: type[_Request],
    prepare: Callable[[_Request], _Prepared],
    *,
    find_paths: Callable[[_Request], WirePaths] | None = None,
    adapt: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    takes_msgpack: bool = False,
) -> tuple[_Request, _Prepared]:
    """Receive a request's body and check it; return it as `kind`, with the result of `prepare`.

    `prepare` gets the checked request. It may run in a thread, and may raise. `adapt` changes the
    decoded body before the check. `find_paths` returns the field names for errors of the engine.
    Raise an `ApiError` or a `RequestError` if the body is not valid.
    """

    def parse(body: dict[str, Any]) -> tuple[_Request, _Prepared, str | None]:
        request, warning = read_request(kind, body if adapt is None else adapt(body))  # type: ignore[type-var]
        check_model(request.model, context.options.model_names)
        return request, prepare(request), warning

    request, prepared, warning = await read_body(
        http_request, parse, intake=context.bodies, takes_msgpack=takes_msgpack
    )
    if warning is not None:
        http_request.state.warning = warning
        logger.warning("request %s: %s", http_request.state.request_id, warning)
    if find_paths is not None:
        http_request.state.paths = find_paths(request)
    return request, prepared


async def start_call(
    http_request: Request,
    context: Context,
    kind: type[_Generating],
    prepare: Callable[[_Generating], Work],
    *,
    id_prefix: str,
    find_paths: Callable[[_Generating], WirePaths],
    n_path: str = "n",
    takes_msgpack: bool = False,
) -> Call[_Generating]:
    """Receive and check a request that generates text, and return a `Call` that is ready to run.

    `n_path` is the field with the number of completions per prompt. Raise an `ApiError` if that
    number is above the server's limit.
    """

    def prepare_checked(request: _Generating) -> Work:
        prompts, params = prepare(request)
        max_n = context.options.max_n
        if params.n > max_n:
            raise ApiError(
                f"{n_path} is {params.n}, but this server makes {max_n} completions of a prompt at "
                "most (--max-n)",
                param=n_path,
            )
        return prompts, params

    request, (prompts, params) = await read_call(
        http_request,
        context,
        kind,
        prepare_checked,
        find_paths=find_paths,
        takes_msgpack=takes_msgpack,
    )
    return Call(
        context=context,
        request=request,
        id=f"{id_prefix}-{uuid.uuid4().hex}",
        prompts=set_uuid_scope(prompts, http_request),
        params=params,
        arrived=http_request.state.arrived,
        model=request.model or context.options.model_names[0],
        created=int(time.time()),
        has_trace=bool(request.trace) or http_request.headers.get(TRACE_HEADER) == "1",
    )


@dataclass(slots=True, kw_only=True)
class Call(Generic[_Generating]):
    """A client's request that generates text, with one request of the engine for each prompt."""

    context: Context
    request: _Generating
    id: str
    prompts: Sequence[Prompt | Chat]
    params: SamplingParams
    arrived: float
    model: str  # the model's name in the answer
    created: int  # seconds since 1970
    has_trace: bool
    # The id that the core uses to treat all requests of this call, and no others, as one group.
    group: str = field(default_factory=lambda: uuid.uuid4().hex)
    # index of a prompt that has ended -> its output, and of one that has begun -> its clock
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    clocks: dict[int, RequestClock] = field(default_factory=dict)
    is_whole: bool = False  # the answer is sent when it is complete, not piece by piece

    @property
    def num_top(self) -> int:
        """Return how many of the likeliest tokens the response lists for each generated token."""
        return self.params.logprobs or 0

    @property
    def is_ended(self) -> bool:
        return len(self.outputs) == len(self.prompts)

    def get_trace(self) -> Any:
        """Return the trace (for several prompts a list), or `UNSET` if none was asked for."""
        if not self.has_trace:
            return UNSET
        indices = range(len(self.prompts))
        traces = [make_trace(self.outputs[index], self.clocks[index]) for index in indices]
        return traces[0] if len(traces) == 1 else traces

    def run(self) -> AsyncGenerator[_IndexedDelta, None]:
        """Return a generator of prompt indices and new output; closing it aborts all prompts."""
        return self._run_prompt(0) if len(self.prompts) == 1 else self._merge()

    async def finish(self) -> list[RequestOutput]:
        """Run all prompts to their end, and return their outputs in the order of the prompts."""
        self.is_whole = True
        async with aclosing(self.run()) as deltas:
            async for _ in deltas:
                pass
        return self.get_outputs()

    def get_outputs(self) -> list[RequestOutput]:
        return [self.outputs[index] for index in range(len(self.prompts))]

    async def _run_prompt(self, index: int) -> AsyncGenerator[_IndexedDelta, None]:
        clock = self.context.metrics.start_request(arrived=self.arrived, params=self.params)
        clock.mark("parse")
        self.clocks[index] = clock
        request_id = self.id if len(self.prompts) == 1 else f"{self.id}-{index}"
        deltas = self.context.engine.stream(
            self.prompts[index],
            self.params,
            request_id=request_id,
            group=self.group,
            may_repeat=self.is_whole,
        )
        end: FinishReason | None = FinishReason.ABORT  # the reason if the loop below is left early
        try:
            async for delta in deltas:
                for entry in delta.deltas:
                    clock.on_tokens(entry.index, len(entry.token_ids))
                if delta.final is not None:
                    clock.on_finish(delta.final)
                    self.outputs[index] = delta.final
                yield index, delta
        except Exception as error:
            end = None if is_refused(error) else FinishReason.ERROR
            raise
        finally:
            if end is not None:
                clock.on_end(end)
            await deltas.aclose()
        if index not in self.outputs:
            raise InvariantError(f"the stream of prompt {index} ended without its final output")

    async def _merge(self) -> AsyncGenerator[_IndexedDelta, None]:
        queue: _Queue = asyncio.Queue(_MAX_WAITING * len(self.prompts))
        tasks = [
            asyncio.ensure_future(self._pump(index, queue)) for index in range(len(self.prompts))
        ]
        try:
            num_open = len(tasks)
            while num_open:
                entry = await queue.get()
                if isinstance(entry, Exception):
                    raise entry
                if entry is None:
                    num_open -= 1
                else:
                    yield entry
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, index: int, queue: _Queue) -> None:
        async with aclosing(self._run_prompt(index)) as deltas:
            try:
                async for entry in deltas:
                    await queue.put(entry)
                await queue.put(None)
            except Exception as error:  # raised by `_merge`, whatever it is
                await queue.put(error)


def is_refused(error: Exception) -> bool:
    """Return whether the engine refused a request, instead of accepting it and failing later."""
    is_failed = isinstance(error, FailedRequestError | EngineLostError)
    return isinstance(error, RequestError | CapacityError) and not is_failed


def set_uuid_scope(
    prompts: Sequence[Prompt | Chat], http_request: Request
) -> Sequence[Prompt | Chat]:
    """Return the prompts with the scope in which the client's uuids of media items are valid.

    The client's API key determines the scope. Without a key all clients share their uuids.
    """
    scope = http_request.scope["state"].get("uuid_scope")
    return prompts if scope is None else [_with_scope(prompt, scope) for prompt in prompts]


def _with_scope(prompt: Prompt | Chat, scope: str) -> Prompt | Chat:
    if isinstance(prompt, Chat):
        return replace(prompt, fields={**prompt.fields, "uuid_scope": scope})
    return cast(Prompt, {**cast(TextPrompt, prompt), "uuid_scope": scope})


def check_model(name: str | None, names: Sequence[str]) -> None:
    """Raise an `ApiError` (404) if `name` is neither a name of the served model nor `None`."""
    if name is not None and name not in names:
        raise ApiError(
            f"the model {name[:200]!r} is not served here, only {', '.join(names)}",
            status=404,
            param="model",
            code="model_not_found",
            reason="not_found",
        )


def check_takes_prompts(context: Context) -> None:
    """Raise an `ApiError` that names the right route if the model only transcribes speech."""
    if not context.tasks & PROMPT_TASKS:
        raise ApiError(
            "This model does not answer prompts, it only transcribes speech. Send audio to "
            "/v1/audio/transcriptions.",
            param="model",
            code="unsupported_route",
        )


def get_prompt_fields(request: GeneratingRequest) -> TextPrompt:
    """Return the options that the client has set for each of its prompts, such as `cache_salt`."""
    values = ((name, getattr(request, name)) for name in _PROMPT_FIELDS)
    return cast(TextPrompt, {name: value for name, value in values if value is not None})
