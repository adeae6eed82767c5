"""Speech models: what each of them can transcribe, and by which rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol, TypeVar

from sensorium.checkpoints.files import read_json
from sensorium.engine.assembly.frontend import Frontend
from sensorium.engine.speech.audio import AudioSource, PromptScope, WholeAudio, WithAudioProcessor
from sensorium.engine.speech.chat_models import read_chat_model
from sensorium.engine.speech.ctc_transducer import read_ctc_transducer
from sensorium.engine.speech.streamed import StreamedModel
from sensorium.models.encoder_decoder import WINDOW_S
from sensorium.models.generation_config import load_bans
from sensorium.multimodal.media import MediaItem
from sensorium.multimodal.pipeline import MediaPipeline
from sensorium.multimodal.processing.audio import AudioProcessor
from sensorium.multimodal.processing.ctc_transducer import CtcTransducerProcessor
from sensorium.multimodal.processing.streaming_audio import StreamingAudioProcessor
from sensorium.speech.languages import NAMES, find_code
from sensorium.speech.options import SpeechOptions
from sensorium.speech.pieces import transcribe_pieces
from sensorium.speech.whisper import encode_prompt, transcribe_whisper
from sensorium.speech.whisper_tokens import (
    WhisperSettings,
    WhisperTokens,
    read_whisper_settings,
    read_whisper_tokens,
)
from sensorium.speech.windows import Transcription
from sensorium.types.errors import RequestError
from sensorium.types.model_kind import PROMPT_TASKS, ModelKind, Task
from sensorium.utils.pausing import Pausing

_Audio = TypeVar("_Audio", bound=AudioSource)


class TextTokens:
    """A `SpeechTokenizer` over a tokenizer of Transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: dict[str, int] = tokenizer.get_vocab()

    def encode(self, text: str) -> Sequence[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def get_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; those of a character may be spread over several tokens."""
        token = str(self._tokenizer.convert_ids_to_tokens(token_id))
        table = _make_byte_table()
        if all(character in table for character in token):
            return bytes(table[character] for character in token)
        return self.decode([token_id]).encode()

    def get_id(self, token: str) -> int | None:
        return self._vocabulary.get(token)


@cache
def _make_byte_table() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for."""
    # Bytes that Latin-1 prints stand for themselves. The other bytes have characters from 256 on.
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printed]
    table = {chr(byte): byte for byte in printed}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


class SpeechModel(Protocol[_Audio]):
    """A model that transcribes: what it can do, and the rules by which it does so."""

    @property
    def can_translate(self) -> bool: ...

    @property
    def has_segments(self) -> bool: ...

    @property
    def has_words(self) -> bool: ...

    def open_pausing(
        self,
        item: MediaItem,
        *,
        pipeline: MediaPipeline,
        scope: PromptScope,
        cancelled: Future[None] | None = None,
    ) -> Pausing[_Audio]:
        """Return audio that is ready to be transcribed. The caller has to release it.

        `pipeline` is the readonly one. Raise a `RequestError` if the audio can't be decoded.
        """
        ...

    def check(self, options: SpeechOptions) -> None:
        """Raise a `RequestError` if the model can't do what the options ask for."""
        ...

    def start(self, audio: _Audio, options: SpeechOptions) -> Transcription:
        """Return the rules of one transcript. Raise a `RequestError` as `check` does."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperModel(WithAudioProcessor):
    """A Whisper model: its audio processor, its tokens and its settings."""

    processor: AudioProcessor
    tokenizer: TextTokens
    tokens: WhisperTokens
    settings: WhisperSettings
    has_segments: bool = True
    has_words: bool = True

    @property
    def can_translate(self) -> bool:
        return "translate" in self.tokens.task_ids

    def check(self, options: SpeechOptions) -> None:
        self.tokens.check_task(options.task)
        if options.language is not None:
            self.tokens.find_language(options.language)
        encode_prompt(options.prompt, self.tokens, self.tokenizer)

    def start(self, audio: WholeAudio, options: SpeechOptions) -> Transcription:
        return transcribe_whisper(
            self.tokens,
            self.tokenizer,
            num_frames=audio.num_frames,
            duration_s=audio.duration_s,
            options=options,
            settings=self.settings,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceModel(WithAudioProcessor):
    """A model that transcribes one short clip at a time, such as Moonshine. Times are coarse."""

    processor: AudioProcessor
    tokenizer: TextTokens
    end_ids: frozenset[int]
    max_positions: int  # of the decoder
    can_translate: bool = False
    has_segments: bool = True
    has_words: bool = False

    def check(self, options: SpeechOptions) -> None:
        if options.prompt:
            raise RequestError("this model takes no prompt: leave it out", path=("prompt",))
        if options.language is not None and find_code(options.language) not in NAMES:
            reason = f"{options.language[:50]!r} is no known language"
            raise RequestError(reason, path=("language",))

    def start(self, audio: WholeAudio, options: SpeechOptions) -> Transcription:
        self.check(options)
        if options.language is not None:
            options = replace(options, language=find_code(options.language))
        return transcribe_pieces(
            audio.get_samples(),
            self.processor.sampling_rate,
            max_s=WINDOW_S,
            prompt_token_ids=self.processor.start_token_ids,
            end_ids=self.end_ids,
            max_positions=self.max_positions,
            tokenizer=self.tokenizer,
            options=options,
        )


def find_tasks(kind: ModelKind, speech: SpeechModel[Any] | None) -> frozenset[Task]:
    """Return the tasks that a model can do; `speech` is the result of `read_speech_model`."""
    tasks: set[Task] = set(PROMPT_TASKS) if kind.takes_prompts else set()
    if speech is not None:
        tasks |= {"transcription", "realtime"}
        if speech.can_translate:
            tasks.add("translation")
    return frozenset(tasks)


def read_speech_model(
    frontend: Frontend, *, chat_template: str | None = None
) -> SpeechModel[Any] | None:
    """Return how a model transcribes, or `None` if it can't; `chat_template` replaces its own."""
    processor, config = frontend.processor, frontend.checkpoint.hf_config
    directory = frontend.checkpoint.directory
    if isinstance(processor.outside_audio, CtcTransducerProcessor):
        return read_ctc_transducer(processor.outside_audio, processor.tokenizer, config)
    tokenizer = TextTokens(processor.tokenizer)
    if processor.outside_audio is None:
        return read_chat_model(
            processor,
            tokenizer,
            model_type=config.model_type,
            folder=directory.name,
            chat_template=chat_template,
        )
    if isinstance(processor.outside_audio, StreamingAudioProcessor):
        return StreamedModel(
            processor=processor.outside_audio,
            tokenizer=tokenizer,
            silent_ids=frozenset(processor.tokenizer.all_special_ids),
        )
    generation: Mapping[str, Any] = read_json(directory / "generation_config.json")
    if config.model_type == "whisper":
        return WhisperModel(
            processor=processor.outside_audio,
            tokenizer=tokenizer,
            tokens=read_whisper_tokens(
                generation, config.to_dict(), tokenizer, load_bans(str(directory))
            ),
            # An old checkpoint has the lengths of texts in its config.
            settings=read_whisper_settings(generation or config.to_dict()),
        )
    end = generation.get("eos_token_id", config.eos_token_id)
    return PieceModel(
        processor=processor.outside_audio,
        tokenizer=tokenizer,
        end_ids=frozenset(end if isinstance(end, list) else [end]),
        max_positions=config.max_position_embeddings,
    )
