"""Tool calls in Python: `[name(key=value), …]` at the start of an answer, or a `tool_code` block.

Prompts for Gemma 3 ask for this format. Tool calls are returned only when the block has ended,
because only then it is certain that it has nothing but calls.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from sensorium.render.answers.answer import AnswerBuffer
from sensorium.render.answers.syntax import (
    MAX_HELD,
    CallFormat,
    CallReader,
    HeldText,
    ShortText,
    Step,
    Tools,
    get_parameters,
    repeat,
    write_value,
)
from sensorium.types.errors import RequestError

if TYPE_CHECKING:
    from sensorium.render.answers.lark import Lark

_OPEN_LIST = "["
_OPEN_BLOCK = "```tool_code"
_CLOSE_BLOCK = "```"
_NAME_BEGUN = re.compile(r"\s{0,64}[\w.]{0,128}\s{0,64}")
_NAMES = {"true": True, "false": False, "null": None, "None": None, "True": True, "False": False}
_MAX_CALLS = 64


class PythonicCall(CallReader, tag="pythonic"):
    """A reader of tool calls that are written in Python, as a list or in a `tool_code` block."""

    is_block: bool = False
    is_done: bool = False  # its calls were given out
    held: HeldText = ""
    quote: ShortText = ""  # the end of the string that is being read; empty outside of strings
    is_escaped: bool = False
    # The number of open brackets, including the one that opened the list.
    depth: Annotated[int, Meta(ge=1, le=MAX_HELD + 1)] = 1

    @classmethod
    def begin(cls, tag: str, opening: str) -> PythonicCall:
        return cls(opening=opening, is_block=tag == _OPEN_BLOCK)

    def step(self, character: str, buffer: AnswerBuffer) -> Step:
        if len(self.held) >= MAX_HELD:
            return Step.BEFORE
        if self.is_block:
            return self._step_block(character, buffer)
        if "(" not in self.held and character != "(":
            is_name = _NAME_BEGUN.fullmatch(self.held + character) is not None
            if not is_name:
                return Step.BEFORE
        self._follow(character)
        self.held += character
        if self.depth:
            return Step.ON
        self.is_done = _add_calls("[" + self.held, buffer)
        return Step.LAST

    @property
    def rest(self) -> str:
        return "" if self.is_done else self.opening + self.held

    def _step_block(self, character: str, buffer: AnswerBuffer) -> Step:
        self.held += character
        if not self.held.endswith(_CLOSE_BLOCK):
            return Step.ON
        self.is_done = _add_calls(self.held.removesuffix(_CLOSE_BLOCK).strip(), buffer)
        return Step.LAST

    def _follow(self, character: str) -> None:
        if self.quote:
            if character == self.quote and not self.is_escaped:
                self.quote = ""
            self.is_escaped = character == "\\" and not self.is_escaped
        elif character in "\"'":
            self.quote = character
        elif character in "([{":
            self.depth += 1
        elif character in ")]}":
            self.depth -= 1


def _add_calls(source: str, buffer: AnswerBuffer) -> bool:
    """Add the tool calls in Python code, or return False if it has anything else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about unknown escapes in strings
            module = ast.parse(source)
        calls = [_read_call(node, source) for node in _find_calls(module)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    if not 0 < len(calls) <= _MAX_CALLS or not {name for name, _ in calls} <= buffer.names:
        return False
    for name, arguments in calls:
        buffer.begin_call(name)
        buffer.add_arguments(arguments)
    return True


def _find_calls(module: ast.Module) -> Iterator[ast.Call]:
    """Yield the function calls in statements or in a list, without a `print` around them.

    Raise a `ValueError` if the code has anything else.
    """
    for statement in module.body:
        if not isinstance(statement, ast.Expr):
            raise ValueError("the code must have nothing but function calls")
        value = statement.value
        for node in value.elts if isinstance(value, ast.List) else (value,):
            if not isinstance(node, ast.Call):
                raise ValueError("the code must have nothing but function calls")
            is_printed = isinstance(node.func, ast.Name) and node.func.id == "print"
            inner = node.args[0] if is_printed and len(node.args) == 1 else node
            if not isinstance(inner, ast.Call):
                raise ValueError("the code must have nothing but function calls")
            yield inner


def _read_call(node: ast.Call, source: str) -> tuple[str, str]:
    if node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("a tool must be called by its name, with named arguments")
    arguments = {}
    for entry in node.keywords:
        if entry.arg is None:
            raise ValueError("a tool must be called by its name, with named arguments")
        arguments[entry.arg] = _get_value(entry.value, source)
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False, default=_refuse)
    return ast.unparse(node.func), text


def _get_value(node: ast.expr, source: str) -> Any:
    """Return the value of an argument that is written as JSON or as a Python literal."""
    # JSON first, because Python reads some escapes in strings differently.
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
            raise ValueError("the keys of a dict in a tool's arguments must be strings, as in JSON")
        return dict(zip(keys, map(_get_literal, node.values), strict=True))
    return ast.literal_eval(node)


def _refuse(value: object) -> Any:
    raise ValueError(f"JSON can't hold a value of type {type(value).__name__}")


def _write_calls(lark: Lark, tools: Tools, is_single: bool) -> str:
    calls = []
    for index, tool in enumerate(tools):
        name = tool["function"]["name"]
        if not all(map(_is_name, name.split("."))):
            raise RequestError(
                "must be a Python identifier, because this model writes tool calls in Python",
                path=("tools", index, "function", "name"),
            )
        arguments = _write_keywords(lark, tool, index)
        head = lark.write_text(f"{name}(")
        calls.append(lark.add(f"call_{index}", f'{head} {arguments} ")"'))
    call = lark.add("call", " | ".join(calls))
    body = repeat(call, '", "', is_single)
    return f'"[" {body} "]"'


def _is_name(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _write_keywords(lark: Lark, tool: Mapping[str, Any], index: int) -> str:
    parameters = get_parameters(tool)
    shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    required = parameters.get("required") or ()
    entries = []
    for key, schema in (parameters.get("properties") or {}).items():
        if not _is_name(key):
            raise RequestError(
                f"has {key[:100]!r}, but this model writes tool calls in Python, so that "
                "names of parameters must be Python identifiers",
                path=("tools", index, "function", "parameters"),
            )
        schema = {**schema, **shared} if isinstance(schema, Mapping) else schema
        value = lark.add_new("value", write_value(lark, tool, schema))
        entries.append((lark.write_text(f"{key}=") + " " + value, key in required))
    return lark.add_ordered("keyword", entries, separator=", ")


CALLS = CallFormat(
    name="pythonic",
    tags=(_OPEN_BLOCK,),
    start_tags=(_OPEN_LIST,),
    reader=PythonicCall,
    write_calls=_write_calls,
    # A template with other tags of calls means another format.
    is_used_by=lambda _, template: "tool_code" in template and "<tool_call>" not in template,
)
