"""The embedded model is right about thirty fixed cases of all modalities, cold and from caches.

The cases are from the held-out ones that `training.heldout` makes (seed and all); the model answers
these right, so that a wrong gather, position or cache shows up as a wrong answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.support.server import ServerProcess
from training.evaluate import make_content
from training.scoring import is_right

pytestmark = pytest.mark.xdist_group("mini")

FOLDER = Path(__file__).with_name("embedded_cases")
CASES: list[dict[str, Any]] = [
    json.loads(line) for line in (FOLDER / "cases.jsonl").read_text().splitlines()
]


@pytest.fixture
def server(mini_server: ServerProcess) -> ServerProcess:
    mini_server.reset_caches()
    return mini_server


def ask_all(client: OpenAI, cases: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    answers = []
    for case in cases:
        message: Any = {"role": "user", "content": make_content(case, FOLDER)}
        completion = client.chat.completions.create(
            model="sensorium-mini", messages=[message], max_tokens=48, extra_body={"trace": True}
        )
        assert completion.choices[0].finish_reason == "stop", case
        assert completion.model_extra is not None
        trace = completion.model_extra["sensorium_trace"]
        answers.append((completion.choices[0].message.content or "", trace))
    return answers


@pytest.mark.parametrize(
    "step", [pytest.param(3, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]
)
def test_all_cases_are_answered_right_cold_and_from_caches(
    server: ServerProcess, step: int
) -> None:
    kinds = ("picture", "video", "sound")
    assert len(CASES) == 30
    cases = CASES[::step]
    assert {kind for case in cases for kind in kinds if case[kind]} == set(kinds)
    client = OpenAI(base_url=f"{server.get_url()}/v1", api_key="none")
    cold, cached = ask_all(client, cases), ask_all(client, cases)
    for case, (answer, trace) in zip(cases, cold, strict=True):
        is_text = case["task"].startswith(("words", "digits"))
        assert is_right(answer, case["answer"], is_text=is_text), (case, answer)
        assert len(trace["items"]) == sum(case[kind] is not None for kind in kinds)
        for item in trace["items"]:
            assert (item["processor"], item["encoder"]) == ("miss", "miss"), case
    assert [answer for answer, _ in cached] == [answer for answer, _ in cold]
    for case, (_, trace) in zip(cases, cached, strict=True):
        for item in trace["items"]:
            assert (item["processor"], item["transfer"]) == ("hit", "none"), case
            assert item["encoder"] in ("hit", "skipped"), case
        assert not {"decode", "process", "encode"} & set(trace["ms"]), case
