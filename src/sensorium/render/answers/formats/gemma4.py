"""Calls as Gemma 4 writes them: `<|tool_call>call:name{key:<|"|>text<|"|>,n:3}<tool_call|>`.

Keys are bare, texts stand between two tokens that nothing escapes, the rest is as in JSON. The
arguments are told as JSON while they are read; brackets that don't match are put right.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Literal

from msgspec import Meta

from sensorium.render.answers.calls import NAME, CallReader, ShortText, Step
from sensorium.render.answers.told import AnswerBuffer

OPEN = "<|tool_call>"
CLOSE = "<tool_call|>"
QUOTE = '<|"|>'
_MAX_WORD = 192  # characters of a key, or of a value that is no text
_MAX_DEPTH = 64
_HEAD = re.compile(rf"\s*call:\s*({NAME})\s*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORDS = {"true": "true", "false": "false", "null": "null"} | {
    "True": "true",
    "False": "false",
    "None": "null",
    "": "null",
}
_PLAIN_TEXT = re.compile(r'[^<"\\\x00-\x1f]+')
_Place = Literal["head", "key", "value", "text", "string", "after", "end"]


class Gemma4Call(CallReader, tag="gemma4"):
    """`place`: what is being read. `word`: what there is of a head, a key, a bare value, the end of
    a text or the closing tag. `nesting`: the brackets that are open. `has_comma`: one was written,
    and is told with what follows it.
    """

    place: _Place = "head"
    word: ShortText = ""
    nesting: Annotated[str, Meta(max_length=_MAX_DEPTH, pattern=r"^[\[{]*$")] = ""
    has_comma: bool = False
    is_escaped: bool = False

    def __post_init__(self) -> None:
        if self.place in ("key", "value", "text", "string", "after") and not self.nesting:
            raise ValueError("no bracket is open")

    def step(self, character: str, told: AnswerBuffer) -> Step:
        match self.place:
            case "head":
                return self._step_head(character, told)
            case "key":
                return self._step_key(character, told)
            case "value":
                return self._step_value(character, told)
            case "text":
                self._step_text(character, told)
            case "string":
                self._step_string(character, told)
            case "after":
                return self._step_after(character, told)
            case "end":
                return self._close(character)
        return Step.ON

    @property
    def rest(self) -> str:
        if self.place == "head":
            return self.opening + self.word
        return self.word if self.place == "end" else ""

    def count_plain(self, text: str, start: int) -> int:
        if self.place != "text" or self.word:
            return 0
        found = _PLAIN_TEXT.match(text, start)
        return 0 if found is None else found.end() - start

    def _step_head(self, character: str, told: AnswerBuffer) -> Step:
        if character == "{":
            found = _HEAD.fullmatch(self.word)
            if found is None:
                return Step.BEFORE
            told.begin_call(found.group(1))
            self.word, self.opening = "", ""
            return self._open("{", told)
        if len(self.word) >= _MAX_WORD:
            return Step.BEFORE
        self.word += character
        return Step.ON

    def _step_key(self, character: str, told: AnswerBuffer) -> Step:
        if not self.word and (character.isspace() or character == ","):
            return Step.ON
        if not self.word and character in "}]":
            return self._pop(told)
        if character == ":" and not _is_open_quote(self.word):
            self._tell_next(json.dumps(_unquote(self.word), ensure_ascii=False) + ": ", told)
            self.word, self.place = "", "value"
            return Step.ON
        return self._add_to_word(character)

    def _step_value(self, character: str, told: AnswerBuffer) -> Step:
        if not self.word:
            if character.isspace():
                return Step.ON
            if character in "{[":
                return self._open(character, told)
            if character == "]" and self.nesting[-1] == "[":
                return self._pop(told)
            if character == '"':
                self._tell_next('"', told)
                self.place = "string"
                return Step.ON
        if character in ",}]":
            self._tell_next(_convert(self.word.strip()), told)
            self.word, self.place = "", "after"
            return self._step_after(character, told)
        if self.word + character == QUOTE:
            self._tell_next('"', told)
            self.word, self.place = "", "text"
            return Step.ON
        return self._add_to_word(character)

    def _step_text(self, character: str, told: AnswerBuffer) -> None:
        """`word`: what may be the beginning of the token that ends it."""
        word, self.word = self.word + character, ""
        if word == QUOTE:
            told.add_arguments('"')
            self.place = "after"
        elif QUOTE.startswith(word):
            self.word = word
        else:
            told.add_arguments(json.dumps(word[0], ensure_ascii=False)[1:-1])
            for later in word[1:]:
                self._step_text(later, told)

    def _step_string(self, character: str, told: AnswerBuffer) -> None:
        """As in JSON, which some calls have instead."""
        text = json.dumps(character)[1:-1] if character < " " else character
        told.add_arguments(text)
        if character == '"' and not self.is_escaped:
            self.place = "after"
        self.is_escaped = character == "\\" and not self.is_escaped

    def _step_after(self, character: str, told: AnswerBuffer) -> Step:
        if character.isspace():
            return Step.ON
        if character in "}]":
            return self._pop(told)
        if character != ",":
            return self._break_off(character)
        self.has_comma = True
        self.place = "key" if self.nesting[-1] == "{" else "value"
        return Step.ON

    def _close(self, character: str) -> Step:
        """A closing tag may be missing: whatever else comes is content again."""
        if not self.word and character.isspace():
            return Step.ON
        if not CLOSE.startswith(self.word + character):
            return Step.BEFORE
        self.word += character
        if self.word != CLOSE:
            return Step.ON
        self.word = ""
        return Step.LAST

    def _break_off(self, character: str) -> Step:
        """What follows is no value: the arguments end here, unfinished."""
        self.place, self.word = "end", ""
        return self._close(character)

    def _add_to_word(self, character: str) -> Step:
        if len(self.word) >= _MAX_WORD:
            return self._break_off(character)
        self.word += character
        if not self.word.endswith(CLOSE):
            return Step.ON
        self.word, self.place = "", "end"
        return Step.LAST

    def _open(self, bracket: str, told: AnswerBuffer) -> Step:
        if len(self.nesting) >= _MAX_DEPTH:
            return self._break_off(bracket)
        self._tell_next(bracket, told)
        self.nesting += bracket
        self.place = "key" if bracket == "{" else "value"
        return Step.ON

    def _pop(self, told: AnswerBuffer) -> Step:
        told.add_arguments("}" if self.nesting[-1] == "{" else "]")
        self.nesting, self.has_comma = self.nesting[:-1], False
        self.place = "after" if self.nesting else "end"
        return Step.ON

    def _tell_next(self, text: str, told: AnswerBuffer) -> None:
        told.add_arguments(", " + text if self.has_comma else text)
        self.has_comma = False


def _convert(word: str) -> str:
    if word in _WORDS:
        return _WORDS[word]
    return word if _NUMBER.fullmatch(word) else json.dumps(word, ensure_ascii=False)


def _is_open_quote(word: str) -> bool:
    return any(
        word.startswith(quote) and not (len(word) > len(quote) and word.endswith(quote))
        for quote in (QUOTE, '"')
    )


def _unquote(word: str) -> str:
    word = word.strip()
    for quote in (QUOTE, '"'):
        if len(word) >= 2 * len(quote) and word.startswith(quote) and word.endswith(quote):
            return word[len(quote) : -len(quote)]
    return word
