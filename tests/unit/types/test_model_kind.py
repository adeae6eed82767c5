"""The questions that follow from how a model decodes and where its media stands."""

from __future__ import annotations

import msgspec
import pytest

from sensorium.types.model_kind import (
    CAUSAL,
    CROSS,
    NO_DECODER,
    PROMPT_TASKS,
    STREAMING,
    TASKS,
    ModelKind,
)


@pytest.mark.parametrize(
    ("kind", "takes_prompts", "is_streaming", "has_kept_encodings"),
    [
        (CAUSAL, True, False, True),
        (CROSS, False, False, True),
        (NO_DECODER, False, False, False),
        (STREAMING, True, True, False),
    ],
)
def test_each_kind_answers_the_questions_about_it(
    kind: ModelKind, takes_prompts: bool, is_streaming: bool, has_kept_encodings: bool
) -> None:
    assert kind.takes_prompts is takes_prompts
    assert kind.is_streaming is is_streaming
    assert kind.has_kept_encodings is has_kept_encodings


def test_kinds_are_equal_by_value_also_in_another_process() -> None:
    for kind in (CAUSAL, CROSS, NO_DECODER, STREAMING):
        copy = msgspec.msgpack.decode(msgspec.msgpack.encode(kind), type=ModelKind)
        assert copy == kind
        assert hash(copy) == hash(kind)
    assert len({CAUSAL, CROSS, NO_DECODER, STREAMING}) == 4


def test_tasks_that_take_prompts_are_among_all_tasks() -> None:
    assert set(TASKS) > PROMPT_TASKS
