"""Calls as Hermes, Qwen and many others write them: a JSON object between two tags."""

from __future__ import annotations

from msgspec import field

from sensorium.render.answers.calls import CallObject, CallReader, JsonScan, ShortText, Step
from sensorium.render.answers.told import AnswerBuffer

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesCall(CallReader, tag="hermes"):
    """`closing`: what there is of the closing tag, once the object has ended."""

    call: CallObject = field(default_factory=lambda: CallObject(scan=JsonScan()))
    is_ended: bool = False
    closing: ShortText = ""

    def step(self, character: str, told: AnswerBuffer) -> Step:
        if self.is_ended:
            return self._close(character)
        step = self.call.step(character, told)
        if step is Step.ON or not self.call.is_begun:
            return step
        self.is_ended = True
        return Step.ON if step is Step.LAST else self._close(character)

    def _close(self, character: str) -> Step:
        """A closing tag may be missing: whatever else comes is content again."""
        closing = self.closing + character
        if not self.closing and character.isspace():
            return Step.ON
        if not CLOSE.startswith(closing):
            return Step.BEFORE
        self.closing = "" if closing == CLOSE else closing
        return Step.ON if self.closing else Step.LAST

    def count_plain(self, text: str, start: int) -> int:
        return 0 if self.is_ended else self.call.count_plain(text, start)

    @property
    def rest(self) -> str:
        return self.closing if self.call.is_begun else self.opening + self.call.held
