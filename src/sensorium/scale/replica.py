"""An engine of a cluster: a core with its own media pipeline, as a deployment of Ray Serve.

It answers calls of frontends; calls and answers are bytes (`scale.messages`). A file of media is
loaded only if no cache of this engine has its item, and an item that several calls need at the same
time is processed once, as on a server of one machine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from hashlib import blake2b
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from sensorium.engine.assembly.frontend import MakeEncoder
from sensorium.engine.async_engine import AsyncEngine
from sensorium.engine.audio_request import AudioRequest
from sensorium.engine.speech.transcriber import AsyncTranscriber
from sensorium.multimodal.media import DeferredBytes
from sensorium.multimodal.names import UuidScope
from sensorium.scale import messages
from sensorium.scale.core_host import CoreHost
from sensorium.scale.encoders import RayEncoder
from sensorium.scale.loopback import listen_locally
from sensorium.scale.metrics import encode_samples
from sensorium.server.logs import set_up_logging
from sensorium.server.metrics.frontend import FrontendMetrics
from sensorium.server.metrics.shared_files import Files, get_directory
from sensorium.server.options import ServeOptions
from sensorium.server.processes.frontend_app import (
    FrontendApp,
    build_frontend_app,
    finish_warm_up,
)
from sensorium.speech.transcript import Segment
from sensorium.types.errors import (
    CapacityError,
    EngineLostError,
    InvariantError,
    MissingMediaError,
    SensoriumError,
    make_record,
)

logger = logging.getLogger(__name__)
_SYNC_S = 1.0
_LOAD_S = 60.0  # for a file on its way through the object store
_LONG_BYTES = 2**20  # of a call, from which on it is decoded in a thread
Answers = AsyncGenerator[bytes, None]
Refs = Mapping[str, Any]  # digest -> a reference to the file in the object store


class EngineReplica:
    """One engine of a cluster. Ray makes it, in a process of its own."""

    async def __init__(  # type: ignore[misc]
        self, options: ServeOptions, encoders: DeploymentHandle[Any] | None = None
    ) -> None:
        """Load the model. Ray sends calls when this has returned."""
        listen_locally()
        self._name = serve.get_replica_context().replica_id.unique_id
        set_up_logging(
            f"engine-{self._name}", log_format=options.log_format, log_level=options.log_level
        )
        self._host = CoreHost(options, on_end=self._on_core_end)
        self._tasks: list[asyncio.Task[None]] = []
        self._open_audios: dict[str, AudioRequest] = {}
        self._max_audios = options.max_concurrent_requests
        try:
            await self._host.start()
            build = partial(
                build_frontend_app,
                identity="f0-1",
                index=_draw_index(self._name),
                shm_fd=self._host.shm_fd,
                make_encoder=None if encoders is None else _connect(encoders, options),
            )
            self._app: FrontendApp = await asyncio.to_thread(build, options)
            self._engine: AsyncEngine = self._app.engine
            self._metrics = FrontendMetrics(options.model_names[0])
            self._info = await self._host.wait_until_ready()
            await self._engine.connect(self._info)
            if options.warmup:
                await finish_warm_up(self._app)
        except BaseException:
            await self._host.close()
            raise
        pool, speech = self._app.media_parts.pool, self._app.speech
        if pool is not None:
            pool.start()
        self._transcriber = None if speech is None else AsyncTranscriber(self._engine, speech)
        self._tasks.append(asyncio.create_task(self._sync_often()))

    def check_health(self) -> None:
        """Raise an error if Ray has to replace this engine."""
        self._host.check()

    def describe(self) -> bytes:
        return messages.encode(messages.Description(info=self._info))

    async def run(self, call: bytes, refs: Refs | None = None, **_: object) -> Answers:
        """Answer a call of a frontend with a stream of `messages.Answer`.

        `refs` has the large files that came with the call. Closing the stream aborts the request.
        """
        yield messages.encode(messages.Accepted(self._name))
        lacking: set[str] = set()
        try:
            self._host.check()
            is_long = len(call) >= _LONG_BYTES
            decoded = await messages.run_long(is_long, messages.decode_call, call)
            async with aclosing(self._answer(decoded, refs or {}, lacking)) as answers:
                async for answer in answers:
                    yield messages.encode(answer)
        except SensoriumError as error:
            if isinstance(error, _LackingFileError):  # perhaps of another call for the same item
                lacking.update(error.missing)
            yield messages.encode(messages.Failure(make_record(error), tuple(lacking)))
        except Exception as error:
            logger.exception("a call of a frontend fails")
            failed = InvariantError(f"internal error: {type(error).__name__}: {error}")
            yield messages.encode(messages.Failure(make_record(failed)))
        finally:
            self._sync()

    async def append_audio(self, message: bytes, *, pinned: str, **_: object) -> bytes:
        """Receive more audio; return empty bytes, or a `Failure` if it is for another engine.

        If an engine is gone or is being removed, Ray sends its calls to another one. Audio for a
        request that has ended is dropped.
        """
        if pinned != self._name:
            lost = EngineLostError("the engine that had the audio is gone: begin a new stream")
            return messages.encode(messages.Failure(make_record(lost)))
        decoded = messages.decode_append(message)
        request = self._open_audios.get(decoded.request_id)
        if request is not None:
            request.send(messages.read_audio(decoded), is_last=decoded.is_last)
        return b""

    async def reset_cache(self, level: str) -> None:
        await self._engine.reset_cache(level)

    async def read_metrics(self) -> bytes:
        """Return the values of all metrics of this engine and its core."""
        self._sync()
        directory = get_directory()
        if directory is None:
            raise InvariantError("the metrics of this engine have no directory")
        return await asyncio.to_thread(encode_samples, Files(directory))

    async def find(self, uuids: bytes, **_: object) -> str | None:
        """Return the name of this engine if it has all of these uuids, else `None`."""
        bindings = self._app.media_parts.pipeline.uuids
        hasher = self._app.media_parts.pipeline.hasher
        for key in messages.decode_uuids(uuids):
            scope = UuidScope(client=key.client, cache_salt=key.cache_salt)
            own = bindings.get(key.uuid, modality=key.modality, scope=scope)
            external = bindings.get(
                hasher.name_external(key.uuid, key.cache_salt),
                modality=f"external {key.modality}",
                scope=scope,
            )
            if own is None and external is None:
                return None
        return self._name

    async def __del__(self) -> None:
        """End the core. Ray calls this when all requests have ended, or their time is over."""
        for task in self._tasks:
            task.cancel()
        if hasattr(self, "_engine"):
            await self._engine.close()
            self._app.media_parts.close()
        if hasattr(self, "_host"):
            await self._host.close()

    # ---- calls

    def _answer(
        self, call: messages.Call, refs: Refs, lacking: set[str]
    ) -> AsyncGenerator[messages.Answer, None]:
        if isinstance(call, messages.Generate):
            return self._generate(call, _Files(call.files, refs, lacking))
        if isinstance(call, messages.Transcribe):
            return self._transcribe(call, _Files(call.files, refs, lacking))
        return self._take_audio(call)

    async def _generate(
        self, call: messages.Generate, files: _Files
    ) -> AsyncGenerator[messages.Answer, None]:
        prompt = await messages.run_long(
            messages.has_tensors(call), messages.read_prompt, call.prompt, files.open
        )
        deltas = self._engine.stream(
            prompt, call.params, request_id=call.request_id, group=call.group
        )
        is_first = True
        async with aclosing(deltas):
            async for delta in deltas:
                yield messages.Delta(messages.leave_out_prompt(delta, is_first=is_first))
                is_first = False

    async def _transcribe(
        self, call: messages.Transcribe, files: _Files
    ) -> AsyncGenerator[messages.Answer, None]:
        if self._transcriber is None:
            raise InvariantError("a model that can't transcribe was asked to")
        parts = self._transcriber.transcribe(
            DeferredBytes(call.digest, files.open(call.digest)),
            call.options,
            request_id=call.request_id,
            cache_salt=call.cache_salt,
        )
        async with aclosing(parts):
            async for part in parts:
                if isinstance(part, Segment):
                    yield messages.Part(segment=part)
                else:
                    yield messages.Part(transcript=part)

    async def _take_audio(self, call: messages.OpenAudio) -> AsyncGenerator[messages.Answer, None]:
        if len(self._open_audios) >= self._max_audios:
            raise CapacityError("the engine has no room for more streaming audio: try again later")
        request = await self._engine.open_audio(
            call.params, request_id=call.request_id, delay_ms=call.delay_ms
        )
        self._open_audios[call.request_id] = request
        try:
            yield messages.Opened()
            async for delta in request.deltas:
                yield messages.Delta(delta)
        finally:
            del self._open_audios[call.request_id]
            request.close()

    # ---- the engine's own state

    def _on_core_end(self, reason: str) -> None:
        if hasattr(self, "_engine"):  # else it is still being built, and `check_health` fails
            self._engine.disconnect(f"the engine has ended ({reason}): send the request again")

    def _sync(self) -> None:
        num_preparing = self._engine.get_statistics().num_preparing
        self._metrics.sync(media_parts=self._app.media_parts, num_preparing=num_preparing)

    async def _sync_often(self) -> None:
        while True:
            await asyncio.sleep(_SYNC_S)
            self._sync()


def _draw_index(name: str) -> int:
    """Return a number that differs between engines, so that they don't draw the same seeds."""
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest())


def _connect(encoders: DeploymentHandle[Any], options: ServeOptions) -> MakeEncoder:
    return partial(
        RayEncoder,
        encoders,
        asyncio.get_running_loop(),
        timeout_s=options.media.encoder_timeout,
    )


class _LackingFileError(MissingMediaError):
    """An error that means that the frontend has not sent a file that is needed.

    Other calls that wait for the same item get a copy of this error, even if they brought the file.
    """


class _Files:
    """The files of media of one call, which are loaded when a cache does not have the item.

    The digests of files that are needed and did not come are added to `lacking`.
    """

    def __init__(self, sent: Mapping[str, bytes], refs: Refs, lacking: set[str]) -> None:
        self._sent = sent
        self._refs = refs
        self._lacking = lacking

    def open(self, digest: str) -> Callable[[], bytes]:
        """Return a function that loads a file, for a thread that may block."""
        return partial(self._load, digest)

    def _load(self, digest: str) -> bytes:
        if digest in self._sent:
            return self._sent[digest]
        if digest in self._refs:
            try:
                file: Any = ray.get(self._refs[digest], timeout=_LOAD_S)
                return memoryview(file).tobytes()
            except ray.exceptions.RayError as error:
                raise EngineLostError(
                    "a file of media was lost on its way to the engine: send the request again"
                ) from error
        self._lacking.add(digest)
        raise _LackingFileError("a file of media did not come with the request", (digest,))
