"""Cuts the tokens of a window into pieces at Whisper's timestamps, and finds the next window.

A pair of timestamps ends one piece and begins the next. Tokens after the last pair are not kept,
because the audio was cut in the middle of them; the next window begins at that pair. If there is
only one timestamp at the end, nothing was said after it, and the window is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sensorium.speech.whisper_tokens import FRAMES_PER_POSITION


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The tokens [start, stop), and their time in frames of the window."""

    start: int
    stop: int
    first_frame: int
    last_frame: int


def cut_at_timestamps(
    token_ids: Sequence[int], *, first_timestamp_id: int, num_frames: int
) -> tuple[list[Piece], int]:
    """Return the pieces of a window, and how many frames after its start the next window begins.

    That number is never 0, so windows end. `token_ids` has no end of text, `num_frames` no padding.
    """
    is_timestamp = [token_id >= first_timestamp_id for token_id in token_ids]
    cuts = [i for i in range(1, len(token_ids)) if is_timestamp[i - 1] and is_timestamp[i]]
    if not cuts:
        return [_take_all(token_ids, first_timestamp_id, num_frames)], num_frames
    ends_with_one = is_timestamp[-2:] == [False, True]
    if ends_with_one:
        cuts.append(len(token_ids))
    else:
        cuts[-1] += 1  # both timestamps of the last pair belong to the last piece
    frames = [_to_frame(token_id, first_timestamp_id) for token_id in token_ids]
    pieces = [
        Piece(start=start, stop=stop, first_frame=frames[start], last_frame=frames[stop - 1])
        for start, stop in zip([0, *cuts], cuts, strict=False)
    ]
    if ends_with_one:
        return pieces, num_frames
    last = pieces[-1]
    end = frames[last.stop - 2]
    pieces[-1] = Piece(
        start=last.start, stop=last.stop, first_frame=last.first_frame, last_frame=end
    )
    # Without rules for timestamps, a model may write a pair at 0, where the window began.
    return pieces, end or num_frames


def _take_all(token_ids: Sequence[int], first_timestamp_id: int, num_frames: int) -> Piece:
    """Return all tokens as one piece, which ends at the last timestamp, if there is one."""
    last = next((each for each in reversed(token_ids) if each >= first_timestamp_id), 0)
    num_whole = num_frames - num_frames % FRAMES_PER_POSITION
    last_frame = _to_frame(last, first_timestamp_id) or num_whole
    return Piece(start=0, stop=len(token_ids), first_frame=0, last_frame=last_frame)


def _to_frame(token_id: int, first_timestamp_id: int) -> int:
    """Return the frame of a timestamp, or 0 for other tokens."""
    return max(0, token_id - first_timestamp_id) * FRAMES_PER_POSITION
