"""A scripted engine and metrics that only count, and a real HTTP server over them."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn

from sensorium.engine.inputs.renderer import Chat
from sensorium.render.answers.format import PLAIN, AnswerFormat
from sensorium.server.http.app import make_app
from sensorium.server.http.wire.websocket_protocol import RealtimeProtocol
from sensorium.server.metrics.metric_set import MetricSet
from sensorium.server.metrics.realtime import SessionClock
from sensorium.speech.transcript import SpeechUsage
from sensorium.types.model_kind import PROMPT_TASKS, Task
from sensorium.types.outputs import (
    CompletionDelta,
    CompletionOutput,
    Logprob,
    RequestDelta,
    RequestOutput,
)
from sensorium.types.request import FinishReason
from sensorium.types.sampling import SamplingParams
from tests.support.waiting import wait_until

MAX_MESSAGE_BYTES = 2**24
WORDS = ("Hel", "lo", " wörld")
PROMPT_IDS = (1, 2, 3)


def make_logprob(index: int) -> dict[int, Logprob]:
    return {
        100 + index: Logprob(logprob=-0.5, rank=1, decoded_token=WORDS[index]),
        7: Logprob(logprob=float("-inf"), rank=2, decoded_token="x"),
    }


@dataclass
class ScriptedEngine:
    """An engine that answers everything with `WORDS`, one a delta.

    `prepare` runs before the first delta, `between` before each later one; either may wait or
    raise.
    """

    is_connected: bool = True
    is_stalled: bool = False
    info: Any = field(
        default_factory=lambda: SimpleNamespace(max_model_len=64, kernels={"fused": "nothing"})
    )
    prepare: Callable[[Any], Any] | None = None
    between: Callable[[int], Any] | None = None
    calls: list[tuple[Any, SamplingParams]] = field(default_factory=list)
    groups: list[str | None] = field(default_factory=list)
    may_repeat: list[bool] = field(default_factory=list)  # of all requests
    resets: list[str] = field(default_factory=list)
    num_open: int = 0
    num_started: int = 0
    num_aborted: int = 0
    reset_error: Exception | None = None
    modalities: tuple[str, ...] = ("image",)
    switched_off: dict[str, str] = field(default_factory=dict)
    only_one: dict[str, str] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()

    @property
    def tokenizer(self) -> Any:
        return SimpleNamespace(decode=lambda ids: "".join(f"<{i}>" for i in ids))

    async def stream(
        self,
        prompt: Any,
        params: SamplingParams,
        *,
        request_id: str,
        group: str | None = None,
        may_repeat: bool = False,
    ) -> AsyncGenerator[RequestDelta, None]:
        self.may_repeat.append(may_repeat)
        self.groups.append(group)
        self.calls.append((prompt, params))
        self.num_open += 1
        self.num_started += 1
        is_ended = False
        try:
            if isinstance(prompt, Chat):
                _check_chat(prompt)
            if self.prepare is not None:
                await _settle(self.prepare(prompt))
            for index in range(len(WORDS)):
                if index and self.between is not None:
                    await _settle(self.between(index))
                await asyncio.sleep(0)
                delta = self._make_delta(index, params, request_id)
                is_ended = delta.final is not None
                yield delta
        finally:
            self.num_aborted += not is_ended
            self.num_open -= 1

    def _make_delta(self, index: int, params: SamplingParams, request_id: str) -> RequestDelta:
        is_last = index == len(WORDS) - 1
        has_logprobs = params.logprobs is not None
        entries = tuple(
            CompletionDelta(
                index=choice,
                text=WORDS[index],
                token_ids=(100 + index,),
                finish_reason=FinishReason.STOP if is_last else None,
                stop_reason=42 if is_last else None,
                logprobs=(make_logprob(index),) if has_logprobs else None,
            )
            for choice in range(params.n)
        )
        return RequestDelta(
            request_id=request_id,
            deltas=entries,
            prompt_token_ids=PROMPT_IDS,
            final=self._make_final(params, request_id) if is_last else None,
        )

    def _make_final(self, params: SamplingParams, request_id: str) -> RequestOutput:
        logprobs = tuple(make_logprob(index) for index in range(len(WORDS)))
        outputs = tuple(
            CompletionOutput(
                index=choice,
                text="".join(WORDS),
                token_ids=(100, 101, 102),
                finish_reason=FinishReason.STOP,
                stop_reason=42,
                logprobs=logprobs if params.logprobs is not None else None,
            )
            for choice in range(params.n)
        )
        entry = {2: Logprob(logprob=-1.0, rank=3, decoded_token="<2>")}
        last = {3: Logprob(logprob=-2.0, rank=1, decoded_token="<3>")}
        return RequestOutput(
            request_id=request_id,
            prompt=None,
            prompt_token_ids=PROMPT_IDS,
            outputs=outputs,
            finished=True,
            prompt_logprobs=None if params.prompt_logprobs is None else (None, entry, last),
            num_cached_tokens=2,
        )

    async def reset_cache(self, level: str) -> None:
        if self.reset_error is not None:
            raise self.reset_error
        self.resets.append(level)


def _check_chat(chat: Chat) -> None:
    """Check a chat as rendering does."""
    from sensorium.render.messages import parse_messages

    parse_messages(chat.messages)


async def _settle(value: Any) -> None:
    if asyncio.iscoroutine(value):
        await value


class CountingClock:
    def __init__(self, metrics: CountingMetrics) -> None:
        self._metrics = metrics
        self._is_ended = False

    def mark(self, stage: str) -> None:
        self._metrics.stages[stage] += 1

    def on_tokens(self, index: int, num_tokens: int) -> None:
        self._metrics.tokens[index] += num_tokens

    def on_finish(self, output: RequestOutput) -> None:
        self._is_ended = True
        self._metrics.finished.append(output)

    def on_segment(self) -> None:
        self._metrics.num_segments += 1

    def on_transcript(self, usage: SpeechUsage) -> None:
        self._is_ended = True
        self._metrics.transcripts.append(usage)

    def on_end(self, reason: FinishReason) -> None:
        if not self._is_ended:
            self._metrics.ends[str(reason)] += 1

    @property
    def stages(self) -> dict[str, float]:
        return {}

    @property
    def elapsed_s(self) -> float:
        return 0.0


class CountingMetrics:
    def __init__(self) -> None:
        self.refusals: Counter[str] = Counter()
        self.stages: Counter[str] = Counter()
        self.tokens: Counter[int] = Counter()
        self.ends: Counter[str] = Counter()
        self.responses: Counter[tuple[str, str, int]] = Counter()
        self.finished: list[RequestOutput] = []
        self.num_segments = 0
        self.transcripts: list[SpeechUsage] = []
        self.load = 0
        self.num_websockets = 0
        self.num_lags = 0

    @contextmanager
    def track_arrival(self) -> Iterator[None]:
        self.load += 1
        try:
            yield
        finally:
            self.load -= 1

    @contextmanager
    def track_websocket(self) -> Iterator[None]:
        self.num_websockets += 1
        try:
            yield
        finally:
            self.num_websockets -= 1

    def start_session(self) -> SessionClock:
        return SessionClock(self.real)

    @cached_property
    def real(self) -> MetricSet:
        """The series that live sessions write."""
        return MetricSet("tiny")

    def count_refusal(self, reason: str) -> None:
        self.refusals[reason] += 1

    def start_request(self, *, arrived: float, params: SamplingParams | None) -> CountingClock:
        assert arrived <= time.monotonic()
        assert params is not None
        return CountingClock(self)

    def observe_loop_lag(self, seconds: float) -> None:
        assert seconds >= 0
        self.num_lags += 1

    def observe_response(self, *, handler: str, method: str, status: int, seconds: float) -> None:
        assert seconds >= 0
        self.responses[handler, method, status] += 1

    async def read_others(self) -> tuple[()]:
        return ()

    def render(self, others: object) -> tuple[bytes, str]:  # noqa: ARG002
        return b"metric 1\n", "text/plain; version=0.0.4"

    def get_load(self, others: object) -> int:  # noqa: ARG002
        return self.load


@dataclass(frozen=True, kw_only=True)
class StandInOptions:
    model_names: tuple[str, ...] = ("tiny", "org/tiny")
    api_key: tuple[str, ...] = ()
    api_server_count: int = 1
    max_concurrent_requests: int = 64
    max_body_mb: int = 64
    max_upload_mb: int = 64
    max_n: int = 128
    body_timeout: float = 600.0
    min_body_rate: int = 8
    max_unfinished_bodies_mb: int = 1024
    host: str = "127.0.0.1"
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    share_uuids: bool = False
    trust_request_chat_template: bool = False
    is_render_only: bool = False
    protect_metrics: bool = False
    stream_timeout: float = 60.0
    max_realtime_sessions: int = 8
    realtime_idle_timeout: float = 60.0
    realtime_max_session: float = 3600.0


@dataclass
class RunningServer:
    url: str
    engine: ScriptedEngine
    metrics: CountingMetrics
    loop: asyncio.AbstractEventLoop
    port: int
    stop: Callable[[], None]  # begins to stop the server, and does not wait for it

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, **options)

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request on its own connection, with a longer timeout than that of httpx."""
        return httpx.request(method, f"{self.url}{path}", timeout=120, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.ask("GET", path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.ask("POST", path, **options)

    def chat(self, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        return self.post("/v1/chat/completions", json=body)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", json={"prompt": "hi", **fields})


def read_answer(connection: socket.socket) -> bytes:
    """Read one whole answer: its head and body may arrive separately."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += connection.recv(65536)
    head, _, body = answer.partition(b"\r\n\r\n")
    (size,) = re.findall(rb"content-length: (\d+)", head)
    while len(body) < int(size):
        body += connection.recv(65536)
    return head + body


class _Server(uvicorn.Server):
    loop: asyncio.AbstractEventLoop

    async def startup(self, sockets: Any = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)


def _find_tasks(transcriber: Any, live: Any) -> frozenset[Task]:
    """Return the tasks of a model that chats, and transcribes with this transcriber."""
    tasks: set[Task] = set(PROMPT_TASKS)
    if transcriber is not None:
        tasks |= {"transcription"} | ({"translation"} if transcriber.can_translate else set())
    return frozenset(tasks | ({"realtime"} if live is not None else set()))


@contextmanager
def serve(
    engine: ScriptedEngine | None = None,
    answers: AnswerFormat = PLAIN,
    *,
    http: Any = "auto",
    transcriber: Any = None,
    live: Any = None,
    tasks: frozenset[Task] | None = None,
    ping_s: float = 20.0,
    ping_timeout_s: float | None = None,  # as often as there are pings
    shutdown_s: int = 60,  # after which sessions are cancelled
    **options: Any,
) -> Iterator[RunningServer]:
    engine = engine or ScriptedEngine()
    metrics = CountingMetrics()
    app = make_app(
        engine,
        StandInOptions(**options),
        metrics,
        answers=answers,
        transcriber=transcriber,
        live=live,
        tasks=_find_tasks(transcriber, live) if tasks is None else tasks,
    )
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        http=http,
        ws=RealtimeProtocol,
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,
        ws_ping_interval=ping_s,
        ws_ping_timeout=ping_s if ping_timeout_s is None else ping_timeout_s,
        log_config=None,
        timeout_graceful_shutdown=1 if live is None else shutdown_s,
        timeout_keep_alive=600,
    )
    server = _Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started, "the server does not start")
    port = server.servers[0].sockets[0].getsockname()[1]

    def stop() -> None:
        server.should_exit = True

    try:
        yield RunningServer(f"http://127.0.0.1:{port}", engine, metrics, server.loop, port, stop)
    finally:
        server.should_exit = True
        thread.join(60)


def read_events(response: httpx.Response) -> list[str]:
    """Return the data of each event."""
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") for frame in frames)
    return [frame.removeprefix("data: ") for frame in frames]
