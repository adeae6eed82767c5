"""Builds a frontend from the parent's first message, and runs it with uvicorn."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import uvicorn
import uvloop
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sensorium.engine.assembly.builder import resolve_string_limit
from sensorium.engine.assembly.config import resolve_context
from sensorium.engine.assembly.frontend import (
    Caches,
    Checkpoint,
    Frontend,
    MakeEncoder,
    MediaParts,
    build_caches,
    build_frontend,
    build_readonly_caches,
    read_checkpoint,
)
from sensorium.engine.assembly.options import MediaOptions
from sensorium.engine.assembly.tiers import build_tiers
from sensorium.engine.async_engine import AsyncEngine
from sensorium.engine.core_process import CoreInfo
from sensorium.engine.inputs.input_processor import InputProcessor
from sensorium.engine.inputs.warmup import Dummy, warm_up
from sensorium.engine.speech.live import TurnSource
from sensorium.engine.speech.live_streams import StreamSource
from sensorium.engine.speech.models import SpeechModel, find_tasks, read_speech_model
from sensorium.engine.speech.streamed import StreamedModel
from sensorium.engine.speech.transcriber import AsyncTranscriber
from sensorium.models.checkpoint import blame_checkpoint
from sensorium.models.generation_config import load_generation_defaults
from sensorium.multimodal.cache.shm_store import ShmStore
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.render.answers.format import AnswerFormat, make_answer_format
from sensorium.render.chat_template import get_template_text
from sensorium.render.messages import load_chat_template
from sensorium.server.http.app import make_app
from sensorium.server.http.middleware import RequestCount
from sensorium.server.http.protocol.requests import ChatCompletionRequest, CompletionRequest
from sensorium.server.http.wire.descriptors import raise_file_limit
from sensorium.server.http.wire.http_protocol import make_http_protocol
from sensorium.server.http.wire.websocket_protocol import RealtimeProtocol
from sensorium.server.logs import adopt_library_logs, log_step
from sensorium.server.metrics.frontend import FrontendMetrics
from sensorium.server.metrics.shared_files import get_frontend_name, write_as
from sensorium.server.options import MAX_FRONTENDS, ServeOptions
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
from sensorium.server.processes.shared_resources import SharedNumbers
from sensorium.speech.live.session import LiveSource
from sensorium.types.checking import check
from sensorium.types.families import FAMILIES
from sensorium.types.model_kind import Task
from sensorium.types.sampling import GenerationDefaults
from sensorium.utils.process import report_step

_SYNC_S = 1.0
_POOL_LOOK_S = 0.02
_BACKLOG = 2048
_REFUSING_S = 10  # for errors to clients that are still waiting at the end of a shutdown
# Longer than clients keep connections that they don't use. Otherwise a connection may be closed
# just when its client uses it again.
_KEEP_ALIVE_S = 75
_MAX_MESSAGE_BYTES = 2**24  # of a WebSocket; OpenAI's API allows 15 MiB of audio in one
Messages = asyncio.Queue[ToFrontend]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendApp:
    """The parts of a frontend, built before it begins to serve HTTP."""

    engine: AsyncEngine
    media_parts: MediaParts
    answers: AnswerFormat
    info: CoreInfo | None  # used in place of that of a core; None: the server has a core
    speech: SpeechModel[Any] | None  # None: the model is no speech model
    tasks: frozenset[Task]
    dummies: Sequence[Dummy] = ()  # for the warm-up of the model; none without a warm-up


def build_frontend_app(
    options: ServeOptions,
    *,
    identity: str,
    index: int = 0,
    shm_fd: int | None = None,
    make_engine: Callable[..., AsyncEngine] = AsyncEngine,
    make_encoder: MakeEncoder | None = None,  # connects to a remote encoder
) -> FrontendApp:
    """Build all parts of a frontend that do not depend on the core, while the core still loads.

    `StartFrontend` explains the first arguments. The default sampling parameters are set when the
    core is ready. Raise a `SensoriumError` if a file of the model can't be used.
    """
    adopt_library_logs()
    engine_options, media = options.engine, options.media
    loading = replace(options.loading, use_tqdm_on_load=False)
    with blame_checkpoint(options.model):
        checkpoint = read_checkpoint(loading)
        string_limit = resolve_string_limit(engine_options, checkpoint)
        is_alone = options.is_render_only
        frontend = build_frontend(
            loading,
            checkpoint,
            media,
            build_readonly_caches(media) if is_alone else _open_caches(media, shm_fd),
            tiers=build_tiers(loading, checkpoint.directory, checkpoint.hf_config, media),
            starts_early=True,
            warm_modalities=engine_options.allowed_modalities if options.warmup else (),
            make_encoder=make_encoder,
        )
        inputs = _make_inputs(options, frontend, seed=engine_options.seed + index)
        info = make_render_info(options, checkpoint) if is_alone else None
    template = load_chat_template(options.chat_template)
    engine = make_engine(inputs, frontend.media_parts, identity=identity, chat_template=template)
    answers = _make_answer_format(
        options, frontend.processor, template, max_string_length=string_limit
    )
    speech = read_speech_model(frontend, chat_template=template)
    dummies = _warm_up(engine) if options.warmup else []
    pool = frontend.media_parts.pool
    if pool is not None and _has_cores_for_all(options, media.mm_processor_pool_size):
        pool.start()
    return FrontendApp(
        engine=engine,
        media_parts=frontend.media_parts,
        answers=answers,
        info=info,
        speech=speech,
        tasks=find_tasks(checkpoint.kind, speech),
        dummies=dummies,
    )


def _make_inputs(options: ServeOptions, frontend: Frontend, *, seed: int) -> InputProcessor:
    return InputProcessor(
        frontend.processor,
        pipeline=frontend.media_parts.pipeline,
        readonly=frontend.media_parts.readonly,
        defaults=GenerationDefaults(),
        limit_mm_per_prompt=options.engine.limit_mm_per_prompt,
        mm_processor_kwargs=options.media.mm_processor_kwargs,
        media_io_kwargs=options.media.media_io_kwargs,
        trust_injected=options.trust_injected,
        seed=seed,
        max_string_length=resolve_string_limit(options.engine, frontend.checkpoint),
    )


def _open_caches(media: MediaOptions, shm_fd: int | None) -> Caches:
    return build_caches(media, None if shm_fd is None else ShmStore.attach(shm_fd))


def _warm_up(engine: AsyncEngine) -> list[Dummy]:
    """Warm up this process, which renders some requests itself, as the pool has not started."""
    report_step("warming up")
    dummies = warm_up(engine.renderer)
    # The first check of each type of request is slow, and makes the next ones fast.
    check({"messages": []}, ChatCompletionRequest)
    check({"prompt": ""}, CompletionRequest)
    return dummies


async def finish_warm_up(
    app: FrontendApp, *, has_core: bool = True, waits_for_pool: bool = True
) -> None:
    """Warm up what a frontend uses in other processes: the model, and the processes for media.

    The core must be connected if there is one. This returns when the core has computed a dummy of
    each modality, and all processes of the pool are ready, or can't be started. Raise a
    `ModelError` if not even text can be computed.
    """
    pool = app.media_parts.pool
    if pool is not None:
        pool.start()  # now, so that it imports while the core computes
    if has_core:
        log_step("warming up the model")
        await app.engine.rehearse(app.dummies)
    if pool is not None and waits_for_pool and not pool.is_complete:
        log_step("waiting for the processes for media")
        while not pool.is_complete:
            await asyncio.sleep(_POOL_LOOK_S)


def _make_live_source(
    engine: AsyncEngine, speech: SpeechModel[Any] | None, transcriber: AsyncTranscriber | None
) -> LiveSource | None:
    """Return the source of live sessions, or `None` if the model does not transcribe."""
    if isinstance(speech, StreamedModel):
        return StreamSource(engine, speech)
    return None if transcriber is None else TurnSource(transcriber)


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
    """Return whether this machine has a CPU core for each process, so that all can load at once."""
    num_cores = 0 if options.is_render_only else 1
    num_processes = num_cores + options.api_server_count * (1 + pool_size)
    return (os.cpu_count() or 1) >= num_processes


def run_frontend(
    start: StartFrontend,
    app: FrontendApp,
    *,
    channel: Channel[ToFrontend],
    attach: Callable[[Callable[[ToFrontend], object]], None],  # gets the handler of messages
) -> None:
    """Serve HTTP until the parent sends `Drain` and the requests in flight have ended."""

    async def run() -> None:
        messages: Messages = asyncio.Queue()
        loop = asyncio.get_running_loop()
        attach(lambda message: loop.call_soon_threadsafe(messages.put_nowait, message))
        serving = Serving(description=() if app.info is None else app.info.description)
        await _serve(start, app, messages, lambda: channel.send(serving))

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
    finally:
        app.media_parts.close()


async def _serve(
    start: StartFrontend, app: FrontendApp, messages: Messages, report_serving: Callable[[], None]
) -> None:
    options, media_parts, engine = start.options, app.media_parts, app.engine
    write_as(get_frontend_name(start.index))
    metrics = FrontendMetrics(options.model_names[0])

    def sync() -> None:
        num_preparing = engine.get_statistics().num_preparing
        metrics.sync(media_parts=media_parts, num_preparing=num_preparing)

    def on_started() -> None:
        report_serving()
        if media_parts.pool is not None:
            media_parts.pool.start()  # if not yet; until it is ready, this process does its work

    counts = SharedNumbers.attach(start.counts_fd).values
    speech = None if options.is_render_only else app.speech
    transcriber = None if speech is None else AsyncTranscriber(engine, speech)
    application = make_app(
        engine,
        options,
        metrics,
        answers=app.answers,
        count=RequestCount(counts[: options.api_server_count], start.index),
        sessions=RequestCount(counts[MAX_FRONTENDS : 2 * MAX_FRONTENDS], start.index),
        transcriber=transcriber,
        live=_make_live_source(engine, speech, transcriber),
        tasks=app.tasks,
    )
    config = make_config(options, SyncBeforeEnd(application, sync))
    config.load()  # early, while the core still loads
    server = _Server(config, on_started)
    try:
        if app.info is not None:
            engine.run_alone(app.info)
        if app.info is not None or await _connect_first(messages, engine):
            warming = asyncio.create_task(_warm_up_first(start, app))
            tasks = [
                asyncio.create_task(
                    _obey(messages, engine, server, options.shutdown_timeout, warming)
                ),
                asyncio.create_task(_sync_often(sync)),
            ]
            await asyncio.wait([warming])
            if not server.should_exit:
                warming.result()
                sync()
                await server.serve(sockets=[socket.socket(fileno=start.listen_fd)])
            for task in tasks:
                task.cancel()
    finally:
        await engine.close()


async def _warm_up_first(start: StartFrontend, app: FrontendApp) -> None:
    """Finish the warm-up, if it is on; a restarted frontend does not wait for the pool."""
    if start.options.warmup:
        await finish_warm_up(app, has_core=app.info is None, waits_for_pool=not start.is_restart)


async def _connect_first(messages: Messages, engine: AsyncEngine) -> bool:
    """Connect the engine to the first core, or return False if `Drain` arrives first."""
    while True:
        message = await messages.get()
        if isinstance(message, Drain):
            return False
        if isinstance(message, CoreUp):
            await engine.connect(message.info)
            return True


async def _obey(
    messages: Messages,
    engine: AsyncEngine,
    server: uvicorn.Server,
    shutdown_timeout_s: float,
    warming: asyncio.Task[None],
) -> None:
    """Handle the messages of the parent while the HTTP server runs, until the task is cancelled.

    After `Drain` the warm-up is cancelled, and the HTTP server accepts no new requests. Requests
    that are still in flight after `shutdown_timeout_s` seconds fail.
    """
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
            warming.cancel()
            ends.append(asyncio.create_task(_close_late(engine, shutdown_timeout_s)))


async def _close_late(engine: AsyncEngine, delay_s: float) -> None:
    """Close the engine after `delay_s` seconds, so that requests in flight fail with a reason."""
    await asyncio.sleep(delay_s)
    await engine.close()


async def _sync_often(sync: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(_SYNC_S)
        sync()


def make_config(options: ServeOptions, app: ASGIApp) -> uvicorn.Config:
    """Return uvicorn's configuration for an app, and raise this process's limit on open files."""
    return uvicorn.Config(
        app,
        loop="none",  # the event loop runs already
        http=make_http_protocol(
            head_timeout_s=options.head_timeout,
            max_connections=raise_file_limit(),
            stream_timeout_s=options.stream_timeout,
        ),
        ws=RealtimeProtocol,
        ws_max_size=_MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,  # base64 of audio is not worth the work
        backlog=_BACKLOG,
        log_config=None,
        access_log=options.access_log,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(options.shutdown_timeout) + _REFUSING_S,
    )


class SyncBeforeEnd:
    """An ASGI middleware that updates the metrics before the last part of each response is sent.

    So a client that reads the metrics after its response, from any frontend, finds its request in
    them.
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
    """A uvicorn server that calls `on_started` when it begins to accept connections."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # no handlers are installed, because the parent handles signals


def make_render_info(options: ServeOptions, checkpoint: Checkpoint) -> CoreInfo:
    """Return the facts that a core would report, for a server that only renders and has no core.

    A server that runs the model may have reduced its context to what fits into memory. Then both
    servers need the same option `max_model_len`.
    """
    hf_config = checkpoint.hf_config
    text_config = hf_config.get_text_config(decoder=True)
    max_model_len = resolve_context(options.engine, text_config=text_config, kind=checkpoint.kind)
    names = {family.model_type: family.name for family in FAMILIES}
    return CoreInfo(
        endpoint="",
        max_model_len=max_model_len,
        defaults=load_generation_defaults(
            str(checkpoint.directory), options.engine.generation_config
        ),
        description=(
            ("model", options.model_label),
            ("family", names.get(hf_config.model_type, f"{hf_config.model_type} (unknown)")),
            ("engine", "none: this server renders, and loads no weights"),
            ("context", f"{max_model_len} tokens"),
        ),
    )
