"""Remote encoders of a cluster: their deployment, and how engines call them.

An engine sends the source of an item through Ray's object store, and gets its encoder output in the
same way. Equal items go to the same encoder, which encodes them once. An encoder output is accepted
only from an encoder with the same weights, types, versions and options as the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context
from functools import partial
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from sensorium.engine.assembly.encoder import Encoder, build_encoder
from sensorium.engine.assembly.options import EncodeOptions
from sensorium.engine.encoding.client import WrongAnswerError, read_item
from sensorium.engine.encoding.listener import answer_job
from sensorium.engine.encoding.wire import (
    Encoded,
    Failed,
    Identity,
    decode_answer,
    encode_message,
)
from sensorium.models.checkpoint import blame_checkpoint
from sensorium.multimodal.processing.item_backend import FinishedItem, encode_job
from sensorium.multimodal.processing.item_worker import ItemJob
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.multimodal.tiers.breaker import Breaker
from sensorium.scale.loopback import listen_locally
from sensorium.server.logs import adopt_library_logs, set_up_logging
from sensorium.server.options import ServeOptions
from sensorium.types.errors import EncoderLostError, SensoriumError, make_record

logger = logging.getLogger(__name__)
MAX_ITEMS = 64  # that an encoder works on at once, each in a thread that mostly waits
_GONE = "no encoder of the cluster answers"
_LOAD_S = 60.0  # for a block on its way through the object store
_FAILURES = (
    *(TimeoutError, WrongAnswerError, RayError, RayServeException, msgspec.MsgspecError),
    StopAsyncIteration,  # its stream ended without an answer
)
_RESETS = ("mm", "encoder")  # an encoder has one cache for both of these levels
_ACCEPT_S = 3.0  # after which a job that no encoder has taken goes back to the engine


class EncoderReplica:
    """One encoder of a cluster. Ray makes it, in a process of its own."""

    def __init__(self, options: ServeOptions) -> None:
        listen_locally()
        name = serve.get_replica_context().replica_id.unique_id
        set_up_logging(
            f"encoder-{name}", log_format=options.log_format, log_level=options.log_level
        )
        adopt_library_logs()
        with blame_checkpoint(options.model):
            self._encoder: Encoder = build_encoder(
                options.loading, options=EncodeOptions(socket=name), media=options.media
            )
        self._identity = digest_identity(self._encoder.identity)
        # The threads of the event loop are as many as there are cores, and a few more. Items that
        # have been accepted would wait for a thread, and not be encoded together.
        self._threads = ThreadPoolExecutor(MAX_ITEMS, thread_name_prefix="encode")
        pool = self._encoder.frontend.media_parts.pool
        if pool is not None:
            pool.start()

    def check_health(self) -> None:
        """Raise an error if Ray has to replace this encoder."""
        if self._encoder.towers.has_failed.is_set():
            raise EncoderLostError("the towers of this encoder have failed")

    def reset_cache(self, level: str) -> None:
        """Empty this encoder's cache if `level` is "mm" or "encoder"; there are no others here."""
        if level in _RESETS:
            self._encoder.service.clear_cache()

    async def encode(
        self, job: bytes, source: Any, identity: str, **_: object
    ) -> AsyncIterator[tuple[bytes, Any]]:
        """Yield the answer to a job, and a reference to its tensors in the object store.

        `source` is a reference to the job's media. Before the answer an empty one is yielded, which
        shows the engine that an encoder has the job.
        """
        yield b"", None
        if identity != self._identity:
            reason = "the encoder has other weights, types, versions or options than the engine"
            yield encode_message(Failed(make_record(EncoderLostError(reason)))), None
        else:
            loop = asyncio.get_running_loop()
            yield await loop.run_in_executor(self._threads, self._encode, job, source[0])

    def _encode(self, job: bytes, source: Any) -> tuple[bytes, Any]:
        block: Any = ray.get(source, timeout=_LOAD_S)
        # A copy, because tensors of a read-only block could not be used in place.
        answer, buffers = answer_job(self._encoder.service, job, memoryview(bytearray(block)))
        return encode_message(answer), _put(buffers) if buffers else None

    def __del__(self) -> None:
        if hasattr(self, "_encoder"):
            self._encoder.close()
        if hasattr(self, "_threads"):
            self._threads.shutdown(wait=False, cancel_futures=True)


class RayEncoder:
    """An `EncoderService` that asks the encoders of the cluster, from the event loop `loop`."""

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        loop: asyncio.AbstractEventLoop,
        identity: Identity,
        processor: MultiModalProcessor,
        *,
        timeout_s: float,
    ) -> None:
        self._handle = handle
        self._loop = loop
        self._identity = digest_identity(identity)
        self._processor = processor
        self._timeout_s = timeout_s
        self._has_warned = False  # that an encoder answers, but can't be used
        self._breaker = Breaker(
            "the encoder of the cluster",
            failed="can't be used",
            advice="This engine encodes by itself until it is back, unless that is turned off.",
            back="is used again",
        )

    def encode(self, job: ItemJob, media: object) -> Future[FinishedItem]:
        message, blocks = encode_job(job, media, processor=self._processor, keep=False)
        return asyncio.run_coroutine_threadsafe(self._ask(job, message, blocks), self._loop)

    def close(self) -> None:
        pass  # the handle belongs to Ray

    async def _ask(self, job: ItemJob, message: bytes, blocks: list[Any]) -> FinishedItem:
        """Return the item with its encoder output, or raise an `EncoderLostError`."""
        token = self._breaker.enter(self._timeout_s)
        if token is None:  # lost encoders are not asked for a while, so that requests don't wait
            raise EncoderLostError(_GONE)
        try:
            async with asyncio.timeout(self._timeout_s):
                finished = await self._call(job, message, blocks)
        except _FAILURES as error:
            reason = str(error).partition("\n")[0] or f"no answer in {self._timeout_s:g} s"
            self._breaker.note_failure(token, reason)
            raise EncoderLostError(_GONE) from error
        except SensoriumError as error:  # it answers, if not as hoped
            self._breaker.note_success(token)
            if isinstance(error, EncoderLostError):
                self._warn(error)
            raise
        except Exception as error:  # whatever it is, the engine can do without the encoder
            logger.exception("an item could not be encoded by the cluster")
            self._breaker.note_failure(token, f"{type(error).__name__}: {error}")
            raise EncoderLostError(_GONE) from error
        self._breaker.note_success(token)
        return finished

    def _warn(self, error: EncoderLostError) -> None:
        """Log once that an encoder refuses items. It has not failed: others may take the items."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning("an encoder of the cluster can't be used: %s", error)

    async def _call(self, job: ItemJob, message: bytes, blocks: list[Any]) -> FinishedItem:
        began = time.monotonic()
        source = await asyncio.to_thread(_put, blocks)
        call = partial(
            self._handle.options(stream=True).encode.remote,
            message,
            [source],  # in a list, so that Ray does not load it for the encoder
            self._identity,
            routing_key=job.mm_hash,
        )
        stream: Any = Context().run(call)
        try:
            # Ray would wait for an encoder for as long as there is none.
            await asyncio.wait_for(anext(stream), _ACCEPT_S)
            frame, reference = await anext(stream)
        except BaseException:
            stream.cancel()
            raise
        answer = decode_answer(frame)
        if isinstance(answer, Failed):
            raise answer.error.make_error()
        if not isinstance(answer, Encoded):
            raise WrongAnswerError("its answer is of the wrong kind")
        block = await asyncio.to_thread(_load, reference)
        return read_item(job, answer, block, began=began)


def digest_identity(identity: Identity) -> str:
    return sha256(msgspec.msgpack.encode(identity)).hexdigest()


def _put(buffers: list[Any]) -> Any:
    """Put buffers into the object store as one array, which other processes on this machine map."""
    arrays = [np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers]
    return ray.put(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))


def _load(reference: Any) -> memoryview:
    array: Any = ray.get(reference, timeout=_LOAD_S)
    return memoryview(bytearray(array))
