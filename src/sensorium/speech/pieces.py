"""Transcribes long sounds in pieces, for models that write down one short sound at a time.

A piece ends where the sound is quiet, so that no word is cut in two.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from sensorium.speech.options import SpeechOptions
from sensorium.speech.transcript import Segment, SpeechUsage, TokenScore, Transcript
from sensorium.speech.whisper_tokens import SpeechTokenizer
from sensorium.speech.windows import Transcription, WindowRequest, WindowResult
from sensorium.types.errors import InvariantError
from sensorium.utils.silences import Samples, find_cuts

_TOKENS_PER_S = 6.5  # more than anyone speaks; a text with more repeats itself
_MIN_TOKENS = 8
_POSITIONS_PER_S = 50  # that sounds are counted by, as those of Whisper


def transcribe_pieces(
    samples: Samples,
    rate: int,
    *,
    max_s: float,
    prompt_token_ids: tuple[int, ...],
    end_ids: Collection[int],
    max_positions: int,
    tokenizer: SpeechTokenizer,
    options: SpeechOptions,
) -> Transcription:
    """Return a generator that asks for the pieces of a sound and returns its transcript.

    The frames of its requests are samples. `max_positions` is the context of the decoder, and
    `end_ids` are the tokens that end a text. Each piece is a segment.
    """
    segments: list[Segment] = []
    num_output_tokens = 0
    for start, end in find_cuts(samples, rate, max_s=max_s):
        most = max(_MIN_TOKENS, math.ceil(_TOKENS_PER_S * (end - start) / rate))
        result = yield WindowRequest(
            first_frame=start,
            num_frames=end - start,
            prompt_token_ids=prompt_token_ids,
            max_tokens=min(most, max_positions - len(prompt_token_ids)),
            temperature=options.temperature or 0.0,
        )
        if result is None:
            raise InvariantError("a piece of a sound was not answered")
        num_output_tokens += len(result.token_ids)
        kept = [i for i, token_id in enumerate(result.token_ids) if token_id not in end_ids]
        text = tokenizer.decode([result.token_ids[i] for i in kept]).strip()
        if not text:
            continue
        segment = Segment(
            index=len(segments),
            seek=100 * start // rate,
            start=start / rate,
            end=end / rate,
            text=f" {text}" if segments else text,
            token_ids=tuple(result.token_ids[i] for i in kept),
            temperature=options.temperature or 0.0,
            avg_logprob=sum(result.logprobs) / max(1, len(result.logprobs)),
            scores=_make_scores(result, kept, tokenizer) if options.needs_logprobs else (),
        )
        segments.append(segment)
        yield segment
    return Transcript(
        text="".join(segment.text for segment in segments),
        task=options.task,
        language=options.language,
        duration_s=len(samples) / rate,
        segments=tuple(segments),
        usage=SpeechUsage(
            num_audio_tokens=math.ceil(_POSITIONS_PER_S * len(samples) / rate),
            num_output_tokens=num_output_tokens,
        ),
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
