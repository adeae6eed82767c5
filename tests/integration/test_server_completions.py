"""The `openai` client uses `/v1/completions`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from sensorium import LLM, SamplingParams
from tests.support.clients import MODEL
from tests.support.server import ServerProcess

pytestmark = pytest.mark.xdist_group("server")
TEXTS = ["The quick brown fox", "Tell me"]


@pytest.fixture(scope="module")
def client(omni_server: ServerProcess) -> Iterator[OpenAI]:
    with omni_server.make_client() as client:
        yield client


@pytest.fixture(scope="module")
def token_ids(omni_llm: LLM) -> list[list[int]]:
    return [omni_llm.get_tokenizer()(text)["input_ids"] for text in TEXTS]


def complete(client: OpenAI, prompt: Any, **fields: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 6, **fields}
    return client.completions.create(model=MODEL, prompt=prompt, **fields)


def get_texts(answer: Any) -> list[str]:
    assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
    return [choice.text for choice in answer.choices]


def test_prompts_may_have_every_form(
    client: OpenAI, omni_llm: LLM, token_ids: list[list[int]]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    outputs = omni_llm.generate(TEXTS, params, use_tqdm=False)
    expected = [output.outputs[0].text for output in outputs]
    num_prompt_tokens = [len(ids) for ids in token_ids]
    for prompt, texts, num_tokens in (
        (TEXTS[0], expected[:1], num_prompt_tokens[0]),
        (TEXTS, expected, sum(num_prompt_tokens)),
        (token_ids[0], expected[:1], num_prompt_tokens[0]),
        (token_ids, expected, sum(num_prompt_tokens)),
    ):
        answer = complete(client, prompt)
        assert get_texts(answer) == texts
        assert answer.usage.prompt_tokens == num_tokens
        assert answer.object == "text_completion"


def test_streamed_completions_are_the_whole_ones(client: OpenAI) -> None:
    fields = {"n": 2, "temperature": 1.0, "seed": 4, "logprobs": 1}
    whole = complete(client, TEXTS, **fields)
    texts: dict[int, str] = defaultdict(str)
    tokens: dict[int, list[str]] = defaultdict(list)
    reasons: dict[int, str] = {}
    chunks = complete(client, TEXTS, stream=True, stream_options={"include_usage": True}, **fields)
    for chunk in chunks:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert [texts[index] for index in range(4)] == get_texts(whole)
    assert [tokens[choice.index] for choice in whole.choices] == [
        choice.logprobs.tokens for choice in whole.choices
    ]
    assert [reasons[index] for index in range(4)] == [
        choice.finish_reason for choice in whole.choices
    ]
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.parametrize("is_streamed", [False, True])
def test_echo_puts_the_prompt_before_its_continuation(client: OpenAI, is_streamed: bool) -> None:
    plain = get_texts(complete(client, TEXTS))
    expected = [prompt + text for prompt, text in zip(TEXTS, plain, strict=True)]
    answer = complete(client, TEXTS, echo=True, stream=is_streamed)
    if not is_streamed:
        assert get_texts(answer) == expected
        return
    found = ["", ""]
    for chunk in answer:
        for choice in chunk.choices:
            found[choice.index] += choice.text
    assert found == expected


def test_echo_with_logprobs_scores_the_prompt(client: OpenAI, token_ids: list[list[int]]) -> None:
    (choice,) = complete(client, TEXTS[0], echo=True, logprobs=2).choices
    found = choice.logprobs
    assert len(found.tokens) == len(token_ids[0]) + 6
    assert found.token_logprobs[0] is None
    assert all(value <= 0 for value in found.token_logprobs[1:])
    assert len(found.text_offset) == len(found.top_logprobs) == len(found.tokens)
    assert found.text_offset[len(token_ids[0])] == len(TEXTS[0])


def test_max_tokens_zero_with_echo_is_a_clear_answer(
    omni_server: ServerProcess, token_ids: list[list[int]]
) -> None:
    """Scoring a prompt needs no token; where it is not offered, the field is named."""
    body = {"model": MODEL, "prompt": TEXTS[0], "max_tokens": 0, "echo": True, "logprobs": 1}
    response = omni_server.post("/v1/completions", body)
    if response.status_code == 200:
        (choice,) = response.json()["choices"]
        assert choice["text"] == TEXTS[0]
        assert len(choice["logprobs"]["tokens"]) == len(token_ids[0])
    else:
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "max_tokens"


def test_extra_fields_of_chats_also_work_for_prompts(
    client: OpenAI, token_ids: list[list[int]]
) -> None:
    extra = {"return_token_ids": True, "prompt_logprobs": 1, "ignore_eos": True, "trace": True}
    answer = complete(client, TEXTS[0], extra_body=extra, stop="never said", user="somebody")
    (choice,) = answer.choices
    assert choice.prompt_token_ids == token_ids[0]
    assert len(choice.token_ids) == 6
    assert len(choice.prompt_logprobs) == len(token_ids[0])
    assert answer.sensorium_trace["num_prompt_tokens"] == len(token_ids[0])


def test_prompts_share_the_prefix_cache(client: OpenAI, omni_server: ServerProcess) -> None:
    omni_server.post("/reset_prefix_cache").raise_for_status()
    prompt = list(range(100, 164))
    cached = []
    for salt in (None, None, "other"):
        extra = {} if salt is None else {"cache_salt": salt}
        answer = complete(client, prompt, extra_body=extra)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 48, 0]
