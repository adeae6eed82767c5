"""Transcribes long audio in pieces, for models that take one short piece at a time.

A piece ends where the audio is quiet, so that no word is cut in two. If it has text, it is a
segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from sensorium.speech.languages import WITHOUT_SPACES
from sensorium.speech.options import SpeechOptions
from sensorium.speech.transcript import Segment, SpeechUsage, TokenScore, Transcript
from sensorium.speech.whisper_tokens import SpeechTokenizer
from sensorium.speech.windows import (
    Transcription,
    WindowRequest,
    WindowResult,
    look_ahead,
)
from sensorium.types.errors import InvariantError
from sensorium.utils.silences import Samples, find_cuts

_TOKENS_PER_S = 6.5  # more than anyone speaks; a text with more repeats itself
_MIN_TOKENS = 8
_POSITIONS_PER_S = 50  # for the usage, as with Whisper


def transcribe_pieces(
    samples: Samples,
    rate: int,
    *,
    max_s: float,
    prompt_token_ids: tuple[int, ...],
    end_ids: Collection[int],  # tokens that end a text
    max_positions: int,  # of the decoder
    tokenizer: SpeechTokenizer,
    options: SpeechOptions,
) -> Transcription:
    """Return a generator that asks for pieces, in samples, and returns the transcript."""

    def make_request(start: int, end: int) -> WindowRequest:
        most = max(_MIN_TOKENS, math.ceil(_TOKENS_PER_S * (end - start) / rate))
        return WindowRequest(
            first_frame=start,
            num_frames=end - start,
            prompt_token_ids=prompt_token_ids,
            max_tokens=min(most, max_positions - len(prompt_token_ids)),
            temperature=options.temperature or 0.0,
        )

    def read(result: WindowResult) -> PieceText:
        kept = [i for i, token_id in enumerate(result.token_ids) if token_id not in end_ids]
        text = tokenizer.decode([result.token_ids[i] for i in kept]).strip()
        return PieceText(text=text, kept=kept)

    cuts = find_cuts(samples, rate, max_s=max_s)
    transcript = yield from transcribe_cuts(
        cuts, rate, make_request=make_request, read=read, tokenizer=tokenizer, options=options
    )
    num_audio_tokens = math.ceil(_POSITIONS_PER_S * len(samples) / rate)
    return replace(transcript, usage=replace(transcript.usage, num_audio_tokens=num_audio_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceText:
    """The text of a piece, and which tokens of the result belong to it."""

    text: str  # without white space around it
    kept: Sequence[int]  # indices into the tokens of the result
    language: str | None = None  # its code, if the model names the language
    num_text_tokens: int = 0  # of the prompt
    num_audio_tokens: int = 0  # of the prompt


def transcribe_cuts(
    cuts: Sequence[tuple[int, int]],
    rate: int,
    *,
    make_request: Callable[[int, int], WindowRequest],
    read: Callable[[WindowResult], PieceText],
    tokenizer: SpeechTokenizer,
    options: SpeechOptions,
    language: str | None = None,  # its code; None: the first one that the model names
) -> Transcription:
    """Return a generator that asks for pieces, in samples, and returns their transcript."""
    segments: list[Segment] = []
    usage = SpeechUsage()
    requests = look_ahead([make_request(start, end) for start, end in cuts])
    for (start, end), request in zip(cuts, requests, strict=True):
        result = yield request
        if result is None:
            raise InvariantError("a piece of audio was not answered")
        piece = read(result)
        usage = SpeechUsage(
            num_text_tokens=usage.num_text_tokens + piece.num_text_tokens,
            num_audio_tokens=usage.num_audio_tokens + piece.num_audio_tokens,
            num_output_tokens=usage.num_output_tokens + len(result.token_ids),
        )
        language = language or piece.language
        if not piece.text:
            continue
        space = " " if segments and language not in WITHOUT_SPACES else ""
        segment = Segment(
            index=len(segments),
            seek=100 * start // rate,
            start=start / rate,
            end=end / rate,
            text=space + piece.text,
            token_ids=tuple(result.token_ids[i] for i in piece.kept),
            temperature=options.temperature or 0.0,
            avg_logprob=sum(result.logprobs) / max(1, len(result.logprobs)),
            scores=_make_scores(result, piece.kept, tokenizer) if options.needs_logprobs else (),
        )
        segments.append(segment)
        yield segment
    return Transcript(
        text="".join(segment.text for segment in segments),
        task=options.task,
        language=language or options.language,
        duration_s=cuts[-1][1] / rate,
        segments=tuple(segments),
        usage=usage,
    )


def _make_scores(
    result: WindowResult, kept: Sequence[int], tokenizer: SpeechTokenizer
) -> tuple[TokenScore, ...]:
    return tuple(
        TokenScore(
            text=tokenizer.decode([result.token_ids[i]]),
            utf8=tokenizer.get_bytes(result.token_ids[i]),
            logprob=result.logprobs[i],
        )
        for i in kept
    )
