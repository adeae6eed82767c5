"""Collects the parts of an answer until they are taken, and numbers the calls."""

from __future__ import annotations

from collections.abc import Callable

from sensorium.render.answers.answer import AnswerDelta, ToolCallDelta

MakeId = Callable[[], str]


class AnswerBuffer:
    """The reasoning, the content and the calls that were not taken yet."""

    def __init__(
        self,
        *,
        make_id: MakeId,  # for calls to which the model gave no id
        names: frozenset[str] = frozenset(),  # of all tools
        max_calls: int | None = None,  # calls after these are read and dropped
        num_begun: int = 0,
    ) -> None:
        self.num_begun = num_begun  # all calls so far
        self._make_id = make_id
        self._names = names
        self._max_calls = max_calls
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: dict[int, ToolCallDelta] = {}  # index of a call -> its id and name
        self._arguments: dict[int, list[str]] = {}  # index of a call -> pieces of its arguments

    @property
    def num_given(self) -> int:
        """The number of calls that are given out."""
        return self.num_begun if self._max_calls is None else min(self.num_begun, self._max_calls)

    def is_known(self, name: str) -> bool:
        return name in self._names

    def add_reasoning(self, text: str) -> None:
        self._reasoning.append(text)

    def add_content(self, text: str) -> None:
        self._content.append(text)

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        index = self.num_begun
        self.num_begun += 1
        if self.num_given > index:
            new_id = call_id or self._make_id()
            self._calls[index] = ToolCallDelta(index=index, id=new_id, name=name)

    def add_arguments(self, text: str) -> None:
        """Add arguments to the call that has begun last."""
        index = self.num_begun - 1
        if self.num_given > index:
            self._calls.setdefault(index, ToolCallDelta(index=index))
            self._arguments.setdefault(index, []).append(text)

    def take(self) -> AnswerDelta:
        """Return all parts that were not taken yet, and forget them."""
        calls = tuple(
            ToolCallDelta(
                index=index,
                id=call.id,
                name=call.name,
                arguments="".join(self._arguments.get(index, ())),
            )
            for index, call in self._calls.items()
        )
        delta = AnswerDelta(
            reasoning="".join(self._reasoning), content="".join(self._content), tool_calls=calls
        )
        self._reasoning, self._content, self._calls, self._arguments = [], [], {}, {}
        return delta
