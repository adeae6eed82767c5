"""What the readers of calls have in common: steps, limits, and where JSON ends.

A reader of calls takes one character at a time, so that an answer is read the same however it is
cut. Its fields are all that it remembers, as plain data of bounded size.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import Annotated, Any

from msgspec import Meta, Struct

from sensorium.render.answers.told import AnswerBuffer

MAX_HELD = 2**14  # characters of a call that are held back until its name is known
HeldText = Annotated[str, Meta(max_length=MAX_HELD + 128)]
ShortText = Annotated[str, Meta(max_length=256)]
Depth = Annotated[int, Meta(ge=0, le=2**53)]
NAME = r"[\w.\-]{1,128}"


class Step(Enum):
    """What a character did: the call goes on, it ended with it, or before it. What is still held
    then was no call: it is content.
    """

    ON = auto()
    LAST = auto()
    BEFORE = auto()


class CallReader(Struct):
    """`opening`: what came before the call and goes to the content if it is none."""

    opening: ShortText = ""

    def step(self, character: str, told: AnswerBuffer) -> Step:
        raise NotImplementedError

    def count_plain(self, text: str, start: int) -> int:
        """How many characters from there on are of the arguments, whatever follows them. They are
        told as they are.
        """
        del text, start
        return 0

    @property
    def rest(self) -> str:
        """What is held back."""
        raise NotImplementedError


class JsonScan(Struct):
    """Where a JSON object or list ends: at `depth` 0. Looks at brackets and strings only."""

    depth: Depth = 0
    is_in_string: bool = False
    is_escaped: bool = False

    def step(self, character: str) -> str:
        """The character as JSON has it: a line break in a string is escaped."""
        is_raw = self.is_in_string and character < " "
        self._follow(character)
        return json.dumps(character)[1:-1] if is_raw else character

    def _follow(self, character: str) -> None:
        if self.is_in_string:
            if self.is_escaped:
                self.is_escaped = False
            elif character == "\\":
                self.is_escaped = True
            elif character == '"':
                self.is_in_string = False
        elif character == '"':
            self.is_in_string = True
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth = max(0, self.depth - 1)

    def count_plain(self, text: str, start: int) -> int:
        """How many characters change nothing here."""
        if self.is_escaped:
            return 0
        found = (_IN_STRING if self.is_in_string else _IN_NUMBERS).match(text, start)
        return 0 if found is None else found.end() - start


_IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')
_IN_NUMBERS = re.compile(r"[\w\s:,.+\-]+")
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*', re.DOTALL
)


class CallObject(Struct):
    """One `{"name": …, "arguments": {…}}`. Arguments that come after the name are told as they are
    written; other orders are held back until the object ends.
    """

    scan: JsonScan
    held: HeldText = ""
    is_begun: bool = False  # its name was told
    is_told: bool = False  # and all of its arguments

    def step(self, character: str, told: AnswerBuffer) -> Step:
        scan = self.scan
        if not scan.is_in_string and self._is_broken(character):
            return Step.BEFORE
        if not self.is_begun and len(self.held) >= MAX_HELD:
            return Step.BEFORE
        text = scan.step(character)
        if self.is_begun:
            self._tell(text, told)
        else:
            self.held += character
            self._find_name(character, told)
        is_end = scan.depth == 0 and character == "}" and not scan.is_in_string
        return Step.LAST if is_end else Step.ON

    def count_plain(self, text: str, start: int) -> int:
        is_free = self.is_begun and not self.is_told
        return self.scan.count_plain(text, start) if is_free else 0

    def _is_broken(self, character: str) -> bool:
        """Outside of strings JSON has no such thing; a tag begins there."""
        if self.scan.depth == 0:
            return character != "{" and not character.isspace()
        return character == "<"

    def _tell(self, text: str, told: AnswerBuffer) -> None:
        if not self.is_told:
            told.add_arguments(text)
            self.is_told = self.scan.depth == 1

    def _find_name(self, character: str, told: AnswerBuffer) -> None:
        scan = self.scan
        if scan.is_in_string:
            return
        if character == "{" and scan.depth == 2:
            found = _HEAD.fullmatch(self.held, 0, len(self.held) - 1)
            name = None if found is None else _load(found.group(1))
            if isinstance(name, str) and name:
                told.begin_call(name)
                told.add_arguments("{")
                self.held, self.is_begun = "", True
        elif character == "}" and scan.depth == 0:
            self._tell_whole(told)

    def _tell_whole(self, told: AnswerBuffer) -> None:
        call = _load(self.held)
        if not isinstance(call, dict):
            return
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
        if isinstance(name, str) and name and isinstance(arguments, dict | None):
            told.begin_call(name)
            told.add_arguments(json.dumps(arguments or {}, ensure_ascii=False))
            self.held, self.is_begun, self.is_told = "", True, True


def _load(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
