"""A scripted transcriber: it returns the same three segments for every recording."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from sensorium.speech.options import SpeechOptions
from sensorium.speech.transcript import Segment, SpeechUsage, TokenScore, Transcript, Word

TEXTS = (" Hello <there> & you.", " Two -->", " wörds.")
TEXT = "".join(TEXTS).strip()


def make_segment(index: int, *, has_scores: bool = False) -> Segment:
    text = TEXTS[index]
    score = TokenScore(text=text, utf8=text.encode(), logprob=-0.25 * index)
    return Segment(
        index=index,
        seek=3000 * index,
        start=1.5 * index,
        end=1.5 * index + 1.25,
        text=text,
        token_ids=(10 + index, 20),
        avg_logprob=float("-inf") if index == 2 else -0.5,
        compression_ratio=1.25,
        no_speech_prob=0.125,
        words=(Word(text=text, start=1.5 * index, end=1.5 * index + 1),),
        scores=(score,) if has_scores else (),
    )


@dataclass
class ScriptedTranscriber:
    """A transcriber that yields a segment for each of `TEXTS`, and then the transcript.

    `between` runs before each segment, and may wait or raise. Without `yields_segments` only the
    transcript comes.
    """

    can_translate: bool = True
    has_segments: bool = True
    has_words: bool = True
    yields_segments: bool = True
    between: Callable[[int], Any] | None = None
    refuses: Callable[[SpeechOptions], None] | None = None  # raises for options it can't take
    calls: list[tuple[bytes, SpeechOptions, str | None]] = field(default_factory=list)
    num_open: int = 0
    num_aborted: int = 0

    def check(self, options: SpeechOptions) -> None:
        if self.refuses is not None:
            self.refuses(options)

    async def transcribe(
        self,
        media: bytes,
        options: SpeechOptions,
        *,
        request_id: str,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[Segment | Transcript, None]:
        assert request_id
        self.calls.append((media, options, cache_salt))
        self.num_open += 1
        is_ended = False
        segments = []
        try:
            for index in range(len(TEXTS)):
                if self.between is not None:
                    value = self.between(index)
                    if asyncio.iscoroutine(value):
                        await value
                await asyncio.sleep(0)
                segments.append(make_segment(index, has_scores=options.needs_logprobs))
                if self.yields_segments:
                    yield segments[-1]
            is_ended = True
            yield Transcript(
                text="".join(TEXTS),
                task=options.task,
                language="de",
                duration_s=4.25,
                segments=tuple(segments),
                usage=SpeechUsage(num_text_tokens=4, num_audio_tokens=1500, num_output_tokens=9),
            )
        finally:
            self.num_aborted += not is_ended
            self.num_open -= 1
