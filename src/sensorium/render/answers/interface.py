"""The interface to readers, which divide a model's text into reasoning, content and tool calls.

An `AnswerFormat` belongs to a model; it starts an `AnswerReader` for each completion. Pure: text
in, values out. A reader's `state` is plain data, from which another process can go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from sensorium.types.structured import StructuredOutputsParams


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    """What one tool call has got since the last delta."""

    index: int  # among the calls of the answer
    id: str | None = None  # in the first delta of a call only
    name: str | None = None  # in the first delta of a call only
    arguments: str = ""  # a piece of the JSON text


class AnswerDelta(Struct, frozen=True, kw_only=True):
    """What new text has brought; empty if all of it is held back."""

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
        """The tools that a demanded call may call."""
        choice = self.tool_choice
        if isinstance(choice, str):
            return self.tools
        return tuple(tool for tool in self.tools if tool["function"]["name"] == choice["name"])


class AnswerReader(Protocol):
    """A reader of one answer."""

    def add(self, text: str) -> AnswerDelta:
        """Read more text. What may still become something else is held back."""
        ...

    def finish(self) -> AnswerDelta:
        """End the answer, and return what was held back.

        Never raises: text that is cut off becomes content, or a call with incomplete arguments.
        """
        ...

    @property
    def num_tool_calls(self) -> int: ...

    @property
    def state(self) -> Any:
        """Plain data for `AnswerFormat.resume`; its size does not grow with the answer."""
        ...


class AnswerFormat(Protocol):
    """The way in which a model writes its answers."""

    @property
    def kept_special_token_ids(self) -> tuple[int, ...]:
        """Special tokens that must be in the text to be read."""
        ...

    @property
    def shows_tools(self) -> bool:
        """Whether the model's chat template shows the tools to the model."""
        ...

    def opens_reasoning(self, prompt: str | Sequence[int]) -> bool:
        """Return whether an answer to this prompt begins in the middle of reasoning."""
        ...

    def start(self, context: AnswerContext) -> AnswerReader: ...

    def resume(self, context: AnswerContext, state: Any) -> AnswerReader:
        """Go on from a reader's state. Raise a `RequestError` if it can't be one."""
        ...

    def make_constraint(self, context: AnswerContext) -> StructuredOutputsParams | None:
        """Return a constraint with which the text is a call, or `None` if no call is demanded."""
        ...

    def make_constraint_after_reasoning(
        self, wanted: StructuredOutputsParams
    ) -> StructuredOutputsParams:
        """Return a constraint that applies the wanted one after the end of the reasoning.

        The text begins in the middle of reasoning.
        """
        ...
