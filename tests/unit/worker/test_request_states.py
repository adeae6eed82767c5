"""What the worker keeps of a request: tokens, positions, slots, encoder keys."""

from __future__ import annotations

import numpy as np
import pytest

from sensorium.worker.request_states import PromptPositions, RequestTable

from .factories import get_table, make_feature, make_request, make_state

PROMPT = (5, 6, 7, 8)
MROPE = PromptPositions(positions=np.array([[0, 1, 1, 2], [0, 1, 2, 2], [0, 1, 3, 2]]), delta=-1)


def test_without_mrope_a_position_is_the_index() -> None:
    assert make_state(make_request(PROMPT)).get_positions(2, 6).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 2, [[0, 1], [0, 1], [0, 1]]),
        (1, 4, [[1, 1, 2], [1, 2, 2], [1, 3, 2]]),
        (2, 6, [[1, 2, 3, 4], [2, 2, 3, 4], [3, 2, 3, 4]]),
        (4, 6, [[3, 4]] * 3),
        (9, 10, [[8]] * 3),
    ],
)
def test_with_mrope_output_tokens_continue_with_the_delta_of_the_prompt(
    start: int, end: int, expected: list[list[int]]
) -> None:
    state = make_state(make_request(PROMPT), mrope=MROPE)
    assert state.get_positions(start, end).tolist() == expected


def test_slots_follow_the_blocks_of_each_group() -> None:
    state = make_state(make_request(PROMPT), ((7, 2), (3, 9)))
    assert state.get_slots(0, 2, 7, 4).tolist() == [30, 31, 8, 9, 10]
    assert state.get_slots(1, 3, 5, 4).tolist() == [15, 36]


def test_blocks_are_appended_group_by_group() -> None:
    state = make_state(make_request(PROMPT), ((1,), (2,)))
    state.add_blocks(((3,), ()))
    table = get_table(2)
    assert [table.get_blocks(state.row, group).tolist() for group in (0, 1)] == [[1, 3], [2]]


def test_a_row_that_is_used_again_has_nothing_of_its_last_request() -> None:
    table = RequestTable(2)
    rows = [table.take_row() for _ in range(40)]  # more than there are at first
    assert len(set(rows)) == 40
    table.add_blocks(rows[7], (tuple(range(1, 50)), (5,)))
    table.add_blocks(rows[8], ((2,), ()))
    table.release_row(rows[7])
    assert table.take_row() == rows[7]
    assert not table.block_ids[0][rows[7]].any()
    assert not table.block_ids[1][rows[7]].any()
    table.add_blocks(rows[7], ((9,), ()))
    assert table.get_blocks(rows[7], 0).tolist() == [9]
    assert table.get_blocks(rows[8], 0).tolist() == [2]


def test_a_resumed_request_has_the_tokens_that_it_had_made() -> None:
    state = make_state(make_request(PROMPT), output_token_ids=(9, 10))
    assert state.token_ids.values.tolist() == [5, 6, 7, 8, 9, 10]
    assert state.num_output_tokens == 2
    state.token_ids.extend((11,))
    assert state.num_output_tokens == 3


def test_encoder_keys_differ_for_each_salt_and_adapter() -> None:
    keys = {
        make_state(
            make_request(PROMPT, make_feature("h", 0, 1), cache_salt=salt, lora_id=lora_id)
        ).get_encoder_key(0)
        for salt in (None, "", "a", "None")
        for lora_id in (None, "a")
    }
    assert len(keys) == 8
    assert make_state(make_request(PROMPT, make_feature("h", 0, 1))).get_encoder_key(0) == "h"
