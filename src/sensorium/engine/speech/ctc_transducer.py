"""Transcription by models without a decoder, such as Parakeet and wav2vec2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from sensorium.engine.speech.audio import WholeAudio, WithAudioProcessor
from sensorium.models.ctc_transducer import get_blank_id, is_transducer
from sensorium.multimodal.processing.ctc_transducer import CtcTransducerProcessor
from sensorium.speech.frames import FrameRules, Head, transcribe_frames
from sensorium.speech.options import SpeechOptions, check_audio_alone
from sensorium.speech.windows import Transcription
from sensorium.types.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class CtcTransducerSpeech(WithAudioProcessor):
    """A model that finds tokens in the frames of audio, and takes nothing but audio."""

    processor: CtcTransducerProcessor
    rules: FrameRules
    can_translate: bool = False
    has_segments: bool = True
    has_words: bool = True

    def check(self, options: SpeechOptions) -> None:
        check_audio_alone(options)
        if options.temperature:
            raise RequestError(
                "this model does not sample, so its temperature is always 0: leave it out",
                path=("temperature",),
            )

    def start(self, audio: WholeAudio, options: SpeechOptions) -> Transcription:
        self.check(options)
        return transcribe_frames(
            audio.get_pieces(), self.rules, duration_s=audio.duration_s, options=options
        )


def read_ctc_transducer(
    processor: CtcTransducerProcessor, tokenizer: Any, config: PretrainedConfig
) -> CtcTransducerSpeech:
    def decode(token_ids: Sequence[int]) -> str:
        # Tokens are collapsed already: two equal ones were said twice.
        text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True, group_tokens=False)
        return text

    head: Head = "ctc"
    if is_transducer(config):
        head = "rnnt" if getattr(config, "durations", None) is None else "tdt"
    return CtcTransducerSpeech(
        processor=processor,
        rules=FrameRules(
            head=head,
            blank_id=get_blank_id(config),
            rate=processor.sampling_rate,
            samples_per_frame=processor.samples_per_frame,
            decode=decode,
        ),
    )
