"""The `openai` client uses `/v1/chat/completions`: media from everywhere, roles, streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from sensorium import LLM
from tests.integration.media_hosts import MediaServer, reply
from tests.support.clients import (
    MODEL,
    Part,
    ask,
    chat,
    make_audio_part,
    make_conversations,
    make_image_part,
    make_mp4,
    make_png,
    make_url_part,
    make_wav,
    stream_chat,
)
from tests.support.server import ServerProcess

pytestmark = pytest.mark.xdist_group("server")
CONVERSATIONS = make_conversations()


@pytest.fixture(scope="module")
def client(omni_server: ServerProcess) -> Iterator[OpenAI]:
    with omni_server.make_client() as client:
        yield client


@pytest.mark.parametrize("modality", CONVERSATIONS)
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="greedy"),
        pytest.param({"n": 2, "temperature": 1.0, "seed": 3, "logprobs": True}, id="two choices"),
    ],
)
def test_streamed_answer_is_the_whole_one(
    client: OpenAI, modality: str, fields: dict[str, Any]
) -> None:
    whole = chat(client, CONVERSATIONS[modality], **fields)
    streamed = stream_chat(client, CONVERSATIONS[modality], **fields)
    assert streamed.choices == whole.choices
    assert streamed.prompt_token_ids == whole.prompt_token_ids
    assert streamed.usage.prompt_tokens == whole.usage.prompt_tokens == len(whole.prompt_token_ids)
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens
    assert len(whole.choices) == fields.get("n", 1)
    num_tokens = sum(len(choice.token_ids) for choice in whole.choices)
    assert whole.usage.completion_tokens == num_tokens
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + num_tokens
    for one, other in zip(streamed.choices, whole.choices, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert len(one.logprobs) == (len(one.token_ids) if fields else 0)
    if fields:
        assert whole.choices[0] != whole.choices[1]


@pytest.mark.parametrize("is_kept", [False, True])
def test_stop_strings_end_streams_where_they_end_whole_answers(
    client: OpenAI, omni_llm: LLM, is_kept: bool
) -> None:
    fields: dict[str, Any] = {"max_tokens": 24, "extra_body": {"ignore_eos": True}}
    free = chat(client, CONVERSATIONS["text"], **fields)
    decode = omni_llm.get_tokenizer().decode
    word = decode(free.token_ids[6:8])  # of two tokens: the first alone must be held back
    assert word in free.text
    assert not free.text.startswith(word)
    fields["extra_body"]["include_stop_str_in_output"] = is_kept
    whole = chat(client, CONVERSATIONS["text"], stop=[word, "never said"], **fields)
    streamed = stream_chat(client, CONVERSATIONS["text"], stop=[word, "never said"], **fields)
    assert streamed.choices == whole.choices
    (choice,) = whole.choices
    before = free.text[: free.text.index(word)]
    assert choice.text == before + (word if is_kept else "")
    assert (choice.finish_reason, choice.stop_reason) == ("stop", word)
    assert whole.usage.completion_tokens == len(choice.token_ids) < len(free.token_ids)


def test_chunks_have_no_usage_unless_it_is_asked_for(client: OpenAI) -> None:
    def get_chunks(**fields: Any) -> list[Any]:
        stream: Any = client.chat.completions.create(
            model=MODEL, messages=ask("Hello"), max_tokens=4, stream=True, **fields
        )
        return list(stream)

    plain = get_chunks()
    assert {chunk.usage for chunk in plain} == {None}
    assert all(chunk.choices for chunk in plain)
    assert plain[0].choices[0].delta.role == "assistant"
    assert plain[-1].choices[0].finish_reason is not None
    counted = get_chunks(stream_options={"include_usage": True})
    assert [bool(chunk.usage) for chunk in counted] == [False] * (len(counted) - 1) + [True]
    assert counted[-1].choices == []
    running = get_chunks(stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk.usage.completion_tokens for chunk in running]
    assert counts == sorted(counts)
    assert counts[-1] == counted[-1].usage.completion_tokens
    assert {chunk.id for chunk in running} == {running[0].id}


# ---- where media comes from


@pytest.fixture(scope="module")
def host() -> Iterator[MediaServer]:
    server = MediaServer()
    server.on("/picture.png", reply(200, make_png()))
    server.on("/clip.mp4", reply(200, make_mp4(), Content_Type="video/mp4"))
    server.on("/speech.wav", reply(200, make_wav(), Content_Type="audio/wav"))
    yield server
    server.close()


SOURCES = {
    "image": ("picture.png", make_png, "image/png"),
    "video": ("clip.mp4", make_mp4, "video/mp4"),
    "audio": ("speech.wav", make_wav, "audio/wav"),
}


@pytest.mark.parametrize("modality", SOURCES)
def test_media_is_the_same_wherever_it_comes_from(
    client: OpenAI, host: MediaServer, media_path: Path, modality: str
) -> None:
    name, make, _ = SOURCES[modality]
    (media_path / name).write_bytes(make())
    expected = chat(client, CONVERSATIONS[modality])
    (message,) = CONVERSATIONS[modality]
    text: Part = message["content"][-1]
    for url in (f"http://127.0.0.1:{host.port}/{name}", f"file://{media_path}/{name}"):
        answer = chat(client, ask(make_url_part(modality, url), text))
        assert answer.choices == expected.choices
        assert answer.prompt_token_ids == expected.prompt_token_ids
        assert answer.get_hits("processor") == ["hit"]  # its bytes are known


def test_files_elsewhere_and_hosts_that_fail_are_refused(
    omni_server: ServerProcess, host: MediaServer, tmp_path: Path
) -> None:
    (tmp_path / "secret.png").write_bytes(make_png())
    for url, status in (
        (f"file://{tmp_path}/secret.png", 422),
        (f"http://127.0.0.1:{host.port}/nothing.png", 422),
        ("data:image/png;base64,!!!", 400),
        ("gopher://127.0.0.1/picture.png", 400),
    ):
        body = {"messages": ask("Look:", make_url_part("image", url))}
        response = omni_server.post("/v1/chat/completions", body)
        error = response.json()["error"]
        assert response.status_code == status, (url, error)
        assert error["param"] == "messages[0].content[1]", error


def test_uuid_stands_for_media_that_was_sent(client: OpenAI, omni_server: ServerProcess) -> None:
    sent = make_image_part(41, uuid="cat")
    kept = {"type": "image_url", "image_url": None, "uuid": "cat"}
    first = chat(client, ask(sent, "What is this?"))
    second = chat(client, ask(kept, "What is this?"))
    assert second.choices == first.choices
    assert first.get_hits("processor") + second.get_hits("processor") == ["miss", "hit"]
    audio = chat(client, ask(make_audio_part(41, uuid="cat"), "Who speaks?"))
    again = chat(
        client, ask({"type": "input_audio", "input_audio": None, "uuid": "cat"}, "Who speaks?")
    )
    assert again.choices == audio.choices  # audio has uuids of its own

    unknown = {"type": "image_url", "image_url": None, "uuid": "dog"}
    body = {"messages": ask(kept, unknown)}
    response = omni_server.post("/v1/chat/completions", body)
    error = response.json()["error"]
    assert (response.status_code, error["missing"]) == (409, ["dog"])
    other = {"messages": ask(make_image_part(42, uuid="cat"))}
    refused = omni_server.post("/v1/chat/completions", other)
    assert refused.status_code == 400
    assert "cat" in refused.json()["error"]["message"]


def test_a_known_uuid_avoids_the_fetch(client: OpenAI) -> None:
    host = MediaServer()
    host.on("/once.png", reply(200, make_png(43), Cache_Control="no-store"))
    part = make_url_part("image", f"http://127.0.0.1:{host.port}/once.png", uuid="seen once")
    answers = [chat(client, ask(part, "What is this?")) for _ in range(2)]
    assert answers[0].choices == answers[1].choices
    assert len(host.visits) == 1
    host.close()


def test_uuid_of_forgotten_media_is_missing(client: OpenAI, omni_server: ServerProcess) -> None:
    chat(client, ask(make_image_part(44, uuid="forgotten")))
    omni_server.post("/reset_mm_cache").raise_for_status()
    body = {"messages": ask({"type": "image_url", "image_url": None, "uuid": "forgotten"})}
    response = omni_server.post("/v1/chat/completions", body)
    assert response.status_code == 409
    assert response.json()["error"]["missing"] == ["forgotten"]


# ---- roles


def test_messages_of_every_role_reach_the_template(client: OpenAI, omni_llm: LLM) -> None:
    call = {
        "id": "call-1",
        "type": "function",
        "function": {"name": "look_up", "arguments": '{"word": "cat"}'},
    }
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
        *ask("Look it up:", make_image_part(0)),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "An animal.", "tool_call_id": "call-1"},
        {"role": "assistant", "content": "It is an animal."},
        {"role": "user", "content": "Which one?"},
    ]
    answer = chat(client, messages)
    text = omni_llm.get_tokenizer().decode(answer.prompt_token_ids)
    positions = [
        text.index(words)
        for words in (
            "Be brief.",
            "Be kind.",
            "Look it up:",
            "An animal.",
            "It is an",
            "Which one?",
        )
    ]
    assert positions == sorted(positions)
    (output,) = omni_llm.chat(messages, use_tqdm=False)  # type: ignore[arg-type]
    assert answer.prompt_token_ids == tuple(output.prompt_token_ids)


# ---- the trace


def test_trace_is_asked_for_by_field_or_by_header(client: OpenAI) -> None:
    for fields in ({"extra_body": {"trace": True}}, {"extra_headers": {"X-Sensorium-Trace": "1"}}):
        options: dict[str, Any] = {"model": MODEL, "messages": CONVERSATIONS["mixed"], **fields}
        whole: Any = client.chat.completions.create(max_tokens=3, **options)
        chunks: list[Any] = list(
            client.chat.completions.create(max_tokens=3, stream=True, **options)
        )
        traces = [chunk.sensorium_trace for chunk in chunks if hasattr(chunk, "sensorium_trace")]
        assert len(traces) == 1
        assert hasattr(chunks[-1], "sensorium_trace")
        for trace in (whole.sensorium_trace, traces[0]):
            kinds = sorted(item["modality"] for item in trace["items"])
            assert kinds == ["audio", "image", "image", "video"]
            assert {"parse", "render", "queue", "prefill", "total"} <= trace["ms"].keys()
            assert trace["num_prompt_tokens"] == whole.usage.prompt_tokens
    plain: Any = client.chat.completions.create(model=MODEL, messages=ask("Hello"), max_tokens=2)
    assert not hasattr(plain, "sensorium_trace")


def test_trace_says_which_levels_hit(client: OpenAI, omni_server: ServerProcess) -> None:
    part = make_image_part(45)
    levels = ("processor", "transfer", "encoder", "prefix")

    def look(text: str) -> list[Any]:
        answer = chat(client, ask(text, part, "What is this?"))
        return [answer.get_hits(level)[0] for level in levels]

    assert look("Look:") == ["miss", "tensors", "miss", False]
    assert look("Look:") == ["hit", "none", "skipped", True]
    assert look("Now look:") == ["hit", "none", "hit", False]
    omni_server.post("/reset_prefix_cache").raise_for_status()
    assert look("Look:") == ["hit", "none", "hit", False]
    omni_server.post("/reset_prefix_cache").raise_for_status()
    omni_server.post("/reset_encoder_cache").raise_for_status()
    assert look("Look:") == ["hit", "none", "miss", False]
    omni_server.post("/reset_mm_cache").raise_for_status()
    omni_server.post("/reset_prefix_cache").raise_for_status()
    assert look("Look:")[:2] == ["miss", "tensors"]
