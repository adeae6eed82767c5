"""The formats of calls: their tags, their readers and the grammars of calls that are demanded."""

from __future__ import annotations

import json
import keyword
import secrets
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sensorium.render.answers.calls import CallReader
from sensorium.render.answers.formats import gemma4, hermes, mistral, pythonic
from sensorium.render.answers.formats.gemma4_grammar import Gemma4Grammar
from sensorium.render.answers.lark import Lark
from sensorium.render.answers.told import MakeId
from sensorium.types.errors import RequestError

_ALPHANUMERIC = string.ascii_letters + string.digits
Tools = Sequence[Mapping[str, Any]]
# The body of a rule for one call or, where `is_single` is false, for one or more of them.
WriteCalls = Callable[[Lark, Tools, bool], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """`tags` begin a call; `start_tags` do at the start of an answer only. `special_tokens`: texts
    that are special tokens in the tokenizers of such models.
    """

    tags: tuple[str, ...]
    start_tags: tuple[str, ...] = ()
    special_tokens: tuple[str, ...]
    reader: type[CallReader]
    make_id: MakeId
    write_calls: WriteCalls

    def start(self, tag: str, opening: str) -> Any:
        call = self.reader(opening=opening)
        if isinstance(call, pythonic.PythonicCall):
            call.is_block = tag == pythonic.OPEN_BLOCK
        return call


def get_parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of the arguments, an object. A tool that declares none takes none."""
    declared = tool["function"].get("parameters") or {"properties": {}}
    return {**declared, "type": "object"}


def _is_lenient(tool: Mapping[str, Any]) -> bool:
    return not tool["function"].get("strict")


def make_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def make_mistral_id() -> str:
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


def _write_objects(lark: Lark, tools: Tools) -> str:
    """One of `{"name": …, "arguments": …}`."""
    objects = []
    for index, tool in enumerate(tools):
        name = json.dumps(tool["function"]["name"])
        head = lark.write_text(f'{{"name": {name}, "arguments": ')
        schema = lark.write_json(get_parameters(tool), is_lenient=_is_lenient(tool))
        arguments = lark.add(f"arguments_{index}", schema)
        objects.append(lark.add(f"object_{index}", f'{head} {arguments} "}}"'))
    return lark.add("object", " | ".join(objects))


def _repeat(call: str, separator: str, is_single: bool) -> str:
    return call if is_single else f"{call} ({separator} {call})*"


def _write_hermes(lark: Lark, tools: Tools, is_single: bool) -> str:
    opening, closing = lark.write_text(hermes.OPEN), lark.write_text(hermes.CLOSE)
    body = _write_objects(lark, tools)
    call = lark.add("call", f'{opening} "\\n" {body} "\\n" {closing}')
    return _repeat(call, '"\\n"', is_single)


def _write_mistral_list(lark: Lark, tools: Tools, is_single: bool) -> str:
    calls = _repeat(_write_objects(lark, tools), '", "', is_single)
    return f'{lark.write_text(mistral.OPEN)} "[" {calls} "]"'


def _write_mistral_named(lark: Lark, tools: Tools, is_single: bool) -> str:
    calls = []
    for index, tool in enumerate(tools):
        schema = lark.write_json(get_parameters(tool), is_lenient=_is_lenient(tool))
        arguments = lark.add(f"arguments_{index}", schema)
        head = lark.write_text(tool["function"]["name"]) + " " + lark.write_text(mistral.ARGUMENTS)
        calls.append(lark.add(f"call_{index}", f"{head} {arguments}"))
    call = lark.add("call", f"{lark.write_text(mistral.OPEN)} ({' | '.join(calls)})")
    return _repeat(call, "", is_single)


def _write_gemma4(lark: Lark, tools: Tools, is_single: bool) -> str:
    opening, closing = lark.write_text(gemma4.OPEN), lark.write_text(gemma4.CLOSE)
    calls = []
    for index, tool in enumerate(tools):
        name = lark.write_text(f"call:{tool['function']['name']}")
        arguments = Gemma4Grammar(lark, get_parameters(tool)).add_arguments()
        calls.append(lark.add(f"call_{index}", f"{name} {arguments}"))
    call = lark.add("call", f"{opening} ({' | '.join(calls)}) {closing}")
    return _repeat(call, "", is_single)


def _write_pythonic(lark: Lark, tools: Tools, is_single: bool) -> str:
    calls = []
    for index, tool in enumerate(tools):
        name = tool["function"]["name"]
        if not all(map(_is_python_name, name.split("."))):
            raise RequestError("is not a name in Python", path=("tools", index, "function", "name"))
        arguments = _write_keywords(lark, tool, index)
        head = lark.write_text(f"{name}(")
        calls.append(lark.add(f"call_{index}", f'{head} {arguments} ")"'))
    call = lark.add("call", " | ".join(calls))
    calls_body = _repeat(call, '", "', is_single)
    return f'"[" {calls_body} "]"'


def _is_python_name(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _write_keywords(lark: Lark, tool: Mapping[str, Any], index: int) -> str:
    parameters = get_parameters(tool)
    shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    required = parameters.get("required") or ()
    entries = []
    for key, schema in (parameters.get("properties") or {}).items():
        if not _is_python_name(key):
            raise RequestError(
                f"has {key[:100]!r}, which is not a name in Python",
                path=("tools", index, "function", "parameters"),
            )
        schema = {**schema, **shared} if isinstance(schema, Mapping) else schema
        value = lark.write_json(schema, is_lenient=_is_lenient(tool))
        entry = lark.write_text(f"{key}=") + " " + lark.add_new("value", value)
        entries.append((entry, key in required))
    return lark.add_ordered("keyword", entries, separator=", ")


HERMES = CallSyntax(
    tags=(hermes.OPEN,),
    special_tokens=(hermes.OPEN, hermes.CLOSE),
    reader=hermes.HermesCall,
    make_id=make_call_id,
    write_calls=_write_hermes,
)
MISTRAL_LIST = CallSyntax(
    tags=(mistral.OPEN,),
    special_tokens=(mistral.OPEN, mistral.ARGUMENTS, mistral.CALL_ID),
    reader=mistral.MistralCall,
    make_id=make_mistral_id,
    write_calls=_write_mistral_list,
)
MISTRAL_NAMED = CallSyntax(
    tags=(mistral.OPEN,),
    special_tokens=(mistral.OPEN, mistral.ARGUMENTS, mistral.CALL_ID),
    reader=mistral.MistralCall,
    make_id=make_mistral_id,
    write_calls=_write_mistral_named,
)
GEMMA4 = CallSyntax(
    tags=(gemma4.OPEN,),
    special_tokens=(gemma4.OPEN, gemma4.CLOSE, gemma4.QUOTE),
    reader=gemma4.Gemma4Call,
    make_id=make_call_id,
    write_calls=_write_gemma4,
)
PYTHONIC = CallSyntax(
    tags=(pythonic.OPEN_BLOCK,),
    start_tags=(pythonic.OPEN_LIST,),
    special_tokens=(),
    reader=pythonic.PythonicCall,
    make_id=make_call_id,
    write_calls=_write_pythonic,
)
