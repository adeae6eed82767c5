"""The tool calls and the reasoning of Mistral's models.

Tool calls are a list of JSON objects behind `[TOOL_CALLS]` or, since version 11 of their
tokenizers, `[TOOL_CALLS]name[ARGS]{…}` for each call.
"""

from __future__ import annotations

import re
import secrets
import string
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import field

from sensorium.render.answers.answer import AnswerBuffer
from sensorium.render.answers.syntax import (
    NAME,
    CallFormat,
    CallObject,
    CallReader,
    JsonScan,
    ReasoningFormat,
    ShortText,
    Step,
    Tools,
    Vocabulary,
    get_parameters,
    repeat,
    write_objects,
    write_value,
)

if TYPE_CHECKING:
    from sensorium.render.answers.lark import Lark

_OPEN = "[TOOL_CALLS]"
_ARGUMENTS = "[ARGS]"
_CALL_ID = "[CALL_ID]"
_ALPHANUMERIC = string.ascii_letters + string.digits
_MAX_HEAD = 64 + 128
_HEAD = re.compile(rf"\s*({NAME})\s*(?:\[CALL_ID\]\s*(\w{{1,64}})\s*)?(?:\[ARGS\]\s*)?")


class MistralCall(CallReader, tag="mistral"):
    """A reader of Mistral's tool calls: a JSON list, or a name before its arguments."""

    head: ShortText = ""  # the text before the first object, or before the arguments
    is_list: bool = False
    is_begun: bool = False  # the name of a call was given out
    call: CallObject | None = None  # the object of a list that is being read
    scan: JsonScan = field(default_factory=JsonScan)  # reads the arguments of a named call

    def step(self, character: str, buffer: AnswerBuffer) -> Step:
        if self.is_list:
            return self._step_list(character, buffer)
        if self.is_begun:
            return self._step_arguments(character, buffer)
        if character == "[" and not self.head.strip():
            self.head += character
            self.is_list = True
            return Step.ON
        return self._step_head(character, buffer)

    def _step_head(self, character: str, buffer: AnswerBuffer) -> Step:
        if character != "{":
            if len(self.head) >= _MAX_HEAD:
                return Step.BEFORE
            self.head += character
            return Step.ON
        found = _HEAD.fullmatch(self.head)
        if found is None:
            return Step.BEFORE
        buffer.begin_call(found.group(1), found.group(2))
        self.is_begun, self.head, self.opening = True, "", ""
        return self._step_arguments(character, buffer)

    def _step_arguments(self, character: str, buffer: AnswerBuffer) -> Step:
        if character == "<" and not self.scan.is_in_string:
            return Step.BEFORE
        buffer.add_arguments(self.scan.step(character))
        return Step.LAST if self.scan.depth == 0 else Step.ON

    def _step_list(self, character: str, buffer: AnswerBuffer) -> Step:
        if self.call is None:
            if self.is_begun and (character.isspace() or character in ",]"):
                return Step.LAST if character == "]" else Step.ON
            if character.isspace() and len(self.head) < _MAX_HEAD:
                self.head += character
                return Step.ON
            self.call = CallObject(scan=JsonScan())
        step = self.call.step(character, buffer)
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


def _write_list(lark: Lark, tools: Tools, is_single: bool) -> str:
    calls = repeat(write_objects(lark, tools), '", "', is_single)
    return f'{lark.write_text(_OPEN)} "[" {calls} "]"'


def _write_named(lark: Lark, tools: Tools, is_single: bool) -> str:
    calls = []
    for index, tool in enumerate(tools):
        arguments = lark.add(f"arguments_{index}", write_value(lark, tool, get_parameters(tool)))
        head = lark.write_text(tool["function"]["name"]) + " " + lark.write_text(_ARGUMENTS)
        calls.append(lark.add(f"call_{index}", f"{head} {arguments}"))
    call = lark.add("call", f"{lark.write_text(_OPEN)} ({' | '.join(calls)})")
    return repeat(call, "", is_single)


def _make_id() -> str:
    """Return a random tool call id as Mistral's templates require it: nine letters and digits."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


def _choose_variant(vocabulary: Vocabulary, template: str) -> CallFormat:
    is_named = _ARGUMENTS in template or vocabulary.mistral_version >= 11
    return replace(CALLS, write_calls=_write_named) if is_named else CALLS


CALLS = CallFormat(
    name="mistral",
    rank=0,
    tags=(_OPEN,),
    special_tokens=(_OPEN, _ARGUMENTS, _CALL_ID),
    reader=MistralCall,
    write_calls=_write_list,
    is_used_by=lambda vocabulary, template: vocabulary.is_mistral or _OPEN in template,
    choose_variant=_choose_variant,
    make_id=_make_id,
)
REASONING = ReasoningFormat(
    name="mistral",
    rank=0,
    open="[THINK]",
    close="[/THINK]",
    # A tag in the vocabulary proves nothing: older vocabularies have it, and their models don't
    # use it.
    is_used_by=lambda vocabulary, template: (
        vocabulary.mistral_version >= 13 or "[THINK]" in template
    ),
    is_anywhere=True,
    special_tokens=("[THINK]", "[/THINK]"),
)
