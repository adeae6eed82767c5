"""A server gives the answers that `LLM` gives, for every modality.

That holds however many ask at once, from cold caches and from warm ones, with one frontend and with
several.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from sensorium import LLM, SamplingParams
from tests.support.clients import Answer, Message, chat, make_conversations, stream_chat
from tests.support.server import ServerProcess

pytestmark = pytest.mark.xdist_group("server-shared")
OTHERS = make_conversations(1)
CONVERSATIONS = {
    **make_conversations(0),
    "another image": OTHERS["image"],
    "another sound": OTHERS["audio"],
}
MAX_TOKENS = 6


@pytest.fixture(params=["omni_server", "shared_server"])
def server(request: pytest.FixtureRequest) -> ServerProcess:
    found: ServerProcess = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def expected(omni_llm: LLM) -> dict[str, tuple[tuple[int, ...], str]]:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    outputs = omni_llm.chat(list(CONVERSATIONS.values()), params, use_tqdm=False)  # type: ignore[arg-type]
    return {
        name: (output.outputs[0].token_ids, output.outputs[0].text)
        for name, output in zip(CONVERSATIONS, outputs, strict=True)
    }


def ask_all(server: ServerProcess, conversations: Mapping[str, list[Message]]) -> dict[str, Answer]:
    """Eight at once, each over a connection of its own; every second one streamed."""

    def ask_one(entry: tuple[int, list[Message]]) -> Answer:
        index, messages = entry
        with server.make_client() as client:
            answer = stream_chat if index % 2 else chat
            return answer(client, messages, max_tokens=MAX_TOKENS)

    with ThreadPoolExecutor(8) as threads:
        answers = threads.map(ask_one, enumerate(conversations.values()))
        return dict(zip(conversations, answers, strict=True))


def test_greedy_answers_are_those_of_the_offline_engine(
    server: ServerProcess, expected: dict[str, tuple[tuple[int, ...], str]]
) -> None:
    server.reset_caches()
    cold = ask_all(server, CONVERSATIONS)
    warm = ask_all(server, CONVERSATIONS)
    for answers in (cold, warm):
        found = {name: (answer.token_ids, answer.text) for name, answer in answers.items()}
        assert found == expected
    assert {len(set(ids)) for ids, _ in expected.values()} != {1}  # the model says something
    for name, answer in warm.items():
        media = answer.get_hits("processor")
        assert media == ["hit"] * len(media), name
        num_whole_blocks = (len(answer.prompt_token_ids) - 1) // 16
        assert answer.num_cached_tokens == 16 * num_whole_blocks, name
