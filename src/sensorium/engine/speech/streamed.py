"""Transcription of whole files by streaming models, such as Voxtral-Realtime."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from sensorium.engine.speech.audio import WholeAudio, WithAudioProcessor
from sensorium.multimodal.processing.streaming_audio import StreamingAudioProcessor
from sensorium.speech.options import SpeechOptions, check_audio_alone
from sensorium.speech.pieces import PieceText, transcribe_cuts
from sensorium.speech.whisper_tokens import SpeechTokenizer
from sensorium.speech.windows import Transcription, WindowRequest, WindowResult


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedModel(WithAudioProcessor):
    """A model that transcribes audio of any length as one text, without times."""

    processor: StreamingAudioProcessor
    tokenizer: SpeechTokenizer
    silent_ids: Collection[int]  # tokens that stand for no text
    can_translate: bool = False
    has_segments: bool = True
    has_words: bool = False

    def check(self, options: SpeechOptions) -> None:
        check_audio_alone(options)

    def start(self, audio: WholeAudio, options: SpeechOptions) -> Transcription:
        """Return the rules of one transcript: all audio is one window and one segment."""
        self.check(options)
        rate = self.processor.sampling_rate
        num_positions = audio.num_positions

        def make_request(start: int, end: int) -> WindowRequest:
            del start, end
            return WindowRequest(
                first_frame=0,
                num_frames=audio.num_frames,
                prompt_token_ids=self.processor.start_token_ids,
                max_tokens=num_positions,
                temperature=options.temperature or 0.0,
            )

        def read(result: WindowResult) -> PieceText:
            token_ids = result.token_ids
            kept = [i for i, token_id in enumerate(token_ids) if token_id not in self.silent_ids]
            text = self.tokenizer.decode(token_ids).strip()
            return PieceText(text=text, kept=kept, num_audio_tokens=num_positions)

        return transcribe_cuts(
            [(0, math.ceil(audio.duration_s * rate))],
            rate,
            make_request=make_request,
            read=read,
            tokenizer=self.tokenizer,
            options=options,
        )
