"""A whole answer that is computed once more, because the first engine was lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

from sensorium.render.prompts import EnginePrompt
from sensorium.scale import messages
from sensorium.scale.cluster_engine import ClusterEngine
from sensorium.types.outputs import CompletionDelta, CompletionOutput, RequestDelta, RequestOutput
from sensorium.types.request import FinishReason
from sensorium.types.sampling import SamplingParams


def _make_delta(number: int, *, final: RequestOutput | None = None) -> messages.Delta:
    entry = CompletionDelta(index=0, text="a", token_ids=(number,))
    return messages.Delta(RequestDelta(request_id="r", deltas=(entry,), final=final))


def test_tokens_that_come_again_are_not_counted_again() -> None:
    """The caller counts those of each delta, and what is lacking when it gets the final output."""
    completion = CompletionOutput(
        index=0, text="aaa", token_ids=(0, 1, 2), finish_reason=FinishReason.LENGTH
    )
    final = RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=(), outputs=(completion,), finished=True
    )
    answers: list[messages.Answer] = [
        messages.Accepted("lost"),
        *(_make_delta(number) for number in range(2)),
        messages.Accepted("other"),
        *(_make_delta(number) for number in range(2)),
        _make_delta(2, final=final),
    ]

    async def run(*_: object, **_options: object) -> AsyncGenerator[messages.Answer, None]:
        for answer in answers:
            yield answer

    prompt = EnginePrompt(text="x", token_ids=(1,), media=())
    outline = SimpleNamespace(prompt=prompt, params=SamplingParams(), text="x", items=())

    async def make_outline(*_: object) -> Any:
        return outline

    engine = SimpleNamespace(
        _check_open=lambda: None,
        _num_preparing=0,
        _preparation=SimpleNamespace(outline=make_outline),
        _engines=SimpleNamespace(run=run),
    )

    async def collect() -> list[RequestDelta]:
        deltas = ClusterEngine.stream(
            cast(ClusterEngine, cast(Any, engine)),
            cast(Any, prompt),
            SamplingParams(),
            request_id="r",
            may_repeat=True,
        )
        return [delta async for delta in deltas]

    deltas = asyncio.run(collect())
    assert [entry.token_ids for delta in deltas for entry in delta.deltas] == [(0,), (1,)]
    assert deltas[-1].final is not None
    assert deltas[-1].final.outputs == (completion,)
