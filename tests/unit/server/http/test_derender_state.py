"""What a client carries between two chunks: every state that was given is taken back."""

from __future__ import annotations

import pytest

from sensorium.engine.outputs.text_reader import TextState
from sensorium.server.http.tokens.derendering import ChoiceState, read_state, write_state

LARGEST = 2**63 - 1  # of the numbers that a chunk may have


@pytest.mark.parametrize("number", [0, 2**53 + 1, LARGEST])
def test_a_state_that_was_given_is_taken_back(number: int) -> None:
    choices = {number: ChoiceState(TextState())}
    state = read_state(write_state(number, 7, choices))
    assert (state.created, state.num_completion_tokens, state.choices) == (number, 7, choices)
