"""The calls of Hermes, Qwen and many others: a JSON object between two tags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import field

from sensorium.render.answers.answer_buffer import AnswerBuffer
from sensorium.render.answers.syntax import (
    CallFormat,
    CallObject,
    CallReader,
    JsonScan,
    ShortText,
    Step,
    Tools,
    repeat,
    write_objects,
)
from sensorium.render.answers.vocabulary import Vocabulary

if TYPE_CHECKING:
    from sensorium.render.answers.lark import Lark

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


class HermesCall(CallReader, tag="hermes"):
    """A reader of one call."""

    call: CallObject = field(default_factory=lambda: CallObject(scan=JsonScan()))
    is_ended: bool = False  # the object has ended
    closing: ShortText = ""  # the beginning of the closing tag

    def step(self, character: str, buffer: AnswerBuffer) -> Step:
        if self.is_ended:
            return self._close(character)
        step = self.call.step(character, buffer)
        if step is Step.ON or not self.call.is_begun:
            return step
        self.is_ended = True
        return Step.ON if step is Step.LAST else self._close(character)

    def _close(self, character: str) -> Step:
        """Read the closing tag. It may be missing: other text is content again."""
        closing = self.closing + character
        if not self.closing and character.isspace():
            return Step.ON
        if not _CLOSE.startswith(closing):
            return Step.BEFORE
        self.closing = "" if closing == _CLOSE else closing
        return Step.ON if self.closing else Step.LAST

    def count_plain(self, text: str, start: int) -> int:
        return 0 if self.is_ended else self.call.count_plain(text, start)

    @property
    def rest(self) -> str:
        return self.closing if self.call.is_begun else self.opening + self.call.held


def _write_calls(lark: Lark, tools: Tools, is_single: bool) -> str:
    opening, closing = lark.write_text(_OPEN), lark.write_text(_CLOSE)
    body = write_objects(lark, tools)
    call = lark.add("call", f'{opening} "\\n" {body} "\\n" {closing}')
    return repeat(call, '"\\n"', is_single)


def _is_used_by(vocabulary: Vocabulary, template: str) -> bool:  # noqa: ARG001
    # A template with "<function=" has another format with the same tag.
    return _OPEN in template and "<function=" not in template


CALLS = CallFormat(
    name="hermes",
    tags=(_OPEN,),
    special_tokens=(_OPEN, _CLOSE),
    reader=HermesCall,
    write_calls=_write_calls,
    is_used_by=_is_used_by,
)
