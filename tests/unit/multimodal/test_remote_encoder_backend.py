"""The engine encodes what a remote encoder can't, and no callback thread waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, cast

import pytest

from sensorium.multimodal.media import MediaBytes
from sensorium.multimodal.processing.item_backend import FinishedItem
from sensorium.multimodal.processing.item_worker import ItemJob
from sensorium.multimodal.processing.remote_encoder_backend import RemoteEncoderBackend
from sensorium.multimodal.single_flight import FinishedFlight, Flight
from sensorium.types.errors import EncoderLostError, StoppingError

_JOB = ItemJob(mm_hash="ab" * 32, modality="image", decode_options=None, processor_kwargs={})
_MEDIA = MediaBytes(b"file")
_WAIT_S = 30.0


class _Service:
    """An encoder that answers when a test settles its last question."""

    def encode(self, _job: ItemJob, _media: object) -> Future[FinishedItem]:
        self.asked: Future[FinishedItem] = Future()
        return self.asked

    def close(self) -> None:
        pass


class _Local:
    """The engine's own backend, which has no room until `has_room` is set."""

    def __init__(self) -> None:
        self.has_room = threading.Event()
        self.num_started = 0

    def start(self, _job: ItemJob, _media: object) -> Flight:
        assert self.has_room.wait(_WAIT_S)
        self.num_started += 1
        return FinishedFlight("done here")


@pytest.fixture
def local() -> Iterator[_Local]:
    local = _Local()
    yield local
    local.has_room.set()


def _make(local: _Local, service: _Service) -> RemoteEncoderBackend:
    return RemoteEncoderBackend(cast(Any, local), service, above=0, has_fallback=True)


def test_the_thread_in_which_an_answer_comes_does_not_wait_for_the_engine(local: _Local) -> None:
    """It may be that of an event loop, on which all requests depend."""
    service = _Service()
    backend = _make(local, service)
    flights = []
    for _ in range(12):
        flights.append(backend.start(_JOB, _MEDIA))
        service.asked.set_exception(EncoderLostError("gone"))  # would hang here
    assert not any(flight.done() for flight in flights)
    local.has_room.set()
    assert [flight.result(_WAIT_S) for flight in flights] == ["done here"] * 12
    assert backend.get_counts()["fallback"] == 12
    backend.close()


def test_nothing_starts_after_the_engine_is_closed(local: _Local) -> None:
    service = _Service()
    backend = _make(local, service)
    waiting = []
    for _ in range(9):  # one more than there are threads
        waiting.append(backend.start(_JOB, _MEDIA))
        service.asked.set_exception(EncoderLostError("gone"))
    late = backend.start(_JOB, _MEDIA)
    backend.close()
    service.asked.set_exception(EncoderLostError("the engine is closed"))
    for flight in (waiting[-1], late):
        with pytest.raises(StoppingError):
            flight.result(_WAIT_S)
    local.has_room.set()
    assert [flight.result(_WAIT_S) for flight in waiting[:-1]] == ["done here"] * 8
    assert local.num_started == 8


def test_an_item_without_waiting_requests_is_not_encoded(local: _Local) -> None:
    service = _Service()
    backend = _make(local, service)
    flights = []
    for _ in range(9):
        flights.append(backend.start(_JOB, _MEDIA))
        service.asked.set_exception(EncoderLostError("gone"))
    flights[-1].cancel()
    local.has_room.set()
    backend._threads.shutdown(wait=True)
    assert local.num_started == 8
