"""SmolLM2-135M-Instruct answers through the engine as in Transformers, token by token.

That holds offline and from a server, in chunks and in company, with a prefix cache; and the answers
make sense. Ours: the engine, the prompts, the server. Transformers': the model's code (in both),
`generate` and the chat template of the reference. Both compute in float32.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from jsonschema import Draft202012Validator

from sensorium import LLM, SamplingParams
from sensorium.types.structured import StructuredOutputsParams
from tests.real.chatting import (
    CITY_QUESTION,
    CITY_SCHEMA,
    MAX_TOKENS,
    QUESTIONS,
    ask,
    get_oracle,
    make_long_question,
)
from tests.real.conftest import MAX_NUM_BATCHED_TOKENS
from tests.support.clients import Answer, chat, stream_chat
from tests.support.engine import Trace, assert_nothing_is_left, get_token_ids
from tests.support.server import ServerProcess

GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
CONVERSATIONS = [ask(question) for question in QUESTIONS]
BLOCK = 16


@pytest.fixture(scope="module")
def expected(smollm2: str) -> list[tuple[int, ...]]:
    oracle = get_oracle(smollm2)
    return [oracle.answer(question) for question in QUESTIONS]


def check_sense(texts: list[str]) -> None:
    for (question, word), text in zip(QUESTIONS.items(), texts, strict=True):
        assert text.strip(), question
        assert word is None or word in text, f"{question} {text}"


def check_city(text: str) -> None:
    found = json.loads(text)
    Draft202012Validator(CITY_SCHEMA).validate(found)
    assert [found["city"].lower(), found["country"].lower()] == ["paris", "france"]
    assert found["is_in_europe"] is True


def test_prompts_are_those_of_transformers(smollm2_llm: LLM, smollm2: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=1)
    outputs = smollm2_llm.chat(CONVERSATIONS, params, use_tqdm=False)
    rendered = [get_oracle(smollm2).render(question) for question in QUESTIONS]
    assert [list(output.prompt_token_ids) for output in outputs] == rendered


def test_answers_alone_are_those_of_transformers(
    smollm2_llm: LLM, smollm2: str, expected: list[tuple[int, ...]]
) -> None:
    outputs = [
        smollm2_llm.chat(conversation, GREEDY, use_tqdm=False)[0] for conversation in CONVERSATIONS
    ]
    assert get_token_ids(outputs) == expected
    texts = [output.outputs[0].text for output in outputs]
    assert texts == [get_oracle(smollm2).read(token_ids) for token_ids in expected]
    check_sense(texts)


def test_answers_in_batches_and_in_chunks_are_the_same(
    smollm2_llm: LLM, expected: list[tuple[int, ...]]
) -> None:
    smollm2_llm.core.scheduler.kv_cache.clear_cache()
    trace = Trace(smollm2_llm)
    outputs = smollm2_llm.chat(CONVERSATIONS, GREEDY, use_tqdm=False)
    assert get_token_ids(outputs) == expected
    assert trace.most_requests_in_a_step == len(QUESTIONS)
    cached = [output.num_cached_tokens for output in outputs]
    again = smollm2_llm.chat(CONVERSATIONS, GREEDY, use_tqdm=False)
    assert get_token_ids(again) == expected
    for before, output in zip(cached, again, strict=True):
        num_whole = BLOCK * ((len(output.prompt_token_ids) - 1) // BLOCK)
        assert output.num_cached_tokens == num_whole
        assert before <= num_whole
    assert sum(cached) < sum(output.num_cached_tokens for output in again)
    assert_nothing_is_left(smollm2_llm)


def test_a_long_prompt_is_computed_in_many_steps(smollm2_llm: LLM, smollm2: str) -> None:
    question = make_long_question()
    expected = get_oracle(smollm2).answer(question, 8)
    trace = Trace(smollm2_llm)
    params = SamplingParams(temperature=0, max_tokens=8)
    (output,) = smollm2_llm.chat(ask(question), params, use_tqdm=False)
    assert len(output.prompt_token_ids) > 2000
    assert len(trace.steps) > 2000 // MAX_NUM_BATCHED_TOKENS
    assert get_token_ids([output]) == [expected]
    assert "pineapple" in output.outputs[0].text.lower()


def test_json_follows_its_schema_and_answers_the_question(smollm2_llm: LLM) -> None:
    structured = StructuredOutputsParams(json=CITY_SCHEMA)
    params = SamplingParams(temperature=0, max_tokens=80, structured_outputs=structured)
    (output,) = smollm2_llm.chat(ask(CITY_QUESTION), params, use_tqdm=False)
    assert str(output.outputs[0].finish_reason) == "stop"
    check_city(output.outputs[0].text)


def test_a_choice_is_the_sensible_one(smollm2_llm: LLM) -> None:
    choice = StructuredOutputsParams(choice=["Berlin", "Paris", "Tokyo"])
    params = SamplingParams(temperature=0, max_tokens=8, structured_outputs=choice)
    (output,) = smollm2_llm.chat(
        ask("What is the capital of France? Answer with the name of the city only."),
        params,
        use_tqdm=False,
    )
    assert output.outputs[0].text == "Paris"


# ---- through a server, with OpenAI's client


def ask_all(server: ServerProcess) -> list[Answer]:
    """All at once, each over a connection of its own; every second one streamed."""

    def ask_one(index: int) -> Answer:
        with server.make_client() as client:
            answer = stream_chat if index % 2 else chat
            return answer(client, CONVERSATIONS[index], max_tokens=MAX_TOKENS)

    with ThreadPoolExecutor(len(CONVERSATIONS)) as threads:
        return list(threads.map(ask_one, range(len(CONVERSATIONS))))


def test_a_server_answers_as_transformers_do(
    smollm2_server: ServerProcess, smollm2: str, expected: list[tuple[int, ...]]
) -> None:
    texts = [get_oracle(smollm2).read(token_ids) for token_ids in expected]
    for round_number in range(2):
        answers = ask_all(smollm2_server)
        assert [answer.token_ids for answer in answers] == expected
        assert [answer.text for answer in answers] == texts
        if round_number:
            for answer in answers:
                num_whole = BLOCK * ((len(answer.prompt_token_ids) - 1) // BLOCK)
                assert answer.num_cached_tokens == num_whole
    check_sense(texts)


def test_a_server_answers_with_json(smollm2_server: ServerProcess) -> None:
    schema = {"name": "city", "strict": True, "schema": CITY_SCHEMA}
    with smollm2_server.make_client() as client:
        answer = chat(
            client,
            ask(CITY_QUESTION),
            max_tokens=80,
            response_format={"type": "json_schema", "json_schema": schema},
        )
    assert answer.choices[0].finish_reason == "stop"
    check_city(answer.text)
