"""Calls as Mistral's models write them: a list of JSON objects behind `[TOOL_CALLS]`, or, since
version 11 of their tokenizers, `[TOOL_CALLS]name[ARGS]{…}` for each.
"""

from __future__ import annotations

import re

from msgspec import field

from sensorium.render.answers.calls import (
    NAME,
    CallObject,
    CallReader,
    JsonScan,
    ShortText,
    Step,
)
from sensorium.render.answers.told import AnswerBuffer

OPEN = "[TOOL_CALLS]"
ARGUMENTS = "[ARGS]"
CALL_ID = "[CALL_ID]"
_MAX_HEAD = 64 + 128
_HEAD = re.compile(rf"\s*({NAME})\s*(?:\[CALL_ID\]\s*(\w{{1,64}})\s*)?(?:\[ARGS\]\s*)?")


class MistralCall(CallReader, tag="mistral"):
    """`head`: what was read before the first call is known. `is_list`: one of objects, of which
    `call` is being read; else `scan` reads the arguments.
    """

    head: ShortText = ""
    is_list: bool = False
    is_begun: bool = False
    call: CallObject | None = None
    scan: JsonScan = field(default_factory=JsonScan)

    def step(self, character: str, told: AnswerBuffer) -> Step:
        if self.is_list:
            return self._step_list(character, told)
        if self.is_begun:
            return self._step_arguments(character, told)
        if character == "[" and not self.head.strip():
            self.head += character
            self.is_list = True
            return Step.ON
        return self._step_head(character, told)

    def _step_head(self, character: str, told: AnswerBuffer) -> Step:
        if character != "{":
            if len(self.head) >= _MAX_HEAD:
                return Step.BEFORE
            self.head += character
            return Step.ON
        found = _HEAD.fullmatch(self.head)
        if found is None:
            return Step.BEFORE
        told.begin_call(found.group(1), found.group(2))
        self.is_begun, self.head, self.opening = True, "", ""
        return self._step_arguments(character, told)

    def _step_arguments(self, character: str, told: AnswerBuffer) -> Step:
        if character == "<" and not self.scan.is_in_string:
            return Step.BEFORE
        told.add_arguments(self.scan.step(character))
        return Step.LAST if self.scan.depth == 0 else Step.ON

    def _step_list(self, character: str, told: AnswerBuffer) -> Step:
        if self.call is None:
            if self.is_begun and (character.isspace() or character in ",]"):
                return Step.LAST if character == "]" else Step.ON
            if character.isspace() and len(self.head) < _MAX_HEAD:
                self.head += character
                return Step.ON
            self.call = CallObject(scan=JsonScan())
        step = self.call.step(character, told)
        if self.call.is_begun:
            self.is_begun, self.head, self.opening = True, "", ""
        if step is Step.LAST and self.call.is_begun:
            self.call = None
            return Step.ON
        return step

    def count_plain(self, text: str, start: int) -> int:
        if self.call is not None:
            return self.call.count_plain(text, start)
        is_free = self.is_begun and not self.is_list
        return self.scan.count_plain(text, start) if is_free else 0

    @property
    def rest(self) -> str:
        return self.opening + self.head + ("" if self.call is None else self.call.held)
