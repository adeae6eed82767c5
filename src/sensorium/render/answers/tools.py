"""The tools that a request brings, checked: OpenAI's shapes. Every mistake is a `RequestError` that
names the field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sensorium.types.errors import RequestError

MAX_TOOLS = 1024
NAME_PATTERN = r"^[a-zA-Z0-9_.\-]{1,128}$"
CHOICES = ("auto", "none", "required")
_NAME = re.compile(NAME_PATTERN)


def parse_tools(tools: Sequence[Any] | None) -> tuple[Mapping[str, Any], ...]:
    tools = tools or ()
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries, {MAX_TOOLS} at most")
    seen: dict[str, int] = {}
    for index, tool in enumerate(tools):
        name = _check_tool(tool, f"tools[{index}]")
        if name in seen:
            raise RequestError(
                f"tools[{index}].function.name {name!r} is that of tools[{seen[name]}] too"
            )
        seen[name] = index
    return tuple(tools)


def _check_tool(tool: object, path: str) -> str:
    if not isinstance(tool, Mapping):
        raise RequestError(f"{path} must be an object")
    if tool.get("type", "function") != "function":
        raise RequestError(f"{path}.type must be function")
    function = tool.get("function")
    path = f"{path}.function"
    if not isinstance(function, Mapping):
        raise RequestError(f"{path} must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{path}.name must be 1 to 128 letters, digits, underscores, dots and dashes"
        )
    if not isinstance(function.get("description"), str | None):
        raise RequestError(f"{path}.description must be a string")
    if not isinstance(function.get("strict"), bool | None):
        raise RequestError(f"{path}.strict must be true or false")
    _check_parameters(function.get("parameters"), f"{path}.parameters")
    return name


def _check_parameters(parameters: object, path: str) -> None:
    if parameters is None:
        return
    if not isinstance(parameters, Mapping):
        raise RequestError(f"{path} must be an object: a JSON schema")
    if parameters.get("type", "object") != "object":
        raise RequestError(f"{path}.type must be object: arguments have names")
    if not isinstance(parameters.get("properties"), Mapping | None):
        raise RequestError(f"{path}.properties must be an object")
    required = parameters.get("required")
    is_names = isinstance(required, list) and all(isinstance(name, str) for name in required)
    if required is not None and not is_names:
        raise RequestError(f"{path}.required must be a list of strings")


def parse_tool_choice(
    choice: object, tools: Sequence[Mapping[str, Any]]
) -> str | Mapping[str, str]:
    """As `AnswerContext` has it. Without a choice tools may be called, if there are any."""
    if choice is None:
        return "auto" if tools else "none"
    if isinstance(choice, str):
        if choice not in CHOICES:
            raise RequestError(f"tool_choice must be one of {', '.join(CHOICES)}, or an object")
        if choice == "required" and not tools:
            raise RequestError("tool_choice is required, and there are no tools")
        return choice
    if not isinstance(choice, Mapping):
        raise RequestError(f"tool_choice must be one of {', '.join(CHOICES)}, or an object")
    if choice.get("type", "function") != "function":
        raise RequestError("tool_choice.type must be function")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError("tool_choice.function.name must be a string")
    if all(tool["function"]["name"] != name for tool in tools):
        raise RequestError(f"tool_choice.function.name {name[:128]!r} is none of the tools")
    return {"name": name}
