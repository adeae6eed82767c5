"""A frontend of a cluster: the HTTP application of a server, as a deployment of Ray Serve.

It loads no weights and decodes no media. Ray's proxy accepts the connections of clients, and gives
their requests to one of the frontends.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import quote

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sensorium.engine.speech.live_streams import StreamSource
from sensorium.engine.speech.models import SpeechModel
from sensorium.engine.speech.streamed import StreamedModel
from sensorium.scale.cluster_engine import ClusterEngine, ClusterTranscriber, ClusterTurnSource
from sensorium.scale.engines import Engines, Replicas
from sensorium.scale.loopback import listen_locally
from sensorium.scale.metrics import ClusterMetrics
from sensorium.server.http.app import make_app
from sensorium.server.http.middleware import HEADER
from sensorium.server.logs import ACCESS_LOGGER, set_up_logging
from sensorium.server.options import ServeOptions
from sensorium.server.processes.frontend_app import (
    SyncBeforeEnd,
    build_frontend_app,
    finish_warm_up,
)
from sensorium.speech.live.session import LiveSource
from sensorium.types.errors import InvariantError

access_logger = logging.getLogger(ACCESS_LOGGER)
_SYNC_S = 1.0
NAME = "Frontend"  # of the deployment


class Frontend:
    """One frontend of a cluster. Ray makes it, in a process of its own."""

    async def __init__(  # type: ignore[misc]
        self,
        options: ServeOptions,
        engines: DeploymentHandle[Any],
        encoders: DeploymentHandle[Any] | None = None,
    ) -> None:
        listen_locally()
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        set_up_logging(
            f"frontend-{self._name}",
            log_format=options.log_format,
            log_level=options.log_level,
            access_log=options.access_log,
        )
        self._options = options
        self._metrics = ClusterMetrics(options.model_names[0], self._read_others)
        build = partial(build_frontend_app, identity=self._name, make_engine=ClusterEngine)
        # The frontend's own parts are those of a server that only renders; caches that
        # outlive a process belong to the engines.
        media = replace(options.media, mm_disk_cache=None, mm_remote_cache=None, encoder=None)
        own = replace(options, is_render_only=True, media=media)
        app = await asyncio.to_thread(build, own)
        if not isinstance(app.engine, ClusterEngine):
            raise InvariantError("the frontend of a cluster has another engine")
        self._engine, self._media_parts, self._parts = app.engine, app.media_parts, app
        if options.warmup:
            await finish_warm_up(app, has_core=False)
        elif self._media_parts.pool is not None:
            self._media_parts.pool.start()
        self._peers = Replicas(serve.get_deployment_handle(NAME, context.app_name))
        called = Engines(engines, count_retry=self._metrics.count_retry)
        self._tally = called.tally
        await self._engine.use(
            called,
            self._peers,
            None if encoders is None else Replicas(encoders, may_be_none=True),
        )
        self._syncing = asyncio.create_task(self._sync_often())

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the HTTP application. Ray calls this once, after the constructor."""
        speech = self._parts.speech
        transcriber = None if speech is None else ClusterTranscriber(self._engine, speech)
        app = make_app(
            self._engine,
            self._options,
            self._metrics,
            answers=self._parts.answers,
            transcriber=transcriber,
            live=_make_live_source(self._engine, speech, transcriber),
            tasks=self._parts.tasks,
        )
        return BehindProxy(SyncBeforeEnd(app, self._sync))

    async def read_metrics(self) -> tuple[str, bytes]:
        """Return the name of this frontend, and the values of its own metrics."""
        self._sync()
        return self._name, self._metrics.encode_own()

    async def forget_media(self) -> None:
        self._engine.forget_media()

    async def _read_others(self) -> list[bytes]:
        named, engines = await asyncio.gather(
            self._peers.read_metrics(), self._engine.read_engine_metrics()
        )
        return [*(part for name, part in named if name != self._name), *engines]

    def _sync(self) -> None:
        num_preparing = self._engine.get_statistics().num_preparing
        self._metrics.sync(media_parts=self._media_parts, num_preparing=num_preparing)
        self._metrics.follow_placements(
            placed=self._tally.num_placed, spilled=self._tally.num_spilled
        )

    async def _sync_often(self) -> None:
        while True:
            await asyncio.sleep(_SYNC_S)
            self._sync()


class BehindProxy:
    """ASGI middleware that adapts the application to Ray Serve's proxy in front of it.

    It logs each request with its path, which Ray's own log lines lack. It drops our header with the
    request id, because the proxy has already set one, and the client would get two.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)[HEADER]
                _log_access(scope, message["status"])
            await send(message)

        await self._app(scope, receive, send_without)


def _log_access(scope: Scope, status: int) -> None:
    """Log a request as uvicorn does, to the log that `--access-log` turns on."""
    host, port = scope.get("client") or ("-", 0)
    version = scope.get("http_version", "1.1")
    line = '%s - "%s %s HTTP/%s" %d'
    address, path = f"{host}:{port}", quote(scope["path"])
    access_logger.info(line, address, scope.get("method"), path, version, status)


def _make_live_source(
    engine: ClusterEngine, speech: SpeechModel[Any] | None, transcriber: ClusterTranscriber | None
) -> LiveSource | None:
    if isinstance(speech, StreamedModel):
        return StreamSource(engine, speech)
    return None if transcriber is None else ClusterTurnSource(transcriber)
