"""Tokens in and tokens out, over HTTP, give the same answers as a conversation.

Media comes from elsewhere, or is the server's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from openai import OpenAI

from sensorium import LLM
from tests.integration.generating import (
    PATH,
    generate,
    join_events,
    post,
    read_events,
    render,
    without_items,
)
from tests.support.clients import (
    ask,
    chat,
    get_media,
    make_conversations,
    make_image_part,
)
from tests.support.server import ServerProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("server-trusting")
CONVERSATIONS = make_conversations(seed=70)
QUERIES, HITS = "vllm:mm_cache_queries_total", "vllm:mm_cache_hits_total"


@pytest.fixture(scope="module")
def client(omni_server: ServerProcess) -> Iterator[OpenAI]:
    with omni_server.make_client() as client:
        yield client


class Count:
    """Queries and hits of the processor cache since this was made."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._before = server.get_metrics()

    def get(self) -> tuple[float, float]:
        now = self._server.get_metrics()
        queries, hits = (now[name] - self._before.get(name, 0.0) for name in (QUERIES, HITS))
        return queries, hits


@pytest.mark.parametrize("is_msgpack", [False, True])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_request_rendered_elsewhere_is_answered_like_its_conversation(
    omni_server: ServerProcess, client: OpenAI, omni_llm: LLM, name: str, is_msgpack: bool
) -> None:
    body = render(omni_llm, CONVERSATIONS[name], rename=lambda own: f"{own[:32]}-{is_msgpack}")
    expected = chat(client, CONVERSATIONS[name])
    assert tuple(body["token_ids"]) == expected.prompt_token_ids
    assert generate(omni_server, body, is_msgpack=is_msgpack) == expected.token_ids
    if body["features"] is not None:
        again = without_items(body)
        assert generate(omni_server, again, is_msgpack=is_msgpack) == expected.token_ids


def test_an_answer_has_the_fields_of_the_wire(omni_server: ServerProcess, omni_llm: LLM) -> None:
    body = render(omni_llm, CONVERSATIONS["image"])
    params = {**body["sampling_params"], "logprobs": 2, "prompt_logprobs": 1}
    whole = {**body, "request_id": "mine", "sampling_params": params, "trace": True}
    answer = post(omni_server, whole, is_msgpack=False).json()
    assert set(answer) == {
        *("request_id", "model", "created", "choices", "usage", "prompt_logprobs"),
        "sensorium_trace",
    }
    assert (answer["request_id"], answer["model"]) == ("mine", "tiny")
    (choice,) = answer["choices"]
    assert set(choice) == {"index", "token_ids", "finish_reason", "stop_reason", "logprobs"}
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 10)
    assert len(choice["logprobs"]["content"]) == 10
    assert len(answer["prompt_logprobs"]) == len(body["token_ids"])
    assert answer["usage"]["prompt_tokens"] == len(body["token_ids"])
    assert [item["modality"] for item in answer["sensorium_trace"]["items"]] == ["image"]


def test_an_answer_is_msgpack_where_the_client_asks(omni_server: ServerProcess) -> None:
    body = {"token_ids": [205, 206, 207], "sampling_params": {"temperature": 0.0}}
    plain = post(omni_server, body, is_msgpack=False)
    packed = post(omni_server, body, accept="application/x-msgpack")
    assert packed.headers["content-type"] == "application/x-msgpack"
    (choice,) = msgspec.msgpack.decode(packed.content)["choices"]
    assert choice["token_ids"] == plain.json()["choices"][0]["token_ids"]
    assert len(choice["token_ids"]) == 16  # the default, where the request has no max_tokens


def test_a_stream_has_the_same_tokens_then_usage(omni_server: ServerProcess, omni_llm: LLM) -> None:
    body = render(omni_llm, CONVERSATIONS["mixed"])
    body["sampling_params"] = {**body["sampling_params"], "n": 2, "seed": 3, "temperature": 1.0}
    whole = post(omni_server, body).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = read_events(post(omni_server, {**body, **options}))
    for choice in whole["choices"]:
        assert join_events(chunks, choice["index"]) == tuple(choice["token_ids"])
    ends = [c for chunk in chunks for c in chunk["choices"] if c["finish_reason"] is not None]
    assert sorted(c["index"] for c in ends) == [0, 1]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 20)
    assert len({chunk["request_id"] for chunk in (*chunks, usage)}) == 1


def test_a_stop_string_ends_a_request_that_never_shows_text(
    omni_server: ServerProcess, client: OpenAI
) -> None:
    expected = chat(client, CONVERSATIONS["text"], stop=None)
    stop = expected.text[3:5]
    body = {
        "token_ids": list(expected.prompt_token_ids),
        "sampling_params": {"temperature": 0.0, "max_tokens": 10, "stop": [stop]},
    }
    (choice,) = post(omni_server, body).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert tuple(choice["token_ids"]) == expected.token_ids[: len(choice["token_ids"])]


def test_media_may_come_as_parts_that_the_server_loads(
    omni_server: ServerProcess, client: OpenAI, omni_llm: LLM
) -> None:
    """One marker token for each part, and what a part is called is what chats call it."""
    messages = CONVERSATIONS["mixed"]
    expected = chat(client, messages)
    processor = omni_llm.input_processor.processor
    parts = []
    for part in get_media(messages):
        kind, value = part["type"], part[part["type"]]
        url = value["url"] if "url" in value else f"data:audio/wav;base64,{value['data']}"
        parts.append({"type": kind, "url": url})
    token_ids = list(expected.prompt_token_ids)
    for modality in ("image", "video", "audio"):
        token_ids = _shrink(token_ids, processor.get_token_ids(modality)[0])
    body = {
        "token_ids": token_ids,
        "content_parts": parts,
        "sampling_params": {"temperature": 0.0, "max_tokens": 10},
    }
    assert generate(omni_server, body, is_msgpack=False) == expected.token_ids
    bad = {**body, "content_parts": [*parts[:2], {**parts[2], "url": "data:,x"}, *parts[3:]]}
    response = post(omni_server, bad, is_msgpack=False)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "content_parts[2]"


def _shrink(token_ids: list[int], token_id: int) -> list[int]:
    """Each run of a token becomes one."""
    pairs = zip([None, *token_ids[:-1]], token_ids, strict=True)
    return [own for previous, own in pairs if own != token_id or previous != token_id]


def test_missing_items_are_listed_by_the_hashes_of_the_request(
    omni_server: ServerProcess, omni_llm: LLM
) -> None:
    names = iter(["my own/ä", "second", "third"])
    body = render(omni_llm, CONVERSATIONS["images"], rename=lambda _: next(names))
    response = post(omni_server, without_items(body), is_msgpack=False)
    assert response.status_code == 409
    error = response.json()["error"]
    assert error["missing"] == ["my own/ä", "second", "third"]
    data = body["features"]["kwargs_data"]["image"]
    body["features"]["kwargs_data"] = {"image": [data[0], None, data[2]]}
    assert post(omni_server, body).json()["error"]["missing"] == ["second"]


def test_hashes_from_clients_are_separate_from_the_servers_own(
    omni_server: ServerProcess, client: OpenAI, omni_llm: LLM
) -> None:
    """A true name does not help, in either direction, and a wrong item harms no other client."""
    question, other = ask(make_image_part(711), "Well?"), ask(make_image_part(712), "Well?")
    body = render(omni_llm, question)
    own_hash = body["features"]["mm_hashes"]["image"][0]
    forged = render(omni_llm, other, rename=lambda _: own_hash)
    count = Count(omni_server)
    generate(omni_server, forged)
    assert count.get() == (1, 0)
    generate(omni_server, without_items(forged))
    assert count.get() == (2, 1)  # under that name, for those who send names
    answer = chat(client, question)
    assert (count.get(), answer.get_hits("processor")) == ((3, 1), ["miss"])
    assert answer.get_hits("encoder") == ["miss"]
    omni_server.reset_caches()
    assert chat(client, question).token_ids == answer.token_ids
    assert post(omni_server, without_items(body)).status_code == 409  # though the chat has it


def test_a_requests_own_tensors_are_used_whatever_its_hash_stood_for(
    omni_server: ServerProcess, client: OpenAI, omni_llm: LLM
) -> None:
    question, other = ask(make_image_part(713), "Well?"), ask(make_image_part(714), "Well?")
    honest, forged = (render(omni_llm, q, rename=lambda _: "taken") for q in (question, other))
    expected, theirs = chat(client, question).token_ids, chat(client, other).token_ids
    assert expected != theirs
    assert generate(omni_server, forged) == theirs
    assert generate(omni_server, honest) == expected
    assert generate(omni_server, without_items(honest)) == theirs  # alone, it is the first one's


def test_hashes_are_found_only_within_their_salt(omni_server: ServerProcess, omni_llm: LLM) -> None:
    body = render(omni_llm, ask(make_image_part(721)), rename=lambda _: "salted")
    assert post(omni_server, {**body, "cache_salt": "alice"}).status_code == 200
    again = without_items(body)
    salts: list[dict[str, str]] = [{"cache_salt": "alice"}, {"cache_salt": "bob"}, {}]
    statuses = [post(omni_server, {**again, **salt}).status_code for salt in salts]
    assert statuses == [200, 409, 409]


def test_a_trusted_item_serves_later_chats(
    trusting_server: ServerProcess, client: OpenAI, omni_llm: LLM
) -> None:
    question = ask(make_image_part(731), "Well?")
    expected = chat(client, question).token_ids
    count = Count(trusting_server)
    assert generate(trusting_server, render(omni_llm, question)) == expected
    assert count.get() == (1, 0)
    with trusting_server.make_client() as trusting_client:
        for number in (1, 2, 3, 4):  # two frontends
            answer = chat(trusting_client, question)
            assert (answer.get_hits("processor"), answer.token_ids) == (["hit"], expected)
            assert count.get() == (1 + number, number)


def test_a_trusting_server_finds_items_that_chats_have_sent(
    trusting_server: ServerProcess, omni_llm: LLM
) -> None:
    question = ask(make_image_part(741), "Well?")
    with trusting_server.make_client() as trusting_client:
        expected = chat(trusting_client, question).token_ids
    body = without_items(render(omni_llm, question))
    assert generate(trusting_server, body) == expected


def test_an_item_without_a_layout_serves_only_rendered_prompts(
    trusting_server: ServerProcess, omni_llm: LLM
) -> None:
    question = ask(make_image_part(751), "Well?")
    body = render(omni_llm, question, has_layouts=False)
    expected = generate(trusting_server, body)
    with trusting_server.make_client() as trusting_client:
        answer = chat(trusting_client, question)
    assert (answer.get_hits("processor"), answer.token_ids) == (["miss"], expected)


def test_an_encoder_that_refuses_an_item_refuses_it_alone(
    omni_server: ServerProcess, omni_llm: LLM
) -> None:
    """A mask of another length than the placeholders: only the encoder finds out."""
    from sensorium.multimodal.item_codec import decode_item, encode_item

    body = render(omni_llm, CONVERSATIONS["audio"], rename=lambda _: "deaf", has_layouts=False)
    expected = generate(omni_server, body)
    (data,) = body["features"]["kwargs_data"]["audio"]
    kwargs, layout = decode_item(data)
    kwargs["feature_attention_mask"][:, 40:] = 1
    body["features"]["kwargs_data"]["audio"] = [encode_item(kwargs, layout)]
    body["features"]["mm_hashes"]["audio"] = ["deafer"]
    response = post(omni_server, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "features")
    assert "could not be encoded" in error["message"]
    body["features"]["mm_hashes"]["audio"] = ["deaf"]
    assert generate(omni_server, without_items(body)) == expected


def test_a_hash_that_stood_for_another_item_fails_alone(
    trusting_server: ServerProcess, omni_llm: LLM
) -> None:
    """Its encoder output outlives its tensors."""
    small, large = ask(make_image_part(761), "?"), CONVERSATIONS["video"]
    body = render(omni_llm, small, rename=lambda _: "twice", has_layouts=False)
    expected = generate(trusting_server, body)
    trusting_server.post("/reset_mm_cache").raise_for_status()
    other = render(omni_llm, large, rename=lambda _: "twice", has_layouts=False)
    response = post(trusting_server, other)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "features")
    trusting_server.reset_caches()
    assert generate(trusting_server, body) == expected


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "a prompt without tokens": ({"token_ids": []}, "token_ids", "empty"),
    "a token of text": ({"token_ids": [1, "2"]}, "token_ids[1]", "an integer"),
    "a token that is true": ({"token_ids": [True]}, "token_ids[0]", "an integer"),
    "a negative token": ({"token_ids": [1, -1]}, "token_ids[1]", "at least 0"),
    "a token beyond the vocabulary": ({"token_ids": [2**30]}, "token_ids", "vocabulary"),
    "a long prompt": ({"token_ids": [205] * 4000}, "token_ids", "context"),
    "a long id": ({"request_id": "x" * 257}, "request_id", "256"),
    "a temperature of text": (
        {"sampling_params": {"temperature": "hot"}},
        "sampling_params.temperature",
        "number",
    ),
    "more than most": (
        {"sampling_params": {"min_tokens": 9, "max_tokens": 3}},
        "sampling_params.min_tokens",
        "at most",
    ),
    "a bias outside the vocabulary": (
        {"sampling_params": {"logit_bias": {"99999999": 1.0}}},
        "sampling_params.logit_bias",
        "vocabulary",
    ),
    "scores of a streamed prompt": (
        {"stream": True, "sampling_params": {"prompt_logprobs": 1}},
        "sampling_params.prompt_logprobs",
        "streamed",
    ),
    "options of no stream": ({"stream_options": {"include_usage": True}}, "stream_options", "need"),
    "a part of an unknown kind": (
        {"content_parts": [{"type": "smell", "url": "data:,x"}]},
        "content_parts[0].type",
        "unknown",
    ),
    "a part of nothing": ({"content_parts": [{"type": "image"}]}, "content_parts[0]", "neither"),
    "parts and features": (
        {
            "content_parts": [{"type": "image", "url": "data:,x"}],
            "features": {"mm_hashes": {}, "mm_placeholders": {}},
        },
        "content_parts",
        "exclude",
    ),
    "a marker too few": (
        {"content_parts": [{"type": "image", "url": "file:///nowhere.png"}]},
        "content_parts[0]",
        "",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_field_is_named(omni_server: ServerProcess, name: str) -> None:
    fields, param, words = BAD[name]
    response = post(omni_server, {"token_ids": [205, 206], **fields}, is_msgpack=False)
    error = response.json()["error"]
    assert response.status_code in (400, 422), response.text
    assert (error["param"], words in error["message"]) == (param, True), error


def test_a_model_that_is_not_served_is_not_found(omni_server: ServerProcess) -> None:
    response = post(omni_server, {"token_ids": [205], "model": "other"})
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")


def test_a_client_that_leaves_ends_its_request(omni_server: ServerProcess) -> None:
    finished = 'vllm:request_success_total{finished_reason="abort"}'
    before = omni_server.get_metrics().get(finished, 0.0)
    body = {
        "token_ids": [205, 206, 207],
        "sampling_params": {"max_tokens": 1900, "ignore_eos": True},
        "stream": True,
    }
    with httpx.stream("POST", omni_server.get_url(PATH), json=body, timeout=240.0) as response:
        next(response.iter_lines())
    wait_until(lambda: omni_server.get_metrics().get(finished, 0.0) > before, "it is ended")
    assert omni_server.get_metrics()[finished] == before + 1
