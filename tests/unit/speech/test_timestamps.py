from __future__ import annotations

import pytest

from sensorium.speech.timestamps import cut_at_timestamps

FIRST = 100  # the token of the time 0; the time of a token is 2 frames for each one above it
WINDOW = 3000


def cut(*token_ids: int, num_frames: int = WINDOW) -> tuple[list[tuple[int, int, int, int]], int]:
    pieces, num_seek = cut_at_timestamps(token_ids, first_timestamp_id=FIRST, num_frames=num_frames)
    return [(each.start, each.stop, each.first_frame, each.last_frame) for each in pieces], num_seek


@pytest.mark.parametrize(
    ("token_ids", "pieces", "num_seek"),
    [
        # A pair in the middle, and one timestamp at the end: the window is done.
        ((100, 1, 150, 160, 2, 200), [(0, 3, 0, 100), (3, 6, 120, 200)], WINDOW),
        # Two pairs: the next window begins at the first timestamp of the second one.
        ((100, 1, 150, 150, 2, 200, 210), [(0, 3, 0, 100), (3, 7, 100, 200)], 200),
        # Tokens behind the last pair are not kept.
        ((100, 1, 150, 160, 2, 3), [(0, 4, 0, 100)], 100),
        # No pair: one piece, which ends at its last timestamp.
        ((110, 1, 2, 180), [(0, 4, 0, 160)], WINDOW),
        ((110, 1, 2), [(0, 3, 0, 20)], WINDOW),
        # No timestamp but 0, or none: the piece has the whole window.
        ((100, 1, 2), [(0, 3, 0, WINDOW)], WINDOW),
        ((1, 2), [(0, 2, 0, WINDOW)], WINDOW),
        ((), [(0, 0, 0, WINDOW)], WINDOW),
        # A pair at 0 must not hold the window where it is.
        ((100, 100, 1, 2), [(0, 2, 0, 0)], WINDOW),
        ((1, 100, 150), [(0, 3, 0, 0)], WINDOW),
    ],
)
def test_windows_are_cut_at_pairs_of_timestamps(
    token_ids: tuple[int, ...], pieces: list[tuple[int, int, int, int]], num_seek: int
) -> None:
    assert cut(*token_ids) == (pieces, num_seek)


def test_a_last_window_ends_with_its_last_whole_position() -> None:
    assert cut(1, 2, num_frames=271) == ([(0, 2, 0, 270)], 271)
