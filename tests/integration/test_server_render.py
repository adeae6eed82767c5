"""The routes that render and tokenise, on a real server."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from sensorium.multimodal.item_codec import decode_item
from tests.support.clients import (
    MODEL,
    ask,
    make_audio_part,
    make_conversations,
    make_image_part,
    make_video_part,
)
from tests.support.server import ServerProcess

pytestmark = pytest.mark.xdist_group("server")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PACKED = {"accept": "application/x-msgpack"}
Body = dict[str, Any]


def _post(server: ServerProcess, path: str, body: Body) -> Any:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("kind", make_conversations())
def test_a_rendered_chat_is_what_the_model_reads(omni_server: ServerProcess, kind: str) -> None:
    messages = make_conversations()[kind]
    chat = {"messages": messages, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    expected = _post(omni_server, CHAT, chat)["prompt_token_ids"]
    rendered = _post(omni_server, f"{CHAT}/render", chat)
    assert rendered["token_ids"] == expected
    assert rendered["sampling_params"] == {"temperature": 0.0, "max_tokens": 1}
    light = _post(omni_server, f"{CHAT}/render", {**chat, "return_kwargs": False})
    counted = _post(omni_server, "/tokenize", {"messages": messages, "return_token_strs": True})
    assert counted["tokens"] == light["token_ids"] == expected
    assert (counted["count"], counted["max_model_len"]) == (len(expected), 2048)
    assert len(counted["token_strs"]) == len(expected)
    features = rendered["features"]
    if features is None:
        assert (kind, light["features"]) == ("text", None)
        return
    assert light["features"] == {**features, "kwargs_data": None}
    num_items = {name: len(entries) for name, entries in features["mm_hashes"].items()}
    for name in ("mm_placeholders", "kwargs_data"):
        assert {kind: len(entries) for kind, entries in features[name].items()} == num_items
    for modality, places in features["mm_placeholders"].items():
        for place, data in zip(places, features["kwargs_data"][modality], strict=True):
            tensors, layout = decode_item(base64.b64decode(data))
            span = rendered["token_ids"][place["offset"] :][: place["length"]]
            assert layout is not None
            assert tensors
            assert span.count(layout.token_id) == layout.num_embeds


def test_msgpack_has_the_same_without_base64(omni_server: ServerProcess) -> None:
    messages = ask("see", make_image_part(1), make_video_part(1), "hear", make_audio_part(1))
    plain = _post(omni_server, f"{CHAT}/render", {"messages": messages})
    response = omni_server.post(f"{CHAT}/render", {"messages": messages}, headers=PACKED)
    assert response.headers["content-type"] == "application/x-msgpack"
    packed = msgspec.msgpack.decode(response.content)
    for items in packed["features"]["kwargs_data"].values():
        items[:] = [base64.b64encode(item).decode() for item in items]
    assert {**packed, "request_id": ""} == {**plain, "request_id": ""}


def test_a_rendered_request_keeps_the_fields_of_the_caller(omni_server: ServerProcess) -> None:
    said: Body = {
        "n": 2,
        "seed": 5,
        "stop": ["x"],
        "top_p": 0.5,
        "logit_bias": {"70": 1.5},
        "stop_token_ids": [9],
        "ignore_eos": True,
    }
    more = {"cache_salt": "mine", "priority": 3, "stream": True}
    options = {"stream_options": {"include_usage": True}}
    body = {"messages": ask("hello"), "logprobs": True, "top_logprobs": 2, **said}
    rendered = _post(omni_server, f"{CHAT}/render", {**body, **more, **options})
    room = 2048 - len(rendered["token_ids"])
    assert rendered["sampling_params"] == {**said, "logprobs": 2, "max_tokens": room}
    assert rendered["model"] == MODEL
    assert {name: rendered[name] for name in (*more, *options)} == {**more, **options}
    limit = {"max_completion_tokens": 7, "max_tokens": 9}
    limited = _post(omni_server, f"{CHAT}/render", {"messages": ask("hello"), **limit})
    assert limited["sampling_params"] == {"max_tokens": 7}
    assert (limited["stream"], limited["stream_options"], limited["priority"]) == (False, None, 0)


def test_each_prompt_of_a_completion_is_rendered(omni_server: ServerProcess) -> None:
    first, second = _post(omni_server, f"{COMPLETIONS}/render", {"prompt": ["one", "two"]})
    assert first["sampling_params"] == {"max_tokens": 16}
    assert first["request_id"].removesuffix("-0") == second["request_id"].removesuffix("-1")
    (single,) = _post(omni_server, f"{COMPLETIONS}/render", {"prompt": second["token_ids"]})
    assert single["token_ids"] == second["token_ids"]
    assert _post(omni_server, "/tokenize", {"prompt": "two"})["tokens"] == second["token_ids"]


def test_text_survives_tokenize_and_detokenize(omni_server: ServerProcess) -> None:
    text = "Grüße, 世界! 🙂"
    answer = _post(omni_server, "/tokenize", {"prompt": text})
    assert answer["token_strs"] is None
    assert _post(omni_server, "/detokenize", {"tokens": answer["tokens"]}) == {"prompt": text}
    assert _post(omni_server, "/detokenize", {"tokens": []}) == {"prompt": ""}


def test_a_prompt_that_is_too_long_is_counted_but_not_rendered(omni_server: ServerProcess) -> None:
    body = {"prompt": "hello " * 3000}
    assert _post(omni_server, "/tokenize", body)["count"] > 2048
    for path, more in ((COMPLETIONS, body), (CHAT, {"messages": ask(body["prompt"])})):
        for has_kwargs in (True, False):
            refused = omni_server.post(f"{path}/render", {**more, "return_kwargs": has_kwargs})
            assert refused.status_code == 400
            assert "context" in refused.json()["error"]["message"]


def test_render_and_tokenize_are_counted_separately(omni_server: ServerProcess) -> None:
    """The main cache gets no query and no hit, and the core is asked for nothing."""
    before = omni_server.get_metrics()
    messages = ask("see", make_image_part(77), make_audio_part(77))
    for _ in range(2):
        _post(omni_server, f"{CHAT}/render", {"messages": messages})
        _post(omni_server, f"{CHAT}/render", {"messages": messages, "return_kwargs": False})
        _post(omni_server, "/tokenize", {"messages": messages})
    after = omni_server.get_metrics()
    changed = {name for name in after if after[name] != before.get(name)}
    level = 'level="readonly"'
    caches = {name for name in changed if "cache" in name}
    assert all(level in name for name in caches), caches
    queries, hits = (
        after[f"sensorium:cache_{name}_total{{{level}}}"]
        - before.get(f"sensorium:cache_{name}_total{{{level}}}", 0)
        for name in ("queries", "hits")
    )
    assert (queries, hits) == (12, 10)
    assert not {name for name in changed if name.startswith("vllm:")}


_IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
_BAD: list[tuple[str, Body, str]] = [
    (f"{CHAT}/render", {}, "messages"),
    (f"{CHAT}/render", {"messages": ask("a"), "return_kwargs": 1}, "return_kwargs"),
    (f"{CHAT}/render", {"messages": ask("a"), "n": 0}, "n"),
    (f"{CHAT}/render", {"messages": [{"role": "user"}]}, "messages[0].content"),
    (
        f"{CHAT}/render",
        {"messages": [{"role": "user", "content": _IMAGE}], "return_kwargs": False},
        "messages[0].content[0]",
    ),
    (f"{COMPLETIONS}/render", {"prompt": []}, "prompt"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": ask("a")}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"prompt": "a" * (2**22 + 1)}, "prompt"),
    ("/tokenize", {"messages": ask("a"), "chat_template": "x"}, "chat_template"),
    ("/tokenize", {"messages": [{"role": "user", "content": _IMAGE}]}, "messages[0].content[0]"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
    ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
    ("/detokenize", {"tokens": [1, 10**6]}, "tokens[1]"),
    ("/detokenize", {"tokens": [1, 10**12]}, "tokens[1]"),
]


@pytest.mark.parametrize(("path", "body", "param"), _BAD)
def test_bad_bodies_are_refused_by_their_field(
    omni_server: ServerProcess, path: str, body: Body, param: str
) -> None:
    response = omni_server.post(path, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "path",
    [
        f"{CHAT}/render",
        f"{COMPLETIONS}/render",
        "/tokenize",
        "/detokenize",
        f"{CHAT}/derender",
        f"{COMPLETIONS}/derender",
    ],
)
def test_the_model_must_be_one_that_is_served(omni_server: ServerProcess, path: str) -> None:
    body: Body = {"model": "another", "messages": ask("a"), "prompt": "a", "tokens": [1]}
    response = omni_server.post(path, body)
    assert response.status_code == 404, response.text
    assert response.json()["error"]["code"] == "model_not_found"
