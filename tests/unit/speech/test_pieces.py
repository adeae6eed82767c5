"""Where long audio is cut into pieces, and how their answers are joined."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.speech.options import SpeechOptions
from sensorium.speech.pieces import transcribe_pieces
from sensorium.speech.transcript import Segment, Transcript
from sensorium.speech.windows import WindowRequest, WindowResult
from sensorium.utils.silences import Samples, find_cuts

RATE = 1000
END = 99


class Words:
    """A tokenizer in which each token is a word."""

    def encode(self, text: str) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(f"w{token_id}" for token_id in token_ids)

    def get_bytes(self, token_id: int) -> bytes:
        return f"w{token_id}".encode()

    def get_id(self, _: str) -> int | None:
        return None


def make_noise(seconds: float, *quiet: float) -> Samples:
    """Return noise with 0.3 s of silence around each of the given times."""
    samples = np.random.default_rng(0).uniform(-1, 1, int(seconds * RATE)).astype(np.float32)
    for time in quiet:
        samples[int((time - 0.15) * RATE) : int((time + 0.15) * RATE)] = 0
    return samples


def test_short_audio_is_one_piece() -> None:
    assert find_cuts(make_noise(30.0), RATE, max_s=30) == [(0, 30_000)]


def test_pieces_end_at_quiet_places() -> None:
    cuts = find_cuts(make_noise(70.0, 5.0, 24.0, 50.0), RATE, max_s=30)
    assert [end / RATE for _, end in cuts] == [
        pytest.approx(24.0, abs=0.06),
        pytest.approx(50.0, abs=0.06),
        70.0,
    ]


@given(st.integers(0, 20_000), st.floats(0.5, 4.0), st.integers(0, 5))
def test_pieces_are_the_whole_audio(num_samples: int, max_s: float, seed: int) -> None:
    samples = np.random.default_rng(seed).normal(size=num_samples).astype(np.float32)
    cuts = find_cuts(samples, RATE, max_s=max_s)
    assert cuts[0][0] == 0
    assert cuts[-1][1] == num_samples
    assert all(end == start for (_, end), (start, _) in pairwise(cuts))
    assert all(0 < end - start <= max_s * RATE for start, end in cuts) or num_samples == 0


def run(samples: Samples, answers: list[list[int]], **options: object) -> tuple[Transcript, list]:
    requests: list[WindowRequest] = []
    rules = transcribe_pieces(
        samples,
        RATE,
        max_s=30,
        prompt_token_ids=(1,),
        end_ids={END},
        max_positions=100,
        tokenizer=Words(),  # type: ignore[arg-type]
        options=SpeechOptions(**options),  # type: ignore[arg-type]
    )
    result: WindowResult | None = None
    while True:
        try:
            step = rules.send(result)
        except StopIteration as end:
            return end.value, requests
        if isinstance(step, Segment):
            result = None
            continue
        token_ids = answers[len(requests)]
        requests.append(step)
        result = WindowResult(token_ids=tuple(token_ids), logprobs=(-0.5,) * len(token_ids))


def test_each_piece_with_a_text_is_a_segment() -> None:
    samples = make_noise(70.0, 24.0, 50.0)
    transcript, requests = run(samples, [[2, 3, END], [END], [4]], needs_logprobs=True)
    assert transcript.text == "w2 w3 w4"
    assert [segment.text for segment in transcript.segments] == ["w2 w3", " w4"]
    assert transcript.segments[1].end == 70.0
    assert [score.text for score in transcript.segments[0].scores] == ["w2", "w3"]
    ends = [request.first_frame + request.num_frames for request in requests]
    assert [request.first_frame for request in requests] == [0, *ends[:-1]]
    assert all(request.max_tokens <= 99 for request in requests)
    assert transcript.usage.num_output_tokens == 5


def test_a_short_piece_may_have_few_tokens() -> None:
    _, (request,) = run(make_noise(0.5), [[2]])
    assert request.max_tokens == 8
    assert request.num_frames == 500
