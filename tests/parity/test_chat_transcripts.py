"""Chat models transcribe as `generate` does with the model's own prompt for a transcript."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from sensorium import LLM, SamplingParams
from sensorium.engine.speech.chat_models import ChatSpeechModel
from sensorium.multimodal.processing import item_worker
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.speech.options import SpeechOptions
from sensorium.speech.pieces import find_cuts
from sensorium.speech.transcript import Transcript
from sensorium.types.errors import RequestError
from tests.parity.cases import Audio, make_audio
from tests.support.engine import Trace, assert_nothing_is_left, make_llm
from tests.support.media import write_audio

RATE = 16_000
TinyModel = Callable[[str], str]
Inputs = Mapping[str, torch.Tensor]
GEMMA_FORM = (
    "\n\nFollow these specific instructions for formatting the answer:\n"
    "* Only output the transcription, with no newlines.\n"
    "* When transcribing numbers, write the digits, i.e. write 1.7 and not one point seven, and "
    "write 3 instead of three."
)


def ask(processor: Any, audio: Audio, text: str, *, system: str = "") -> Inputs:
    """Return what a processor makes of a chat with audio and a text."""
    content = [{"type": "audio"}, {"type": "text", "text": text}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    # As in `apply_chat_template`: a beginning that the template has written is not written again.
    has_bos = bool(processor.tokenizer.bos_token) and prompt.startswith(
        processor.tokenizer.bos_token
    )
    options = {"add_special_tokens": False} if has_bos else {}
    inputs: Inputs = processor(
        text=[prompt], audio=[audio], sampling_rate=RATE, return_tensors="pt", **options
    )
    return inputs


def ask_voxtral(processor: Any, audio: Audio, **options: Any) -> Inputs:
    inputs: Inputs = processor.apply_transcription_request(
        audio=[audio], model_id="any", sampling_rate=RATE, format=["wav"], **options
    )
    return inputs


# family -> options of a transcript, and the inputs of the model for a piece
QUESTIONS: dict[str, list[tuple[dict[str, Any], Callable[[Any, Audio], Inputs]]]] = {
    "qwen2_audio": [
        ({}, lambda p, s: ask(p, s, "Detect the language and recognize the speech:")),
        (
            {"language": "french"},
            lambda p, s: ask(p, s, "Detect the language and recognize the speech: <|fr|>"),
        ),
    ],
    "qwen2_5_omni": [
        (
            {"language": "de"},
            lambda p, s: ask(
                p,
                s,
                "Transcribe the German audio into text.",
                system="You are a speech recognition model.",
            ),
        ),
        (
            {"task": "translate"},
            lambda p, s: ask(
                p,
                s,
                "Listen to the provided speech and produce a translation in English text.",
                system="You are a speech translation model.",
            ),
        ),
    ],
    "gemma4": [
        (
            {"language": "de"},
            lambda p, s: ask(
                p,
                s,
                "Transcribe the following speech segment in German into German text." + GEMMA_FORM,
            ),
        ),
    ],
    "audioflamingo3": [({}, lambda p, s: p.apply_transcription_request(s))],
    "voxtral": [
        ({}, ask_voxtral),
        ({"language": "fr"}, lambda p, s: ask_voxtral(p, s, language="fr")),
    ],
    "glmasr": [({}, lambda p, s: p.apply_transcription_request(s))],
    "qwen3_asr": [
        ({}, lambda p, s: p.apply_transcription_request(s)),
        (
            {"language": "en", "prompt": "the fox"},
            lambda p, s: p.apply_transcription_request(s, language="en", prompt="the fox"),
        ),
    ],
}
LONG_S = {"qwen2_audio": 7.5, "audioflamingo3": 7.5, "glmasr": 7.5}  # their windows have 3 or 4 s


def make_16_bit_audio(seconds: float, *, seed: int) -> Audio:
    """Make audio with samples that fit a WAV file of 16 bits, as Voxtral's processor writes."""
    return (np.round(make_audio(seconds, seed=seed) * 32767) / 32768).astype(np.float32)


class Model:
    """A tiny model in Transformers and in an engine."""

    def __init__(self, directory: str) -> None:
        self.llm = make_llm(directory, max_model_len=4096)
        self.processor = transformers.AutoProcessor.from_pretrained(directory)
        config = transformers.AutoConfig.from_pretrained(directory)
        model_class = getattr(transformers, config.architectures[0])
        self.model = model_class.from_pretrained(directory, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None

    def transcribe(self, audio: Any, **options: Any) -> Transcript:
        sampling = SamplingParams(ignore_eos=True)
        (transcript,) = self.llm.transcribe(audio, use_tqdm=False, sampling=sampling, **options)
        return transcript

    @torch.inference_mode()
    def generate(self, inputs: Inputs, num_tokens: int) -> list[int]:
        """Return greedy tokens past the end of the text, without special ones."""
        if hasattr(self.model.base_model, "rope_deltas"):
            self.model.base_model.rope_deltas = None  # left over from the last call
        output = self.model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
        answer = output[0, inputs["input_ids"].shape[1] :].tolist()
        assert len(answer) == num_tokens
        special_ids = self.processor.tokenizer.all_special_ids
        return [token_id for token_id in answer if token_id not in special_ids]


def get_max_tokens(num_samples: int) -> int:
    return max(32, -(-16 * num_samples // RATE))


@pytest.mark.parametrize("family", QUESTIONS)
def test_tokens_are_those_of_the_models_own_prompt(family: str, tiny_model: TinyModel) -> None:
    model = Model(tiny_model(family))
    speech = model.llm._speech
    assert isinstance(speech, ChatSpeechModel)
    audio = make_16_bit_audio(LONG_S.get(family, 2.5), seed=7)
    cuts = find_cuts(audio, RATE, max_s=speech.max_s)
    assert len(cuts) > 1 or family not in LONG_S
    for options, make_inputs in QUESTIONS[family]:
        transcript = model.transcribe((audio, RATE), **options)
        found = {segment.start: list(segment.token_ids) for segment in transcript.segments}
        num_audio_tokens = num_prompt_tokens = 0
        for start, end in cuts:
            inputs = make_inputs(model.processor, audio[start:end])
            expected = model.generate(inputs, get_max_tokens(end - start))
            assert found.get(start / RATE, []) == expected, (options, start)
            ids = inputs["input_ids"][0]
            num_audio_tokens += int((ids == model.model.config.audio_token_id).sum())
            num_prompt_tokens += len(ids)
        assert found
        usage = transcript.usage
        assert usage.num_audio_tokens == num_audio_tokens
        assert usage.num_text_tokens == num_prompt_tokens - num_audio_tokens
        assert usage.num_output_tokens == sum(get_max_tokens(end - start) for start, end in cuts)
    assert_nothing_is_left(model.llm)


@pytest.mark.slow
def test_long_audio_is_transcribed_in_pieces_of_half_a_minute(tiny_model: TinyModel) -> None:
    model = Model(tiny_model("voxtral"))
    audio = make_16_bit_audio(40.0, seed=3)
    quiet = slice(int(22.9 * RATE), int(23.4 * RATE))
    audio[quiet] = 0.0
    transcript = model.transcribe((audio, RATE))
    assert [(segment.start, segment.end) for segment in transcript.segments] == [
        (0.0, pytest.approx(23.15, abs=0.25)),
        (transcript.segments[0].end, 40.0),
    ]
    joined = "".join(segment.text for segment in transcript.segments)
    assert transcript.text == joined
    for segment in transcript.segments:
        start, end = round(segment.start * RATE), round(segment.end * RATE)
        inputs = ask_voxtral(model.processor, audio[start:end])
        assert list(segment.token_ids) == model.generate(inputs, get_max_tokens(end - start))


class Counter:
    """Counts since the last look: files decoded, and audio items processed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._counts = {"decoded": 0, "processed": 0}
        self._count(monkeypatch, item_worker, "decode", "decoded")
        self._count(monkeypatch, MultiModalProcessor, "process_item", "processed")

    def _count(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, key: str) -> None:
        function = getattr(owner, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            self._counts[key] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, count)

    def take(self) -> dict[str, int]:
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return counts


@pytest.fixture
def llm(tiny_model: TinyModel) -> LLM:
    return make_llm(tiny_model("qwen2_audio"), max_model_len=4096)


def test_the_same_file_again_needs_no_work_but_the_text(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_audio(make_audio(7.5, seed=1), "WAV", "PCM_16")
    options: dict[str, Any] = {"use_tqdm": False, "needs_logprobs": True}
    llm.transcribe(write_audio(make_audio(7.5, seed=2), "WAV", "PCM_16"), use_tqdm=False)
    counter = Counter(monkeypatch)  # now the window of the processor is known
    first = llm.transcribe(file, **options)
    assert counter.take() == {"decoded": 1, "processed": len(first[0].segments)}
    trace = Trace(llm)
    llm.media_parts.readonly.cache.clear_cache()  # the samples are not needed
    assert llm.transcribe(file, **options) == first
    assert counter.take() == {"decoded": 0, "processed": 0}
    assert trace.num_encoded_items == 0
    translated = llm.transcribe(file, use_tqdm=False, task="translate")
    assert translated[0].task == "translate"
    assert counter.take() == {"decoded": 0, "processed": 0}
    assert trace.num_encoded_items == 0
    assert_nothing_is_left(llm)


def test_pieces_that_no_cache_has_are_processed_again(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_audio(make_audio(7.5, seed=1), "WAV", "PCM_16")
    first = llm.transcribe(file, use_tqdm=False)
    counter = Counter(monkeypatch)
    llm.media_parts.caches.sender.clear_cache()
    llm.media_parts.readonly.cache.clear_cache()
    assert llm.transcribe(file, use_tqdm=False) == first
    assert counter.take() == {"decoded": 1, "processed": len(first[0].segments)}
    assert_nothing_is_left(llm)


@pytest.mark.parametrize(
    ("family", "options", "path", "words"),
    [
        ("qwen2_audio", {"prompt": "names"}, ("prompt",), "takes no prompt"),
        ("qwen2_audio", {"language": "klingon"}, ("language",), "klingon"),
        ("qwen2_5_omni", {"prompt": "<|AUDIO|>"}, ("prompt",), "stands for media"),
        ("voxtral", {"prompt": "names"}, ("prompt",), "takes no prompt"),
        ("voxtral", {"language": "yue"}, ("language",), "refuses"),
        ("glmasr", {"language": "en"}, ("language",), "finds the language itself"),
        ("glmasr", {"task": "translate"}, ("task",), "does not translate"),
    ],
)
def test_options_that_a_model_can_not_take_are_refused(
    family: str,
    options: dict[str, Any],
    path: tuple[str, ...],
    words: str,
    tiny_model: TinyModel,
) -> None:
    llm = make_llm(tiny_model(family), max_model_len=4096)
    with pytest.raises(RequestError, match=words) as raised:
        llm.transcribe((make_audio(1.0, seed=1), RATE), use_tqdm=False, **options)
    assert raised.value.path == path
    assert_nothing_is_left(llm)
    if "task" not in options:  # a live session checks before it has any audio
        assert llm._speech is not None
        with pytest.raises(RequestError, match=words) as raised:
            llm._speech.check(SpeechOptions(**options))
        assert raised.value.path == path


def test_models_without_audio_do_not_transcribe(tiny_model: TinyModel) -> None:
    llm = make_llm(tiny_model("llava"))
    with pytest.raises(RequestError, match="transcribe"):
        llm.transcribe((make_audio(1.0, seed=1), RATE), use_tqdm=False)
