"""The interface between the rules of a speech model and an engine: one window of audio at a time.

The rules are generators that yield `WindowRequest`s and are sent `WindowResult`s, so they use no
engine. In between they yield each `Segment` that is final.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from sensorium.speech.transcript import Segment, Transcript
from sensorium.types.sampling import TimestampRules, TokenBans

_NUM_AHEAD = 3  # windows that may run before the result of an earlier one is known


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRequest:
    """A window of audio to decode: frames [first_frame, first_frame + num_frames), then padding."""

    first_frame: int
    num_frames: int
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    bans: TokenBans | None = None  # tokens that are never chosen; None: what the model bans
    # The only tokens that may be chosen. The caller's sampling parameters, which are about text,
    # do not hold then.
    allowed: tuple[int, ...] | None = None
    timestamps: TimestampRules | None = None
    # The result has this token's probability right after the prompt's token at this index.
    scored_token: tuple[int, int] | None = None  # (index in the prompt, token id)
    # Nothing is decoded: the prompt holds the whole text, and the result has its alignment.
    needs_alignment: bool = False
    # Nothing is decoded: the result has what a model without a decoder has found in the window.
    needs_frames: bool = False
    # Requests that come next whatever the result of this one is, so that they may run in parallel.
    following: tuple[WindowRequest, ...] = field(default=(), compare=False)


def look_ahead(requests: Sequence[WindowRequest]) -> list[WindowRequest]:
    """Return independent windows, each with the next few windows as its `following`."""
    return [
        replace(request, following=tuple(requests[index + 1 : index + 1 + _NUM_AHEAD]))
        for index, request in enumerate(requests)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowResult:
    """The decoded tokens of a window, with the end-of-sequence token if the answer has one."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()  # after all rules, before the temperature
    prompt_token_ids: Sequence[int] = ()  # with the placeholders of the audio, if it has any
    scored_probability: float | None = None
    # The attention of the prompt's tokens to the positions of the window, for each alignment head:
    # float32 [heads, tokens, positions].
    alignment: npt.NDArray[np.float32] | None = None
    # The table of a CTC/transducer model, one of those that `models.ctc_transducer` explains.
    frames: npt.NDArray[np.float32] | None = None


Transcription = Generator[WindowRequest | Segment, WindowResult | None, Transcript]
