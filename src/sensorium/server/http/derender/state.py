"""What a client carries from one derendered chunk to the next: nothing is kept here.

Opaque to it: base64 of msgpack. What comes back is checked as everything from outside is. Its size
depends on the number of choices, never on the length of the answer.
"""

from __future__ import annotations

import base64
import time
from typing import Any

import msgspec

from sensorium.engine.outputs.text_reader import TextState
from sensorium.server.http.errors import ApiError
from sensorium.types.errors import RequestError

_VERSION = 1
_MAX_CHOICES = 128
_MAX_COUNT = 2**63 - 1  # as large as any number that is taken from outside


class ChoiceState(msgspec.Struct, frozen=True, array_like=True):
    """`answer`: of the one who reads what the text means. `offset`: where the text of the next
    token begins, as completions count it.
    """

    text: TextState
    answer: Any = None
    offset: int = 0


class StreamState(msgspec.Struct, frozen=True, array_like=True):
    version: int
    created: int
    num_completion_tokens: int
    choices: dict[int, ChoiceState]

    @classmethod
    def start(cls, created: int | None) -> StreamState:
        """Before the first chunk. `created`: as that says, or now."""
        return cls(_VERSION, int(time.time()) if created is None else created, 0, {})


_decoder = msgspec.msgpack.Decoder(StreamState)


def write_state(created: int, num_tokens: int, choices: dict[int, ChoiceState]) -> str:
    if len(choices) > _MAX_CHOICES:
        raise ApiError(
            f"generate_chunk is of a stream with more than {_MAX_CHOICES} choices",
            param="generate_chunk.choices",
        )
    state = StreamState(_VERSION, created, num_tokens, choices)
    return base64.b64encode(msgspec.msgpack.encode(state)).decode("ascii")


def read_state(text: str) -> StreamState:
    try:
        state = _decoder.decode(base64.b64decode(text, validate=True))
        for choice in state.choices.values():
            choice.text.check()
    except (ValueError, msgspec.MsgspecError, RecursionError, RequestError) as error:
        raise _make_error() from error
    offsets = (choice.offset for choice in state.choices.values())
    counts = (state.created, state.num_completion_tokens, *state.choices, *offsets)
    is_whole = state.version == _VERSION and len(state.choices) <= _MAX_CHOICES
    if not is_whole or not all(0 <= count <= _MAX_COUNT for count in counts):
        raise _make_error()
    return state


def _make_error() -> ApiError:
    return ApiError("stream_state is none that this server has given", param="stream_state")
