"""Builds what a frontend's process runs, and runs it: uvicorn on one event loop."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
import uvloop
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sensorium.engine.async_engine import AsyncEngine
from sensorium.engine.build.builder import build_frontend, load_source, resolve_string_limit
from sensorium.engine.build.perception import Perception, build_caches, build_readonly_caches
from sensorium.engine.core_process.core_info import CoreInfo
from sensorium.engine.inputs.input_processor import InputProcessor
from sensorium.models.checkpoint import blame_checkpoint
from sensorium.multimodal.cache.shm_store import ShmStore
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.render.answers.format import make_answer_format
from sensorium.render.answers.interface import AnswerFormat
from sensorium.render.chat_options import load_chat_template
from sensorium.render.own_templates import get_template_text
from sensorium.server.http.app import make_app
from sensorium.server.http.connections.http_protocol import make_http_protocol
from sensorium.server.logs import adopt_library_logs
from sensorium.server.metrics.frontend import FrontendMetrics
from sensorium.server.metrics.memory import get_frontend_name
from sensorium.server.metrics.metric_set import write_as
from sensorium.server.options import (
    ServeOptions,
    make_engine_options,
    make_media_options,
    make_source,
)
from sensorium.server.processes.control import (
    Channel,
    CoreDown,
    CoreResumed,
    CoreStalled,
    CoreUp,
    Drain,
    Serving,
    StartFrontend,
    ToFrontend,
)
from sensorium.server.processes.file_limit import raise_file_limit
from sensorium.server.processes.render_app import make_render_info
from sensorium.types.sampling import GenerationDefaults

_SYNC_S = 1.0
_BACKLOG = 2048
_TELLING_S = 10  # for answers to those whose time is over
# Longer than clients keep connections that they don't use: else one is closed as they use it again.
_KEEP_ALIVE_S = 75
Messages = asyncio.Queue[ToFrontend]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendApp:
    """`info`: what a core would say, where there is none."""

    engine: AsyncEngine
    perception: Perception
    answers: AnswerFormat
    info: CoreInfo | None = None


def build_frontend_app(start: StartFrontend) -> FrontendApp:
    """All that needs no core, while that one loads. Its defaults for sampling come with it."""
    adopt_library_logs()
    options, is_alone = start.options, start.options.is_render_only
    engine_options, media = make_engine_options(options), make_media_options(options)
    source = make_source(options, use_tqdm=False)
    with blame_checkpoint(options.model):
        loaded = load_source(source)
        string_limit = resolve_string_limit(engine_options, loaded)
        store = None if start.shm_fd is None else ShmStore.attach(start.shm_fd)
        frontend = build_frontend(
            source,
            loaded,
            media,
            build_readonly_caches(media) if is_alone else build_caches(media, store),
            starts_early=True,
            warm_modalities=engine_options.allowed_modalities if options.warmup else (),
        )
        inputs = InputProcessor(
            frontend.processor,
            pipeline=frontend.perception.pipeline,
            readonly=frontend.perception.readonly,
            defaults=GenerationDefaults(),
            limit_mm_per_prompt=engine_options.limit_mm_per_prompt,
            mm_processor_kwargs=media.mm_processor_kwargs,
            media_io_kwargs=media.media_io_kwargs,
            trust_injected=options.trust_injected,
            seed=engine_options.seed + start.index,
            max_string_length=string_limit,
        )
        info = make_render_info(options, engine_options, loaded) if is_alone else None
    template = load_chat_template(options.chat_template)
    engine = AsyncEngine(
        inputs,
        frontend.perception,
        identity=start.identity,
        chat_template=template,
    )
    answers = _make_answer_format(
        options, frontend.processor, template, max_string_length=string_limit
    )
    if options.warmup:
        engine.renderer.warmup()  # before the pool starts: what it warms is this process
    pool = frontend.perception.pool
    if pool is not None and _has_cores_for_all(options, media.mm_processor_pool_size):
        pool.start()
    return FrontendApp(engine=engine, perception=frontend.perception, answers=answers, info=info)


def _make_answer_format(
    options: ServeOptions,
    processor: MultiModalProcessor,
    chat_template: str | None,
    *,
    max_string_length: int | None,
) -> AnswerFormat:
    tokenizer = processor.tokenizer
    return make_answer_format(
        tokenizer,
        chat_template or get_template_text(processor.hf_processor, tokenizer),
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        max_string_length=max_string_length,
    )


def _has_cores_for_all(options: ServeOptions, pool_size: int) -> bool:
    """Whether pools can load while core and frontends do, and make nothing later."""
    num_cores = 0 if options.is_render_only else 1
    num_processes = num_cores + options.api_server_count * (1 + pool_size)
    return (os.cpu_count() or 1) >= num_processes


def run_frontend(
    start: StartFrontend,
    half: FrontendApp,
    *,
    channel: Channel[ToFrontend],
    inbox_attach: Callable[[Callable[[ToFrontend], object]], None],
) -> None:
    """Until the parent says `Drain` and the requests in flight have ended."""

    async def run() -> None:
        messages: Messages = asyncio.Queue()
        loop = asyncio.get_running_loop()
        inbox_attach(lambda message: loop.call_soon_threadsafe(messages.put_nowait, message))
        description = () if half.info is None else half.info.description
        serving = Serving(description=description)
        await _serve(start, half, messages, lambda: channel.send(serving))

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
    finally:
        half.perception.close()


async def _serve(
    start: StartFrontend, half: FrontendApp, messages: Messages, tell_serving: Callable[[], None]
) -> None:
    options, perception, engine = start.options, half.perception, half.engine
    write_as(get_frontend_name(start.index))
    metrics = FrontendMetrics(options.model_names[0])

    def sync() -> None:
        num_preparing = engine.get_statistics().num_preparing
        metrics.sync(perception=perception, num_preparing=num_preparing)

    def on_started() -> None:
        tell_serving()
        if perception.pool is not None:
            perception.pool.start()  # if it is not yet; until it is there, this process does it

    app = SyncBeforeEnd(make_app(engine, options, metrics, answers=half.answers), sync)
    config = make_config(options, app)
    config.load()  # before the core is there, not after
    server = _Server(config, on_started)
    try:
        if half.info is not None:
            engine.run_alone(half.info)
        if half.info is not None or await _connect_first(messages, engine):
            tasks = [
                asyncio.create_task(_obey(messages, engine, server, options.shutdown_timeout)),
                asyncio.create_task(_sync_often(sync)),
            ]
            await server.serve(sockets=[socket.socket(fileno=start.listen_fd)])
            for task in tasks:
                task.cancel()
    finally:
        await engine.close()


async def _connect_first(messages: Messages, engine: AsyncEngine) -> bool:
    """Wait for a core; `False` if the parent wants to stop before there is one."""
    while True:
        message = await messages.get()
        if isinstance(message, Drain):
            return False
        if isinstance(message, CoreUp):
            await engine.connect(message.info)
            return True


async def _obey(
    messages: Messages, engine: AsyncEngine, server: uvicorn.Server, shutdown_timeout_s: float
) -> None:
    ends: list[asyncio.Task[None]] = []
    while True:
        message = await messages.get()
        if isinstance(message, CoreUp):
            await engine.connect(message.info)
        elif isinstance(message, CoreDown):
            engine.disconnect(message.reason)
        elif isinstance(message, CoreStalled | CoreResumed):
            engine.is_stalled = isinstance(message, CoreStalled)
        elif isinstance(message, Drain):
            server.should_exit = True
            ends.append(asyncio.create_task(_close_late(engine, shutdown_timeout_s)))


async def _close_late(engine: AsyncEngine, delay_s: float) -> None:
    """What is still in flight then fails, and its clients are told why."""
    await asyncio.sleep(delay_s)
    await engine.close()


async def _sync_often(sync: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(_SYNC_S)
        sync()


def make_config(options: ServeOptions, app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="none",  # it is there already
        http=make_http_protocol(
            head_timeout_s=options.head_timeout,
            max_connections=raise_file_limit(),
            stream_timeout_s=options.stream_timeout,
        ),
        backlog=_BACKLOG,
        log_config=None,
        access_log=options.access_log,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(options.shutdown_timeout) + _TELLING_S,
    )


class SyncBeforeEnd:
    """Metrics are up to date before a client has its whole answer: whoever asks for them then,
    any frontend, sees the request in them.
    """

    def __init__(self, app: ASGIApp, sync: Callable[[], None]) -> None:
        self._app = app
        self._sync = sync

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_after(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self._sync()
            await send(message)

        await self._app(scope, receive, send_after if scope["type"] == "http" else send)


class _Server(uvicorn.Server):
    """Says when it accepts connections, and leaves signals to the parent."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
