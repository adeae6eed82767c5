"""Whisper's rules: how audio of any length becomes a transcript, window by window.

A window has 30 seconds. The timestamps that the model has written decide where the next one begins.
The rules ask for windows and get tokens (see `windows`); they use no engine. With equal settings
they give the tokens and segments of Transformers' `WhisperForConditionalGeneration.generate`.

Invariants:
  1. Each window begins after the one before it, so the loop ends.
  2. Times lie in [0, duration] and never go back, whatever tokens the model writes.
  3. A segment is yielded once, after its window was accepted, with all it will ever have.
  4. The windows, and the tokens of all attempts at them, are bounded by the length of the audio.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from sensorium.speech.alignment import find_token_times
from sensorium.speech.options import SpeechOptions
from sensorium.speech.timestamps import Piece, cut_at_timestamps
from sensorium.speech.transcript import Segment, SpeechUsage, TokenScore, Transcript, Word
from sensorium.speech.whisper_tokens import (
    FRAMES_PER_POSITION,
    SpeechTokenizer,
    WhisperSettings,
    WhisperTokens,
)
from sensorium.speech.windows import Transcription, WindowRequest, WindowResult
from sensorium.speech.words import split_words
from sensorium.types.errors import InvariantError, RequestError
from sensorium.types.sampling import NO_BANS, TimestampRules

FRAMES_PER_S = 100
# A text that was decoded at this temperature or above is too uncertain to lead the next window.
_MAX_CARRIED_TEMPERATURE = 0.5
# The most tokens of a text that is sampled at random. Scripts such as Burmese have the most: about
# a token for each byte, so that a fast speaker says 40 of them in a second.
_LEAST_ROOM = 64
_ROOM_PER_S = 50
_NUM_ATTEMPTS = 6  # at all of the audio, each with all of that room
_WINDOW_TOKENS = 64  # encoding a window counts as so many tokens


def transcribe_whisper(
    tokens: WhisperTokens,
    tokenizer: SpeechTokenizer,
    *,
    num_frames: int,
    duration_s: float,
    options: SpeechOptions,
    settings: WhisperSettings | None = None,
) -> Transcription:
    """Return a generator that asks for windows of audio and returns the transcript.

    `num_frames` does not count padding. Raise `RequestError` at once if the model lacks the
    language or the task, or if the prompt has special tokens.
    """
    rules = _WhisperRules(
        tokens, tokenizer, num_frames, duration_s, options, settings or WhisperSettings()
    )
    return rules.transcribe()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """The tokens of a window at one temperature, and how good they are."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # without the end of the text
    logprobs: tuple[float, ...]  # of `token_ids`, and of the end of the text if there is one
    temperature: float
    no_speech_prob: float
    token_compression_ratio: float

    @property
    def has_end(self) -> bool:
        return len(self.logprobs) > len(self.token_ids)

    @property
    def avg_logprob(self) -> float:
        return sum(self.logprobs) / max(1, len(self.logprobs))


class _WhisperRules:
    """The state of one transcript: where the next window begins, and which text it continues."""

    def __init__(
        self,
        tokens: WhisperTokens,
        tokenizer: SpeechTokenizer,
        num_frames: int,
        duration_s: float,
        options: SpeechOptions,
        settings: WhisperSettings,
    ) -> None:
        tokens.check_task(options.task)
        self._tokens = tokens
        self._tokenizer = tokenizer
        self._num_frames = num_frames
        self._duration_s = duration_s
        self._options = options
        self._settings = settings
        self._temperatures = list_temperatures(settings.temperatures, options.temperature)
        given = options.language
        self._language = "en" if not tokens.is_multilingual else None
        if given is not None:
            self._language = tokens.find_language(given)
        # Times of words are found better in a text with timestamps, because the first word then
        # has a token before it.
        is_long = num_frames > tokens.num_window_frames
        self._has_timestamps = is_long or options.needs_segments or options.needs_words
        # Half of the decoder's positions are left for the text of the window.
        self._max_previous = tokens.max_positions // 2 - 1
        self._prompt = encode_prompt(options.prompt, tokens, tokenizer)[-self._max_previous :]
        self._previous = self._prompt  # the prompt and all tokens so far, at most `_max_previous`
        carries = options.carries_text
        self._carries_text = settings.condition_on_prev_tokens if carries is None else carries
        self._carries_previous = self._carries_text  # into the next window
        self._max_length = settings.max_length
        self._seek = 0  # the first frame of the next window
        self._last_end = 0.0  # of a segment, in seconds
        self._last_word_end = 0.0
        self._segments: list[Segment] = []
        self._num_windows = 0
        self._num_audio_tokens = 0
        self._num_output_tokens = 0

    def transcribe(self) -> Transcription:
        if self._language is None and self._num_frames > 0:
            yield from self._detect_language()
        while self._seek < self._num_frames:
            self._num_windows += 1
            self._num_audio_tokens += -(-self._num_window_frames // FRAMES_PER_POSITION)
            attempt = yield from self._decode_window()
            if self._is_silent(attempt):
                self._seek += self._num_window_frames
            else:
                yield from self._accept(attempt)
        return Transcript(
            text="".join(segment.text for segment in self._segments).strip(),
            task=self._options.task,
            language=self._language,
            duration_s=self._duration_s,
            segments=tuple(self._segments),
            usage=SpeechUsage(
                num_text_tokens=len(self._prompt),
                num_audio_tokens=self._num_audio_tokens,
                num_output_tokens=self._num_output_tokens,
            ),
        )

    @property
    def _num_window_frames(self) -> int:
        """Return the number of frames of the present window without padding."""
        return min(self._num_frames - self._seek, self._tokens.num_window_frames)

    def _detect_language(self) -> Generator[WindowRequest | Segment, WindowResult | None, None]:
        codes = {token_id: code for code, token_id in self._tokens.language_ids.items()}
        request = WindowRequest(
            first_frame=0,
            num_frames=self._num_window_frames,
            prompt_token_ids=(self._tokens.start_id,),
            max_tokens=1,
            bans=NO_BANS,  # a text may not have the tokens of languages, but this is no text
            allowed=tuple(sorted(codes)),
        )
        result = yield from _ask(request)
        if len(result.token_ids) != 1 or result.token_ids[0] not in codes:
            raise InvariantError(f"{result.token_ids} is not the token of a language.")
        self._language = codes[result.token_ids[0]]

    def _decode_window(self) -> Generator[WindowRequest | Segment, WindowResult | None, _Attempt]:
        """Return the first attempt that is good enough, or the one at the last temperature."""
        prompt = (*self._list_previous(), *self._list_first_tokens())
        room = self._get_room(prompt)
        for temperature in self._temperatures:
            # A text that is sampled at random continues where nothing is said any more. The
            # likeliest text has all the room, as in Transformers.
            most = count_room(self._num_window_frames) if temperature > 0 else room
            request = self._make_request(prompt, min(room, most), temperature)
            result = yield from _ask(request)
            attempt = self._read_attempt(request, result)
            if self._is_silent(attempt) or self._is_good(attempt) or self._has_spent_all:
                break
        self._carries_previous = (
            self._carries_text and attempt.temperature < _MAX_CARRIED_TEMPERATURE
        )
        return attempt

    @property
    def _has_spent_all(self) -> bool:
        """Return whether the work so far is too much for the audio up to the window's end.

        Then the window is not tried again, and the next one begins where it ends. Otherwise one
        second of audio could have fifty windows with six attempts each, if a model writes times of
        some hundredths of a second. One window's room is added for a text that never ends.
        """
        num_frames = self._seek + self._num_window_frames
        most = self._tokens.max_positions + _NUM_ATTEMPTS * count_room(num_frames)
        return self._num_output_tokens + _WINDOW_TOKENS * self._num_windows >= most

    def _get_room(self, prompt: tuple[int, ...]) -> int:
        """Return how many tokens the text of the next window may have, and update the limit."""
        room = self._tokens.max_positions - len(prompt)
        if self._settings.max_new_tokens is not None:
            return min(room, self._settings.max_new_tokens)
        if self._max_length is None:
            return room
        # Transformers adds the prompt of each window to the limit that the window before it had, at
        # most as much as text may be carried.
        self._max_length += min(len(prompt), self._max_previous)
        return max(1, min(room, self._max_length - len(prompt)))

    def _list_previous(self) -> tuple[int, ...]:
        """Return the tokens before the transcript of this window."""
        # Without the text of earlier windows, the caller's prompt alone, as in Transformers.
        previous = self._previous if self._carries_previous else self._prompt
        return (self._tokens.previous_id, *previous) if previous else ()

    def _list_first_tokens(self) -> list[int]:
        tokens = self._tokens
        first = [tokens.start_id]
        if tokens.is_multilingual and self._language is not None:
            first += [tokens.language_ids[self._language], tokens.task_ids[self._options.task]]
        return first if self._has_timestamps else [*first, tokens.no_timestamps_id]

    def _make_request(
        self, prompt: tuple[int, ...], max_tokens: int, temperature: float
    ) -> WindowRequest:
        tokens = self._tokens
        rules = TimestampRules(
            first_id=tokens.first_timestamp_id,
            no_timestamps_id=tokens.no_timestamps_id,
            eos_token_id=tokens.end_id,
            max_initial_index=tokens.max_initial_index,
        )
        return WindowRequest(
            first_frame=self._seek,
            num_frames=self._num_window_frames,
            prompt_token_ids=prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            bans=tokens.bans,
            timestamps=rules if self._has_timestamps else None,
            # Silence shows right after the start of the transcript.
            scored_token=(len(prompt) - len(self._list_first_tokens()), tokens.no_speech_id),
        )

    def _read_attempt(self, request: WindowRequest, result: WindowResult) -> _Attempt:
        if len(result.token_ids) != len(result.logprobs) or result.scored_probability is None:
            raise InvariantError("The result of a window lacks probabilities.")
        self._num_output_tokens += len(result.token_ids)
        has_end = result.token_ids[-1:] == (self._tokens.end_id,)
        return _Attempt(
            prompt_token_ids=request.prompt_token_ids,
            token_ids=result.token_ids[:-1] if has_end else result.token_ids,
            logprobs=result.logprobs,
            temperature=request.temperature,
            no_speech_prob=result.scored_probability,
            token_compression_ratio=compress_tokens(result.token_ids, self._tokens.vocab_size),
        )

    def _is_good(self, attempt: _Attempt) -> bool:
        most = self._settings.max_compression_ratio
        is_repeating = most is not None and attempt.token_compression_ratio > most
        return not is_repeating and not self._is_unlikely(attempt)

    def _is_unlikely(self, attempt: _Attempt) -> bool:
        least = self._settings.min_avg_logprob
        return least is not None and attempt.avg_logprob < least

    def _is_silent(self, attempt: _Attempt) -> bool:
        """Return whether nothing was said: silence is likely, and the text is not."""
        most = self._settings.max_no_speech_prob
        is_silence = most is not None and attempt.no_speech_prob > most
        # Without a threshold for the text, silence is enough.
        return is_silence and (self._settings.min_avg_logprob is None or self._is_unlikely(attempt))

    def _accept(
        self, attempt: _Attempt
    ) -> Generator[WindowRequest | Segment, WindowResult | None, None]:
        """Yield the segments of a window, and move to the next one."""
        pieces, num_frames = cut_at_timestamps(
            attempt.token_ids,
            first_timestamp_id=self._tokens.first_timestamp_id,
            num_frames=self._num_window_frames,
        )
        times: Sequence[float] = ()
        if self._options.needs_words and any(map(self._tokens.is_text, attempt.token_ids)):
            times = yield from self._find_times(attempt)
        text = self._decode(attempt.token_ids[: pieces[-1].stop])
        compression_ratio = compress_text(text)
        for piece in pieces:
            self._remember(attempt.token_ids[piece.start : piece.stop])
            segment = self._make_segment(attempt, piece, times, compression_ratio)
            if segment.text.strip():
                self._segments.append(segment)
                self._last_end = segment.end
                yield segment
        self._seek += self._num_window_frames if self._has_spent_all else num_frames

    def _find_times(
        self, attempt: _Attempt
    ) -> Generator[WindowRequest | Segment, WindowResult | None, Sequence[float]]:
        """Return when each token of a window ends, in seconds from the window's start."""
        # If the text has no end, its last token was never read. Like Transformers, it gets the
        # time of the one before. So the prompt is never longer than the decoder's positions.
        read = attempt.token_ids if attempt.has_end else attempt.token_ids[:-1]
        if not read:
            return [0.0] * len(attempt.token_ids)
        num_before = len(attempt.prompt_token_ids)
        request = WindowRequest(
            first_frame=self._seek,
            num_frames=self._num_window_frames,
            prompt_token_ids=(*attempt.prompt_token_ids, *read),
            max_tokens=1,
            needs_alignment=True,
        )
        result = yield from _ask(request)
        if result.alignment is None or result.alignment.shape[1] != num_before + len(read):
            raise InvariantError("The result of an alignment lacks the attention of its tokens.")
        times = find_token_times(
            result.alignment[:, num_before:],
            num_positions=self._num_window_frames // FRAMES_PER_POSITION,
            median_filter_width=self._tokens.median_filter_width,
        ).tolist()
        return times if attempt.has_end else [*times, times[-1]]

    def _remember(self, token_ids: tuple[int, ...]) -> None:
        """Add the tokens of a piece to those that the next window may be given."""
        first = self._tokens.first_timestamp_id
        if len(token_ids) > 2 and token_ids[-2] >= first:
            # The second timestamp of a pair begins the next piece, which repeats it.
            token_ids = token_ids[:-1]
        self._previous = (*self._previous, *token_ids)[-self._max_previous :]

    def _make_segment(
        self, attempt: _Attempt, piece: Piece, times: Sequence[float], compression_ratio: float
    ) -> Segment:
        token_ids = attempt.token_ids[piece.start : piece.stop]
        start = self._clamp((self._seek + piece.first_frame) / FRAMES_PER_S, self._last_end)
        return Segment(
            index=len(self._segments),
            seek=self._seek,
            start=start,
            end=self._clamp((self._seek + piece.last_frame) / FRAMES_PER_S, start),
            text=self._decode(token_ids),
            token_ids=token_ids,
            temperature=attempt.temperature,
            avg_logprob=attempt.avg_logprob,
            compression_ratio=compression_ratio,
            no_speech_prob=attempt.no_speech_prob,
            words=self._make_words(attempt.token_ids, piece, times) if times else (),
            scores=self._make_scores(attempt, piece) if self._options.needs_logprobs else (),
        )

    def _make_words(
        self, token_ids: tuple[int, ...], piece: Piece, times: Sequence[float]
    ) -> tuple[Word, ...]:
        """Return the words of a piece; `times` are when the tokens of the whole window end."""
        indices = [i for i in range(piece.start, piece.stop) if self._tokens.is_text(token_ids[i])]
        language = "en" if self._options.task == "translate" else self._language
        spans = split_words([token_ids[i] for i in indices], self._tokenizer.decode, language)
        starts = (0.0, *times)
        begin = self._seek / FRAMES_PER_S
        words = []
        for span in spans:
            moments = [begin + starts[indices[span.start]], begin + times[indices[span.stop - 1]]]
            first, last = (round(moment, 2) for moment in moments)
            first = self._clamp(first, self._last_word_end)
            self._last_word_end = self._clamp(last, first)
            if span.text.strip():
                words.append(Word(text=span.text.strip(), start=first, end=self._last_word_end))
        return tuple(words)

    def _make_scores(self, attempt: _Attempt, piece: Piece) -> tuple[TokenScore, ...]:
        return tuple(
            TokenScore(
                text=self._tokenizer.decode([attempt.token_ids[i]]),
                utf8=self._tokenizer.get_bytes(attempt.token_ids[i]),
                logprob=attempt.logprobs[i],
            )
            for i in range(piece.start, piece.stop)
            if self._tokens.is_text(attempt.token_ids[i])
        )

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode([each for each in token_ids if self._tokens.is_text(each)])

    def _clamp(self, time: float, least: float) -> float:
        """Return a time between `least` and the end of the audio."""
        return min(max(time, least), self._duration_s)


def _ask(
    request: WindowRequest,
) -> Generator[WindowRequest | Segment, WindowResult | None, WindowResult]:
    result = yield request
    if result is None:
        raise InvariantError("A window was asked for, and no result was sent.")
    return result


def count_room(num_frames: int) -> int:
    """Return how many tokens may be sampled at random for so many frames of audio."""
    return _LEAST_ROOM + math.ceil(_ROOM_PER_S * num_frames / FRAMES_PER_S)


def list_temperatures(ladder: tuple[float, ...], first: float | None) -> tuple[float, ...]:
    """Return the temperatures to try: the ladder, or the caller's `first` and those above it."""
    if not first:
        return ladder
    return (first, *(temperature for temperature in ladder if temperature > first))


def encode_prompt(text: str, tokens: WhisperTokens, tokenizer: SpeechTokenizer) -> tuple[int, ...]:
    """Return the tokens of a caller's prompt, which is text without special tokens."""
    if not text.strip():
        return ()
    token_ids = tuple(tokenizer.encode(f" {text.strip()}"))
    if not all(map(tokens.is_text, token_ids)):
        raise RequestError("The prompt has special tokens.", path=("prompt",))
    return token_ids


def compress_tokens(token_ids: Sequence[int], vocab_size: int) -> float:
    """Return the compression ratio of tokens, as Transformers measures it."""
    num_bytes = int(math.log2(vocab_size) / 8) + 1
    content = b"".join(token_id.to_bytes(num_bytes, "little") for token_id in token_ids)
    return len(content) / len(zlib.compress(content))


def compress_text(text: str) -> float:
    """Return the compression ratio of a text, as OpenAI measures it."""
    content = text.encode(errors="replace")
    return len(content) / len(zlib.compress(content))
