"""Reads one answer as it grows: sections of reasoning, content and calls, one after another.

Every decision is made character by character, so that it does not matter how the text is cut into
pieces. Text that may begin a tag is held back. Whitespace next to a tag belongs to the tag.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from sensorium.render.answers.answer import AnswerBuffer, AnswerContext, AnswerDelta
from sensorium.render.answers.syntax import (
    CallFormat,
    CallReader,
    ReasoningFormat,
    ShortText,
    Step,
    make_call_id,
)
from sensorium.types.errors import RequestError

_MAX_SPACE = 64
_MAX_CALLS = 2**20


class ReaderState(Struct, kw_only=True):
    """The state between two pieces of text, from which another `AnswerReader` can continue."""

    section: Literal["reasoning", "content", "call"] = "content"
    space: Annotated[str, Meta(max_length=_MAX_SPACE)] = ""  # whitespace that is held back
    tag: ShortText = ""  # text that is held back because it may begin a tag
    is_after_tag: bool = False  # whitespace is dropped, unless it separates content
    is_at_start: bool = True  # nothing but whitespace and reasoning has come
    has_content: bool = False
    num_calls: Annotated[int, Meta(ge=0, le=_MAX_CALLS)] = 0
    # The reader of the call that is being read. In a state from a client it is plain data, because
    # its type depends on the format.
    call: Any = None


class AnswerReader:
    """A reader that splits a growing answer into reasoning, content and tool calls."""

    def __init__(
        self,
        context: AnswerContext,
        *,
        calls: CallFormat | None = None,  # None: tool calls stay content
        reasoning: ReasoningFormat | None = None,  # None: reasoning stays content
        state: ReaderState | None = None,  # of the reader that this one continues
    ) -> None:
        if state is None:
            state = ReaderState()
            if reasoning is not None and context.starts_in_reasoning:
                state.section = "reasoning"
                state.is_after_tag = context.separate_reasoning
        self._calls = calls
        self._reasoning = reasoning
        self._state = state
        self._is_separate = context.separate_reasoning
        self._buffer = AnswerBuffer(
            make_id=make_call_id if calls is None else calls.make_id,
            names=frozenset(tool["function"]["name"] for tool in context.tools),
            max_calls=None if context.parallel_tool_calls else 1,
            num_begun=state.num_calls,
        )

    @property
    def num_tool_calls(self) -> int:
        return self._buffer.num_given

    @property
    def state(self) -> Any:
        """Return plain data of bounded size, from which another reader can continue the answer."""
        self._state.num_calls = min(self._buffer.num_begun, _MAX_CALLS)
        return msgspec.to_builtins(self._state)

    def add(self, text: str) -> AnswerDelta:
        """Read more text of the answer, and return the parts that later text can't change."""
        position = 0
        while position < len(text):
            length = self._take_plain_run(text, position)
            if not length:
                self._step(text[position])
                length = 1
            position += length
        return self._buffer.take()

    def finish(self) -> AnswerDelta:
        """End the answer, and return the text that was held back.

        This never raises: a tool call that was cut off becomes content, or has incomplete
        arguments.
        """
        state = self._state
        if state.call is not None:
            self._end_call(state.call)
        space = "" if state.is_after_tag and not state.tag else state.space
        self._add_text(space + state.tag)
        state.space, state.tag = "", ""
        return self._buffer.take()

    def _take_plain_run(self, text: str, start: int) -> int:
        """Copy the plain characters from `start` on into the answer, and return their number.

        Characters that may begin a tag are not plain.
        """
        # This is faster than reading them one by one.
        state = self._state
        call: CallReader | None = state.call
        if call is not None:
            length = call.count_plain(text, start)
            if length:
                self._buffer.add_arguments(text[start : start + length])
            return length
        if state.tag:
            return 0
        found = _find_plain(self._get_tags()).match(text, start)
        if found is None:
            return 0
        self._add_plain(found.group())
        return found.end() - start

    def _step(self, character: str) -> None:
        state = self._state
        if state.call is not None:
            step = state.call.step(character, self._buffer)
            if step is not Step.ON:
                self._end_call(state.call)
            if step is Step.BEFORE:
                self._step(character)
            return
        tag, state.tag = state.tag + character, ""
        tags = self._get_tags()
        if tag in tags:
            self._take_tag(tag)
        elif any(candidate.startswith(tag) for candidate in tags):
            state.tag = tag
        else:
            self._take_character(tag[0])
            for later in tag[1:]:
                self._step(later)

    def _take_character(self, character: str) -> None:
        state = self._state
        if not character.isspace() or not self._get_tags():
            self._add_plain(character)
        elif not state.is_after_tag or (state.has_content and state.section == "content"):
            state.space += character
            if len(state.space) > _MAX_SPACE:
                self._add_text(state.space[0])
                state.space = state.space[1:]

    def _add_plain(self, text: str) -> None:
        state = self._state
        self._add_text(state.space + text)
        state.space, state.is_after_tag = "", False
        if state.section == "content" or not self._is_separate:
            state.is_at_start = False

    def _add_text(self, text: str) -> None:
        if not text:
            return
        if self._state.section == "reasoning" and self._is_separate:
            self._buffer.add_reasoning(text)
        else:
            self._buffer.add_content(text)
            self._state.has_content = True

    def _get_tags(self) -> tuple[str, ...]:
        """Return the tags that may follow at this place of the answer."""
        is_reasoning, is_at_start = self._state.section == "reasoning", self._state.is_at_start
        return _get_tags(self._reasoning, self._calls, is_reasoning, is_at_start)

    def _take_tag(self, tag: str) -> None:
        state, reasoning = self._state, self._reasoning
        if reasoning is None or tag not in (reasoning.open, reasoning.close):
            self._begin_call(tag)
            return
        is_opened = tag == reasoning.open
        if is_opened and state.section == "reasoning" and not state.is_after_tag:
            self._add_plain(tag)  # text, because reasoning is open already
            return
        if self._is_separate:
            state.is_after_tag = True
        else:
            self._add_plain(tag)
        state.space = ""
        state.section = "reasoning" if is_opened else "content"

    def _begin_call(self, tag: str) -> None:
        state = self._state
        if self._calls is not None:
            state.call = self._calls.reader.begin(tag, state.space + tag)
            state.section, state.space, state.is_at_start = "call", "", False

    def _end_call(self, call: CallReader) -> None:
        state = self._state
        state.call, state.section = None, "content"
        rest = call.rest
        self._add_text(rest)
        state.is_after_tag = not rest


@lru_cache(maxsize=256)
def _get_tags(
    reasoning: ReasoningFormat | None,
    calls: CallFormat | None,
    is_reasoning: bool,
    is_at_start: bool,
) -> tuple[str, ...]:
    if is_reasoning:
        return () if reasoning is None else (reasoning.close, reasoning.open)
    tags: list[str] = []
    if reasoning is not None and (is_at_start or reasoning.is_anywhere):
        tags.append(reasoning.open)
    if calls is not None:
        tags += calls.tags
        tags += calls.start_tags if is_at_start else ()
    return tuple(tags)


@lru_cache(maxsize=64)
def _find_plain(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for characters that are neither whitespace nor the first one of a tag."""
    if not tags:
        return re.compile(r"(?s:.+)")
    first = re.escape("".join(sorted({tag[0] for tag in tags})))
    return re.compile(rf"[^\s{first}]+")


def read_state(
    state: Any, *, calls: CallFormat | None, reasoning: ReasoningFormat | None
) -> ReaderState:
    """Return the state of a reader from plain data, which may come from a client.

    Raise a `RequestError` if it can't be the state of a reader for these formats.
    """
    try:
        read = msgspec.convert(state, ReaderState)
        if read.call is not None and calls is not None:
            read.call = msgspec.convert(read.call, calls.reader)
    except msgspec.ValidationError as error:
        raise RequestError(f"must be a state that this server has returned: {error}") from error
    is_call = read.section == "call"
    if is_call != (read.call is not None) or (is_call and calls is None):
        raise RequestError("was made by a server with another tool-call or reasoning parser")
    if read.section == "reasoning" and reasoning is None:
        raise RequestError("was made by a server with another tool-call or reasoning parser")
    return read
