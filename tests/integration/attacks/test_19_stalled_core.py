"""Row 19: a core that hangs is noticed and replaced; one that is only slow is kept."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.fault_load import Crowd, Reply, ask, make_body
from tests.support.server import START_TIMEOUT_S, ServerProcess, is_alive, serve
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("attack-19")

LIMIT_S = 6.0
LONG = 3900  # tokens: no machine is so fast that it ends before something has happened to it
NUM_ASKED = 12  # questions for the health of two frontends: each is reached


def get_core(server: ServerProcess) -> int:
    (pid,) = server.find_children("core_main")
    return pid


def get_health(server: ServerProcess, num_asked: int = NUM_ASKED) -> list[tuple[int, str]]:
    """What the frontends say, whichever of them takes a connection."""
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(limits=limits, timeout=60.0) as client:
        replies = [client.get(server.get_url("/health")) for _ in range(num_asked)]
    return [(r.status_code, r.json().get("error", {}).get("code", "")) for r in replies]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGCONT)


def wait_until_stalled(server: ServerProcess, num_asked: int = 1) -> None:
    """Until the frontends report it. If they never do, the error has what they did report."""
    core, seen = get_core(server), Counter[tuple[int, str]]()

    def is_stalled() -> bool:
        answers = get_health(server, num_asked)
        seen.update(answers)
        assert is_alive(core), "the core ended"
        return set(answers) == {(503, "engine_stalled")}

    try:
        wait_until(is_stalled, "it is 503", 120)
    except AssertionError as error:
        raise AssertionError(f"{error}; {seen}\n{server.output[-3000:]}") from error


def wait_until_replaced(server: ServerProcess, core: int) -> None:
    """Until another core answers."""
    wait_until(lambda: not is_alive(core), "the core is killed", 120)
    wait_until(lambda: set(get_health(server)) == {(200, "")}, "the core is back", START_TIMEOUT_S)


async def stop_core_under_load(server: ServerProcess) -> list[Reply]:
    bodies = [make_body(f"question {i}", max_tokens=LONG, stream=bool(i % 2)) for i in range(6)]
    crowd = Crowd(server, bodies)
    await crowd.wait_until_streaming()
    await crowd.wait_until_running(len(bodies))
    core = get_core(server)
    with stopped(core):
        await asyncio.to_thread(wait_until_stalled, server)
        replies = await crowd.finish()
        await asyncio.to_thread(wait_until_replaced, server, core)
    return replies


def test_a_core_that_hangs_makes_the_server_unhealthy_and_is_replaced(
    tiny_model: Callable[[str], str],
) -> None:
    question = make_body("what is it")
    flags = ("--max-model-len", "4096", "--api-server-count", "2", "--mm-processor-pool-size", "1")
    with serve(tiny_model("llama"), *flags, "--core-stall-timeout", str(LIMIT_S)) as server:
        expected = ask(server, question)
        assert expected.is_good
        replies = asyncio.run(stop_core_under_load(server))
        assert all(reply.is_lost_clearly for reply in replies), replies
        assert [reply.status for reply in replies] == [503, 200] * 3
        assert ask(server, question) == expected
        metrics = server.get_metrics()
        assert metrics["sensorium:core_stalls_total"] >= 1
        assert metrics['sensorium:process_restarts_total{kind="core"}'] >= 1

        # One that has nothing to do is stopped, and then there is something to do.
        core = get_core(server)
        with stopped(core):
            lost: list[Reply] = []
            asking = threading.Thread(target=lambda: lost.append(ask(server, question)))
            asking.start()
            wait_until_stalled(server)
            asking.join(120)
            wait_until_replaced(server, core)
        assert [reply.is_lost_clearly for reply in lost] == [True]
        assert ask(server, question) == expected


@pytest.mark.slow  # in short: tests/unit/server/processes/test_pulse.py
def test_all_frontends_agree_and_a_core_that_resumes_keeps_its_requests(
    tiny_model: Callable[[str], str],
) -> None:
    question = make_body("what is it", max_tokens=64)
    # So long that no pause of this test comes near twice the limit.
    flags = ("--api-server-count", "2", "--mm-processor-pool-size", "1")
    with serve(tiny_model("llama"), *flags, "--core-stall-timeout", "20") as server:
        expected = ask(server, question)
        core = get_core(server)
        answers: list[Reply] = []
        with stopped(core):
            asking = threading.Thread(target=lambda: answers.append(ask(server, question)))
            asking.start()
            wait_until_stalled(server, NUM_ASKED)
        asking.join(120)
        assert answers == [expected]
        wait_until(lambda: set(get_health(server)) == {(200, "")}, "it is healthy again", 60)
        assert get_core(server) == core


def make_deep_model(directory: Path) -> str:
    """A decoder of so many layers that a step over a long prompt takes a while on any machine."""
    import transformers as tf

    from tiny_models.building import (
        CHATML_TOKENS,
        chatml,
        make_tokenizer,
        rescale,
        save,
        text_values,
    )

    tokenizer = make_tokenizer(CHATML_TOKENS)
    tokenizer.chat_template = chatml()
    values = text_values(tokenizer, num_hidden_layers=96, hidden_size=192, intermediate_size=512)
    save(directory, rescale(tf.LlamaForCausalLM(tf.LlamaConfig(**values))), tokenizer)
    return str(directory)


def ask_in_one_step(server: ServerProcess, num_tokens: int) -> float:
    """Ask about so many tokens, which are one step; return the seconds that it took."""
    body: dict[str, Any] = {
        "prompt": [1 + number % 200 for number in range(num_tokens)],
        "max_tokens": 1,
        "trace": True,
    }
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return float(response.json()["sensorium_trace"]["ms"]["prefill"]) / 1000


@pytest.mark.slow  # in short: tests/unit/server/processes/test_pulse.py
def test_a_long_step_is_not_mistaken_for_a_stall(tmp_path: Path) -> None:
    flags = ("--max-model-len", "8192", "--max-num-batched-tokens", "8192", "--no-warmup")
    with serve(
        make_deep_model(tmp_path / "deep"), *flags, "--core-stall-timeout", str(LIMIT_S)
    ) as server:
        core = get_core(server)
        for num_tokens in (1024, 2048, 4096, 8000):
            seconds = ask_in_one_step(server, num_tokens)
            if seconds > 2 * LIMIT_S:
                break
        metrics = server.get_metrics()
        assert metrics["sensorium:core_stalls_total"] == 0
        assert get_core(server) == core
        assert server.get("/health").status_code == 200
        if seconds <= 2 * LIMIT_S:
            pytest.skip(f"the longest step took {seconds:.1f} s here: too short to prove anything")
