"""Real servers with a real `sensorium encode` process: shared, stopped, killed, and hung."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from sensorium import LLM, SamplingParams
from sensorium.multimodal.processing.remote_encoder_backend import REMOTE_ENCODER_OUTCOMES
from tests.support.clients import ask, chat, make_image_part, make_url_part
from tests.support.engine import make_llm
from tests.support.server import POOL, ServerProcess, kill, serve
from tests.support.waiting import wait_until

pytestmark = pytest.mark.processes
NAMED = ("--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "1024")


@contextmanager
def encode(model: str, path: Path, *flags: str) -> Iterator[ServerProcess]:
    given = ("--socket", str(path), "--dtype", "float32", *flags)
    with serve(model, *given, command="encode") as encoder:
        yield encoder


def get_outcomes(server: ServerProcess) -> dict[str, int]:
    """Return what became of items that were meant for the encoder, without zeros."""
    metrics = server.get_metrics()
    counts = {
        outcome: int(metrics.get(f'sensorium:apart_items_total{{outcome="{outcome}"}}', 0))
        for outcome in REMOTE_ENCODER_OUTCOMES
    }
    return {outcome: number for outcome, number in counts.items() if number}


def look(server: ServerProcess, seed: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Ask about a picture, and return the answer and the trace of the picture."""
    answer = chat(server.make_client(), ask(make_image_part(seed), "What is it?"), max_tokens=4)
    (item,) = answer.trace["items"]
    return answer.token_ids, item


def expect(llm: LLM, seed: int) -> tuple[int, ...]:
    messages = ask(make_image_part(seed), "What is it?")
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    return output.outputs[0].token_ids


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], str]) -> str:
    return tiny_model("qwen2_5_vl")


@pytest.fixture(scope="module")
def plain(model: str) -> Iterator[LLM]:
    """Give an engine that encodes everything itself."""
    with make_llm(model) as llm:
        yield llm


def test_a_server_survives_a_killed_encoder_and_uses_the_next_one(
    model: str, plain: LLM, tmp_path: Path
) -> None:
    path = tmp_path / "own" / "encoder.sock"
    flags = (*NAMED, "--encoder", f"unix:{path}", "--api-server-count", "2", *POOL)
    with encode(model, path, *POOL) as encoder, serve(model, *flags) as server:
        assert "remote encoder" in server.output
        tokens, item = look(server, 1)
        assert tokens == expect(plain, 1)
        assert (item["processor"], item["encoder"]) == ("miss", "loaded")
        assert "apart" in item["ms"]
        assert not item["ms"].keys() & {"decode", "process"}
        metrics = server.get_metrics()
        assert metrics['sensorium:encoder_items_total{how="encoded"}'] == 0
        assert metrics['sensorium:encoder_items_total{how="loaded"}'] == 1
        assert get_outcomes(server) == {"encoded": 1}
        # In the middle of an item: it has the question, and can't answer any more.
        for pid in encoder.get_process_ids():
            kill(pid, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(look, server, 2)
            wait_until(lambda: server.get_metrics()["sensorium:num_requests_preparing"] > 0)
            encoder.kill()
            tokens, item = asked.result(120)
        assert tokens == expect(plain, 2)
        assert item["encoder"] == "miss"
        assert get_outcomes(server) == {"encoded": 1, "fallback": 1}
        assert path.exists()
        with encode(model, path, *POOL) as again:
            seeds = iter(range(3, 1000))

            def is_used() -> bool:
                seed = next(seeds)
                tokens, _ = look(server, seed)
                assert tokens == expect(plain, seed)
                return get_outcomes(server)["encoded"] > 1

            wait_until(is_used)
            assert again.stop() == 0
        assert not path.exists()
        core = server.get_metrics()
        num_here = core['sensorium:encoder_items_total{how="encoded"}']
        assert num_here == get_outcomes(server)["fallback"]


def test_engines_share_an_encoder_and_bad_items_are_refused(
    model: str, plain: LLM, tmp_path: Path
) -> None:
    path = tmp_path / "encoder.sock"
    flags = (*NAMED, "--encoder", f"unix:{path}", "--no-encoder-fallback")
    with encode(model, path) as encoder, serve(model, *flags) as server:
        with make_llm(model, encoder=f"unix:{path}") as llm:
            assert look(server, 1)[0] == expect(llm, 1) == expect(plain, 1)
            assert llm.media_parts.remote_encoder is not None
            counts = llm.media_parts.remote_encoder.service.get_counts()  # type: ignore[attr-defined]
            assert (counts.num_asked, counts.num_processed, counts.num_encoded) == (2, 1, 1)
        broken = make_url_part("image", "data:image/png;base64,bm8gaW1hZ2U=")
        refusal = _post(server, ask(broken, "What is it?"))
        assert refusal.status_code == 400, refusal.text
        assert "image" in refusal.json()["error"]["message"]
        assert get_outcomes(server) == {"encoded": 1, "refused": 1}
        assert encoder.stop() == 0
        lost = _post(server, ask(make_image_part(2), "What is it?"))
        assert lost.status_code == 503
        assert int(lost.headers["retry-after"]) >= 1
        assert "encoder" in lost.json()["error"]["message"]
        assert _post(server, ask("What is it?")).status_code == 200
        assert get_outcomes(server) == {"encoded": 1, "refused": 1, "failed": 1}
        with encode(model, path):
            wait_until(lambda: _post(server, ask(make_image_part(2), "What?")).status_code == 200)


def _post(server: ServerProcess, messages: Any) -> httpx.Response:
    return server.post(
        "/v1/chat/completions", {"model": "tiny", "messages": messages, "max_tokens": 4}
    )


def test_an_encoder_says_why_it_cannot_start(model: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for arguments, reason in (
        ((model, "--socket", str(tmp_path / "file")), "is no socket"),
        ((model,), "give --socket PATH"),
    ):
        name, *flags = arguments
        encoder = ServerProcess(name, *flags, command="encode")
        assert encoder.wait() in (1, 2)
        assert reason in encoder.output


def test_ctrl_c_ends_an_encoder(model: str, tmp_path: Path) -> None:
    path = tmp_path / "encoder.sock"
    with encode(model, path) as encoder:
        encoder.process.send_signal(signal.SIGINT)
        assert encoder.wait() == 0
    assert not path.exists()
