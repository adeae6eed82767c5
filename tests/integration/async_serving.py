"""A core that runs its loop in a thread, and frontends that talk to it over real sockets."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from sensorium.engine.assembly.builder import Core, build_core
from sensorium.engine.assembly.config import make_scheduler
from sensorium.engine.assembly.frontend import (
    Checkpoint,
    MediaParts,
    build_caches,
    build_frontend,
    build_receiver,
    build_store,
    read_checkpoint,
)
from sensorium.engine.assembly.options import EngineOptions, LoadingOptions, MediaOptions
from sensorium.engine.async_engine import AsyncEngine
from sensorium.engine.core_process import CoreInfo
from sensorium.engine.core_process.core_loop import CoreLoop
from sensorium.engine.core_process.rehearsal import Rehearsal
from sensorium.engine.inputs.input_processor import InputProcessor
from sensorium.engine.inputs.renderer import Chat
from sensorium.multimodal.cache.mirror import MirrorReceiver
from sensorium.multimodal.cache.shm_store import ShmStore
from sensorium.render.messages import ChatOptions


def make_png(seed: int, size: tuple[int, int] = (90, 60)) -> bytes:
    buffer = io.BytesIO()
    color = (seed * 37 % 256, seed * 91 % 256, seed * 53 % 256)
    Image.new("RGB", size, color).save(buffer, "PNG")
    return buffer.getvalue()


def make_chat(*images: bytes | str, text: str = "What is this?", **fields: Any) -> Chat:
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
    parts.append({"type": "text", "text": text})
    messages = [{"role": "user", "content": parts}]
    return Chat(messages=messages, options=ChatOptions(), fields=fields)  # type: ignore[arg-type]


class LocalCore:
    """A core that runs in this process. Each restart begins empty, as a new process would."""

    def __init__(self, model: str, directory: Path, media: MediaOptions, **options: Any) -> None:
        self.loading = LoadingOptions(model=model)
        self.checkpoint: Checkpoint = read_checkpoint(self.loading)
        self.media = media
        self.directory = directory
        self.store = build_store(media)
        self.options = EngineOptions(**{"max_model_len": 4096, **options})
        self.life = 0
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.start()

    def start(self) -> None:
        self.life += 1
        store = None if self.store is None else ShmStore.attach(self.store.fd)
        receiver = build_receiver(store)
        self.built: Core = build_core(
            self.loading, self.checkpoint, options=self.options, receiver=receiver
        )
        self.core = self.built.core
        endpoint = f"ipc://{self.directory}/core-{self.life}.sock"
        rehearse = Rehearsal(self.core, partial(make_scheduler, self.built.config))
        self.loop = CoreLoop(self.core, endpoint, rehearse=rehearse)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.info = CoreInfo(
            endpoint=endpoint,
            max_model_len=self.core.scheduler.limits.max_model_len,
            defaults=self.built.defaults,
            epoch=receiver.epoch if isinstance(receiver, MirrorReceiver) else None,
        )

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        if self._thread is not None:
            self.loop.stop()
            self.join()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(60)
            assert not self._thread.is_alive()
            self._thread = None

    def make_frontend(self, identity: str, **options: Any) -> tuple[AsyncEngine, MediaParts]:
        store = None if self.store is None else ShmStore.attach(self.store.fd)
        frontend = build_frontend(
            self.loading, self.checkpoint, self.media, build_caches(self.media, store)
        )
        media_parts = frontend.media_parts
        inputs = InputProcessor(
            frontend.processor,
            pipeline=media_parts.pipeline,
            readonly=media_parts.readonly,
            defaults=self.built.defaults,
            limit_mm_per_prompt={},
            seed=0,
        )
        return AsyncEngine(inputs, media_parts, identity=identity, **options), media_parts

    def assert_nothing_is_left(self) -> None:
        """Assert that the core holds nothing of any request. What the caches keep is allowed."""
        scheduler = self.core.scheduler
        assert scheduler.requests == {}
        assert len(self.core.payloads) == 0
        assert all(pool.num_used == 0 for pool in scheduler.kv_cache.statistics())
        assert scheduler.encoder_cache.statistics().num_references == 0


@contextmanager
def run_core(model: str, directory: Path, **options: Any) -> Iterator[LocalCore]:
    media_names = MediaOptions.__dataclass_fields__.keys()
    media = {name: options.pop(name) for name in list(options) if name in media_names}
    core = LocalCore(model, directory, MediaOptions(mm_processor_cache_gb=0.05, **media), **options)
    try:
        yield core
    finally:
        core.stop()
        if core.store is not None:
            core.store.close()
