"""Transcripts by chat models: each piece of the audio is a prompt of the normal engine.

A file is decoded once, by the pool that processes all media, and cut where it is quiet. A piece is
a media item; its uuid is the file's digest and the place of the piece. The table of a file's pieces
is kept, so that the same file is neither decoded nor cut again: its prompts only name the pieces,
which the caches have. If a cache has lost a piece, the file is decoded again.
"""

from __future__ import annotations

import logging
import math
import re
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock

from sensorium.engine.speech.audio import PromptScope
from sensorium.multimodal.media import MediaItem, ProcessingOptions
from sensorium.multimodal.pipeline import CachedItem, MediaPipeline
from sensorium.multimodal.processing.item_worker import SAMPLES
from sensorium.multimodal.processing.processor import MultiModalProcessor, tokenize
from sensorium.render.messages import ChatOptions
from sensorium.render.renderer import ChatRenderer
from sensorium.speech.instructions import Instruction, find_instruction
from sensorium.speech.options import SpeechOptions
from sensorium.speech.pieces import PieceText, transcribe_cuts
from sensorium.speech.whisper_tokens import SpeechTokenizer
from sensorium.speech.windows import Transcription, WindowRequest, WindowResult
from sensorium.types.errors import InvariantError, RequestError
from sensorium.types.request import TextPrompt
from sensorium.utils.lru import LruCache
from sensorium.utils.pausing import Pausing
from sensorium.utils.silences import Samples, find_cuts

logger = logging.getLogger(__name__)
_MODALITY = "audio"
_SCOPE = "pieces of transcripts"  # of uuids; clients' scopes are digests, and never equal it
_MAX_TABLES = 1024  # files with a table of pieces
_TOKENS_PER_S = 16  # more than any language needs; a text with more repeats itself
_MIN_TOKENS = 32
_TAG = re.compile(r"<\|[a-z]{2,3}\|>")  # the token of a language

Cuts = tuple[tuple[int, int], ...]  # the pieces [start, end) of the audio, in samples


class PiecedAudio:
    """Audio that is divided into pieces. It has samples only if it had to be decoded."""

    def __init__(
        self,
        item: MediaItem,
        digest: str,
        cuts: Cuts,
        *,
        rate: int,
        scope: PromptScope,
        pipeline: MediaPipeline,
        decoded: CachedItem | None,
    ) -> None:
        self.cuts = cuts
        self._item = item  # with its source
        self._digest = digest
        self._rate = rate
        self._scope = scope
        self._pipeline = pipeline
        self._decoded = decoded  # None: prompts name their pieces, which caches should have
        self._is_released = False
        self._lock = Lock()  # a thread may still decode when the audio is released

    @property
    def duration_s(self) -> float:
        return self.num_frames / self._rate

    @property
    def num_frames(self) -> int:
        return self.cuts[-1][1]

    def make_prompt(self, request: WindowRequest) -> TextPrompt:
        start, end = request.first_frame, request.first_frame + request.num_frames
        piece = None if self._decoded is None else get_samples(self._decoded)[start:end]
        prompt: TextPrompt = {
            "prompt_token_ids": request.prompt_token_ids,
            "multi_modal_data": {_MODALITY: [piece]},
            "multi_modal_uuids": {_MODALITY: [f"{self._digest}@{start}-{end}"]},
            "uuid_scope": _SCOPE,
            "priority": self._scope.priority,
        }
        if self._scope.cache_salt is not None:
            prompt["cache_salt"] = self._scope.cache_salt
        return prompt

    def restore_pausing(self, cancelled: Future[None] | None = None, /) -> Pausing[None]:
        if self._decoded is not None:
            return
        decoded = yield from decode_pausing(
            self._item, pipeline=self._pipeline, scope=self._scope, cancelled=cancelled
        )
        with self._lock:
            is_late = self._is_released
            self._decoded = None if is_late else decoded
        if is_late:
            self._pipeline.release([decoded])

    def release(self) -> None:
        with self._lock:
            decoded, self._decoded, self._is_released = self._decoded, None, True
        if decoded is not None:
            self._pipeline.release([decoded])


def decode_pausing(
    item: MediaItem,
    *,
    pipeline: MediaPipeline,
    scope: PromptScope,
    cancelled: Future[None] | None = None,
) -> Pausing[CachedItem]:
    """Decode audio under the limits of all media, and return it with its samples."""
    options = ProcessingOptions(cache_salt=scope.cache_salt, is_decoded_only=True)
    (decoded,) = yield from pipeline.process_pausing([item], options, cancelled=cancelled)
    return decoded


def get_samples(decoded: CachedItem) -> Samples:
    """Return the samples of decoded audio that was not released yet."""
    kwargs = decoded.handle.kwargs
    if kwargs is None:
        raise InvariantError(f"audio {decoded.handle.mm_hash} has no samples")
    samples: Samples = kwargs[SAMPLES].numpy()
    return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSpeechModel:
    """A chat model that is asked to transcribe. Its segments are pieces: times are coarse."""

    processor: MultiModalProcessor
    renderer: ChatRenderer
    tokenizer: SpeechTokenizer
    instruction: Instruction
    chat_template: str | None  # that of the operator, in place of the model's
    max_s: float  # the longest piece, in seconds
    has_segments: bool = True
    has_words: bool = False
    # (digest of a file, cache salt) -> its pieces
    tables: LruCache[tuple[str, str | None], Cuts] = field(
        default_factory=lambda: LruCache(_MAX_TABLES)
    )

    @property
    def can_translate(self) -> bool:
        return self.instruction.can_translate

    def open_pausing(
        self,
        item: MediaItem,
        *,
        pipeline: MediaPipeline,
        scope: PromptScope,
        cancelled: Future[None] | None = None,
    ) -> Pausing[PiecedAudio]:
        """Return audio with its pieces; decode it only if no table of its pieces is kept."""
        item, digest = yield from pipeline.identify_pausing(item, cancelled=cancelled)
        key, decoded, rate = (digest, scope.cache_salt), None, self._get_rate()
        cuts = self.tables.get(key)
        if cuts is None:
            decoded = yield from decode_pausing(
                item, pipeline=pipeline, scope=scope, cancelled=cancelled
            )
            cuts = tuple(find_cuts(get_samples(decoded), rate, max_s=self.max_s))
            self.tables.put(key, cuts)
        return PiecedAudio(
            item, digest, cuts, rate=rate, scope=scope, pipeline=pipeline, decoded=decoded
        )

    def check(self, options: SpeechOptions) -> None:
        self.render(options)

    def start(self, audio: PiecedAudio, options: SpeechOptions) -> Transcription:
        """Return the rules of a transcript. The prompt is rendered at the first step."""
        prompt_token_ids, rate = self.render(options), self._get_rate()

        def make_request(start: int, end: int) -> WindowRequest:
            num_tokens = math.ceil(_TOKENS_PER_S * (end - start) / rate)
            return WindowRequest(
                first_frame=start,
                num_frames=end - start,
                prompt_token_ids=prompt_token_ids,
                max_tokens=max(_MIN_TOKENS, num_tokens),
                temperature=options.temperature or 0.0,
            )

        transcript = yield from transcribe_cuts(
            audio.cuts,
            rate,
            make_request=make_request,
            read=self._read,
            tokenizer=self.tokenizer,
            options=options,
            language=self.instruction.find_language(options),
        )
        return transcript

    def _get_rate(self) -> int:
        rate = self.processor.sampling_rate
        if rate is None:
            raise InvariantError("a model that takes audio has no sampling rate")
        return rate

    def render(self, options: SpeechOptions) -> tuple[int, ...]:
        """Return the token ids of the prompt, with one marker for the audio.

        Raise a `RequestError` if the model does not support an option, or has no chat template.
        """
        if options.task == "transcribe":
            language = self.instruction.find_language(options)
            own = self.renderer.render_transcription(language)
            if own is not None:
                if options.prompt:
                    raise RequestError("this model takes no prompt: leave it out", ("prompt",))
                return tuple(own)
        messages = self.instruction.make_messages(options)
        is_begun = messages[-1]["role"] == "assistant"
        chat = ChatOptions(
            chat_template=self.chat_template,
            add_generation_prompt=not is_begun,
            continue_final_message=is_begun,
        )
        try:
            prompt = self.renderer.render(messages, chat)
        except RequestError as error:
            if not options.prompt:
                raise
            raise RequestError(str(error), path=("prompt",)) from error  # the fault is in it
        if prompt.text is None:
            return tuple(prompt.token_ids)
        ids, _ = tokenize(
            self.processor.tokenizer, prompt.text, add_special_tokens=prompt.add_special_tokens
        )
        return tuple(ids)

    def _read(self, result: WindowResult) -> PieceText:
        """Return the text of a piece, without the words that the model writes around it."""
        special_ids = set(self.processor.tokenizer.all_special_ids)
        token_ids = result.token_ids
        kept = [i for i, token_id in enumerate(token_ids) if token_id not in special_ids]
        answer = self._decode(result, kept)
        if token_ids and 0 not in kept:
            first = str(self.processor.tokenizer.convert_ids_to_tokens(token_ids[0]))
            answer = first + answer if _TAG.fullmatch(first) else answer
        reading = self.instruction.read(answer)
        if reading.text != answer.strip():  # leave out tokens before the text
            while kept[1:] and reading.text in self._decode(result, kept[1:]):
                kept = kept[1:]
        placeholders = self.processor.get_token_ids(_MODALITY)
        num_audio = sum(token_id in placeholders for token_id in result.prompt_token_ids)
        return PieceText(
            text=reading.text,
            kept=kept,
            language=reading.language,
            num_text_tokens=len(result.prompt_token_ids) - num_audio,
            num_audio_tokens=num_audio,
        )

    def _decode(self, result: WindowResult, kept: list[int]) -> str:
        return self.tokenizer.decode([result.token_ids[i] for i in kept])


def read_chat_model(
    processor: MultiModalProcessor,
    tokenizer: SpeechTokenizer,
    *,
    model_type: str,
    folder: str,
    chat_template: str | None,
) -> ChatSpeechModel | None:
    """Return a chat model, or `None` if it takes no audio or can't be asked to transcribe."""
    if _MODALITY not in processor.modalities:
        return None
    instruction = find_instruction(model_type, folder)
    model = ChatSpeechModel(
        processor=processor,
        renderer=ChatRenderer(processor),
        tokenizer=tokenizer,
        instruction=instruction,
        chat_template=chat_template,
        max_s=min(instruction.max_s, _get_window_s(processor)),
    )
    try:
        model.render(SpeechOptions())
    except RequestError as error:
        logger.info("this model takes audio, but can't be asked to transcribe: %s", error)
        return None
    return model


def _get_window_s(processor: MultiModalProcessor) -> float:
    """Return the window of the processor in seconds, or infinity if it does not name it."""
    extractor = getattr(processor.hf_processor, "feature_extractor", None)
    window_s = getattr(extractor, "chunk_length", None)
    return math.inf if window_s is None else float(window_s)
