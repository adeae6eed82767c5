"""How an engine of a cluster answers calls that fail."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sensorium.scale import messages
from sensorium.scale.replica import EngineReplica
from sensorium.types.errors import InvariantError, RequestError
from sensorium.types.sampling import SamplingParams

_CALL = messages.encode_call(messages.OpenAudio(params=SamplingParams(), request_id="r"))


@pytest.mark.parametrize(
    ("raised", "kind"), [(KeyError("secret"), InvariantError), (RequestError("bad"), RequestError)]
)
def test_a_bug_is_not_described_to_clients(raised: Exception, kind: type[Exception]) -> None:
    """An `InvariantError` has its text in the log only, as any other bug of a server."""

    async def answer(*_: object) -> Any:
        raise raised
        yield

    async def run() -> list[messages.Answer]:
        engine = SimpleNamespace(
            _name="one", _host=SimpleNamespace(check=lambda: None), _answer=answer
        )
        engine._sync = lambda: None
        answers = EngineReplica.run(cast(Any, engine), _CALL)
        return [messages.decode_answer(each) async for each in answers]

    accepted, failure = asyncio.run(run())
    assert accepted == messages.Accepted("one")
    assert isinstance(failure, messages.Failure)
    assert type(failure.error.make_error()) is kind
