"""Derendered answers are those of the routes for text, whole and in chunks."""

from __future__ import annotations

import base64
import random
from typing import Any

import msgspec
import pytest

from tests.support.clients import MODEL, ask, make_image_part
from tests.support.server import ServerProcess

pytestmark = pytest.mark.xdist_group("server")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Body = dict[str, Any]
_SAMPLED: Body = {"temperature": 1.0, "seed": 7, "max_tokens": 40, "return_token_ids": True}
_CASES: dict[str, Body] = {
    "plain": {},
    "several choices with logprobs": {"n": 2, "logprobs": True, "top_logprobs": 3},
    "a stop string": {"stop": ["e"], "n": 3},
    "an included stop string": {"stop": ["er", "in"], "include_stop_str_in_output": True, "n": 3},
    "a stop string after some tokens": {"stop": ["e", "a"], "min_tokens": 9, "logprobs": True},
    "stop tokens": {"stop_token_ids": list(range(60, 400, 3)), "n": 2},
}


def _post(server: ServerProcess, path: str, body: Body) -> Any:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def _as_generated(answer: Body, choices: list[Body]) -> Body:
    """What a server that generates would have said."""
    names = ("index", "token_ids", "finish_reason", "stop_reason", "logprobs")
    return {
        "request_id": answer["id"],
        "model": answer["model"],
        "created": answer["created"],
        "choices": [{name: choice[name] for name in names} for choice in choices],
        "usage": answer["usage"],
    }


def _cut(choice: Body, draw: random.Random) -> list[Body]:
    """A choice in chunks of a few tokens; the last has its end, and sometimes nothing else."""
    token_ids, logprobs = choice["token_ids"], choice["logprobs"]
    pieces: list[Body] = []
    start = 0
    while start < len(token_ids):
        end = min(len(token_ids), start + draw.randint(1, 5))
        piece = {"index": choice["index"], "token_ids": token_ids[start:end], "logprobs": None}
        if logprobs is not None:
            piece["logprobs"] = {"content": logprobs["content"][start:end]}
        pieces.append(piece)
        start = end
    pieces[-1] |= {name: choice[name] for name in ("finish_reason", "stop_reason")}
    return pieces


def _stream(
    server: ServerProcess, path: str, generated: Body, request: Body, draw: random.Random
) -> list[Body]:
    """The chunks, each by a call of its own. The choices come by turns."""
    queues = [_cut(choice, draw) for choice in generated["choices"]]
    chunks: list[Body] = []
    body: Body = {"stream": True, **request}
    while queues:
        queue = draw.choice(queues)
        body["generate_chunk"] = {**generated, "choices": [queue.pop(0)], "usage": None}
        queues = [queue for queue in queues if queue]
        if not queues:
            body["generate_chunk"]["usage"] = generated["usage"]
        answer = _post(server, f"{path}/derender", body)
        body["stream_state"] = answer["stream_state"]
        assert len(answer["stream_state"]) < 4096
        chunks.append(answer["chunk"])
    return chunks


@pytest.mark.parametrize("case", _CASES)
def test_derendered_chat_is_the_answer_of_the_chat(omni_server: ServerProcess, case: str) -> None:
    request = {"messages": ask("Say something"), **_SAMPLED, **_CASES[case]}
    expected = _post(omni_server, CHAT, request)
    generated = _as_generated(expected, expected["choices"])
    prompt = {"prompt_token_ids": expected.pop("prompt_token_ids")}
    options = {name: value for name, value in request.items() if name != "messages"}
    body = {"generate_response": generated, "chat_request": options, **prompt}
    answer = _post(omni_server, f"{CHAT}/derender", body)
    assert answer == expected
    draw = random.Random(case)
    chunks = _stream(omni_server, CHAT, generated, {"chat_request": options, **prompt}, draw)
    for choice in expected["choices"]:
        news = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["delta"]["content"] for c in news) == choice["message"]["content"]
        assert [c["delta"].get("role") for c in news] == ["assistant"] + [None] * (len(news) - 1)
        assert [t for c in news for t in c["token_ids"]] == choice["token_ids"]
        assert {c["finish_reason"] for c in news[:-1]} <= {None}
        for name in ("finish_reason", "stop_reason"):
            assert news[-1][name] == choice[name]
        if choice["logprobs"] is not None:
            entries = [entry for c in news for entry in c["logprobs"]["content"]]
            assert entries == choice["logprobs"]["content"]
    assert {(chunk["id"], chunk["created"]) for chunk in chunks} == {
        (expected["id"], expected["created"])
    }
    assert chunks[-1]["usage"] == expected["usage"]
    assert all("usage" not in chunk for chunk in chunks[:-1])


def _as_chat_logprobs(logprobs: Body | None) -> Body | None:
    """As a server that generates has them."""
    if logprobs is None:
        return None
    rows = zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    )
    content = [
        {
            "token": token,
            "logprob": logprob,
            "bytes": None,
            "top_logprobs": [
                {"token": other, "logprob": value, "bytes": None} for other, value in top.items()
            ],
        }
        for token, logprob, top in rows
    ]
    return {"content": content}


@pytest.mark.parametrize(
    "own", [{}, {"stop": ["e"]}, {"logprobs": 2, "stop": ["er"]}], ids=["plain", "stop", "logprobs"]
)
def test_derendered_completions_are_those_of_the_route(
    omni_server: ServerProcess, own: Body
) -> None:
    request = {"prompt": ["One", "Two"], "n": 2, **_SAMPLED, **own}
    expected = _post(omni_server, COMPLETIONS, request)
    prompts = [expected["choices"][index].pop("prompt_token_ids") for index in (0, 2)]
    for index in (1, 3):
        expected["choices"][index].pop("prompt_token_ids")
    raw = [
        {**choice, "index": choice["index"] % 2, "logprobs": _as_chat_logprobs(choice["logprobs"])}
        for choice in expected["choices"]
    ]
    generated = [
        {**_as_generated(expected, raw[start : start + 2]), "usage": None} for start in (0, 2)
    ]
    body = {
        "generate_responses": generated,
        "prompt_token_ids": prompts,
        "completion_request": {**request, "stream": False},
    }
    answer = _post(omni_server, f"{COMPLETIONS}/derender", body)
    assert answer["choices"] == expected["choices"]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert all(answer["usage"][name] == expected["usage"][name] for name in names)
    for number, response in enumerate(generated):
        more = {"completion_request": own, "prompt_token_ids": prompts[number]}
        chunks = _stream(omni_server, COMPLETIONS, response, more, random.Random(number))
        for index in range(2):
            choice = expected["choices"][2 * number + index]
            news = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert "".join(c["text"] for c in news) == choice["text"]
            assert news[-1]["finish_reason"] == choice["finish_reason"]
            if choice["logprobs"] is not None:
                for name in ("tokens", "text_offset", "top_logprobs"):
                    joined = [entry for c in news for entry in c["logprobs"][name]]
                    assert joined == choice["logprobs"][name]


def test_a_bare_answer_is_derendered_in_either_encoding(omni_server: ServerProcess) -> None:
    request = {"messages": ask("Say", make_image_part()), **_SAMPLED}
    expected = _post(omni_server, CHAT, request)
    generated = _as_generated(expected, expected["choices"])
    plain = _post(omni_server, f"{CHAT}/derender", generated)
    assert plain["choices"][0]["message"] == expected["choices"][0]["message"]
    assert (plain["id"], plain["usage"]) == (expected["id"], expected["usage"])
    kind = "application/x-msgpack"
    packed = omni_server.post(
        f"{CHAT}/derender",
        content=msgspec.msgpack.encode(generated),
        headers={"content-type": kind, "accept": kind},
    )
    assert packed.headers["content-type"] == kind
    assert msgspec.msgpack.decode(packed.content) == plain
    single = _post(omni_server, f"{COMPLETIONS}/derender", generated)
    assert single["choices"][0]["text"] == expected["choices"][0]["message"]["content"]


def test_answers_of_other_engines_are_derendered(omni_server: ServerProcess) -> None:
    """Those that say neither what stopped them nor how many tokens there were."""
    ids = _post(omni_server, "/tokenize", {"prompt": "one two", "add_special_tokens": False})
    tokens = ids["tokens"]
    body: Body = {
        "model": MODEL,
        "generate_response": {
            "request_id": "theirs",
            "choices": [{"index": 0, "token_ids": tokens, "finish_reason": "stop"}],
        },
        "prompt_tokens": 5,
        "chat_request": {"stop": ["wo"]},
    }
    answer = _post(omni_server, f"{CHAT}/derender", body)
    assert answer["choices"][0]["message"]["content"] == "one t"
    assert answer["choices"][0]["stop_reason"] == "wo"
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == len(tokens)
    body["chat_request"] = {"stop": ["x"]}
    whole = _post(omni_server, f"{CHAT}/derender", body)["choices"][0]
    assert (whole["message"]["content"], whole["stop_reason"]) == ("one two", None)
    body["chat_request"] = {"stop": ["x"], "stop_token_ids": [tokens[-1]]}
    closed = _post(omni_server, f"{CHAT}/derender", body)["choices"][0]
    text = _post(omni_server, "/detokenize", {"tokens": tokens[:-1]})["prompt"]
    assert (closed["message"]["content"], closed["stop_reason"]) == (text, None)


_GOOD: Body = {"choices": [{"index": 0, "token_ids": [70, 71], "finish_reason": "length"}]}
_STATE = base64.b64encode(msgspec.msgpack.encode([1, 0, 0, {}])).decode()
_BAD: list[tuple[str, Body, str]] = [
    (CHAT, {}, "generate_response"),
    (CHAT, {"stream": True, "generate_response": _GOOD}, "generate_chunk"),
    (CHAT, {"generate_response": {"choices": []}}, "generate_response.choices"),
    (CHAT, {"generate_response": {"choices": 5}}, "generate_response.choices"),
    (
        CHAT,
        {"generate_response": {"choices": [{"token_ids": [-1]}]}},
        "generate_response.choices[0].token_ids[0]",
    ),
    (
        CHAT,
        {"generate_response": {"choices": [{"token_ids": [2**31]}]}},
        "generate_response.choices[0].token_ids[0]",
    ),
    (
        CHAT,
        {"generate_response": {"choices": [{"token_ids": [1], "logprobs": {"content": [1]}}]}},
        "generate_response.choices[0].logprobs",
    ),
    (
        CHAT,
        {"generate_response": {**_GOOD, "prompt_logprobs": [{"1": 2}]}},
        "generate_response.prompt_logprobs",
    ),
    (CHAT, {"generate_response": _GOOD, "prompt_tokens": -1}, "prompt_tokens"),
    (CHAT, {"generate_response": _GOOD, "chat_request": {"stop": 1}}, "chat_request.stop"),
    (COMPLETIONS, {}, "generate_responses"),
    (COMPLETIONS, {"generate_responses": []}, "generate_responses"),
    (
        COMPLETIONS,
        {"generate_responses": [_GOOD], "prompt_tokens": [1, 2]},
        "prompt_tokens",
    ),
    (
        COMPLETIONS,
        {"generate_responses": [_GOOD], "prompt_token_ids": [[1], [2]]},
        "prompt_token_ids",
    ),
    (
        COMPLETIONS,
        {"generate_responses": [_GOOD], "completion_request": {"echo": True}},
        "completion_request.echo",
    ),
]


@pytest.mark.parametrize(("path", "body", "param"), _BAD)
def test_bad_answers_are_refused_by_their_field(
    omni_server: ServerProcess, path: str, body: Body, param: str
) -> None:
    response = omni_server.post(f"{path}/derender", body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_forged_stream_states_are_refused(omni_server: ServerProcess) -> None:
    body: Body = {"stream": True, "generate_chunk": _GOOD}
    good = _post(omni_server, f"{CHAT}/derender", body)["stream_state"]
    assert _post(omni_server, f"{CHAT}/derender", {**body, "stream_state": _STATE})["chunk"]
    raw = bytearray(base64.b64decode(good))
    draw = random.Random(0)
    statuses: set[int] = set()
    bad = ["", "é", "=", "AAAA", good[:-4], base64.b64encode(b"\xff" * 40).decode()]
    for _ in range(40):
        changed = bytearray(raw)
        changed[draw.randrange(len(raw))] = draw.randrange(256)
        bad.append(base64.b64encode(changed).decode())
    for state in bad:
        response = omni_server.post(f"{CHAT}/derender", {**body, "stream_state": state})
        statuses.add(response.status_code)
        if response.status_code == 400:
            assert response.json()["error"]["param"] == "stream_state"
    assert statuses <= {200, 400}
    assert 400 in statuses
