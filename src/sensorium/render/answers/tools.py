"""Checks the tools of a request in OpenAI's shapes, and names the path of a wrong field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sensorium.types.errors import RequestError, at, map_at

MAX_TOOLS = 1024
NAME_PATTERN = r"^[a-zA-Z0-9_.\-]{1,128}$"
CHOICES = ("auto", "none", "required")
_NAME = re.compile(NAME_PATTERN)


def parse_tools(tools: Sequence[Any] | None) -> tuple[Mapping[str, Any], ...]:
    """Check the tools of a request, and return them unchanged, or raise a `RequestError`."""
    tools = tools or ()
    with at("tools"):
        if len(tools) > MAX_TOOLS:
            raise RequestError(f"has {len(tools)} entries; at most {MAX_TOOLS} are allowed")
        seen: dict[str, int] = {}
        for index, name in enumerate(map_at(_check_tool, tools)):
            if name in seen:
                raise RequestError(
                    f"{name!r} is already the name of tools[{seen[name]}]",
                    path=(index, "function", "name"),
                )
            seen[name] = index
    return tuple(tools)


def _check_tool(tool: object) -> str:
    """Check one tool, and return the name of its function, or raise a `RequestError`."""
    if not isinstance(tool, Mapping):
        raise RequestError("must be an object")
    if tool.get("type", "function") != "function":
        raise RequestError('must be "function"', path=("type",))
    function = tool.get("function")
    with at("function"):
        if not isinstance(function, Mapping):
            raise RequestError("must be an object")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RequestError(
                "must be 1 to 128 letters, digits, underscores, dots and dashes", path=("name",)
            )
        if not isinstance(function.get("description"), str | None):
            raise RequestError("must be a string", path=("description",))
        if not isinstance(function.get("strict"), bool | None):
            raise RequestError("must be true or false", path=("strict",))
        with at("parameters"):
            _check_parameters(function.get("parameters"))
    return name


def _check_parameters(parameters: object) -> None:
    if parameters is None:
        return
    if not isinstance(parameters, Mapping):
        raise RequestError("must be a JSON schema, which is an object")
    if parameters.get("type", "object") != "object":
        raise RequestError('must be "object", because arguments have names', path=("type",))
    if not isinstance(parameters.get("properties"), Mapping | None):
        raise RequestError("must be an object", path=("properties",))
    required = parameters.get("required")
    is_names = isinstance(required, list) and all(isinstance(name, str) for name in required)
    if required is not None and not is_names:
        raise RequestError("must be a list of strings", path=("required",))


def parse_tool_choice(
    choice: object, tools: Sequence[Mapping[str, Any]]
) -> str | Mapping[str, str]:
    """Check a request's `tool_choice`, and return it in the form that `AnswerContext` has.

    Without a choice it is "auto" if there are tools, and "none" otherwise. Raise a `RequestError`
    if the choice is invalid.
    """
    if choice is None:
        return "auto" if tools else "none"
    with at("tool_choice"):
        if isinstance(choice, Mapping):
            return _parse_named_choice(choice, tools)
        if not isinstance(choice, str) or choice not in CHOICES:
            raise RequestError(f"must be one of {', '.join(CHOICES)}, or an object naming a tool")
        if choice == "required" and not tools:
            raise RequestError("requires a tool call, but the request has no tools")
        return choice


def _parse_named_choice(
    choice: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> Mapping[str, str]:
    if choice.get("type", "function") != "function":
        raise RequestError('must be "function"', path=("type",))
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    with at("function", "name"):
        if not isinstance(name, str):
            raise RequestError("must be a string")
        if all(tool["function"]["name"] != name for tool in tools):
            raise RequestError(f"{name[:128]!r} is not the name of any of the tools")
    return {"name": name}
