"""The types that answer readers take and return, and the buffer in which they collect deltas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

MakeId = Callable[[], str]


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    """The part of one tool call that is new since the last delta."""

    index: int  # among the calls of the answer
    id: str | None = None  # in the first delta of a call only
    name: str | None = None  # in the first delta of a call only
    arguments: str = ""  # a piece of the JSON text


class AnswerDelta(Struct, frozen=True, kw_only=True):
    """The parts of an answer that are new since the last delta; empty while text is held back."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class AnswerContext(Struct, frozen=True, kw_only=True):
    """The fields of a request that change how its answer is read."""

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
        """Return the tools that the model may call if it must call one: all, or the one named."""
        choice = self.tool_choice
        if isinstance(choice, str):
            return self.tools
        return tuple(tool for tool in self.tools if tool["function"]["name"] == choice["name"])


@dataclass(slots=True, kw_only=True)
class AnswerBuffer:
    """A buffer for the parts of an answer until they are taken.

    It gives the tool calls their indices and ids, and drops those after the first `max_calls`.
    """

    make_id: MakeId  # makes the id of a call to which the model gave none
    names: frozenset[str] = frozenset()  # of all tools
    max_calls: int | None = None  # calls after these are read and dropped
    num_begun: int = 0  # all calls so far
    _reasoning: list[str] = field(default_factory=list)
    _content: list[str] = field(default_factory=list)
    # index of a call -> its id, its name and the pieces of its arguments
    _calls: dict[int, tuple[str | None, str | None, list[str]]] = field(default_factory=dict)

    @property
    def num_given(self) -> int:
        """Return the number of tool calls that have begun, without those that are dropped."""
        return self.num_begun if self.max_calls is None else min(self.num_begun, self.max_calls)

    def add_reasoning(self, text: str) -> None:
        self._reasoning.append(text)

    def add_content(self, text: str) -> None:
        self._content.append(text)

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        index = self.num_begun
        self.num_begun += 1
        if self.num_given > index:
            self._calls[index] = (call_id or self.make_id(), name, [])

    def add_arguments(self, text: str) -> None:
        """Add a piece of the JSON arguments to the tool call that has begun last."""
        index = self.num_begun - 1
        if self.num_given > index:
            self._calls.setdefault(index, (None, None, []))[2].append(text)

    def take(self) -> AnswerDelta:
        """Return all parts that were added since the last call, and empty the buffer."""
        delta = AnswerDelta(
            reasoning="".join(self._reasoning),
            content="".join(self._content),
            tool_calls=tuple(
                ToolCallDelta(index=index, id=call_id, name=name, arguments="".join(pieces))
                for index, (call_id, name, pieces) in self._calls.items()
            ),
        )
        self._reasoning, self._content, self._calls = [], [], {}
        return delta
