"""What reads a model's text as it grows, and tells what is reasoning, what is content and what
calls a tool.

An `AnswerFormat` belongs to a model; it starts an `AnswerReader` for each completion. Pure: text
in, values out. A reader's `state` is plain data: another process can go on with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from sensorium.types.structured import StructuredOutputsParams


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    """News of the n-th tool call. `id` and `name` come once, with the first of its news;
    `arguments` is a piece of the JSON text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class AnswerDelta(Struct, frozen=True, kw_only=True):
    """What new text has brought. All empty: nothing that can be told yet."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.reasoning or self.content or self.tool_calls)


class AnswerContext(Struct, frozen=True, kw_only=True):
    """What a request says that changes how its answer is read. `tools`: OpenAI's, checked;
    `tool_choice`: "auto", "none", "required" or `{"name": …}` for one of them.
    `parallel_tool_calls`: if not, one call at most is told. `starts_in_reasoning`: the prompt
    itself has opened it. `separate_reasoning`: whether it is told apart (else it stays in the
    content, with its tags).
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | Mapping[str, str] = "none"
    parallel_tool_calls: bool = True
    starts_in_reasoning: bool = False
    separate_reasoning: bool = True

    @property
    def reads_calls(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def demands_call(self) -> bool:
        return self.reads_calls and self.tool_choice != "auto"

    @property
    def demanded_tools(self) -> tuple[Mapping[str, Any], ...]:
        """Of which one must be called, if one must."""
        choice = self.tool_choice
        if isinstance(choice, str):
            return self.tools
        return tuple(tool for tool in self.tools if tool["function"]["name"] == choice["name"])


class AnswerReader(Protocol):
    def add(self, text: str) -> AnswerDelta:
        """More of the text. What may still become something else is held back."""
        ...

    def finish(self) -> AnswerDelta:
        """There is no more: what was held back is told. Never raises: text that is broken off is
        content, or a call whose arguments are broken off.
        """
        ...

    @property
    def num_tool_calls(self) -> int: ...

    @property
    def state(self) -> Any:
        """Plain data for `AnswerFormat.resume`; its size does not grow with the answer."""
        ...


class AnswerFormat(Protocol):
    @property
    def kept_special_token_ids(self) -> tuple[int, ...]:
        """Special tokens that must be in the text to be read."""
        ...

    @property
    def shows_tools(self) -> bool:
        """Whether the model is told of its tools: its chat template speaks of them."""
        ...

    def opens_reasoning(self, prompt: str | Sequence[int]) -> bool:
        """Whether an answer to this prompt begins in the middle of reasoning."""
        ...

    def start(self, context: AnswerContext) -> AnswerReader: ...

    def resume(self, context: AnswerContext, state: Any) -> AnswerReader:
        """Go on where another reader was. A `RequestError` if the state can't be one."""
        ...

    def make_constraint(self, context: AnswerContext) -> StructuredOutputsParams | None:
        """What the text must look like so that a call that the context demands can be read;
        `None` where nothing is demanded.
        """
        ...

    def make_constraint_after_reasoning(
        self, wanted: StructuredOutputsParams
    ) -> StructuredOutputsParams:
        """What the text must look like that begins in the middle of reasoning, and has to be what
        is wanted from its end on.
        """
        ...
