"""The tool calls of Hermes, Qwen and many others: a JSON object between two tags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import field

from sensorium.render.answers.answer import AnswerBuffer
from sensorium.render.answers.syntax import (
    CallFormat,
    CallObject,
    CallReader,
    JsonScan,
    ShortText,
    Step,
    Tools,
    read_closing,
    repeat,
    write_objects,
)

if TYPE_CHECKING:
    from sensorium.render.answers.lark import Lark

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


class HermesCall(CallReader, tag="hermes"):
    """A reader of one tool call in the format of Hermes: a JSON object between two tags."""

    call: CallObject = field(default_factory=lambda: CallObject(scan=JsonScan()))
    is_ended: bool = False  # the object has ended
    closing: ShortText = ""  # the part of the closing tag that was read

    def step(self, character: str, buffer: AnswerBuffer) -> Step:
        if self.is_ended:
            return self._close(character)
        step = self.call.step(character, buffer)
        if step is Step.ON or not self.call.is_begun:
            return step
        self.is_ended = True
        return Step.ON if step is Step.LAST else self._close(character)

    def _close(self, character: str) -> Step:
        """Read one character of the closing tag, which may be missing."""
        self.closing, step = read_closing(_CLOSE, self.closing, character)
        return step

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


CALLS = CallFormat(
    name="hermes",
    tags=(_OPEN,),
    special_tokens=(_OPEN, _CLOSE),
    reader=HermesCall,
    write_calls=_write_calls,
    # A template with "<function=" has another format with the same tag.
    is_used_by=lambda _, template: _OPEN in template and "<function=" not in template,
)
