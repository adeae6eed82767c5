"""What a frontend does when a call of an engine fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from sensorium.multimodal.media import MediaBytes
from sensorium.scale import messages
from sensorium.scale.engines import Engines, Replicas
from sensorium.scale.placement import get_tally
from sensorium.types.errors import (
    CapacityError,
    EngineLostError,
    MissingMediaError,
    RequestError,
    make_record,
)
from sensorium.types.outputs import CompletionDelta, RequestDelta, RequestOutput
from sensorium.types.sampling import SamplingParams

_CALL = messages.Generate(
    prompt=messages.WirePrompt(text="x"), params=SamplingParams(), request_id="r"
)
_UUID = messages.UuidKey("image", "u", None, None)
_PIECE = messages.Delta(
    RequestDelta(request_id="r", deltas=(CompletionDelta(index=0, text="a", token_ids=(5,)),))
)
_DONE = messages.Delta(
    RequestDelta(
        request_id="r",
        deltas=(),
        final=RequestOutput(
            request_id="r", prompt=None, prompt_token_ids=(), outputs=(), finished=True
        ),
    )
)
_LOST = RayActorError()
Step = messages.Answer | Exception | str
Behave = Callable[["_Sent"], list[Step]]


class _Sent:
    """One call as it came to the cluster."""

    def __init__(self, call: bytes, given: dict[str, Any]) -> None:
        decoded = messages.decode_call(call)
        assert isinstance(decoded, messages.Generate)
        self.files = decoded.files
        self.pinned: str | None = given["pinned"]
        self.avoided: str | None = given["avoided"]
        self.ticket: str = given["ticket"]


class _Stream:
    def __init__(self, steps: list[Step]) -> None:
        self._steps = iter(steps)
        self.is_cancelled = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        step = next(self._steps, None)
        if step is None:
            raise StopAsyncIteration
        if step == "hang":
            await asyncio.Event().wait()
        if isinstance(step, Exception):
            raise step
        assert not isinstance(step, str)
        return messages.encode(step)

    def cancel(self) -> None:
        self.is_cancelled = True


class _Handle:
    """Stands for Ray's handle of the engines, which `behave` answers for.

    `knows` are the engines that know a uuid, and `hangs` are those that never say.
    """

    def __init__(
        self, behave: Behave, *, knows: Collection[str] = (), hangs: Collection[str] = ()
    ) -> None:
        self.deployment_name = "Engine"
        self.sent: list[_Sent] = []
        self.streams: list[_Stream] = []
        self._behave = behave
        self._knows = knows
        self._hangs = hangs
        self.run = self
        self.find = SimpleNamespace(remote=self._find)

    def options(self, **_: Any) -> _Handle:
        return self

    def remote(self, call: bytes, _refs: Any, **given: Any) -> _Stream:
        self.sent.append(_Sent(call, given))
        self.streams.append(_Stream(self._behave(self.sent[-1])))
        return self.streams[-1]

    async def _find(self, uuids: bytes, *, pinned: str, routing_key: str) -> str | None:
        assert messages.decode_uuids(uuids) == (_UUID,)
        assert routing_key == pinned
        if pinned in self._hangs:
            await asyncio.Event().wait()
        return pinned if pinned in self._knows else None


def _run(
    handle: _Handle, *, uuids: tuple[messages.UuidKey, ...] = (), **options: Any
) -> tuple[list[messages.Answer], list[str]]:
    """Run one call, and return its answers and the reasons for which it was repeated."""
    reasons: list[str] = []

    async def run() -> list[messages.Answer]:
        engines = Engines(cast(Any, handle), count_retry=reasons.append)
        answers = engines.run(_CALL, key="k", uuids=uuids, **options)
        return [answer async for answer in answers]

    return asyncio.run(run()), reasons


def _fail(error: Any, *lacks: str) -> messages.Failure:
    return messages.Failure(make_record(error), lacks)


@pytest.fixture
def four_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_tally("Engine"), "replicas", ("one", "two", "three", "four"))
    monkeypatch.setattr("sensorium.scale.engines._CONTROL_S", 0.05)


@pytest.mark.usefixtures("four_engines")
def test_media_that_is_only_named_is_looked_for_at_the_other_engines() -> None:
    """Some engines have the hash, but no longer its media. One does not answer."""

    def behave(sent: _Sent) -> list[Step]:
        name = sent.pinned or "one"
        if name != "three":
            return [messages.Accepted(name), _fail(MissingMediaError("gone", ("u",)))]
        return [messages.Accepted(name), _PIECE, _DONE]

    handle = _Handle(behave, knows=("one", "three", "four"), hangs=("two",))
    answers, reasons = _run(handle, uuids=(_UUID,))
    assert answers[-1] == _DONE
    assert [sent.pinned for sent in handle.sent] == [None, "four", "three"]
    assert reasons == ["moved", "moved"]


@pytest.mark.usefixtures("four_engines")
def test_media_that_no_other_engine_has_is_missing() -> None:
    error = MissingMediaError("gone", ("u",))
    handle = _Handle(lambda _: [messages.Accepted("one"), _fail(error)], knows=("one",))
    with pytest.raises(MissingMediaError):
        _run(handle, uuids=(_UUID,))
    assert len(handle.sent) == 1


def test_a_call_to_a_lost_engine_is_repeated_once_elsewhere() -> None:
    def behave(sent: _Sent) -> list[Step]:
        return [messages.Accepted("two" if sent.avoided else "one"), _LOST]

    handle = _Handle(behave)
    with pytest.raises(EngineLostError):
        _run(handle)
    assert [sent.avoided for sent in handle.sent] == [None, "one"]
    assert all(stream.is_cancelled for stream in handle.streams)


def test_text_that_was_streamed_is_not_repeated() -> None:
    handle = _Handle(lambda _: [messages.Accepted("one"), _PIECE, _LOST])
    with pytest.raises(EngineLostError):
        _run(handle)
    assert len(handle.sent) == 1
    with pytest.raises(EngineLostError):
        _run(handle, may_repeat=True)
    assert len(handle.sent) == 3


def test_a_file_that_an_engine_lacks_is_sent_to_it() -> None:
    files = {"d": MediaBytes(b"file", "d")}

    def behave(sent: _Sent) -> list[Step]:
        if sent.files or known:
            return [messages.Accepted("one"), _PIECE, _DONE]
        return [messages.Accepted("one"), _fail(MissingMediaError("no file"), "d")]

    known, reasons = True, []
    handle = _Handle(behave)

    async def run() -> None:
        nonlocal known
        engines = Engines(cast(Any, handle), count_retry=reasons.append)
        for is_known in (True, True, False):
            known = is_known
            async for _ in engines.run(_CALL, key="k", files=files):
                pass

    asyncio.run(run())
    assert [list(sent.files) for sent in handle.sent] == [["d"], [], [], ["d"]]
    assert handle.sent[-1].pinned == "one"
    assert reasons == ["missing"]


def test_a_file_that_is_lacking_too_late_is_sent_with_the_next_call() -> None:
    files = {"d": MediaBytes(b"file", "d")}
    lacking = _fail(MissingMediaError("no file"), "d")

    def behave(sent: _Sent) -> list[Step]:
        return [messages.Accepted("one"), _PIECE, _DONE if sent.files else lacking]

    handle = _Handle(behave)

    async def run() -> None:
        engines = Engines(cast(Any, handle), count_retry=lambda _: None)

        async def call(**options: Any) -> None:
            async for _ in engines.run(_CALL, key="k", files=files, **options):
                pass

        await call()
        with pytest.raises(MissingMediaError):
            await call()
        await call()
        await call(sends_all=True)

    asyncio.run(run())
    assert [list(sent.files) for sent in handle.sent] == [["d"], [], ["d"], ["d"]]


def test_an_error_of_the_request_is_raised_at_once() -> None:
    handle = _Handle(lambda _: [messages.Accepted("one"), _fail(RequestError("bad"))])
    with pytest.raises(RequestError, match="bad"):
        _run(handle, uuids=(_UUID,))
    assert len(handle.sent) == 1


@pytest.mark.parametrize(
    ("answers", "num_sent"),
    [([], 2), ([messages.Accepted("one")], 2), ([messages.Accepted("one"), _PIECE], 1)],
    ids=["nothing", "no output", "half of its output"],
)
def test_an_engine_that_does_not_answer_to_the_end_counts_as_lost(
    answers: list[Step], num_sent: int
) -> None:
    handle = _Handle(lambda _: answers)
    with pytest.raises(EngineLostError):
        _run(handle)
    assert len(handle.sent) == num_sent


def test_a_call_that_is_not_accepted_in_time_is_sent_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine that the router tried first may hang."""
    monkeypatch.setattr("sensorium.scale.engines._ACCEPT_S", 0.05)

    def behave(sent: _Sent) -> list[Step]:
        get_tally("Engine").tried.put(sent.ticket, "two" if sent.avoided else "one")
        return [messages.Accepted("two"), _DONE] if sent.avoided else ["hang"]

    handle = _Handle(behave)
    answers, reasons = _run(handle)
    assert answers == [messages.Accepted("two"), _DONE]
    assert [sent.avoided for sent in handle.sent] == [None, "one"]
    assert handle.streams[0].is_cancelled
    assert reasons == []


def test_a_call_that_no_engine_accepts_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sensorium.scale.engines._ACCEPT_S", 0.05)
    handle = _Handle(lambda _: ["hang"])
    with pytest.raises(CapacityError, match="no engine of the cluster"):
        _run(handle)
    assert len(handle.sent) == 3
    assert all(stream.is_cancelled for stream in handle.streams)


@pytest.mark.parametrize("may_be_none", [True, False])
def test_a_reset_is_complete_without_an_encoder_but_not_without_an_engine(
    may_be_none: bool,
) -> None:
    """An encoder that is just being replaced has nothing to forget."""

    async def fail(**_: object) -> list[Any]:
        raise DeploymentUnavailableError(DeploymentID("Encoder"))

    handle = SimpleNamespace(broadcast=lambda *_: SimpleNamespace(results_async=fail))
    replicas = Replicas(cast(Any, handle), may_be_none=may_be_none)
    with nullcontext() if may_be_none else pytest.raises(EngineLostError):
        asyncio.run(replicas.reset_cache("mm"))
