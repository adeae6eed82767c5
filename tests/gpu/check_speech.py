"""Speech models on the device: tokens as in Transformers, transcripts as on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sensorium import LLM
from sensorium.engine.speech.models import WhisperModel
from sensorium.speech.whisper_tokens import WhisperSettings
from tests.parity import ctc_transducer_reference
from tests.parity.cases import make_audio
from tests.parity.speaking import SpeechReference, get_wrong, make_engine, run
from tests.support.engine import assert_nothing_is_left, make_llm

from .setting import get_device, get_directory, use_exact_float32

SPEECH_SETTINGS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "budget 7": {"max_num_batched_tokens": 7},
    "eager": {"enforce_eager": True},
}
_GREEDY = WhisperSettings(
    temperatures=(0.0,),
    max_compression_ratio=None,
    min_avg_logprob=None,
    max_no_speech_prob=None,
)


def check_speech_tokens(family: str, setting: str) -> str:
    use_exact_float32()
    directory, device = get_directory(family), get_device()
    reference = SpeechReference(family, directory, device)
    llm = make_engine(directory, device=device, **SPEECH_SETTINGS[setting])
    for state in ("cold", "cached"):
        wrong = get_wrong(run(llm, reference.spoken), reference.spoken)
        assert not wrong, f"{state}: recordings {wrong}"
    assert_nothing_is_left(llm)
    return f"{len(reference.spoken)} recordings; graphs: {llm.config.graphs}"


def check_transcripts() -> str:
    """Compare texts and times of words with those that the CPU computes."""
    use_exact_float32()
    audios = [(make_audio(seconds, seed=index), 16_000) for index, seconds in enumerate((3.0, 7.5))]
    directory = get_directory("whisper")
    ours, theirs = (_transcribe(directory, device, audios) for device in (get_device(), "cpu"))
    assert [each.text for each in ours] == [each.text for each in theirs]
    words = [
        [word for transcript in transcripts for each in transcript.segments for word in each.words]
        for transcripts in (ours, theirs)
    ]
    assert words[0] == words[1]
    return f"{len(words[0])} words"


def check_ctc_transducer(family: str) -> str:
    """Compare frames and tokens with Transformers on the device, and long audio with the CPU."""
    use_exact_float32()
    directory, device = get_directory(family), get_device()
    reference = ctc_transducer_reference.CtcTransducerReference(directory, device)
    llm = ctc_transducer_reference.make_engine(directory, device=device)
    for state in ("cold", "cached"):
        wrong = ctc_transducer_reference.get_wrong(
            ctc_transducer_reference.run(llm, reference.spoken), reference.spoken
        )
        assert not wrong, f"{state}: recordings {wrong}"
    audios = [(make_audio(seconds, seed=70), 16_000) for seconds in (33.0, 2.0)]
    ours, theirs = (
        engine.transcribe(audios, use_tqdm=False, needs_words=True)
        for engine in (llm, ctc_transducer_reference.make_engine(directory))
    )
    assert [each.text for each in ours] == [each.text for each in theirs]
    words = [[w for t in ts for s in t.segments for w in s.words] for ts in (ours, theirs)]
    assert words[0] == words[1]
    assert_nothing_is_left(llm)
    return f"{len(reference.spoken)} recordings, {len(words[0])} words"


def _transcribe(directory: str, device: str, audios: Any) -> Any:
    llm: LLM = make_llm(directory, max_model_len=None, device=device)
    assert isinstance(llm._speech, WhisperModel)
    llm._speech = replace(llm._speech, settings=_GREEDY)
    return llm.transcribe(audios, use_tqdm=False, language="de", needs_words=True)
