"""Prompts through OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from sensorium.types.errors import RequestError
from tests.support.waiting import wait_until
from tests.unit.server.standing_in import RunningServer, ScriptedEngine, read_events, serve

TEXT = "Hello wörld"


@pytest.fixture
def openai(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    ("prompt", "seen"),
    [
        ("a", [{"prompt": "a"}]),
        (["a", "b"], [{"prompt": "a"}, {"prompt": "b"}]),
        ([1, 2], [{"prompt_token_ids": [1, 2]}]),
        ([1, 2.0], [{"prompt_token_ids": [1, 2]}]),
        ([[1], [2, 3]], [{"prompt_token_ids": [1]}, {"prompt_token_ids": [2, 3]}]),
    ],
)
def test_prompts_are_texts_or_token_ids_one_or_many(
    server: RunningServer, openai: OpenAI, prompt: Any, seen: list[Any]
) -> None:
    before = len(server.engine.calls)
    answer = openai.completions.create(model="tiny", prompt=prompt)
    calls = server.engine.calls[before:]
    assert [given for given, _ in calls] == seen
    assert {params.max_tokens for _, params in calls} == {16}
    assert [choice.text for choice in answer.choices] == [TEXT] * len(seen)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3 * len(seen)


@pytest.mark.parametrize("echo", [False, True])
def test_a_streamed_answer_equals_the_whole_one(openai: OpenAI, echo: bool) -> None:
    options: Any = {
        "model": "tiny",
        "prompt": ["a", [5]][:1] * 2,
        "n": 2,
        "echo": echo,
        "logprobs": None if echo else 1,
    }
    whole = openai.completions.create(**options)
    texts: dict[int, str] = {}
    offsets: dict[int, list[int]] = {}
    for chunk in openai.completions.create(stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            found = (choice.logprobs and choice.logprobs.text_offset) or []
            offsets.setdefault(choice.index, []).extend(found)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    for choice in whole.choices:
        assert texts[choice.index] == choice.text == ("a" + TEXT if echo else TEXT)
        assert offsets[choice.index] == ([] if echo else [0, 3, 5])


def test_log_probabilities_have_the_chosen_token_and_the_likeliest_ones(openai: OpenAI) -> None:
    for number, likeliest in ((0, {"lo": -0.5}), (2, {"lo": -0.5, "x": -9999.0})):
        answer = openai.completions.create(model="tiny", prompt="a", logprobs=number)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens == ["Hel", "lo", " wörld"]
        assert logprobs.token_logprobs == [-0.5] * 3
        assert logprobs.top_logprobs is not None
        assert logprobs.top_logprobs[1] == likeliest


def test_echoed_log_probabilities_start_with_those_of_the_prompt(server: RunningServer) -> None:
    choice = server.complete(echo=True, logprobs=1, prompt=[1, 2, 3]).json()["choices"][0]
    assert choice["text"] == "<1><2><3>" + TEXT
    assert choice["logprobs"]["tokens"] == ["<1>", "<2>", "<3>", "Hel", "lo", " wörld"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, -0.5, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 3, 6, 9, 12, 14]


def test_token_ids_are_given_when_asked_for(server: RunningServer) -> None:
    choice = server.complete(return_token_ids=True).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([1, 2, 3], [100, 101, 102])
    *events, _ = read_events(server.complete(return_token_ids=True, stream=True))
    choices = [json.loads(event)["choices"][0] for event in events]
    assert [choice.get("prompt_token_ids") for choice in choices] == [[1, 2, 3], None, None]
    assert [choice["token_ids"] for choice in choices] == [[100], [101], [102]]


def test_usage_counts_all_prompts(server: RunningServer) -> None:
    response = server.complete(
        prompt=["a", "b"], n=2, stream=True, stream_options={"include_usage": True}, trace=True
    )
    *_, last, done = read_events(response)
    chunk = json.loads(last)
    assert (done, chunk["choices"]) == ("[DONE]", [])
    assert (chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]) == (6, 12)
    assert len(chunk["sensorium_trace"]) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_one_bad_prompt_fails_the_call_and_ends_the_others(stream: bool) -> None:
    def prepare(prompt: Any) -> Any:
        if prompt["prompt"] == "bad":
            raise RequestError("prompt is bad")
        return wait_for_ever()

    async def wait_for_ever() -> None:
        import asyncio

        await asyncio.Event().wait()

    engine = ScriptedEngine(prepare=prepare)
    with serve(engine) as running:
        response = running.complete(prompt=["good", "bad", "good"], stream=stream)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
        wait_until(lambda: engine.num_open == 0, "requests remain")
        assert engine.num_aborted == 3
