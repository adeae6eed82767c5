"""Asks a server through one client library, and prints the results as JSON.

Run by the interpreter of the clients' own environment: `program.py URL CLIENT CASE...`. It imports
nothing of Sensorium, and only the library that CLIENT names. For each case, it prints a line.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

MODEL = "sensorium-mini"
QUESTION = "What is three plus four?"


class Caption(BaseModel):
    """A picture's caption: a free string, a number and a list of free strings."""

    text: str
    score: int
    tags: list[str]


def ask_openai(url: str, case: str) -> Any:
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": QUESTION}]
    if case == "text":
        answer = client.chat.completions.create(model=MODEL, messages=messages)
        return answer.choices[0].message.content
    if case == "schema":
        parsed = client.chat.completions.parse(
            model=MODEL, messages=messages, response_format=Caption
        )
        return parsed.choices[0].message.parsed
    from openai import pydantic_function_tool

    called = client.chat.completions.parse(
        model=MODEL,
        messages=messages,
        tools=[pydantic_function_tool(Caption)],
        tool_choice="required",
    )
    calls: Any = called.choices[0].message.tool_calls
    return calls[0].function.parsed_arguments


def ask_langchain(url: str, case: str) -> Any:
    from langchain_openai import ChatOpenAI

    options: Any = {"base_url": url, "api_key": "none", "model": MODEL, "max_retries": 0}
    model = ChatOpenAI(**options)
    if case == "text":
        return model.invoke(QUESTION).content
    methods = {"schema": "json_schema", "tool": "function_calling"}
    method: Any = methods[case]
    return model.with_structured_output(Caption, method=method).invoke(QUESTION)


def ask_instructor(url: str, case: str) -> Any:
    import instructor
    from openai import OpenAI

    mode = instructor.Mode.TOOLS if case == "tool" else instructor.Mode.JSON_SCHEMA
    client = instructor.from_openai(OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)
    messages: Any = [{"role": "user", "content": QUESTION}]
    if case == "text":
        answer: Any = client.chat.completions.create(
            model=MODEL, messages=messages, response_model=None
        )
        return answer.choices[0].message.content
    return client.chat.completions.create(
        model=MODEL, messages=messages, response_model=Caption, max_retries=0
    )


def ask_pydantic_ai(url: str, case: str) -> Any:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))
    kinds: Any = {"text": str, "schema": NativeOutput(Caption), "tool": ToolOutput(Caption)}
    return Agent(model, output_type=kinds[case], retries=0).run_sync(QUESTION).output


CLIENTS: dict[str, Callable[[str, str], Any]] = {
    "openai": ask_openai,
    "langchain": ask_langchain,
    "instructor": ask_instructor,
    "pydantic-ai": ask_pydantic_ai,
}


def main() -> None:
    url, client, *cases = sys.argv[1:]
    for case in cases:
        try:
            print(json.dumps({"result": ask(url, client, case)}), flush=True)
        except Exception:
            print(json.dumps({"fault": traceback.format_exc()}), flush=True)


def ask(url: str, client: str, case: str) -> Any:
    result = CLIENTS[client](url, case)
    kind: type = str if case == "text" else Caption
    if not isinstance(result, kind):
        raise TypeError(f"not a {kind.__name__}: {result!r}")
    return result if isinstance(result, str) else result.model_dump()


if __name__ == "__main__":
    main()
