"""How the text of this server's model is read: what of it is content."""

from __future__ import annotations

from typing import Any

from sensorium.render.answers.interface import (
    AnswerContext,
    AnswerDelta,
    AnswerFormat,
    AnswerReader,
)
from sensorium.server.http.calls import Context
from sensorium.types.errors import RequestError
from sensorium.types.structured import StructuredOutputsParams


class _PlainReader:
    """All of it."""

    num_tool_calls = 0
    state = None

    def add(self, text: str) -> AnswerDelta:
        return AnswerDelta(content=text)

    def finish(self) -> AnswerDelta:
        return AnswerDelta()


class PlainFormat:
    """An `AnswerFormat` without reasoning and calls."""

    kept_special_token_ids: tuple[int, ...] = ()

    def start(self, context: AnswerContext) -> AnswerReader:
        del context
        return _PlainReader()

    def resume(self, context: AnswerContext, state: Any) -> AnswerReader:
        if state is not None:
            raise RequestError("this text has no state")
        return self.start(context)

    def make_constraint(self, context: AnswerContext) -> StructuredOutputsParams | None:
        del context
        return None


def get_answer_format(context: Context) -> AnswerFormat:
    del context
    return PlainFormat()
