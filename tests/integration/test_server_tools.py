"""Tools and reasoning as the `openai` client uses them, with a template that has both."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
from openai import OpenAI
from transformers import AutoTokenizer

from tests.support.server import ServerProcess, serve

pytestmark = pytest.mark.xdist_group("server")
# As Qwen's: tools in the system's turn, calls and responses between tags, thinking on demand.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Call functions with <tool_call>{"name": ..., "arguments": ...}</tool_call>.
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}
{%- endif %}"""
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["celsius", "kelvin"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
PING: Any = {"type": "function", "function": {"name": "ping", "parameters": NOTHING}}
QUESTION: Any = {"role": "user", "content": "How warm is it?"}


@pytest.fixture(scope="module")
def server(
    tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    template = tmp_path_factory.mktemp("templates") / "tools.jinja"
    template.write_text(TEMPLATE)
    flags = ("--max-model-len", "2048", "--served-model-name", "tiny", "--dtype", "float32")
    with serve(tiny_model("llama"), *flags, "--chat-template", str(template)) as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Callable[[str], str]) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model("llama"))


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with server.make_client() as client:
        yield client


def ask(client: OpenAI, messages: list[Any] | None = None, **options: Any) -> Any:
    options = {"model": "tiny", "messages": messages or [QUESTION], "max_tokens": 200, **options}
    return client.chat.completions.create(**options)


def test_tool_formats_are_found_in_the_template(server: ServerProcess) -> None:
    assert "formats of answers: tool calls hermes, reasoning qwen3" in server.output


def test_the_model_sees_tools_calls_and_results(client: OpenAI, tokenizer: Any) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"unit": "kelvin", "days": 2}'},
    }
    messages = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "300"},
    ]
    answer = ask(
        client, messages, tools=[WEATHER], max_tokens=2, extra_body={"return_token_ids": True}
    )
    prompt = tokenizer.decode(answer.model_extra["prompt_token_ids"])
    assert json.dumps(WEATHER) in prompt
    assert '<tool_call>\n{"name": "weather", "arguments": {"unit": "kelvin", "days": 2}}' in prompt
    assert "<|im_start|>tool\n300<|im_end|>" in prompt


def test_tools_change_nothing_of_an_answer_without_calls(client: OpenAI) -> None:
    options: Any = {"tools": [WEATHER], "temperature": 1.0, "seed": 1, "n": 2, "logprobs": True}
    options["max_tokens"] = 20
    read = ask(client, **options)
    plain = ask(client, **options, tool_choice="none")
    assert [c.message.content for c in read.choices] == [c.message.content for c in plain.choices]
    assert [c.finish_reason for c in read.choices] == [c.finish_reason for c in plain.choices]
    assert read.usage.completion_tokens == plain.usage.completion_tokens
    assert read.usage.prompt_tokens == plain.usage.prompt_tokens
    texts = ["", ""]
    for chunk in ask(client, **options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in plain.choices]


def test_reasoning_that_the_template_opens_is_separated_from_the_answer(client: OpenAI) -> None:
    options: Any = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    message = ask(client, **options, max_tokens=12, temperature=0).choices[0].message
    assert message.content is None
    assert message.model_extra["reasoning_content"]
    deltas = [
        choice.delta
        for chunk in ask(client, **options, max_tokens=12, temperature=0, stream=True)
        for choice in chunk.choices
    ]
    assert not any(delta.content for delta in deltas)
    streamed = "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas)
    assert streamed == message.model_extra["reasoning_content"]


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "weather"}}],
    ids=["any", "named"],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_whole_turn_with_a_demanded_call(
    omni_server: ServerProcess, choice: Any, seed: int
) -> None:
    """Random weights have no wish to call anything, and this model has no format for it.

    The grammar sees to both.
    """
    options: Any = {"tools": [WEATHER, PING], "temperature": 1.0, "seed": seed}
    options |= {"tool_choice": choice, "parallel_tool_calls": False}
    client = omni_server.make_client()
    whole = ask(client, **options).choices[0]
    (call,) = whole.message.tool_calls
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, PARAMETERS if call.function.name == "weather" else NOTHING)
    assert choice == "required" or call.function.name == "weather"
    name, streamed = "", ""
    for chunk in ask(client, **options, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            name += piece.function.name or ""
            streamed += piece.function.arguments
    assert (name, streamed) == (call.function.name, call.function.arguments)
    answer = ask(
        client,
        [
            QUESTION,
            whole.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "300"},
        ],
        tools=[WEATHER, PING],
        tool_choice="none",
        max_tokens=4,
    )
    assert answer.choices[0].message.content is not None
