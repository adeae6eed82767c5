"""The socket of an encoder: what it keeps between questions, and what does not end it."""

from __future__ import annotations

import gc
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from sensorium.engine.encoding import listener as tested
from sensorium.engine.encoding.client import SocketEncoder
from sensorium.engine.encoding.listener import EncoderListener
from sensorium.engine.encoding.service import EncoderCounts, EncodingService
from sensorium.engine.encoding.wire import Identity
from sensorium.multimodal.media import MediaBytes
from sensorium.multimodal.processing.item_backend import FinishedItem
from sensorium.multimodal.processing.item_worker import ItemJob
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.types.errors import EncoderLostError, ModelError
from sensorium.types.multimodal import ENCODED, ItemLayout, ProcessedItem
from tests.support.waiting import wait_until

IDENTITY = Identity(weights="weights", dtype="float32", versions=(), processing=())
COUNTS = EncoderCounts(num_asked=1, num_kept=0, num_processed=1, num_encoded=1)
JOB = ItemJob(mm_hash="ab" * 32, modality="image", decode_options=None, processor_kwargs={})


class Block(bytearray):
    """Memory of an encoder output that may be watched."""


class Service:
    """A stand-in for the encoding service that keeps nothing."""

    def __init__(self) -> None:
        self.outputs: list[weakref.ref[Block]] = []

    def encode(self, job: ItemJob, media: object) -> FinishedItem:  # noqa: ARG002
        block = Block(2**20)
        self.outputs.append(weakref.ref(block))
        encoded = torch.frombuffer(block, dtype=torch.float32).reshape(2, -1)
        layout = ItemLayout(text="<image>", token_id=7, num_embeds=2)
        item = ProcessedItem(
            modality=job.modality, mm_hash=job.mm_hash, kwargs={ENCODED: encoded}, layout=layout
        )
        return FinishedItem(result=item, times={})

    def get_counts(self) -> EncoderCounts:
        return COUNTS


@contextmanager
def listening(path: Path, service: Service) -> Iterator[SocketEncoder]:
    """Listen at a path, and give a connection to it."""
    listener = EncoderListener(
        str(path), cast(EncodingService, service), IDENTITY, max_connections=4
    )
    encoder = SocketEncoder(
        f"unix:{path}", IDENTITY, cast(MultiModalProcessor, object()), timeout_s=60
    )
    try:
        yield encoder
    finally:
        encoder.close()
        listener.close(10)


def test_a_connection_keeps_nothing_of_what_it_has_sent(tmp_path: Path) -> None:
    service = Service()
    with listening(tmp_path / "encoder.sock", service) as encoder:
        finished = encoder.encode(JOB, MediaBytes(b"file")).result(60)
        assert isinstance(finished.result, ProcessedItem)

        def is_gone() -> bool:
            gc.collect()
            return [output() for output in service.outputs] == [None]

        wait_until(is_gone)


def test_a_connection_for_which_there_is_no_thread_is_closed_and_the_next_one_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening(tmp_path / "encoder.sock", Service()) as encoder:

        def start(_thread: Any) -> None:
            monkeypatch.undo()
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(EncoderLostError, match="closed"):
            encoder.get_counts()
        encoder._pause.until = 0.0
        assert encoder.get_counts() == COUNTS


def test_a_socket_with_a_full_queue_belongs_to_another_encoder(tmp_path: Path) -> None:
    path = tmp_path / "encoder.sock"
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(str(path))
        busy.listen(0)
        waiting.connect(str(path))
        with pytest.raises(ModelError, match="another process listens"):
            EncoderListener(
                str(path), cast(EncodingService, Service()), IDENTITY, max_connections=1
            )


def test_of_two_encoders_that_start_together_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find the socket of a killed one, and the second must not remove that of the first."""
    path = tmp_path / "encoder.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    has_looked, remove_stale = threading.Event(), tested._remove_stale

    def remove_late(given: Path) -> None:
        if has_looked.is_set():
            remove_stale(given)
            return
        has_looked.set()
        time.sleep(0.3)  # the other one begins and would end in this time
        remove_stale(given)

    def start() -> EncoderListener:
        service = cast(EncodingService, Service())
        return EncoderListener(str(path), service, IDENTITY, max_connections=1)

    monkeypatch.setattr(tested, "_remove_stale", remove_late)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(start)
        assert has_looked.wait(60)
        with pytest.raises(ModelError, match="another process listens"):
            start()
        first.result(60).close(1)
    assert not path.exists()
