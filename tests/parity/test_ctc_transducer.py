"""CTC/transducer models: frames, tokens, texts and times of Transformers, in any batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sensorium import LLM
from sensorium.engine.speech.ctc_transducer import CtcTransducerSpeech
from sensorium.models import ctc_transducer
from sensorium.models.ctc_transducer import MASK, CtcTransducerModel
from sensorium.multimodal.processing.ctc_transducer import CtcTransducerProcessor
from sensorium.speech import frames
from sensorium.speech.frames import read_table
from sensorium.types.errors import RequestError
from sensorium.types.request import FRAMES
from sensorium.worker.ctc_transducer_runner import CtcTransducerRunner
from tests.parity.cases import make_audio
from tests.parity.ctc_transducer_reference import (
    CTC,
    FAMILIES,
    LETTERS,
    RATE,
    TRANSDUCERS,
    WITHOUT_PADDING,
    CtcTransducerReference,
    Spoken,
    get_wrong,
    make_endless,
    make_engine,
    read_rows,
    run,
)
from tests.support.engine import Trace, assert_nothing_is_left, get_hf_model
from tests.support.media import write_audio

pytestmark = pytest.mark.filterwarnings(
    "ignore:Support for mismatched key_padding_mask:UserWarning",  # in WavLM, also on its own
)
TinyModel = Callable[[str], str]


class CtcTransducerCase:
    """A tiny CTC/transducer model in Transformers and in an engine."""

    def __init__(self, directory: str) -> None:
        self.reference = CtcTransducerReference(directory)
        self.llm = make_engine(directory)

    @property
    def spoken(self) -> list[Spoken]:
        return self.reference.spoken

    @property
    def speech(self) -> CtcTransducerSpeech:
        speech = self.llm._speech
        assert isinstance(speech, CtcTransducerSpeech)
        return speech

    def transcribe(self, audios: Sequence[Any], **options: Any) -> list[Any]:
        return self.llm.transcribe([(audio, RATE) for audio in audios], use_tqdm=False, **options)


CtcTransducerOf = Callable[[str], CtcTransducerCase]


@pytest.fixture(scope="session")
def ctc_transducer_of(tiny_model: TinyModel) -> CtcTransducerOf:
    known: dict[str, CtcTransducerCase] = {}

    def get(family: str) -> CtcTransducerCase:
        if family not in known:
            known[family] = CtcTransducerCase(tiny_model(family))
        return known[family]

    return get


@pytest.mark.slow
def test_the_reference_is_sensitive(ctc_transducer_of: CtcTransducerOf) -> None:
    """Recordings have different answers, and all of a second or more have several tokens."""
    for family in FAMILIES:
        spoken = ctc_transducer_of(family).spoken
        assert len({tuple(entry.rows) for entry in spoken}) == len(spoken)
        assert all(len(set(entry.rows)) > 2 for entry in spoken if len(entry.audio) >= RATE), family


@pytest.mark.check("alone")
@pytest.mark.parametrize("family", FAMILIES)
def test_recordings_one_at_a_time_give_the_reference_frames(
    family: str, ctc_transducer_of: CtcTransducerOf
) -> None:
    spoken = ctc_transducer_of(family).spoken
    llm = make_engine(ctc_transducer_of(family).reference.directory, max_num_seqs=1)
    trace = Trace(llm)
    assert get_wrong(run(llm, spoken), spoken) == []
    assert trace.most_requests_in_a_step == 1
    assert_nothing_is_left(llm)


@pytest.mark.check("budgets")
@pytest.mark.parametrize("family", FAMILIES)
def test_recordings_of_different_lengths_together_give_the_reference_rows(
    family: str, ctc_transducer_of: CtcTransducerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoken = ctc_transducer_of(family).spoken
    llm = make_engine(ctc_transducer_of(family).reference.directory)
    trace, sizes = Trace(llm), note_batches(llm, monkeypatch)
    assert get_wrong(run(llm, spoken), spoken) == []
    assert trace.most_requests_in_a_step == len(spoken)
    assert max(map(len, sizes)) > 1
    has_padding = any(len(set(batch)) > 1 for batch in sizes)
    assert has_padding is (family not in WITHOUT_PADDING)
    assert_nothing_is_left(llm)


def note_batches(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list that gets the lengths of the recordings in each batch of the encoder."""
    hf_model = get_hf_model(llm)
    encode, batches = hf_model.encode, []

    def note(modality: str, items: Sequence[Any], num_embeds: Sequence[int]) -> Any:
        batches.append([item[hf_model._input_name].shape[1] for item in items])
        return encode(modality, items, num_embeds)

    monkeypatch.setattr(hf_model, "encode", note)
    return batches


@pytest.mark.check("texts")
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_those_of_transformers(family: str, ctc_transducer_of: CtcTransducerOf) -> None:
    model = ctc_transducer_of(family)
    transcripts = model.transcribe([entry.audio for entry in model.spoken])
    assert [each.text for each in transcripts] == [entry.text.strip() for entry in model.spoken]
    for transcript in transcripts:
        assert transcript.usage.num_output_tokens >= len(transcript.text.split()) > 0
        assert all(segment.avg_logprob < 0 for segment in transcript.segments)
    assert_nothing_is_left(model.llm)


@pytest.mark.check("times")
@pytest.mark.parametrize("family", LETTERS)
def test_words_have_the_times_of_transformers(
    family: str, ctc_transducer_of: CtcTransducerOf
) -> None:
    model = ctc_transducer_of(family)
    transcripts = model.transcribe([entry.audio for entry in model.spoken], needs_words=True)
    for transcript, entry in zip(transcripts, model.spoken, strict=True):
        token_ids = torch.tensor([row[0] for row in entry.rows])
        decoded = model.reference.tokenizer.decode(token_ids, output_word_offsets=True)
        expected = [
            (word["word"], word["start_offset"] * 0.02, word["end_offset"] * 0.02)
            for word in decoded["word_offsets"]
            if word["word"].strip()
        ]
        words = [word for segment in transcript.segments for word in segment.words]
        assert [word.text for word in words] == [word for word, _, _ in expected]
        found = [time for word in words for time in (word.start, word.end)]
        times = [min(time, len(entry.audio) / RATE) for _, *both in expected for time in both]
        assert found == pytest.approx(times)


@pytest.mark.check("times")
@pytest.mark.parametrize("family", TRANSDUCERS)
def test_tokens_have_the_times_of_transformers(
    family: str, ctc_transducer_of: CtcTransducerOf
) -> None:
    model = ctc_transducer_of(family)
    frame_s = model.speech.rules.samples_per_frame / RATE
    outputs = run(model.llm, model.spoken)
    num_marks = 0
    for output, entry in zip(outputs, model.spoken, strict=True):
        frames = output.results[FRAMES]
        table = np.frombuffer(frames.values, np.float32).reshape(frames.shape)
        tokens = read_table(table, model.speech.rules)
        times = [(token.start * frame_s, token.end * frame_s) for token in tokens]
        expected = model.reference.get_times(entry.audio, model.speech.rules.head)
        assert np.array(times) == pytest.approx(np.array(expected))
        num_marks += sum(model.speech.rules.decode([t.token_id]) in ".,'" for t in tokens)
    assert num_marks > 0 or model.speech.rules.head != "tdt"


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_new_tokens": 7},
        {"max_length": 7},
        pytest.param({"max_new_tokens": 7, "max_length": 5}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", TRANSDUCERS)
def test_a_transducer_that_never_ends_is_stopped_where_transformers_stops_it(
    family: str, limits: dict[str, int], tiny_model: TinyModel, tmp_path: Path
) -> None:
    directory = make_endless(tiny_model(family), tmp_path / family, **limits)
    reference = CtcTransducerReference(directory)
    spoken = [reference.transcribe(make_audio(seconds, seed=3)) for seconds in (1.0, 0.7)]
    assert get_wrong(run(make_engine(directory), spoken), spoken) == []
    if limits:
        assert {len(entry.rows) for entry in spoken} == {7 if "max_new_tokens" in limits else 6}
    else:  # audio of 0.7 s has nine frames, each with room for ten tokens
        assert len(spoken[1].rows) == 89


@pytest.mark.parametrize("family", ["wav2vec2", "parakeet_ctc", "parakeet_tdt"])
def test_long_audio_is_transcribed_in_pieces(
    family: str, ctc_transducer_of: CtcTransducerOf
) -> None:
    model = ctc_transducer_of(family)
    audio = make_audio(40.0, seed=90)
    audio[20 * RATE + 50_000 :][:RATE] = 0  # where it is cut, at 23.1 to 24.1 s
    processed = model.speech.processor.process(audio)[0]
    pieces = [tuple(row[:2]) for row in processed["pieces"].tolist()]
    assert len(pieces) == 2
    assert 23.1 < pieces[0][1] / RATE < 24.2
    (transcript,) = model.transcribe([audio], needs_words=True)
    texts = [model.reference.transcribe(audio[start:end]).text.strip() for start, end in pieces]
    assert transcript.text == " ".join(texts)
    times = [time for each in transcript.segments for time in (each.start, each.end)]
    assert times == sorted(times)
    assert 24 < times[-1] <= transcript.duration_s
    words = [word.text for segment in transcript.segments for word in segment.words]
    assert words == transcript.text.split()


@pytest.mark.check("encoder cache")
@pytest.mark.parametrize("family", ["wav2vec2", "parakeet_tdt"])
def test_the_same_audio_again_computes_nothing(
    family: str, ctc_transducer_of: CtcTransducerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_engine(ctc_transducer_of(family).reference.directory)
    files = [write_audio(make_audio(s, seed=91), "WAV", "PCM_16") for s in (33.0, 2.0)]
    first = llm.transcribe(files, use_tqdm=False)
    processed: list[int] = []
    monkeypatch.setattr(CtcTransducerProcessor, "process", lambda *_: processed.append(1))
    trace, batches = Trace(llm), note_batches(llm, monkeypatch)
    assert llm.transcribe(files, use_tqdm=False) == first
    words = llm.transcribe(files, use_tqdm=False, needs_words=True)
    assert all(segment.words for each in words for segment in each.segments)
    assert len(trace.requests) == 6
    assert trace.num_encoded_items == 0
    assert (processed, batches) == ([], [])


def test_a_recording_that_fails_does_not_affect_the_others(
    ctc_transducer_of: CtcTransducerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ctc_transducer_of("parakeet_ctc")
    llm = make_engine(model.reference.directory)
    recognise = get_hf_model(llm).model.forward
    bad = model.spoken[1]

    def fail(**inputs: Any) -> Any:
        # The bad recording is as long as the last one, but louder.
        if (inputs["input_features"].abs().amax((1, 2)) > 1e3).any():
            raise ValueError("this is too loud")
        return recognise(**inputs)

    extract = model.speech.processor._extractor.__class__.__call__

    def make_loud(self: Any, audio: Any, **options: Any) -> Any:
        found = extract(self, audio, **options)
        if np.array_equal(audio, bad.audio):
            found["input_features"][0, 0] = 1e4
        return found

    monkeypatch.setattr(get_hf_model(llm).model, "forward", fail)
    monkeypatch.setattr(type(model.speech.processor._extractor), "__call__", make_loud)
    outputs = run(llm, model.spoken)
    assert outputs[1].error is not None
    assert "too loud" in str(outputs[1].error)
    others = [number for number in range(len(outputs)) if number != 1]
    assert get_wrong([outputs[n] for n in others], [model.spoken[n] for n in others]) == []
    assert_nothing_is_left(llm)


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"language": "en"}, "language"),
        ({"prompt": "Hello"}, "prompt"),
        ({"temperature": 0.5}, "temperature"),
        ({"task": "translate"}, "task"),
    ],
)
def test_options_that_the_model_can_not_take_are_refused(
    options: dict[str, Any], path: str, ctc_transducer_of: CtcTransducerOf
) -> None:
    model = ctc_transducer_of("parakeet_ctc")
    with pytest.raises(RequestError, match="this model") as refusal:
        model.transcribe([model.spoken[0].audio], **options)
    assert refusal.value.path == (path,)
    assert_nothing_is_left(model.llm)


@pytest.mark.parametrize("num_samples", [1, 300])
@pytest.mark.parametrize("family", ["wav2vec2", "parakeet_ctc"])
def test_audio_that_is_too_short_is_refused(
    family: str, num_samples: int, ctc_transducer_of: CtcTransducerOf
) -> None:
    model = ctc_transducer_of(family)
    with pytest.raises(RequestError, match="too short"):
        model.transcribe([make_audio(1.0, seed=1)[:num_samples]])


# ---- deliberate mistakes, which must be seen


def _swap_audios(monkeypatch: pytest.MonkeyPatch) -> None:
    start = CtcTransducerRunner._run

    def swap(self: CtcTransducerRunner, rows: Any, step: Any) -> Any:
        states = [state for _, state in rows]
        turned = [*states[1:], states[0]]
        return start(self, [(e, s) for (e, _), s in zip(rows, turned, strict=True)], step)

    monkeypatch.setattr(CtcTransducerRunner, "_run", swap)


def _forget_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    pad = CtcTransducerModel._pad

    def forget(self: CtcTransducerModel, items: Any) -> Any:
        return {name: tensor for name, tensor in pad(self, items).items() if name != MASK}

    monkeypatch.setattr(CtcTransducerModel, "_pad", forget)


def _walk_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    get_steps = ctc_transducer._Walk._get_steps
    monkeypatch.setattr(
        ctc_transducer._Walk, "_get_steps", lambda self, *given: get_steps(self, *given) + 1
    )


def in_turns(families: Sequence[str], mistake: Callable[..., None], first: int) -> list[Any]:
    """Return parameters of a test: every second family from `first` on is in every run."""
    chosen = families[first::2]
    return [
        pytest.param(family, mistake, marks=() if family in chosen else pytest.mark.slow)
        for family in families
    ]


@pytest.mark.check("controls")
@pytest.mark.parametrize(
    ("family", "mistake"),
    [
        *in_turns(FAMILIES, _swap_audios, 0),
        *in_turns([f for f in FAMILIES if f not in WITHOUT_PADDING], _forget_masks, 1),
        *((family, _walk_too_far) for family in TRANSDUCERS),
    ],
)
def test_mistakes_are_seen(
    family: str,
    mistake: Callable[[pytest.MonkeyPatch], None],
    ctc_transducer_of: CtcTransducerOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoken = ctc_transducer_of(family).spoken
    llm = make_engine(ctc_transducer_of(family).reference.directory)
    mistake(monkeypatch)
    assert get_wrong(run(llm, spoken), spoken)


@pytest.mark.parametrize("family", ["wav2vec2_layer", "hubert", "wavlm", "wav2vec2-bert"])
def test_a_model_that_ignores_its_mask_is_not_given_padding(
    family: str, ctc_transducer_of: CtcTransducerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoken = ctc_transducer_of(family).spoken
    _forget_masks(monkeypatch)
    llm = make_engine(ctc_transducer_of(family).reference.directory)
    sizes = note_batches(llm, monkeypatch)
    assert get_wrong(run(llm, spoken), spoken) == []
    assert all(len(set(batch)) == 1 for batch in sizes)


@pytest.mark.check("controls")
@pytest.mark.parametrize("family", [f for f in CTC if f != "sew"])  # its frames come in pairs
def test_tokens_that_are_not_collapsed_are_seen(
    family: str, ctc_transducer_of: CtcTransducerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ctc_transducer_of(family)
    monkeypatch.setattr(frames, "groupby", lambda ids: [(token_id, [token_id]) for token_id in ids])
    transcripts = model.transcribe([entry.audio for entry in model.spoken])
    assert [each.text for each in transcripts] != [entry.text.strip() for entry in model.spoken]


def test_the_scores_of_frames_are_compared(ctc_transducer_of: CtcTransducerOf) -> None:
    model = ctc_transducer_of("parakeet_ctc")
    (output,) = run(model.llm, model.spoken[:1])
    _, scores = read_rows(output)
    assert len(scores) == len(model.spoken[0].scores) > 10
    assert all(-4 < score < 0 for score in scores)
