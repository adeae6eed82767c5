"""The remote cache of a real engine and of real servers: neighbours, and a Redis that fails."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sensorium import LLM, SamplingParams
from sensorium.types.errors import ModelError
from tests.integration.media_steps import forget_outputs, make_new_png, make_prompt
from tests.support.clients import ask, chat, make_image_part
from tests.support.engine import make_llm
from tests.support.redis_server import run_redis
from tests.support.server import ServerProcess, serve
from tests.support.waiting import wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
NAMED = ("--served-model-name", "tiny")
FAILED = 'sensorium:tier_faults_total{fault="failed",level="remote"}'


def run(llm: LLM, prompt: Any) -> tuple[tuple[int, ...], int, int]:
    """Return an answer, and how many items the engine has encoded and loaded so far."""
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    runner = llm.core.runner.encoder_runner
    assert output.error is None
    return output.outputs[0].token_ids, runner.num_encoded, runner.num_loaded


@pytest.fixture
def llava(tiny_model: Callable[[str], str]) -> str:
    return tiny_model("llava")


def test_an_output_that_the_encoder_cache_lost_is_loaded(llava: str) -> None:
    """The frontend still has the pixels, so that the core itself has to ask Redis."""
    with run_redis() as redis, make_llm(llava, mm_remote_cache=redis.url) as llm:
        prompt = make_prompt(make_new_png())
        expected, *_ = run(llm, prompt)
        assert llm.media_parts.tiers is not None
        assert llm.media_parts.tiers.writer.wait(30)
        forget_outputs(llm)
        assert run(llm, prompt) == (expected, 1, 1)
        redis.kill()
        forget_outputs(llm)
        assert run(llm, prompt) == (expected, 2, 1)


def test_entries_have_a_time_to_live_and_belong_to_their_salt(llava: str) -> None:
    data = make_new_png()
    with run_redis() as redis:
        options = {"mm_remote_cache": redis.url, "mm_remote_cache_ttl": 1000}
        with make_llm(llava, **options) as llm:
            assert run(llm, make_prompt(data) | {"cache_salt": "mine"})[1:] == (1, 0)
        with redis.make_client() as client:
            times = [client.ttl(key) for key in redis.get_keys()]
        assert len(times) == 2
        assert all(900 < time <= 1000 for time in times)
        with make_llm(llava, **options) as llm:
            assert run(llm, make_prompt(data))[1:] == (1, 0)
            assert run(llm, make_prompt(data) | {"cache_salt": "mine"})[1:] == (1, 1)


def test_an_engine_starts_without_its_redis(llava: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    url = "redis://:hunter2@127.0.0.1:1/0"
    with make_llm(llava, mm_remote_cache=url) as llm:
        assert run(llm, make_prompt(make_new_png()))[1:] == (1, 0)
    assert caplog.text.count("the remote cache of media at redis://127.0.0.1:1/0 fails") == 1
    assert "hunter2" not in caplog.text


def test_a_missing_package_and_a_wrong_address_are_clear_errors(
    llava: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match="mm_remote_cache is no address of a Redis"):
        make_llm(llava, mm_remote_cache="memcached://cache")
    with pytest.raises(ModelError, match="mm_remote_cache_ttl"):
        make_llm(llava, mm_remote_cache="redis://cache", mm_remote_cache_ttl=-1)
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.delitem(sys.modules, "sensorium.multimodal.tiers.redis", raising=False)
    with pytest.raises(ModelError, match="needs the package redis, which is not installed"):
        make_llm(llava, mm_remote_cache="redis://cache")


# ---- servers


def ask_for_trace(server: ServerProcess, seed: int = 1) -> tuple[tuple[int, ...], dict[str, Any]]:
    answer = chat(server.make_client(), ask(make_image_part(seed), "What is it?"), max_tokens=4)
    (item,) = answer.trace["items"]
    return answer.token_ids, item


@pytest.mark.processes
def test_a_second_server_decodes_and_encodes_nothing_that_the_first_has(
    llava: str, tmp_path: Path
) -> None:
    with run_redis("--requirepass", "hunter2") as redis:
        url = f"unix://:hunter2@{redis.socket}"
        flags = (*NAMED, "--log-level", "debug", "--mm-remote-cache", url)
        with (
            serve(llava, *flags, "--mm-disk-cache", str(tmp_path / "first")) as first,
            serve(llava, *flags, "--mm-disk-cache", str(tmp_path / "second")) as second,
        ):
            expected, item = ask_for_trace(first)
            assert item["encoder"] == "miss"
            writes = 'sensorium:tier_writes_total{level="remote"}'
            wait_until(lambda: first.get_metrics()[writes] == 2, "Redis has the item")
            tokens, item = ask_for_trace(second)
            assert tokens == expected
            assert (item["processor"], item["encoder"]) == ("miss", "loaded")
            assert not item["ms"].keys() & {"decode", "process"}
            metrics = second.get_metrics()
            assert metrics['sensorium:encoder_items_total{how="encoded"}'] == 0
            assert metrics['sensorium:cache_hits_total{level="disk"}'] == 0
            assert metrics['sensorium:cache_hits_total{level="remote"}'] == 2
            assert metrics[FAILED] == 0
            wait_until(
                lambda: len(list((tmp_path / "second").glob("*/*.entry"))) == 2,
                "what came from Redis is on the second disk too",
            )
            shown = first.output + first.get("/metrics").text
        assert f"unix://{redis.socket}" in shown
        assert "hunter2" not in shown


@pytest.mark.processes
def test_a_redis_that_dies_and_hangs_under_load_costs_no_answer(llava: str) -> None:
    with run_redis() as redis, serve(llava, *NAMED, "--mm-remote-cache", redis.url) as server:
        expected = {seed: ask_for_trace(server, seed)[0] for seed in range(6)}
        assert len(set(expected.values())) > 1
        numbers = itertools.count()

        def ask_some(num_rounds: int) -> list[tuple[int, tuple[int, ...]]]:
            answers = []
            for _ in range(num_rounds):
                seed = next(numbers) % 6
                server.reset_caches()  # what was in memory is looked for in Redis
                answers.append((seed, ask_for_trace(server, seed)[0]))
            return answers

        with ThreadPoolExecutor(4) as threads:
            for disturb in (lambda: None, redis.kill, redis.start, redis.hang, redis.go_on):
                rounds = [threads.submit(ask_some, 3) for _ in range(4)]
                disturb()
                for each in rounds:
                    assert all(tokens == expected[seed] for seed, tokens in each.result(120))
        assert server.get_metrics()[FAILED] > 0
        assert "the remote cache of media at" in server.output

        def is_back() -> bool:
            server.reset_caches()
            return ask_for_trace(server)[1]["encoder"] == "loaded"

        wait_until(is_back, "items come from Redis again")
        redis.hang()
        server.reset_caches()
        assert ask_for_trace(server)[0] == expected[1]
        assert server.stop() == 0, "a Redis that hangs does not keep a server from stopping"
