"""An engine of a cluster and its encoders: what becomes of errors, without a Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sensorium.engine.encoding.wire import Failed, Identity, encode_message
from sensorium.multimodal.media import MediaBytes
from sensorium.multimodal.processing.item_backend import FinishedItem
from sensorium.multimodal.processing.item_worker import ItemJob
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.scale import encoders as tested
from sensorium.scale import messages
from sensorium.scale.engines import Engines, _Attempt
from sensorium.types.errors import CapacityError, EncoderLostError, EngineLostError, make_record

IDENTITY = Identity(weights="weights", dtype="float32", versions=(), processing=())
JOB = ItemJob(mm_hash="ab" * 32, modality="image", decode_options=None, processor_kwargs={})


class Stream:
    """The answers of an encoder, as Ray gives them."""

    def __init__(self, answers: list[tuple[bytes, Any] | Exception]) -> None:
        self._answers = iter(answers)

    async def __anext__(self) -> tuple[bytes, Any]:
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def __aiter__(self) -> AsyncIterator[tuple[bytes, Any]]:
        return self

    def cancel(self) -> None:
        """Do nothing: the answers are all there."""


class Handle:
    """A handle of encoders that all answer alike."""

    def __init__(self, answer: bytes | Exception) -> None:
        self._answer = answer
        self.encode = self

    def options(self, **_options: object) -> Handle:
        return self

    def remote(self, *_given: object, **_named: object) -> Stream:
        if isinstance(self._answer, Exception):
            return Stream([(b"", None), self._answer])
        return Stream([(b"", None), (self._answer, None)])


async def ask(encoder: tested.RayEncoder) -> FinishedItem:
    future: Future[FinishedItem] = encoder.encode(JOB, MediaBytes(b"file"))
    return await asyncio.wrap_future(future)


def make_encoder(answer: bytes | Exception, monkeypatch: pytest.MonkeyPatch) -> tested.RayEncoder:
    monkeypatch.setattr(tested, "_put", lambda _blocks: None)
    return tested.RayEncoder(
        cast(Any, Handle(answer)),
        asyncio.get_running_loop(),
        IDENTITY,
        cast(MultiModalProcessor, None),
        timeout_s=120,
    )


def test_an_encoder_of_another_model_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reason = "the encoder has other weights, types, versions or options than the engine"
    answer = encode_message(Failed(make_record(EncoderLostError(reason))))

    async def ask_twice() -> None:
        encoder = make_encoder(answer, monkeypatch)
        for _ in range(2):
            with pytest.raises(EncoderLostError, match="other weights"):
                await ask(encoder)

    asyncio.run(ask_twice())
    assert [reason in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(
    "answer", [b"nonsense", StopAsyncIteration(), KeyError("a bug")], ids=["nonsense", "end", "bug"]
)
def test_an_invalid_answer_counts_as_a_lost_encoder(
    answer: bytes | Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask_once() -> None:
        encoder = make_encoder(answer, monkeypatch)
        with pytest.raises(EncoderLostError, match="no encoder of the cluster answers"):
            await ask(encoder)

    asyncio.run(ask_once())


@pytest.mark.parametrize(
    ("level", "is_cleared"), [("mm", True), ("encoder", True), ("prefix", False)]
)
def test_an_encoder_forgets_what_it_has_kept_of_media(level: str, is_cleared: bool) -> None:
    cleared: list[bool] = []
    service = SimpleNamespace(clear_cache=lambda: cleared.append(True))
    replica = SimpleNamespace(_encoder=SimpleNamespace(service=service))
    tested.EncoderReplica.reset_cache(cast(Any, replica), level)
    assert cleared == [True] * is_cleared


@pytest.mark.parametrize(
    ("error", "is_repeated"),
    [
        (EngineLostError("gone"), True),
        (EncoderLostError("gone"), False),
        (CapacityError("x"), False),
    ],
)
def test_only_the_loss_of_an_engine_sends_a_request_to_another_one(
    error: CapacityError, is_repeated: bool
) -> None:
    counted: list[str] = []
    handle = cast(Any, SimpleNamespace(deployment_name="Engine"))
    engines = Engines(handle, count_retry=counted.append)
    failure = messages.Failure(make_record(error))
    attempt = _Attempt(key="key", pinned=None, sends_all=False)
    plan = engines._plan_retry(attempt, failure, failure.error.make_error(), ())
    assert asyncio.run(plan) is is_repeated
    assert counted == ["lost"] * is_repeated
