"""Recognisers: the frames, tokens, texts and times of Transformers, however sounds are batched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sensorium import LLM
from sensorium.engine.speech.recognisers import RecogniserModel
from sensorium.models import recogniser
from sensorium.models.recogniser import MASK, RecogniserAdapter
from sensorium.multimodal.processing.recognisers import RecogniserProcessor
from sensorium.speech import frames
from sensorium.speech.frames import read_table
from sensorium.types.errors import RequestError
from sensorium.worker.recogniser_runner import RecogniserRunner
from tests.parity.cases import make_audio
from tests.parity.recognising import (
    CTC,
    FAMILIES,
    LETTERS,
    RATE,
    TRANSDUCERS,
    WITHOUT_PADDING,
    Heard,
    RecogniserReference,
    get_wrong,
    make_endless,
    make_engine,
    read_rows,
    run,
)
from tests.support.engine import Trace, assert_nothing_is_left, get_adapter
from tests.support.media import write_sound

pytestmark = pytest.mark.filterwarnings(
    "ignore:Support for mismatched key_padding_mask:UserWarning",  # in WavLM, also on its own
)
TinyModel = Callable[[str], str]


class Recogniser:
    """A tiny recogniser in Transformers and in an engine."""

    def __init__(self, directory: str) -> None:
        self.reference = RecogniserReference(directory)
        self.llm = make_engine(directory)

    @property
    def heard(self) -> list[Heard]:
        return self.reference.heard

    @property
    def speech(self) -> RecogniserModel:
        speech = self.llm._speech
        assert isinstance(speech, RecogniserModel)
        return speech

    def transcribe(self, sounds: Sequence[Any], **options: Any) -> list[Any]:
        return self.llm.transcribe([(sound, RATE) for sound in sounds], use_tqdm=False, **options)


RecogniserOf = Callable[[str], Recogniser]


@pytest.fixture(scope="session")
def recogniser_of(tiny_model: TinyModel) -> RecogniserOf:
    known: dict[str, Recogniser] = {}

    def get(family: str) -> Recogniser:
        if family not in known:
            known[family] = Recogniser(tiny_model(family))
        return known[family]

    return get


@pytest.mark.slow
def test_the_reference_is_sensitive(recogniser_of: RecogniserOf) -> None:
    """Sounds have different answers, and all of a second or more have several tokens."""
    for family in FAMILIES:
        heard = recogniser_of(family).heard
        assert len({tuple(entry.rows) for entry in heard}) == len(heard)
        assert all(len(set(entry.rows)) > 2 for entry in heard if len(entry.sound) >= RATE), family


@pytest.mark.check("alone")
@pytest.mark.parametrize("family", FAMILIES)
def test_frames_of_one_sound_at_a_time(family: str, recogniser_of: RecogniserOf) -> None:
    heard = recogniser_of(family).heard
    llm = make_engine(recogniser_of(family).reference.directory, max_num_seqs=1)
    trace = Trace(llm)
    assert get_wrong(run(llm, heard), heard) == []
    assert trace.most_requests_in_a_step == 1
    assert_nothing_is_left(llm)


@pytest.mark.check("budgets")
@pytest.mark.parametrize("family", FAMILIES)
def test_sounds_of_different_lengths_together(
    family: str, recogniser_of: RecogniserOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = recogniser_of(family).heard
    llm = make_engine(recogniser_of(family).reference.directory)
    trace, sizes = Trace(llm), note_batches(llm, monkeypatch)
    assert get_wrong(run(llm, heard), heard) == []
    assert trace.most_requests_in_a_step == len(heard)
    assert max(map(len, sizes)) > 1
    has_padding = any(len(set(batch)) > 1 for batch in sizes)
    assert has_padding is (family not in WITHOUT_PADDING)
    assert_nothing_is_left(llm)


def note_batches(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list that gets the lengths of the sounds in each batch of the encoder."""
    adapter = get_adapter(llm)
    encode, batches = adapter.encode, []

    def note(modality: str, items: Sequence[Any], num_embeds: Sequence[int]) -> Any:
        batches.append([item[adapter._input_name].shape[1] for item in items])
        return encode(modality, items, num_embeds)

    monkeypatch.setattr(adapter, "encode", note)
    return batches


@pytest.mark.check("texts")
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_those_of_transformers(family: str, recogniser_of: RecogniserOf) -> None:
    model = recogniser_of(family)
    transcripts = model.transcribe([entry.sound for entry in model.heard])
    assert [each.text for each in transcripts] == [entry.text.strip() for entry in model.heard]
    for transcript in transcripts:
        assert transcript.usage.num_output_tokens >= len(transcript.text.split()) > 0
        assert all(segment.avg_logprob < 0 for segment in transcript.segments)
    assert_nothing_is_left(model.llm)


@pytest.mark.check("times")
@pytest.mark.parametrize("family", LETTERS)
def test_words_have_the_times_of_transformers(family: str, recogniser_of: RecogniserOf) -> None:
    model = recogniser_of(family)
    transcripts = model.transcribe([entry.sound for entry in model.heard], needs_words=True)
    for transcript, entry in zip(transcripts, model.heard, strict=True):
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
        times = [min(time, len(entry.sound) / RATE) for _, *both in expected for time in both]
        assert found == pytest.approx(times)


@pytest.mark.check("times")
@pytest.mark.parametrize("family", TRANSDUCERS)
def test_tokens_have_the_times_of_transformers(family: str, recogniser_of: RecogniserOf) -> None:
    model = recogniser_of(family)
    frame_s = model.speech.rules.samples_per_frame / RATE
    outputs = run(model.llm, model.heard)
    num_marks = 0
    for output, entry in zip(outputs, model.heard, strict=True):
        assert output.speech is not None
        table = np.frombuffer(output.speech.frames or b"", np.float32).reshape(output.speech.shape)
        tokens = read_table(table, model.speech.rules)
        times = [(token.start * frame_s, token.end * frame_s) for token in tokens]
        expected = model.reference.get_times(entry.sound, model.speech.rules.head)
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
    reference = RecogniserReference(directory)
    heard = [reference.hear(make_audio(seconds, seed=3)) for seconds in (1.0, 0.7)]
    assert get_wrong(run(make_engine(directory), heard), heard) == []
    if limits:
        assert {len(entry.rows) for entry in heard} == {7 if "max_new_tokens" in limits else 6}
    else:  # a sound of 0.7 s has nine frames, each with room for ten tokens
        assert len(heard[1].rows) == 89


@pytest.mark.parametrize("family", ["wav2vec2", "parakeet_ctc", "parakeet_tdt"])
def test_a_long_sound_is_heard_in_pieces(family: str, recogniser_of: RecogniserOf) -> None:
    model = recogniser_of(family)
    sound = make_audio(40.0, seed=90)
    sound[20 * RATE + 50_000 :][:RATE] = 0  # where it is cut, at 23.1 to 24.1 s
    perceived = model.speech.processor.process(sound)[0]
    pieces = [tuple(row[:2]) for row in perceived["pieces"].tolist()]
    assert len(pieces) == 2
    assert 23.1 < pieces[0][1] / RATE < 24.2
    (transcript,) = model.transcribe([sound], needs_words=True)
    texts = [model.reference.hear(sound[start:end]).text.strip() for start, end in pieces]
    assert transcript.text == " ".join(texts)
    times = [time for each in transcript.segments for time in (each.start, each.end)]
    assert times == sorted(times)
    assert 24 < times[-1] <= transcript.duration_s
    words = [word.text for segment in transcript.segments for word in segment.words]
    assert words == transcript.text.split()


@pytest.mark.check("encoder cache")
@pytest.mark.parametrize("family", ["wav2vec2", "parakeet_tdt"])
def test_the_same_sound_again_computes_nothing(
    family: str, recogniser_of: RecogniserOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_engine(recogniser_of(family).reference.directory)
    files = [write_sound(make_audio(s, seed=91), "WAV", "PCM_16") for s in (33.0, 2.0)]
    first = llm.transcribe(files, use_tqdm=False)
    processed: list[int] = []
    monkeypatch.setattr(RecogniserProcessor, "process", lambda *_: processed.append(1))
    trace, batches = Trace(llm), note_batches(llm, monkeypatch)
    assert llm.transcribe(files, use_tqdm=False) == first
    words = llm.transcribe(files, use_tqdm=False, needs_words=True)
    assert all(segment.words for each in words for segment in each.segments)
    assert len(trace.requests) == 6
    assert trace.num_encoded_items == 0
    assert (processed, batches) == ([], [])


def test_a_sound_that_fails_costs_no_other_sound(
    recogniser_of: RecogniserOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = recogniser_of("parakeet_ctc")
    llm = make_engine(model.reference.directory)
    recognise = get_adapter(llm).model.forward
    bad = model.heard[1]

    def fail(**inputs: Any) -> Any:
        # The bad sound is as long as the last one, but louder.
        if (inputs["input_features"].abs().amax((1, 2)) > 1e3).any():
            raise ValueError("this is too loud")
        return recognise(**inputs)

    extract = model.speech.processor._extractor.__class__.__call__

    def make_loud(self: Any, sound: Any, **options: Any) -> Any:
        found = extract(self, sound, **options)
        if np.array_equal(sound, bad.sound):
            found["input_features"][0, 0] = 1e4
        return found

    monkeypatch.setattr(get_adapter(llm).model, "forward", fail)
    monkeypatch.setattr(type(model.speech.processor._extractor), "__call__", make_loud)
    outputs = run(llm, model.heard)
    assert outputs[1].error is not None
    assert "too loud" in str(outputs[1].error)
    others = [number for number in range(len(outputs)) if number != 1]
    assert get_wrong([outputs[n] for n in others], [model.heard[n] for n in others]) == []
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
def test_what_a_recogniser_can_not_do_is_refused(
    options: dict[str, Any], path: str, recogniser_of: RecogniserOf
) -> None:
    model = recogniser_of("parakeet_ctc")
    with pytest.raises(RequestError, match="this model") as refusal:
        model.transcribe([model.heard[0].sound], **options)
    assert refusal.value.path == (path,)
    assert_nothing_is_left(model.llm)


@pytest.mark.parametrize("num_samples", [1, 300])
@pytest.mark.parametrize("family", ["wav2vec2", "parakeet_ctc"])
def test_sounds_that_are_too_short_are_refused(
    family: str, num_samples: int, recogniser_of: RecogniserOf
) -> None:
    model = recogniser_of(family)
    with pytest.raises(RequestError, match="too short"):
        model.transcribe([make_audio(1.0, seed=1)[:num_samples]])


# ---- deliberate mistakes, which must be seen


def _swap_sounds(monkeypatch: pytest.MonkeyPatch) -> None:
    start = RecogniserRunner._run

    def swap(self: RecogniserRunner, rows: Any, step: Any) -> Any:
        states = [state for _, state in rows]
        turned = [*states[1:], states[0]]
        return start(self, [(e, s) for (e, _), s in zip(rows, turned, strict=True)], step)

    monkeypatch.setattr(RecogniserRunner, "_run", swap)


def _forget_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    pad = RecogniserAdapter._pad

    def forget(self: RecogniserAdapter, items: Any) -> Any:
        return {name: tensor for name, tensor in pad(self, items).items() if name != MASK}

    monkeypatch.setattr(RecogniserAdapter, "_pad", forget)


def _walk_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    get_steps = recogniser._Walk._get_steps
    monkeypatch.setattr(
        recogniser._Walk, "_get_steps", lambda self, *given: get_steps(self, *given) + 1
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
        *in_turns(FAMILIES, _swap_sounds, 0),
        *in_turns([f for f in FAMILIES if f not in WITHOUT_PADDING], _forget_masks, 1),
        *((family, _walk_too_far) for family in TRANSDUCERS),
    ],
)
def test_mistakes_are_seen(
    family: str,
    mistake: Callable[[pytest.MonkeyPatch], None],
    recogniser_of: RecogniserOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard = recogniser_of(family).heard
    llm = make_engine(recogniser_of(family).reference.directory)
    mistake(monkeypatch)
    assert get_wrong(run(llm, heard), heard)


@pytest.mark.parametrize("family", ["wav2vec2_layer", "hubert", "wavlm", "wav2vec2-bert"])
def test_a_model_that_does_not_heed_its_mask_is_not_given_padding(
    family: str, recogniser_of: RecogniserOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = recogniser_of(family).heard
    _forget_masks(monkeypatch)
    llm = make_engine(recogniser_of(family).reference.directory)
    sizes = note_batches(llm, monkeypatch)
    assert get_wrong(run(llm, heard), heard) == []
    assert all(len(set(batch)) == 1 for batch in sizes)


@pytest.mark.check("controls")
@pytest.mark.parametrize("family", [f for f in CTC if f != "sew"])  # its frames come in pairs
def test_tokens_that_are_not_collapsed_are_seen(
    family: str, recogniser_of: RecogniserOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = recogniser_of(family)
    monkeypatch.setattr(frames, "groupby", lambda ids: [(token_id, [token_id]) for token_id in ids])
    transcripts = model.transcribe([entry.sound for entry in model.heard])
    assert [each.text for each in transcripts] != [entry.text.strip() for entry in model.heard]


def test_the_scores_of_frames_are_compared(recogniser_of: RecogniserOf) -> None:
    model = recogniser_of("parakeet_ctc")
    (output,) = run(model.llm, model.heard[:1])
    _, scores = read_rows(output)
    assert len(scores) == len(model.heard[0].scores) > 10
    assert all(-4 < score < 0 for score in scores)
