"""The fields of answers come in the order that clients have always seen."""

from __future__ import annotations

import msgspec
import pytest

from sensorium.server.http.protocol import answers

HEAD = ("id", "object", "created", "model", "choices", "usage")


@pytest.mark.parametrize(
    ("struct", "first"),
    [
        (answers.ChatCompletion, HEAD),
        (answers.ChatCompletionChunk, HEAD),
        (answers.Completion, HEAD),
        (answers.GenerateResponse, ("request_id", "model", "created", "choices", "usage")),
        (answers.ChatChoice, ("index", "message", "logprobs", "finish_reason", "stop_reason")),
        (answers.ChatChunkChoice, ("index", "delta", "logprobs", "finish_reason", "stop_reason")),
        (answers.CompletionChoice, ("index", "text", "logprobs", "finish_reason", "stop_reason")),
        (answers.GenerateChoice, ("index", "token_ids", "finish_reason", "stop_reason")),
    ],
)
def test_an_answer_begins_with_its_identifying_fields(
    struct: type[msgspec.Struct], first: tuple[str, ...]
) -> None:
    assert struct.__struct_fields__[: len(first)] == first
