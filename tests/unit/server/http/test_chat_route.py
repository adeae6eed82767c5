"""Conversations through OpenAI's own client."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from sensorium.engine.inputs.renderer import Chat
from tests.unit.server.standing_in import RunningServer, read_events, serve

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
TEXT = "Hello wörld"


@pytest.fixture
def openai(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def get_last_call(server: RunningServer) -> tuple[Chat, Any]:
    prompt, params = server.engine.calls[-1]
    assert isinstance(prompt, Chat)
    return prompt, params


def test_an_answer_has_text_usage_and_reasons(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(model="tiny", messages=HI)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", TEXT)
    assert (choice.finish_reason, choice.model_extra) == ("stop", {"stop_reason": 42})
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 3)
    assert (answer.usage.total_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (6, 2)
    assert (answer.model, answer.object) == ("tiny", "chat.completion")


def test_a_streamed_answer_equals_the_whole_one(openai: OpenAI) -> None:
    options: Any = {
        "messages": HI,
        "model": "tiny",
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"return_token_ids": True},
    }
    whole = openai.chat.completions.create(**options)
    texts, ids, logprobs, reasons = ["", ""], [[], []], [[], []], {}  # type: ignore[var-annotated]
    prompt_ids = []
    for chunk in openai.chat.completions.create(stream=True, **options):
        prompt_ids += (chunk.model_extra or {}).get("prompt_token_ids", [])
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ids[choice.index] += (choice.model_extra or {}).get("token_ids", [])
            logprobs[choice.index] += (choice.logprobs and choice.logprobs.content) or []
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content == TEXT
        assert ids[choice.index] == (choice.model_extra or {})["token_ids"] == [100, 101, 102]
        assert choice.logprobs is not None
        assert logprobs[choice.index] == choice.logprobs.content
        assert reasons[choice.index] == choice.finish_reason
    assert prompt_ids == (whole.model_extra or {})["prompt_token_ids"] == [1, 2, 3]


def test_usage_comes_in_a_last_chunk_without_choices(openai: OpenAI) -> None:
    stream = openai.chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 3)


def test_without_being_asked_for_usage_is_in_no_chunk(server: RunningServer) -> None:
    *events, done = read_events(server.chat(stream=True))
    assert done == "[DONE]"
    assert all("usage" not in json.loads(event) for event in events)


def test_running_usage_grows_with_the_tokens(server: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, _ = read_events(server.chat(stream=True, stream_options=options))
    usages = [json.loads(event)["usage"] for event in events]
    assert [usage["completion_tokens"] for usage in usages] == [1, 1, 2, 3, 3]
    assert {usage["prompt_tokens"] for usage in usages} == {3}
    details = [usage["prompt_tokens_details"] for usage in usages]
    media = {"image_tokens": 0, "audio_tokens": 0, "video_tokens": 0}
    assert details == [None] * 4 + [{"cached_tokens": 2, **media}]


def test_the_first_chunk_of_each_choice_has_its_role(server: RunningServer) -> None:
    *events, _ = read_events(server.chat(stream=True, n=2))
    choices = [json.loads(event)["choices"][0] for event in events]
    assert [choice["index"] for choice in choices if "role" in choice["delta"]] == [0, 1]
    assert [choice["delta"].get("role") for choice in choices[:2]] == ["assistant"] * 2


def test_log_probabilities_have_the_likeliest_tokens_and_no_infinity(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(
        model="tiny", messages=HI, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    last = logprobs.content[-1]
    assert (last.token, last.logprob, last.bytes) == (" wörld", -0.5, list(" wörld".encode()))
    assert [(top.token, top.logprob) for top in last.top_logprobs] == [
        (" wörld", -0.5),
        ("x", -9999.0),
    ]


def test_log_probabilities_without_a_number_have_no_likeliest_tokens(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(model="tiny", messages=HI, logprobs=True)
    assert answer.choices[0].logprobs is not None
    assert [entry.top_logprobs for entry in answer.choices[0].logprobs.content or ()] == [[]] * 3


def test_prompt_log_probabilities_are_by_token_id(server: RunningServer) -> None:
    entries = server.chat(prompt_logprobs=1).json()["prompt_logprobs"]
    assert entries[:2] == [None, {"2": {"logprob": -1.0, "rank": 3, "decoded_token": "<2>"}}]


def test_the_fields_of_a_request_reach_the_engine(server: RunningServer) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    response = server.chat(
        tools=tools,
        tool_choice="auto",
        max_tokens=9,
        max_completion_tokens=5.0,
        temperature=1,
        stop="END",
        seed=-3,
        logit_bias={"5": 1},
        top_k=-1,
        min_tokens=2,
        bad_words=["no"],
        allowed_token_ids=[1, 2],
        ignore_eos=True,
        cache_salt="mine",
        priority=-2,
        mm_processor_kwargs={"a": 1},
        media_io_kwargs={"video": {"num_frames": 2}},
        chat_template_kwargs={"b": 2},
        user=None,
    )
    assert response.status_code == 200
    chat, params = get_last_call(server)
    assert (params.max_tokens, params.temperature, params.stop) == (5, 1, ("END",))
    assert (params.seed, params.logit_bias, params.top_k) == (-3, {5: 1}, 0)
    assert (params.min_tokens, params.bad_words, params.ignore_eos) == (2, ("no",), True)
    assert params.allowed_token_ids == (1, 2)
    assert chat.fields == {
        "cache_salt": "mine",
        "priority": -2,
        "mm_processor_kwargs": {"a": 1},
        "media_io_kwargs": {"video": {"num_frames": 2}},
    }
    assert (chat.options.tools, chat.options.chat_template_kwargs) == (tools, {"b": 2})
    assert chat.options.add_generation_prompt


def test_without_a_limit_an_answer_may_fill_the_context(server: RunningServer) -> None:
    server.chat()
    assert get_last_call(server)[1].max_tokens is None


def test_continuing_a_message_starts_no_new_one(server: RunningServer) -> None:
    server.chat(continue_final_message=True)
    options = get_last_call(server)[0].options
    assert (options.add_generation_prompt, options.continue_final_message) == (False, True)


def test_null_fields_count_as_absent(server: RunningServer) -> None:
    from sensorium.server.http.protocol.requests import ChatCompletionRequest

    nulls = dict.fromkeys(set(ChatCompletionRequest.__struct_fields__) - {"messages"})
    assert server.chat(**nulls).status_code == 200


def test_a_template_of_a_request_is_used_where_requests_are_trusted() -> None:
    with serve(trust_request_chat_template=True) as running:
        assert running.chat(chat_template="{{ messages }}").status_code == 200
        assert get_last_call(running)[0].options.chat_template == "{{ messages }}"


def test_an_unknown_field_is_warned_about_once(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="sensorium.server.http.bodies.reading"):
        for _ in range(3):
            assert server.chat(extra_of_the_test=1, user="known").status_code == 200
    assert [record.getMessage() for record in caplog.records] == [
        "requests have the unknown field 'extra_of_the_test', which is ignored"
    ]


def test_a_long_unknown_field_name_is_cut_in_the_warning(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="sensorium.server.http.bodies.reading"):
        for end in ("a", "b"):
            assert server.chat(**{"long" * 1000 + end: 1}).status_code == 200
    assert [record.getMessage() for record in caplog.records] == [
        f"requests have the unknown field '{'long' * 25}', which is ignored"
    ]


@pytest.mark.parametrize(
    ("fields", "warning"),
    [
        ({"temprature": 1}, "unknown field 'temprature', did you mean 'temperature'?"),
        ({"max_token": 5}, "unknown field 'max_token', did you mean 'max_tokens'?"),
        ({"sotp": "a"}, "unknown field 'sotp', did you mean 'stop'?"),
        (
            {"stream": True, "stream_options": {"include_usages": True}},
            "unknown field 'include_usages', did you mean 'include_usage'?",
        ),
        ({"sto\np": "a"}, "unknown field 'sto\\np', did you mean 'stop'?"),
        ({"seedé": 1}, "unknown field 'seed\\xe9', did you mean 'seed'?"),
    ],
)
def test_a_misspelt_field_is_named_in_the_headers_and_the_log(
    server: RunningServer,
    caplog: pytest.LogCaptureFixture,
    fields: dict[str, Any],
    warning: str,
) -> None:
    with caplog.at_level(logging.WARNING, logger="sensorium.server.http.calls"):
        response = server.chat(**fields)
    assert (response.status_code, response.headers["x-sensorium-warning"]) == (200, warning)
    (record,) = (entry for entry in caplog.records if entry.name == "sensorium.server.http.calls")
    assert record.getMessage() == f"request {response.headers['x-request-id']}: {warning}"


@pytest.mark.parametrize("fields", [{}, {"temperature": 1}, {"m": 1}, {"temp": 1}, {"vendor": {}}])
def test_no_other_field_is_called_misspelt(server: RunningServer, fields: dict[str, Any]) -> None:
    assert "x-sensorium-warning" not in server.chat(**fields).headers


@pytest.mark.parametrize("is_header", [False, True])
def test_a_trace_is_in_the_answer_if_it_was_asked_for(
    server: RunningServer, is_header: bool
) -> None:
    body: dict[str, Any] = {"messages": HI} | ({} if is_header else {"trace": True})
    headers = {"X-Sensorium-Trace": "1"} if is_header else {}
    with server.client(headers=headers) as client:
        whole = client.post("/v1/chat/completions", json=body)
        streamed = client.post("/v1/chat/completions", json={**body, "stream": True})
        counted = client.post(
            "/v1/chat/completions",
            json={**body, "stream": True, "stream_options": {"include_usage": True}},
        )
    assert "sensorium_trace" in whole.json()
    for response in (streamed, counted):
        *events, last, _ = read_events(response)
        assert "sensorium_trace" in json.loads(last)
        assert all("sensorium_trace" not in event for event in events)
    assert "sensorium_trace" not in server.chat().json()


def test_tokens_and_finish_reasons_are_counted_streamed_or_not() -> None:
    with serve() as running:
        running.chat(n=2)
        running.chat(stream=True)
        assert running.metrics.tokens == {0: 6, 1: 3}
        assert len(running.metrics.finished) == 2
        assert running.metrics.stages == {"parse": 2}
