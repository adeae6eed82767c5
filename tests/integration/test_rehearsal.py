"""Rehearsals: the core computes dummy requests before real ones, and keeps nothing of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sensorium import SamplingParams
from sensorium.engine.inputs.warmup import warm_up
from sensorium.types.errors import ModelError
from tests.integration.async_serving import LocalCore, make_chat, make_png, run_core

TinyModel = Callable[[str], str]
Watched = list[str]
_GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(params=["lru", "shm"])
def core(request: Any, tmp_path: Path, tiny_model: TinyModel) -> Iterator[LocalCore]:
    options = {"mm_processor_cache_type": request.param}
    with run_core(tiny_model("qwen2_5_vl"), tmp_path, **options) as core:
        yield core


@pytest.fixture
def small_core(tmp_path: Path, tiny_model: TinyModel) -> Iterator[LocalCore]:
    """Run a core with room in its context for a few words, and for no picture."""
    with run_core(tiny_model("qwen2_5_vl"), tmp_path, max_model_len=32) as core:
        yield core


def watch(monkeypatch: pytest.MonkeyPatch, core: LocalCore) -> Watched:
    """Return a list that gets the modality of each item that the core's encoders are run for."""
    encoded: Watched = []
    runner = core.core.runner.encoder_runner
    original = runner.run

    def run(jobs: Sequence[Any]) -> Any:
        encoded.extend(job.feature.modality for job in jobs)
        return original(jobs)

    monkeypatch.setattr(runner, "run", run)
    return encoded


def break_pictures(monkeypatch: pytest.MonkeyPatch, core: LocalCore) -> None:
    runner = core.core.runner.encoder_runner
    original = runner.run

    def run(jobs: Sequence[Any]) -> Any:
        if jobs:
            raise RuntimeError("no pictures today")
        return original(jobs)

    monkeypatch.setattr(runner, "run", run)


async def rehearse(core: LocalCore, name: str) -> dict[str, str]:
    """Let a new frontend rehearse, and return what it has switched off."""
    engine, media_parts = core.make_frontend(name)
    try:
        before = media_parts.caches.sender.statistics()
        dummies = warm_up(engine.renderer)
        await engine.connect(core.info)
        await engine.rehearse(dummies)
        assert media_parts.caches.sender.statistics() == before
        return engine.switched_off
    finally:
        await engine.close()
        media_parts.close()


def assert_no_trace(core: LocalCore) -> None:
    scheduler, runner = core.core.scheduler, core.core.runner
    assert scheduler.counters.num_scheduled_tokens == scheduler.counters.num_prompt_tokens == 0
    assert sum(scheduler.counters.steps.values()) == sum(scheduler.counters.finished.values()) == 0
    assert all(pool.num_cached == 0 for pool in scheduler.kv_cache.statistics())
    encoder = scheduler.encoder_cache.statistics()
    assert (encoder.num_queries, encoder.num_entries) == (0, 0)
    assert (runner.encoder_runner.num_encoded, runner.num_encoder_bytes) == (0, 0)
    received = core.core.payloads.receiver.statistics()
    assert (received.num_queries, received.num_items) == (0, 0)
    core.assert_nothing_is_left()


def test_each_modality_runs_once_through_the_model_and_leaves_no_trace(
    core: LocalCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = watch(monkeypatch, core)
    assert asyncio.run(rehearse(core, "f0-1")) == {}
    assert sorted(filter(None, encoded)) == ["image", "video"]
    assert_no_trace(core)


def test_what_one_frontend_has_rehearsed_is_not_computed_for_another(
    core: LocalCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = watch(monkeypatch, core)

    async def rehearse_together() -> None:
        found = await asyncio.gather(*(rehearse(core, f"f{i}-1") for i in range(3)))
        assert found == [{}, {}, {}]

    asyncio.run(rehearse_together())
    assert sorted(encoded) == ["image", "video"]


def test_a_modality_that_fails_in_the_model_is_off_at_every_frontend(
    core: LocalCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_pictures(monkeypatch, core)
    for name in ("f0-1", "f1-1"):
        off = asyncio.run(rehearse(core, name))
        assert set(off) == {"image", "video"}
        assert off["image"].startswith("the model could not compute a small image at start: ")
        assert off["image"].endswith("no pictures today")
    assert_no_trace(core)


def test_a_model_that_fails_with_text_is_refused(
    core: LocalCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no words")

    monkeypatch.setattr(core.core.runner, "launch", fail)
    with pytest.raises(ModelError, match=r"can't even compute a prompt of text: .*no words"):
        asyncio.run(rehearse(core, "f0-1"))


def test_a_dummy_that_does_not_fit_switches_nothing_off(
    small_core: LocalCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = watch(monkeypatch, small_core)
    assert asyncio.run(rehearse(small_core, "f0-1")) == {}
    assert encoded == []


def test_real_requests_are_not_kept_waiting_by_a_rehearsal(
    core: LocalCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the first picture is a client's, and its answer is the one without any rehearsal."""
    chat = make_chat(make_png(3))

    async def main() -> None:
        engine, media_parts = core.make_frontend("f0-1")
        await engine.connect(core.info)
        try:
            long = SamplingParams(temperature=0, max_tokens=3500, ignore_eos=True)
            answers = engine.stream({"prompt": "go on"}, long, request_id="long")
            await anext(answers)
            encoded = watch(monkeypatch, core)
            assert await rehearse(core, "f1-1") == {}
            assert encoded == []
            await answers.aclose()
            before = await engine.generate(chat, _GREEDY, request_id="before")
            assert await rehearse(core, "f2-1") == {}
            await engine.reset_cache("prefix")
            after = await engine.generate(chat, _GREEDY, request_id="after")
            assert before.outputs[0].token_ids == after.outputs[0].token_ids
        finally:
            await engine.close()
            media_parts.close()

    asyncio.run(main())
