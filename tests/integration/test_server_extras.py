"""What a request may say about its media and its template, each seen in its answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from sensorium import LLM
from tests.support.clients import (
    ask,
    chat,
    make_audio_part,
    make_image_part,
    make_video_part,
)
from tests.support.server import ServerProcess

pytestmark = pytest.mark.xdist_group("server")


@pytest.fixture(scope="module")
def client(omni_server: ServerProcess) -> Iterator[OpenAI]:
    with omni_server.make_client() as client:
        yield client


def test_processor_options_change_what_an_image_costs(client: OpenAI) -> None:
    question = ask(make_image_part(50), "What is this?")
    small = {"size": {"shortest_edge": 784, "longest_edge": 1568}}
    whole = chat(client, question)
    shrunk = chat(client, question, extra_body={"mm_processor_kwargs": small})
    assert shrunk.usage.prompt_tokens < whole.usage.prompt_tokens
    assert shrunk.get_hits("processor") == ["miss"]  # another item than the same at full size


def test_decoding_options_change_what_a_video_costs(client: OpenAI) -> None:
    question = ask(make_video_part(50), "What happens?")
    whole = chat(client, question)
    options = {"media_io_kwargs": {"video": {"num_frames": 2}}}
    short = chat(client, question, extra_body=options)
    assert short.usage.prompt_tokens < whole.usage.prompt_tokens
    assert chat(client, question, extra_body=options).get_hits("processor") == ["hit"]


def test_salts_share_no_cache(client: OpenAI) -> None:
    question = ask("Read this long text about pictures and sounds first.", make_image_part(51))
    question += [{"role": "assistant", "content": "I have."}, *ask(make_audio_part(51), "Well?")]

    def look(salt: str | None) -> tuple[Any, ...]:
        extra = {} if salt is None else {"cache_salt": salt}
        answer = chat(client, question, extra_body=extra)
        tokens.add(answer.token_ids)
        hits = (answer.get_hits(level) for level in ("processor", "transfer", "encoder"))
        return (answer.num_cached_tokens, *hits)

    tokens: set[tuple[int, ...]] = set()
    cold = (0, ["miss"] * 2, ["tensors"] * 2, ["miss"] * 2)
    assert look("alice") == cold
    assert look("alice")[1] == ["hit"] * 2
    assert look("bob") == cold
    assert look(None) == cold
    assert look("bob")[0] > 0
    assert len(tokens) == 1


def test_uuids_are_known_within_their_salt_only(client: OpenAI, omni_server: ServerProcess) -> None:
    chat(client, ask(make_image_part(52, uuid="mine")), extra_body={"cache_salt": "alice"})
    body: dict[str, Any] = {
        "messages": ask({"type": "image_url", "image_url": None, "uuid": "mine"}),
        "max_tokens": 1,
    }
    statuses = [
        omni_server.post("/v1/chat/completions", {**body, "cache_salt": salt}).status_code
        for salt in ("alice", "bob", None)
    ]
    assert statuses == [200, 409, 409]


def test_generation_prompt_is_added_unless_it_is_unwanted(client: OpenAI, omni_llm: LLM) -> None:
    with_prompt = chat(client, ask("Hello"))
    without = chat(client, ask("Hello"), extra_body={"add_generation_prompt": False})
    added = with_prompt.prompt_token_ids[len(without.prompt_token_ids) :]
    assert with_prompt.prompt_token_ids[: len(without.prompt_token_ids)] == without.prompt_token_ids
    assert "assistant" in omni_llm.get_tokenizer().decode(added)


def test_the_final_message_is_continued_on_demand(client: OpenAI, omni_llm: LLM) -> None:
    messages = [*ask("What is it?"), {"role": "assistant", "content": "It is a"}]
    continued = chat(client, messages, extra_body={"continue_final_message": True})
    ended = chat(client, messages)
    decode = omni_llm.get_tokenizer().decode
    assert decode(continued.prompt_token_ids).endswith("It is a")
    assert not decode(ended.prompt_token_ids).endswith("It is a")


def test_templates_of_requests_are_refused_by_default(omni_server: ServerProcess) -> None:
    body = {"messages": ask("Hello"), "chat_template": "{{ messages[0]['content'] }}"}
    response = omni_server.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "chat_template"
    assert "--trust-request-chat-template" in response.json()["error"]["message"]


def test_unknown_fields_are_ignored_with_one_warning_for_each(omni_server: ServerProcess) -> None:
    body = {"messages": ask("Hello"), "max_tokens": 1, "shoe_size": 43}
    for _ in range(3):
        assert omni_server.post("/v1/chat/completions", body).status_code == 200
    omni_server.wait_for_output("shoe_size")
    assert omni_server.output.count("shoe_size") == 1
