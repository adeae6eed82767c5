"""Calls as Python's: `[name(key=value), …]` at the beginning of an answer, or a block of code
that is marked as `tool_code`. This is what prompts for Gemma 3 ask for.

A call is told when its block has ended: until then it can't be known to be one.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator
from typing import Annotated, Any

from msgspec import Meta

from sensorium.render.answers.calls import MAX_HELD, CallReader, HeldText, ShortText, Step
from sensorium.render.answers.told import AnswerBuffer

OPEN_LIST = "["
OPEN_BLOCK = "```tool_code"
CLOSE_BLOCK = "```"
_NAME_BEGUN = re.compile(r"\s{0,64}[\w.]{0,128}\s{0,64}")
_NAMES = {"true": True, "false": False, "null": None, "None": None, "True": True, "False": False}
_MAX_CALLS = 64


class PythonicCall(CallReader, tag="pythonic"):
    """`quote`: what ends the string that is being read, or nothing. `depth`: brackets that are
    open, the list's own too.
    """

    is_block: bool = False
    is_told: bool = False
    held: HeldText = ""
    quote: ShortText = ""
    is_escaped: bool = False
    depth: Annotated[int, Meta(ge=1, le=MAX_HELD + 1)] = 1

    def step(self, character: str, told: AnswerBuffer) -> Step:
        if len(self.held) >= MAX_HELD:
            return Step.BEFORE
        if self.is_block:
            return self._step_block(character, told)
        if "(" not in self.held and character != "(":
            is_name = _NAME_BEGUN.fullmatch(self.held + character) is not None
            if not is_name:
                return Step.BEFORE
        self._follow(character)
        self.held += character
        if self.depth:
            return Step.ON
        self.is_told = _tell_calls("[" + self.held, told)
        return Step.LAST

    @property
    def rest(self) -> str:
        return "" if self.is_told else self.opening + self.held

    def _step_block(self, character: str, told: AnswerBuffer) -> Step:
        self.held += character
        if not self.held.endswith(CLOSE_BLOCK):
            return Step.ON
        self.is_told = _tell_calls(self.held.removesuffix(CLOSE_BLOCK).strip(), told)
        return Step.LAST

    def _follow(self, character: str) -> None:
        if self.quote:
            if self.is_escaped:
                self.is_escaped = False
            elif character == "\\":
                self.is_escaped = True
            elif character == self.quote:
                self.quote = ""
        elif character in "\"'":
            self.quote = character
        elif character in "([{":
            self.depth += 1
        elif character in ")]}":
            self.depth -= 1


def _tell_calls(source: str, told: AnswerBuffer) -> bool:
    """`False` if this is anything else than calls of tools."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            module = ast.parse(source)
        calls = [_read_call(node, source) for node in _find_calls(module)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    if not 0 < len(calls) <= _MAX_CALLS or not all(told.is_known(name) for name, _ in calls):
        return False
    for name, arguments in calls:
        told.begin_call(name)
        told.add_arguments(arguments)
    return True


def _find_calls(module: ast.Module) -> Iterator[ast.Call]:
    """Statements, or a list, of calls; with or without a `print` around them."""
    for statement in module.body:
        if not isinstance(statement, ast.Expr):
            raise ValueError("no call")
        value = statement.value
        for node in value.elts if isinstance(value, ast.List) else (value,):
            if not isinstance(node, ast.Call):
                raise ValueError("no call")
            is_printed = isinstance(node.func, ast.Name) and node.func.id == "print"
            inner = node.args[0] if is_printed and len(node.args) == 1 else node
            if not isinstance(inner, ast.Call):
                raise ValueError("no call")
            yield inner


def _read_call(node: ast.Call, source: str) -> tuple[str, str]:
    if node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("arguments must have names")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("arguments must have names")
        arguments[keyword.arg] = _get_value(keyword.value, source)
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False, default=_refuse)
    return ast.unparse(node.func), text


def _get_value(node: ast.expr, source: str) -> Any:
    """As JSON if it is JSON, whose strings Python reads otherwise; else as a literal."""
    segment = ast.get_source_segment(source, node) or ""
    try:
        return json.loads(segment)
    except ValueError:
        return _get_literal(node)


def _get_literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_get_literal(entry) for entry in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _get_literal(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("no JSON")
        return dict(zip(keys, map(_get_literal, node.values), strict=True))
    return ast.literal_eval(node)


def _refuse(value: object) -> Any:
    raise ValueError(f"no JSON: {type(value).__name__}")
