"""Reads words, segments and their times from the frames of CTC and transducer models.

Such a model gives a table for each piece of audio (see `models.ctc_transducer`). Rules:
  1. CTC: equal tokens in consecutive frames are one token, and blanks are dropped.
  2. Spaces separate words. A word begins with its first token and ends with its last one.
  3. A segment ends with a piece, with a sentence, and before a pause.
  4. The texts of all segments of a piece, joined, are the text of the whole piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import numpy as np
import numpy.typing as npt

from sensorium.speech.options import SpeechOptions
from sensorium.speech.transcript import Segment, SpeechUsage, TokenScore, Transcript, Word
from sensorium.speech.windows import Transcription, WindowRequest, look_ahead
from sensorium.types.errors import InvariantError

Head = Literal["ctc", "rnnt", "tdt"]
Table = npt.NDArray[np.float32]
Decode = Callable[[Sequence[int]], str]
_PAUSE_S = 0.8  # as long as a pause between two sentences
_SENTENCE_ENDS = (".", "?", "!", "…", "。", "？", "！")  # noqa: RUF001 - full-width marks are meant
# A TDT model gives these marks a time after the word that they belong to. Transformers and NeMo
# move them back to the end of the word.
_MARKS = frozenset("?'¡¿-:,%/.!")


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples [start, end) and feature rows [first_row, end_row) that are computed alone."""

    start: int
    end: int
    first_row: int
    end_row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedToken:
    """A token that was found in the frames [start, end) of a piece."""

    token_id: int
    logprob: float
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedWord:
    """A word: the characters [begin, end) of its piece's text, and the tokens [first, last]."""

    begin: int
    end: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRules:
    """The properties of a model that are needed to read its tables."""

    head: Head
    blank_id: int
    rate: int  # samples per second
    samples_per_frame: int
    decode: Decode  # the text of tokens without blanks


def read_table(table: Table, rules: FrameRules) -> list[TimedToken]:
    if rules.head == "ctc":
        return collapse(table, rules.blank_id)
    tokens = [
        TimedToken(
            token_id=int(token_id),
            logprob=float(logprob),
            start=int(frame),
            end=int(frame) + (int(duration) if rules.head == "tdt" else 1),
        )
        for token_id, logprob, frame, duration in table
    ]
    return _set_back_marks(tokens, rules.decode) if rules.head == "tdt" else tokens


def collapse(table: Table, blank_id: int) -> list[TimedToken]:
    """Return the tokens of a CTC model, given the likeliest token of each frame and its score."""
    tokens, start = [], 0
    for token_id, run in groupby(table[:, 0].astype(np.int64).tolist()):
        end = start + len(list(run))
        if token_id != blank_id:
            logprob = float(table[start:end, 1].mean(dtype=np.float64))
            tokens.append(TimedToken(token_id=token_id, logprob=logprob, start=start, end=end))
        start = end
    return tokens


def _set_back_marks(tokens: Sequence[TimedToken], decode: Decode) -> list[TimedToken]:
    moved = list(tokens[:1])
    for token in tokens[1:]:
        before = moved[-1]
        # A mark with a space before it begins a word.
        text = decode([before.token_id, token.token_id])
        is_mark = text.removeprefix(decode([before.token_id])) in _MARKS
        moved.append(replace(token, start=before.end, end=before.end) if is_mark else token)
    return moved


def find_words(tokens: Sequence[TimedToken], decode: Decode) -> tuple[str, list[TimedWord]]:
    """Return the text of a piece and its words."""
    token_ids = [token.token_id for token in tokens]
    text = decode(token_ids)
    words: list[TimedWord] = []
    position, first = 0, 0
    for index in range(1, len(tokens) + 1):
        is_last = index == len(tokens)
        # A token begins a word if a space comes before it in the text of the word so far.
        if not is_last and len(decode(token_ids[first : index + 1]).split()) < 2:
            continue
        # A tokenizer may write a word in another way where it stands in the text.
        word = decode(token_ids[first:index]).strip()
        begin = max(text.find(word, position), position)
        if word:  # a token that is only a space is part of no word
            while not decode(token_ids[first : first + 1]).strip() and first < index - 1:
                first += 1
            last = index - 1
            while last > first and decode(token_ids[first:last]).strip() == word:
                last -= 1
            position = min(begin + len(word), len(text))
            words.append(TimedWord(begin=begin, end=position, first=first, last=last))
        first = index
    return text, words


def transcribe_frames(
    pieces: Sequence[Piece],
    rules: FrameRules,
    *,
    duration_s: float,
    options: SpeechOptions,
) -> Transcription:
    """Return a generator that asks for pieces of feature rows and returns the transcript."""
    segments: list[Segment] = []
    num_tokens = num_frames = 0
    requests = look_ahead(
        [
            WindowRequest(
                first_frame=piece.first_row,
                num_frames=piece.end_row - piece.first_row,
                prompt_token_ids=(0,),
                max_tokens=1,
                needs_frames=True,
            )
            for piece in pieces
        ]
    )
    for piece, request in zip(pieces, requests, strict=True):
        result = yield request
        if result is None or result.frames is None:
            raise InvariantError("a piece of audio was not answered")
        tokens = read_table(result.frames, rules)
        num_tokens += len(tokens)
        num_frames += round((piece.end - piece.start) / rules.samples_per_frame)
        for segment in _make_segments(piece, tokens, rules, options, len(segments)):
            segments.append(segment)
            yield segment
    return Transcript(
        text="".join(segment.text for segment in segments),
        task=options.task,
        language=None,
        duration_s=duration_s,
        segments=tuple(segments),
        usage=SpeechUsage(num_audio_tokens=num_frames, num_output_tokens=num_tokens),
    )


def _make_segments(
    piece: Piece,
    tokens: Sequence[TimedToken],
    rules: FrameRules,
    options: SpeechOptions,
    num_before: int,
) -> list[Segment]:
    text, words = find_words(tokens, rules.decode)

    def get_time(frame: int) -> float:
        """Return the second at which a frame starts. No time is after the end of the piece."""
        return min(piece.start + frame * rules.samples_per_frame, piece.end) / rules.rate

    times = [
        Word(
            text=text[word.begin : word.end],
            start=get_time(tokens[word.first].start),
            end=get_time(max(token.end for token in tokens[word.first : word.last + 1])),
        )
        for word in words
    ]
    segments: list[Segment] = []
    for first, stop in _find_segments(times):
        spoken = tokens[words[first].first : words[stop - 1].last + 1]
        begin = 0 if first == 0 else words[first - 1].end
        end = len(text) if stop == len(words) else words[stop - 1].end
        is_first = num_before + len(segments) == 0
        joint = "" if is_first or first else " "
        segments.append(
            Segment(
                index=num_before + len(segments),
                seek=100 * piece.start // rules.rate,
                start=times[first].start,
                end=times[stop - 1].end,
                text=joint + text[begin:end],
                token_ids=tuple(token.token_id for token in spoken),
                avg_logprob=sum(token.logprob for token in spoken) / len(spoken),
                words=tuple(times[first:stop]) if options.needs_words else (),
                scores=_make_scores(spoken, rules.decode) if options.needs_logprobs else (),
            )
        )
    return segments


def _find_segments(words: Sequence[Word]) -> list[tuple[int, int]]:
    cuts = [0]
    for index in range(1, len(words)):
        before, word = words[index - 1], words[index]
        is_pause = word.start - before.end >= _PAUSE_S
        if is_pause or before.text.endswith(_SENTENCE_ENDS):
            cuts.append(index)
    return list(zip(cuts, [*cuts[1:], len(words)], strict=True)) if words else []


def _make_scores(tokens: Sequence[TimedToken], decode: Decode) -> tuple[TokenScore, ...]:
    texts = [decode([token.token_id]) for token in tokens]
    return tuple(
        TokenScore(text=text, utf8=text.encode(), logprob=token.logprob)
        for text, token in zip(texts, tokens, strict=True)
    )
