"""Streaming models transcribe audio while it arrives as `generate` does with all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sensorium import SamplingParams
from sensorium.engine.async_engine import AsyncEngine
from sensorium.engine.audio_request import AudioRequest
from sensorium.types.errors import CapacityError, RequestError
from sensorium.utils.silences import Samples
from tests.integration.async_serving import LocalCore, run_core
from tests.integration.test_async_engine import run
from tests.parity.graph_parts import use_graphs
from tests.support.engine import assert_nothing_is_left, get_kv_bytes, make_llm, make_probe
from tests.support.media import write_audio
from tests.support.tones import DEFAULT_DELAY_MS, RATE, TOKEN, StreamedReference, make_tones

GREEDY = SamplingParams(temperature=0, max_tokens=None)
DELAYS_MS = (480, 80, 160, 240, 960, 1200, 2400, 480)
LENGTHS_S = (4.0, 2.5, 6.03, 1.7, 3.0, 5.5, 2.0, 9.0)  # longer than the windows of the layers


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], str]) -> str:
    return tiny_model("voxtral_realtime")


@pytest.fixture(scope="module")
def reference(model: str, tmp_path_factory: pytest.TempPathFactory) -> StreamedReference:
    return StreamedReference(model, tmp_path_factory.mktemp("processors"))


@pytest.fixture(scope="module")
def audios() -> list[Samples]:
    return [make_tones(seed, seconds) for seed, seconds in enumerate(LENGTHS_S)]


@pytest.fixture
def core(model: str, tmp_path: Path) -> Iterator[LocalCore]:
    with run_core(model, tmp_path, max_num_seqs=16) as running:
        yield running


@pytest.fixture(params=["eager", pytest.param("replayed", marks=pytest.mark.slow)])
def any_core(
    request: pytest.FixtureRequest, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalCore]:
    """A core with and without captured steps."""
    if request.param == "replayed":
        use_graphs(monkeypatch)
    with run_core(model, tmp_path, max_num_seqs=16) as running:
        assert ("decoding in" in running.built.config.graphs) == (request.param == "replayed")
        yield running


def test_the_reference_depends_on_the_audio_and_the_delay(
    reference: StreamedReference, audios: list[Samples]
) -> None:
    first, other = reference.generate(audios[0]), reference.generate(audios[7])
    assert len(set(first)) > 10
    assert sum(a != b for a, b in zip(first, other, strict=False)) > len(first) // 2
    assert reference.generate(audios[0], 960) != reference.generate(audios[0], 80)


@pytest.mark.parametrize("max_num_batched_tokens", [7, pytest.param(64, marks=pytest.mark.slow)])
def test_whole_recordings_give_the_reference_tokens(
    model: str, reference: StreamedReference, audios: list[Samples], max_num_batched_tokens: int
) -> None:
    expected = [reference.generate(audio) for audio in audios]
    with make_llm(model, max_num_batched_tokens=max_num_batched_tokens) as llm:
        prompts: Any = [
            {"prompt_token_ids": [], "multi_modal_data": {"audio": [(audio, RATE)]}}
            for audio in audios
        ]
        for _ in range(2):  # the second time the features are in a cache
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
            assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
        assert_nothing_is_left(llm)


@pytest.mark.slow
def test_replayed_steps_give_the_reference_tokens(
    model: str,
    reference: StreamedReference,
    audios: list[Samples],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps in which all requests decode are captured, with their audio and delays."""
    recorders = use_graphs(monkeypatch)
    expected = [reference.generate(audio) for audio in audios]
    with make_llm(model) as llm:
        assert "decoding in 4 sizes up to 8" in llm.config.graphs
        prompts: Any = [
            {"prompt_token_ids": [], "multi_modal_data": {"audio": [(audio, RATE)]}}
            for audio in audios
        ]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert recorders.decoding.num_replays > 50
        assert_nothing_is_left(llm)


@pytest.mark.slow
def test_preempted_requests_give_the_reference_tokens(
    model: str, reference: StreamedReference, audios: list[Samples]
) -> None:
    num_bytes = get_kv_bytes(make_probe(model), 120)
    options = {"block_size": 1, "max_num_batched_tokens": 32}
    with make_llm(model, kv_cache_memory_bytes=num_bytes, **options) as llm:
        prompts: Any = [
            {"prompt_token_ids": [], "multi_modal_data": {"audio": [(audio, RATE)]}}
            for audio in audios
        ]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert llm.core.scheduler.counters.num_preemptions > 0
        expected = [reference.generate(audio) for audio in audios]
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected


def test_chats_and_transcripts_give_the_reference_tokens(
    model: str, reference: StreamedReference, audios: list[Samples]
) -> None:
    files = [write_audio(audio, "WAV", "PCM_16") for audio in audios[:3]]
    expected = [reference.generate(audio) for audio in audios[:3]]
    texts = [reference.decode(token_ids) for token_ids in expected]
    with make_llm(model) as llm:
        for file, token_ids in zip(files, expected, strict=True):
            message = {"role": "user", "content": [{"type": "audio", "audio": file}]}
            (output,) = llm.chat([message], GREEDY, use_tqdm=False)
            assert list(output.outputs[0].token_ids) == token_ids
        transcripts = llm.transcribe(files, use_tqdm=False)
        assert [transcript.text for transcript in transcripts] == texts
        assert_nothing_is_left(llm)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("Hello", "one audio item"),
        ([{"type": "text", "text": "What is said?"}, "audio"], "takes no text"),
        (["audio", "audio"], "one audio item"),
    ],
)
def test_chats_of_anything_but_one_recording_are_refused(
    model: str, content: Any, words: str
) -> None:
    part = {"type": "audio", "audio": write_audio(make_tones(0, 1.0), "WAV", "PCM_16")}
    if isinstance(content, list):
        content = [part if each == "audio" else each for each in content]
    with make_llm(model) as llm, pytest.raises(RequestError, match=words):
        llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)


@pytest.mark.parametrize("options", [{"language": "en"}, {"prompt": "names"}])
def test_language_and_prompt_of_a_transcript_are_refused(
    model: str, options: dict[str, str]
) -> None:
    with make_llm(model) as llm, pytest.raises(RequestError, match="leave it out"):
        llm.transcribe([(make_tones(0, 1.0), RATE)], use_tqdm=False, **options)


def test_a_prompt_longer_than_its_audio_is_refused(model: str) -> None:
    audio: Any = {"audio": [(make_tones(0, 1.0), RATE)]}
    prompt: Any = {"prompt_token_ids": [1] * 200, "multi_modal_data": audio}
    with make_llm(model) as llm:
        with pytest.raises(RequestError, match="shorten the prompt"):
            llm.generate([prompt], GREEDY, use_tqdm=False)
        assert_nothing_is_left(llm)


# ---- streaming audio


async def listen(
    engine: AsyncEngine, audio: Samples, *, delay_ms: int | None = None, pause: int = 1
) -> list[int]:
    """Send audio in chunks of 80 ms, and return the tokens that come back."""
    request = await engine.open_audio(GREEDY, request_id="r", delay_ms=delay_ms)
    reading = asyncio.create_task(read(request))
    for start in range(0, len(audio), TOKEN):
        request.append(audio[start : start + TOKEN])
        for _ in range(pause):
            await asyncio.sleep(0.001)
    request.end()
    try:
        return await reading
    finally:
        request.close()


async def read(request: AudioRequest) -> list[int]:
    token_ids: list[int] = []
    async for delta in request.deltas:
        for part in delta.deltas:
            token_ids += part.token_ids
    return token_ids


def test_streams_give_the_reference_tokens(
    any_core: LocalCore, reference: StreamedReference, audios: list[Samples]
) -> None:
    """Eight streams with different delays and speeds run together with whole recordings."""
    pairs = list(zip(audios, DELAYS_MS, strict=True))
    expected = [reference.generate(audio, delay_ms) for audio, delay_ms in pairs]
    whole: Any = {"prompt_token_ids": [], "multi_modal_data": {"audio": [(audios[5], RATE)]}}
    others = reference.generate(audios[5])

    async def test(engine: AsyncEngine, _: Any) -> None:
        assert await listen(engine, audios[0]) == expected[0]
        *found, output = await asyncio.gather(
            *(
                listen(engine, audio, delay_ms=delay_ms, pause=index % 4)
                for index, (audio, delay_ms) in enumerate(pairs)
            ),
            engine.generate(whole, GREEDY, request_id="whole"),
        )
        assert found == expected
        assert list(output.outputs[0].token_ids) == others

    run(any_core, test)


@pytest.mark.slow
def test_a_stream_of_many_windows_takes_no_more_blocks(
    core: LocalCore, reference: StreamedReference
) -> None:
    """Its first tokens are forgotten, and what follows is computed as if they were there."""
    audio = make_tones(11, 120.0)
    expected = reference.generate(audio)
    used: list[int] = []

    async def test(engine: AsyncEngine, _: Any) -> None:
        request = await engine.open_audio(GREEDY, request_id="r")
        reading = asyncio.create_task(read(request))
        for start in range(0, len(audio), 4 * TOKEN):
            request.append(audio[start : start + 4 * TOKEN])
            await asyncio.sleep(0.002)
            (pool,) = core.core.scheduler.kv_cache.statistics()
            used.append(pool.num_used)
        request.end()
        assert await reading == expected
        request.close()

    run(core, test)
    assert len(expected) > 32 * 16  # blocks of tokens that are forgotten
    window = 24
    assert max(used) <= -(-(window + 64) // 16) + 2


def test_a_stream_may_be_aborted(core: LocalCore) -> None:
    async def test(engine: AsyncEngine, _: Any) -> None:
        idle = await engine.open_audio(GREEDY, request_id="idle")
        busy = await engine.open_audio(GREEDY, request_id="busy")
        busy.append(make_tones(0, 3.0))
        await anext(aiter(busy.deltas))
        idle.close()
        busy.close()
        busy.append(make_tones(0, 3.0))  # is dropped
        busy.end()

    run(core, test)
    assert len(core.core.scheduler.open_streams) == 0


def test_a_stream_that_ends_at_once_gives_the_reference_tokens(
    core: LocalCore, reference: StreamedReference
) -> None:
    expected = reference.generate(np.zeros(0, np.float32))

    async def test(engine: AsyncEngine, _: Any) -> None:
        assert await listen(engine, np.zeros(0, np.float32)) == expected

    run(core, test)


def test_a_wrong_delay_is_refused(core: LocalCore) -> None:
    async def test(engine: AsyncEngine, _: Any) -> None:
        for delay_ms in (0, 100, 2480, -80):
            with pytest.raises(RequestError, match="multiple of 80 ms"):
                await engine.open_audio(GREEDY, request_id="r", delay_ms=delay_ms)
        assert DEFAULT_DELAY_MS % 80 == 0

    run(core, test)


def test_streams_leave_a_seat_to_other_requests(model: str, tmp_path: Path) -> None:
    """Streams may not take all seats, and start although others hold the rest."""
    with run_core(model, tmp_path, max_num_seqs=3) as core:

        async def test(engine: AsyncEngine, _: Any) -> None:
            whole: Any = {
                "prompt_token_ids": [],
                "multi_modal_data": {"audio": [(make_tones(3, 20.0), RATE)]},
            }
            others = [
                asyncio.create_task(engine.generate(whole, GREEDY, request_id=f"{number}"))
                for number in range(3)
            ]
            while len(core.core.scheduler.running) < 3:
                await asyncio.sleep(0.001)
            first = await engine.open_audio(GREEDY, request_id="first")
            second = await engine.open_audio(GREEDY, request_id="second")
            with pytest.raises(CapacityError, match="try again later"):
                await engine.open_audio(GREEDY, request_id="third")
            first.append(make_tones(1, 3.0))
            await anext(aiter(first.deltas))
            assert core.core.scheduler.counters.num_preemptions > 0
            second.close()
            first.close()
            tokens = {tuple((await other).outputs[0].token_ids) for other in others}
            assert len(tokens) == 1

        run(core, test)


@pytest.mark.slow
def test_whole_recordings_are_preempted_after_they_forgot_tokens(
    model: str, reference: StreamedReference, tmp_path: Path
) -> None:
    """All of their tokens are computed again, also those that were forgotten."""
    wholes = [make_tones(30 + number, 24.0) for number in range(2)]
    expected = [reference.generate(audio) for audio in wholes]
    with run_core(model, tmp_path, max_num_seqs=2, block_size=4) as core:
        scheduler = core.core.scheduler

        async def test(engine: AsyncEngine, _: Any) -> None:
            prompts: Any = [
                {"prompt_token_ids": [], "multi_modal_data": {"audio": [(audio, RATE)]}}
                for audio in wholes
            ]
            tasks = [
                asyncio.create_task(engine.generate(prompt, GREEDY, request_id="whole"))
                for prompt in prompts
            ]
            while sum(request.num_dropped > 0 for request in list(scheduler.running)) < 2:
                await asyncio.sleep(0.001)
            live = await engine.open_audio(GREEDY, request_id="live")
            live.append(make_tones(1, 3.0))
            await anext(aiter(live.deltas))
            assert scheduler.counters.num_preemptions > 0
            live.close()
            outputs = await asyncio.gather(*tasks)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected

        run(core, test)


def test_others_wait_while_a_stream_has_the_only_seat(
    model: str, reference: StreamedReference, audios: list[Samples], tmp_path: Path
) -> None:
    """The core does not take that for a request that can never run."""
    expected = reference.generate(audios[1])
    whole: Any = {"prompt_token_ids": [], "multi_modal_data": {"audio": [(audios[1], RATE)]}}
    with run_core(model, tmp_path, max_num_seqs=1) as core:

        async def test(engine: AsyncEngine, _: Any) -> None:
            live = await engine.open_audio(GREEDY, request_id="live")
            live.append(audios[0])
            await anext(aiter(live.deltas))
            other = asyncio.create_task(engine.generate(whole, GREEDY, request_id="whole"))
            while not core.core.scheduler.waiting or core.core.has_requests:
                assert core.error is None
                await asyncio.sleep(0.001)
            live.append(audios[0])
            await anext(aiter(live.deltas))
            assert not other.done()
            live.close()
            assert list((await other).outputs[0].token_ids) == expected

        run(core, test)
