"""Every kind of failure has its status, and the field that it is about."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from sensorium.server.http.errors import WirePaths
from sensorium.server.http.openai.chat import find_chat_paths
from sensorium.server.http.protocol.requests import ChatCompletionRequest
from sensorium.types.errors import (
    CapacityError,
    EngineLostError,
    FailedRequestError,
    FieldPath,
    InvariantError,
    MediaFetchError,
    MissingMediaError,
    RequestError,
    StoppingError,
)
from tests.unit.server.standing_in import RunningServer, ScriptedEngine, read_events, serve


class Fault:
    """What the engine raises."""

    error: Exception | None = None

    def __call__(self, _: Any) -> None:
        if self.error is not None:
            raise self.error


early, late = Fault(), Fault()


@pytest.fixture(scope="module")
def faulty() -> Iterator[RunningServer]:
    with serve(ScriptedEngine(prepare=early, between=late)) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_fault() -> Iterator[None]:
    yield
    early.error = late.error = None


INPUT = "what the model reads"
FAULTS = [
    (RequestError("is odd", ("messages", 0, "content")), 400, "messages[0].content", None),
    (RequestError("must be str", ("cache_salt",)), 400, "cache_salt", None),
    (RequestError("a chat template refuses this"), 400, INPUT, None),
    (RequestError("it is too long", ("prompt",)), 400, INPUT, None),
    (
        MediaFetchError("no such host", ("multi_modal_data", "image", 0)),
        422,
        INPUT,
        "media_not_fetched",
    ),
    (MissingMediaError("gone", ("abc",)), 409, INPUT, "media_not_cached"),
    (CapacityError("full"), 503, None, "no_capacity"),
    (EngineLostError("the engine has died"), 503, None, "engine_lost"),
    (FailedRequestError("a step failed"), 500, None, None),
    (InvariantError("secret of ours"), 500, None, None),
    (KeyError("secret of ours"), 500, None, None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "param", "code"), FAULTS)
def test_a_failure_before_the_first_token_has_its_status(
    faulty: RunningServer,
    error: Exception,
    status: int,
    param: str | None,
    code: str | None,
    stream: bool,
) -> None:
    early.error = error
    response = faulty.chat(stream=stream)
    param = "messages" if param == INPUT else param
    body = response.json()["error"]
    assert (response.status_code, body["param"], body["code"]) == (status, param, code)
    assert response.headers["content-type"] == "application/json"
    assert ("retry-after" in response.headers) == (status == 503)
    assert "secret" not in response.text
    assert body.get("missing") == (["abc"] if status == 409 else None)


@pytest.mark.parametrize(("error", "status", "param", "code"), FAULTS)
def test_a_failure_after_the_first_token_is_an_event(
    faulty: RunningServer, error: Exception, status: int, param: str | None, code: str | None
) -> None:
    late.error = error
    response = faulty.complete(stream=True)
    *events, last, done = read_events(response)
    assert (response.status_code, done) == (200, "[DONE]")
    assert [json.loads(event)["choices"][0]["text"] for event in events] == ["Hel"]
    body = json.loads(last)["error"]
    param = "prompt" if param == INPUT else param
    assert (body["param"], body["code"]) == (param, code)
    assert "secret" not in last
    assert status != 500 or body["type"] == "server_error"


def test_requests_that_fail_in_the_engine_end_with_an_error(faulty: RunningServer) -> None:
    before = faulty.metrics.ends.copy()
    late.error = EngineLostError("the engine has died")
    faulty.chat(stream=True)
    faulty.chat()
    assert faulty.metrics.ends - before == {"error": 2}


def test_a_late_failure_of_a_whole_answer_has_its_status(faulty: RunningServer) -> None:
    late.error = EngineLostError("the engine has died")
    assert faulty.chat().status_code == 503


def test_media_of_a_conversation_is_named_by_its_place(faulty: RunningServer) -> None:
    early.error = RequestError("it is broken", ("messages", 2, "content", 1))
    error = faulty.chat().json()["error"]
    assert error["param"] == "messages[2].content[1]"
    assert error["message"] == "messages[2].content[1]: it is broken"


def test_a_bug_is_logged_under_the_request_id(
    faulty: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    early.error = KeyError("secret of ours")
    with caplog.at_level(logging.ERROR, logger="sensorium.server.http.errors"):
        response = faulty.chat()
    (record,) = caplog.records
    assert response.headers["x-request-id"] in record.getMessage()
    assert record.exc_info is not None
    assert "secret of ours" in str(record.exc_info[1])


def test_failures_are_counted_by_reason(faulty: RunningServer) -> None:
    before = faulty.metrics.refusals.copy()
    for error in (
        *(RequestError("x"), MediaFetchError("x"), EngineLostError("x"), KeyError("x")),
        *(CapacityError("x"), StoppingError("x")),
    ):
        early.error = error
        faulty.chat()
    faulty.chat(model="other")
    counted = faulty.metrics.refusals - before
    assert counted == {
        "bad_request": 1,
        "media": 1,
        "engine_lost": 1,
        "capacity": 1,
        "draining": 1,
        "internal": 1,
        "not_found": 1,
    }


CHAT_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"messages": "hi"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "boss", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages[0].content[0].type"),
    ({"temperature": "5"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"n": 0}, "n"),
    ({"n": 10**6}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": 1}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"top_p": 0}, "top_p"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
    ({"tool_choice": 3}, "tool_choice"),
    ({"tools": [3]}, "tools[0]"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_json": 3}, "guided_json"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.schema",
    ),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"media_io_kwargs": {"video": 3}}, "media_io_kwargs.video"),
    ({"priority": "high"}, "priority"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT_MISTAKES)
def test_a_wrong_field_of_a_chat_is_named(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    response = server.chat(**fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


COMPLETION_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [[1], [-1]]}, "prompt[1][0]"),
    ({"prompt": [1, True]}, "prompt[1]"),
    ({"prompt": [2**40]}, "prompt[0]"),
    ({"prompt": ["a"] * 600, "n": 2}, "prompt"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
]


@pytest.mark.parametrize(("fields", "param"), COMPLETION_MISTAKES)
def test_a_wrong_field_of_a_completion_is_named(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    response = server.complete(**fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_missing_field_is_named(server: RunningServer) -> None:
    response = server.post("/v1/completions", json={})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def test_another_model_is_not_found(server: RunningServer) -> None:
    for response in (server.chat(model="gpt"), server.complete(model="gpt")):
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (
            404,
            "model_not_found",
            "model",
        )


def test_unknown_routes_and_methods_are_errors_of_the_same_shape(server: RunningServer) -> None:
    missing = server.get("/v1/nothing")
    wrong = server.get("/v1/chat/completions")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert wrong.headers["allow"] == "POST"
    both = server.ask("DELETE", "/ping")
    assert both.status_code == 405
    assert set(both.headers["allow"].split(", ")) == {"GET", "POST"}
    for response in (missing, wrong):
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ((), ("features",)),
        (("prompt",), ("token_ids",)),
        (("prompt_token_ids", 3), ("token_ids",)),
        (("multi_modal_data", "image", 0), ("content_parts", 2)),
        (("multi_modal_uuids", "image", 1), ("features",)),
        (("multi_modal_data",), ("features",)),
        (("mm_kwargs", "image", 0), ("features", "kwargs_data", "image", 0)),
        (("structured_outputs", "json"), ("guided_json",)),
        (("messages", 0, "content"), ("messages", 0, "content")),
    ],
)
def test_paths_of_the_engine_are_found_in_the_request(path: FieldPath, place: FieldPath) -> None:
    paths = WirePaths(
        input=("features",),
        prompt=("token_ids",),
        media={"image": [("content_parts", 2)]},
        structured=("guided_json",),
        fields={"mm_kwargs": ("features", "kwargs_data")},
    )
    assert paths.find(path) == place


@pytest.mark.parametrize(
    ("route", "name", "stream"),
    [
        ("chat/completions", "generate_response", False),
        ("chat/completions", "generate_chunk", True),
        ("completions", "generate_responses", False),
        ("completions", "generate_chunk", True),
    ],
)
def test_too_many_tokens_to_derender_are_named_by_their_field(
    server: RunningServer, route: str, name: str, stream: bool
) -> None:
    halves = [{"index": index, "token_ids": [1] * (2**17 + 1)} for index in range(2)]
    given: Any = {"choices": halves}
    body = {name: [given] if name.endswith("s") else given, "stream": stream}
    response = server.post(f"/v1/{route}/derender", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)


DERENDER_MISTAKES: list[tuple[str, str, dict[str, Any], str]] = [
    ("chat/completions", "chat_request", {"top_logprobs": 2}, "top_logprobs"),
    ("chat/completions", "chat_request", {"functions": [1]}, "functions"),
    ("chat/completions", "chat_request", {"temperature": -1}, "temperature"),
    ("chat/completions", "chat_request", {"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ("chat/completions", "chat_request", {"tools": [{"function": {}}]}, "tools[0].function.name"),
    ("chat/completions", "chat_request", {"tool_choice": "required"}, "tool_choice"),
    ("completions", "completion_request", {"best_of": 3}, "best_of"),
    ("completions", "completion_request", {"echo": True}, "echo"),
    ("completions", "completion_request", {"response_format": {"type": 1}}, "response_format.type"),
]


@pytest.mark.parametrize(("route", "outer", "fields", "param"), DERENDER_MISTAKES)
def test_a_wrong_field_of_an_inner_request_is_named_with_its_place(
    server: RunningServer, route: str, outer: str, fields: dict[str, Any], param: str
) -> None:
    response = server.post(f"/v1/{route}/derender", json={outer: fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, f"{outer}.{param}")


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_an_error_about_the_length_names_the_field_that_was_sent(field: str) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], field: 9}
    request = msgspec.convert(body, ChatCompletionRequest)
    assert find_chat_paths(request).find(("max_tokens",)) == (field,)
