"""Audio of CTC/transducer models: features of pieces, counts of frames, filters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from sensorium.multimodal.processing import ctc_transducer
from sensorium.multimodal.processing.ctc_transducer import (
    PIECES,
    CtcTransducerProcessor,
    make_mel_filters,
)
from sensorium.multimodal.processing.processor import MultiModalProcessor
from tests.parity.cases import make_audio

RATE = 16_000
TinyModel = Callable[[str], str]


def load(directory: str) -> CtcTransducerProcessor:
    audios = MultiModalProcessor(directory, AutoConfig.from_pretrained(directory)).outside_audio
    assert isinstance(audios, CtcTransducerProcessor)
    return audios


def test_the_filters_are_those_of_librosa() -> None:
    """The numbers were printed by librosa 0.11.0."""
    filters = make_mel_filters(sr=RATE, n_fft=512, n_mels=80, fmin=0.0, fmax=8e3, norm="slaney")
    assert (filters.shape, filters.dtype) == ((80, 257), np.float32)
    expected = {(0, 1): 0.022534560412168503, (10, 13): 0.02441513165831566, (40, 60): 0.0}
    expected[79, 250] = 0.0021035580430179834
    for place, value in expected.items():
        assert filters[place] == pytest.approx(value, rel=1e-6)
    assert filters.sum(dtype=np.float64) == pytest.approx(2.55826078139944)
    assert (filters > 0).sum() == 500


@pytest.mark.parametrize(
    ("family", "samples_per_frame", "max_frames"),
    [("wav2vec2", 320, 1499), ("wav2vec2-bert", 320, 1499), ("parakeet_ctc", 1280, 375)],
)
def test_frames_are_counted_without_a_model(
    tiny_model: TinyModel, family: str, samples_per_frame: int, max_frames: int
) -> None:
    audios = load(tiny_model(family))
    assert (audios.samples_per_frame, audios.max_positions) == (samples_per_frame, max_frames)


@pytest.mark.parametrize("family", ["wav2vec2", "parakeet_ctc"])
def test_a_piece_has_the_features_of_a_separate_recording(
    tiny_model: TinyModel, family: str
) -> None:
    audios = load(tiny_model(family))
    audio = make_audio(70.0, seed=1)
    item, layout = audios.process(audio)
    pieces = item[PIECES].tolist()
    assert len(pieces) > 2
    assert [start for start, *_ in pieces[1:]] == [end for _, end, *_ in pieces[:-1]]
    num_frames = 0
    for start, end, first_row, end_row in pieces:
        alone, own = audios.process(audio[start:end])
        window = audios.cut_window(item, first_row, end_row - first_row)
        assert window.keys() == alone.keys()
        assert all(torch.equal(window[name], alone[name]) for name in alone)
        num_frames += own.num_embeds
    assert layout.num_embeds == num_frames


def test_a_last_piece_that_is_too_short_is_left_out(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    audios = load(tiny_model("wav2vec2"))
    audio = make_audio(2.0, seed=2)
    for num_samples, num_pieces in ((399, 1), (400, 2)):
        border = len(audio) - num_samples
        cuts = [(0, border), (border, len(audio))]
        monkeypatch.setattr(ctc_transducer, "find_cuts", lambda *_, cuts=cuts, **__: cuts)
        item, _ = audios.process(audio)
        assert item[PIECES][:, :2].tolist() == [list(cut) for cut in cuts[:num_pieces]]
