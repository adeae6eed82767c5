"""What a request may say about sampling, each seen in its answer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from openai import OpenAI

from tests.support.clients import MODEL, Answer, ask, chat, make_image_part
from tests.support.server import ServerProcess

pytestmark = pytest.mark.xdist_group("server")
EOS = 2
QUESTION = ask("What is this?")  # the answer to it ends early by itself


@pytest.fixture(scope="module")
def client(omni_server: ServerProcess) -> Iterator[OpenAI]:
    with omni_server.make_client() as client:
        yield client


@pytest.fixture(scope="module")
def plain(client: OpenAI) -> Answer:
    answer = chat(client, QUESTION, max_tokens=16)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.token_ids[-1] == EOS
    assert len(answer.token_ids) < 12
    return answer


def ask_with(client: OpenAI, max_tokens: int = 16, **extra: Any) -> Answer:
    return chat(client, QUESTION, max_tokens=max_tokens, extra_body=extra)


def test_max_completion_tokens_takes_precedence_over_max_tokens(client: OpenAI) -> None:
    answer = chat(client, QUESTION, max_tokens=16, max_completion_tokens=3)
    assert (len(answer.token_ids), answer.choices[0].finish_reason) == (3, "length")


def test_min_tokens_delay_the_end(client: OpenAI, plain: Answer) -> None:
    answer = ask_with(client, min_tokens=12)
    assert EOS not in answer.token_ids[:12]
    assert len(answer.token_ids) >= 12
    assert answer.token_ids[: len(plain.token_ids) - 1] == plain.token_ids[:-1]


def test_ignore_eos_continues_to_the_limit(client: OpenAI, plain: Answer) -> None:
    answer = ask_with(client, ignore_eos=True)
    assert len(answer.token_ids) == 16
    assert answer.choices[0].finish_reason == "length"
    assert answer.token_ids[: len(plain.token_ids)] == plain.token_ids


def test_stop_token_ids_end_the_answer(client: OpenAI, plain: Answer) -> None:
    token_id = plain.token_ids[1]
    (choice,) = ask_with(client, stop_token_ids=[token_id]).choices
    assert choice.token_ids == plain.token_ids[:2]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", token_id)


def test_logit_bias_forbids_and_forces(client: OpenAI, plain: Answer) -> None:
    first = plain.token_ids[0]
    assert first not in chat(client, QUESTION, logit_bias={str(first): -100}).token_ids
    forced = chat(client, QUESTION, logit_bias={"77": 100}).token_ids
    assert set(forced) == {77}


@pytest.mark.parametrize(
    "extra",
    [{"repetition_penalty": 50.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}],
    ids=lambda extra: next(iter(extra)),
)
def test_penalties_change_what_is_repeated(
    client: OpenAI, plain: Answer, extra: dict[str, Any]
) -> None:
    assert len(set(plain.token_ids)) < len(plain.token_ids)  # it repeats itself
    answer = ask_with(client, max_tokens=10, logit_bias={}, ignore_eos=True, **extra)
    free = ask_with(client, max_tokens=10, ignore_eos=True)
    assert answer.token_ids != free.token_ids
    assert len(set(answer.token_ids)) >= len(set(free.token_ids))


@pytest.mark.parametrize(
    "extra", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9}], ids=lambda extra: next(iter(extra))
)
def test_narrow_choice_is_greedy_at_any_temperature(
    client: OpenAI, plain: Answer, extra: dict[str, Any]
) -> None:
    hot: dict[str, Any] = {"temperature": 2.0, "seed": 5, "max_tokens": 16}
    assert chat(client, QUESTION, **hot).token_ids != plain.token_ids
    assert chat(client, QUESTION, **hot, extra_body=extra).token_ids == plain.token_ids


def test_seed_repeats_an_answer(client: OpenAI) -> None:
    first, same, other = (
        chat(client, QUESTION, temperature=1.0, n=2, seed=seed).choices for seed in (11, 11, 12)
    )
    assert first == same != other
    unseeded = {chat(client, QUESTION, temperature=1.5).token_ids for _ in range(3)}
    assert len(unseeded) > 1


def test_logprobs_are_of_the_chosen_and_the_likeliest(client: OpenAI) -> None:
    found: Any = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, logprobs=True, top_logprobs=3, max_tokens=4
    )
    (choice,) = found.choices
    assert len(choice.logprobs.content) == found.usage.completion_tokens
    assert "".join(entry.token for entry in choice.logprobs.content).startswith(
        choice.message.content
    )
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy
        assert all(a.logprob >= b.logprob for a, b in pairwise(entry.top_logprobs))
        assert sum(math.exp(other.logprob) for other in entry.top_logprobs) <= 1 + 1e-6


def test_prompt_logprobs_are_there_for_every_token(client: OpenAI) -> None:
    found: Any = client.chat.completions.create(
        model=MODEL,
        messages=ask(make_image_part(0), "What is this?"),
        max_tokens=1,
        extra_body={"prompt_logprobs": 2, "return_token_ids": True},
    )
    first, *others = found.prompt_logprobs
    assert first is None
    assert len(others) == len(found.prompt_token_ids) - 1
    for token_id, entry in zip(found.prompt_token_ids[1:], others, strict=True):
        assert entry[str(token_id)]["logprob"] <= 0
        assert {1, 2} <= {row["rank"] for row in entry.values()}


def test_token_ids_come_only_when_asked_for(client: OpenAI) -> None:
    found: Any = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=2)
    assert not hasattr(found, "prompt_token_ids")
    assert not hasattr(found.choices[0], "token_ids")


def test_allowed_and_forbidden_words_are_obeyed(client: OpenAI, plain: Answer) -> None:
    allowed = ask_with(client, allowed_token_ids=[70, 71, 72])
    assert set(allowed.token_ids) <= {70, 71, 72}
    word = plain.text[:4]
    assert word not in ask_with(client, bad_words=[word]).text
