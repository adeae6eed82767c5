"""The values that readers of answers take and return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    """The part of one tool call that is new since the last delta."""

    index: int  # among the calls of the answer
    id: str | None = None  # in the first delta of a call only
    name: str | None = None  # in the first delta of a call only
    arguments: str = ""  # a piece of the JSON text


class AnswerDelta(Struct, frozen=True, kw_only=True):
    """The parts of an answer that new text has completed; empty if all text is held back."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.reasoning or self.content or self.tool_calls)


class AnswerContext(Struct, frozen=True, kw_only=True):
    """The parts of a request that change how its answer is read."""

    tools: tuple[Mapping[str, Any], ...] = ()  # in OpenAI's form, checked
    # "auto", "none", "required", or `{"name": …}` for one of the tools.
    tool_choice: str | Mapping[str, str] = "none"
    parallel_tool_calls: bool = True  # False: only the first call is given out
    starts_in_reasoning: bool = False  # the prompt has opened the reasoning
    separate_reasoning: bool = True  # False: reasoning stays in the content, with its tags

    @property
    def reads_calls(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def demands_call(self) -> bool:
        return self.reads_calls and self.tool_choice != "auto"

    @property
    def demanded_tools(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that may be called if the request demands a call."""
        choice = self.tool_choice
        if isinstance(choice, str):
            return self.tools
        return tuple(tool for tool in self.tools if tool["function"]["name"] == choice["name"])
