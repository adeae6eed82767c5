"""A transcript of pieces: some run together, in any order, and nothing of them is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest

from sensorium.engine.speech.transcriber import AsyncTranscriber
from sensorium.speech.options import SpeechOptions
from sensorium.speech.pieces import PieceText, transcribe_cuts
from sensorium.speech.transcript import Segment, Transcript
from sensorium.speech.windows import Transcription, WindowRequest, WindowResult
from sensorium.types.errors import MissingMediaError, RequestError
from sensorium.types.outputs import CompletionOutput, RequestOutput
from sensorium.types.request import FinishReason
from sensorium.utils.pausing import Pausing, run_through

RATE = 10
NUM_PIECES = 6


class WholeAudio:
    """Audio that is split into prompts of one token: the index of the piece."""

    def __init__(self) -> None:
        self.duration_s = float(NUM_PIECES)
        self.has_samples = False
        self.num_restored = self.num_released = 0

    def make_prompt(self, request: WindowRequest) -> list[int]:
        assert self.num_released == 0
        return [request.first_frame // RATE, int(self.has_samples)]

    def restore_pausing(self, _cancelled: Future[None] | None = None, /) -> Pausing[None]:
        yield from ()
        self.num_restored += not self.has_samples
        self.has_samples = True

    def release(self) -> None:
        self.num_released += 1


class Model:
    """A model that transcribes a piece as the number of its token."""

    can_translate, has_segments, has_words = False, True, False

    def __init__(self) -> None:
        self.audio = WholeAudio()

    def open_pausing(self, _item: Any, **_options: Any) -> Pausing[WholeAudio]:
        yield from ()
        return self.audio

    def start(self, _audio: WholeAudio, options: SpeechOptions) -> Transcription:
        def make_request(start: int, end: int) -> WindowRequest:
            return WindowRequest(
                first_frame=start, num_frames=end - start, prompt_token_ids=(), max_tokens=1
            )

        return transcribe_cuts(
            [(RATE * index, RATE * index + RATE) for index in range(NUM_PIECES)],
            RATE,
            make_request=make_request,
            read=lambda result: PieceText(text=str(result.token_ids[0]), kept=[0]),
            tokenizer=None,  # type: ignore[arg-type]
            options=options,
        )


@dataclass
class Engine:
    """An engine that answers a prompt with its number, when `wait` lets it."""

    wait: Callable[[int], Any]
    running: set[int] = field(default_factory=set)
    begun: list[int] = field(default_factory=list)
    most_running: int = 0

    async def process_media(self, _modality: str, begin: Any, *, drop: Any) -> Any:
        del drop
        await asyncio.sleep(0)
        return run_through(begin(None, Future()))

    async def generate(
        self, prompt: list[int], _params: Any, *, request_id: str, group: str
    ) -> RequestOutput:
        assert request_id == group
        number = prompt[0]
        self.begun.append(number)
        self.running.add(number)
        self.most_running = max(self.most_running, len(self.running))
        try:
            await self.wait(prompt)
        finally:
            self.running.remove(number)
        completion = CompletionOutput(
            index=0, text="", token_ids=(number,), finish_reason=FinishReason.STOP, logprobs=({},)
        )
        return RequestOutput(
            request_id=request_id,
            prompt=None,
            prompt_token_ids=(),
            outputs=(completion,),
            finished=True,
        )


def run(engine: Engine, *, num_segments: int | None = None) -> tuple[list[str], Model]:
    """Transcribe, or leave after some segments. Return the texts and the model."""
    model = Model()

    async def transcribe() -> list[str]:
        texts: list[str] = []
        transcriber = AsyncTranscriber(engine, model)  # type: ignore[arg-type]
        parts = transcriber.transcribe(b"", SpeechOptions(), request_id="one")
        async with aclosing(parts):
            async for part in parts:
                if isinstance(part, Segment):
                    texts.append(part.text.strip())
                if isinstance(part, Transcript):
                    assert part.text == " ".join(texts)
                if len(texts) == num_segments:
                    break
        assert not engine.running
        return texts

    try:
        return asyncio.run(transcribe()), model
    finally:
        assert model.audio.num_released == 1


@pytest.fixture(autouse=True)
def _read_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs of these tests have no log-probabilities."""
    monkeypatch.setattr(
        "sensorium.engine.speech.transcriber.read_result",
        lambda output: WindowResult(token_ids=output.outputs[0].token_ids),
    )


def test_pieces_run_together_and_their_texts_come_in_order() -> None:
    async def wait(prompt: list[int]) -> None:
        await asyncio.sleep(0.02 if prompt[0] % 2 else 0.05)  # later ones are done first

    engine = Engine(wait)
    texts, _ = run(engine)
    assert texts == [str(number) for number in range(NUM_PIECES)]
    assert sorted(engine.begun) == list(range(NUM_PIECES))
    assert engine.most_running == 4


def test_a_client_that_leaves_aborts_the_running_pieces() -> None:
    async def wait(prompt: list[int]) -> None:
        await asyncio.sleep(60.0 if prompt[0] else 0.0)

    engine = Engine(wait)
    texts, _ = run(engine, num_segments=1)
    assert texts == ["0"]
    assert max(engine.begun) <= 3


def test_an_error_of_a_later_piece_comes_in_its_turn() -> None:
    seen: list[int] = []

    async def wait(prompt: list[int]) -> None:
        seen.append(prompt[0])
        if prompt[0] == 2:
            raise RequestError("too short")
        await asyncio.sleep(0.01)

    with pytest.raises(RequestError, match="too short"):
        run(Engine(wait))
    assert 5 not in seen  # it would have begun after the third


def test_audio_is_restored_once_for_all_missing_pieces() -> None:
    async def wait(prompt: list[int]) -> None:
        await asyncio.sleep(0.0)
        if not prompt[1]:
            raise MissingMediaError("gone", ("hash",))

    texts, model = run(Engine(wait))
    assert texts == [str(number) for number in range(NUM_PIECES)]
    assert model.audio.num_restored == 1


def test_a_transcript_that_is_cancelled_twice_releases_its_audio() -> None:
    model = Model()

    async def wait(_prompt: list[int]) -> None:
        try:
            await asyncio.sleep(60.0)
        finally:
            await asyncio.sleep(0.4)  # the engine takes its time to abort a request

    async def transcribe() -> None:
        transcriber = AsyncTranscriber(Engine(wait), model)  # type: ignore[arg-type]
        async with aclosing(transcriber.transcribe(b"", SpeechOptions(), request_id="one")) as all_:
            async for _ in all_:
                pass

    async def cancel_twice() -> None:
        task = asyncio.create_task(transcribe())
        for delay_s in (0.2, 0.6):  # the second time while the other pieces are aborted
            await asyncio.sleep(delay_s)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_twice())
    assert model.audio.num_released == 1
