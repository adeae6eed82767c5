"""What one model can transcribe, and by which rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sensorium.engine.build.frontend import Frontend
from sensorium.engine.speech.sounds import Sound
from sensorium.engine.speech.tokenizer import TextTokens
from sensorium.models.checkpoint import read_json
from sensorium.multimodal.processing.sounds import SoundProcessor
from sensorium.speech.options import SpeechOptions
from sensorium.speech.whisper import transcribe_whisper
from sensorium.speech.whisper_tokens import (
    WhisperSettings,
    WhisperTokens,
    read_whisper_settings,
    read_whisper_tokens,
)
from sensorium.speech.windows import Transcription


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechModel:
    """A Whisper: its processor for sounds, its tokens and its settings."""

    processor: SoundProcessor
    tokenizer: TextTokens
    tokens: WhisperTokens
    settings: WhisperSettings

    @property
    def can_translate(self) -> bool:
        return "translate" in self.tokens.task_ids

    has_segments = True
    has_words = True

    def start(self, sound: Sound, options: SpeechOptions) -> Transcription:
        """Return the rules of one transcript, as a generator.

        Raise a `RequestError` if the model can't do what the options ask for.
        """
        return transcribe_whisper(
            self.tokens,
            self.tokenizer,
            num_frames=sound.num_frames,
            duration_s=sound.duration_s,
            options=options,
            settings=self.settings,
        )


def read_speech_model(frontend: Frontend) -> SpeechModel | None:
    """Return what a model can transcribe, or `None` if it is no speech model."""
    processor, config = frontend.processor, frontend.checkpoint.hf_config
    if processor.beside is None or config.model_type != "whisper":
        return None
    generation: Mapping[str, Any] = read_json(
        frontend.checkpoint.directory / "generation_config.json"
    )
    tokenizer = TextTokens(processor.tokenizer)
    return SpeechModel(
        processor=processor.beside,
        tokenizer=tokenizer,
        tokens=read_whisper_tokens(generation, config.to_dict(), tokenizer),
        settings=read_whisper_settings(generation),
    )
