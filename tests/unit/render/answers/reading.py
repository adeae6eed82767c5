"""Formats over a tokenizer with special tokens of many models, and answers read whole."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from sensorium.render.answers.answer import AnswerContext, AnswerDelta
from sensorium.render.answers.format import make_answer_format
from sensorium.render.answers.reader import AnswerReader


def make_tool(name: str, parameters: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


WEATHER = make_tool(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
TIME = make_tool("time", {"type": "object", "properties": {}, "additionalProperties": False})
AUTO = AnswerContext(tools=(WEATHER, TIME), tool_choice="auto")
BARE_TOKENIZER = SimpleNamespace(added_tokens_decoder={})


@dataclass
class Answer:
    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def take(self, delta: AnswerDelta) -> None:
        self.reasoning += delta.reasoning
        self.content += delta.content
        for call in delta.tool_calls:
            if call.id is not None:
                assert call.name
                assert call.index == len(self.calls)
                self.calls.append({"id": call.id, "name": call.name, "arguments": ""})
            self.calls[call.index]["arguments"] += call.arguments

    @property
    def told(self) -> tuple[str, str, list[tuple[str, str]]]:
        """Everything but the ids of calls, which are random."""
        return (
            self.reasoning,
            self.content,
            [(call["name"], call["arguments"]) for call in self.calls],
        )

    @property
    def parsed(self) -> list[tuple[str, Any]]:
        return [(call["name"], json.loads(call["arguments"])) for call in self.calls]


def make_format(
    tools: str = "none", reasoning: str = "none", tokenizer: Any = BARE_TOKENIZER
) -> Any:
    return make_answer_format(tokenizer, "", tool_call_parser=tools, reasoning_parser=reasoning)


def read(reader: AnswerReader, *pieces: str) -> Answer:
    answer = Answer()
    for piece in pieces:
        answer.take(reader.add(piece))
    answer.take(reader.finish())
    assert reader.num_tool_calls == len(answer.calls)
    return answer
