"""An answer is read the same however it is cut, and by however many readers in turn."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sensorium.render.answers.answer import AnswerContext
from tests.unit.render.answers.reading import AUTO, Answer, make_format, read

FORMATS = [
    ("hermes", "qwen3"),
    ("mistral", "mistral"),
    ("gemma4", "gemma4"),
    ("pythonic", "deepseek_r1"),
    ("none", "none"),
]
# Tags, their pieces, and what stands in calls: broken answers come of them as well as good ones.
PIECES = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '"arguments"', "{}}"],
    "mistral": [
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        '{"name": "f", "arguments": ',
        "f",
        "[",
        "]",
    ],
    "gemma4": ["<|tool_call>", "<tool_call|>", "call:f{", '<|"|>', "a:", "[", "1", "true"],
    "pythonic": ["[", "]", "time(", "get_weather(city=", "'x'", ")", "```tool_code", "```", "\\"],
    "none": [],
}
TAGS = ["<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>thought\n", "<channel|>"]
COMMON = ["{", "}", '"', "\\", ",", ":", " ", "\n", "<", "<|", "t", "é", "🙂", "word", "}}", "\x00"]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\<|}\n é', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("ab_", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
objects = st.dictionaries(st.text("abc", min_size=1, max_size=3), values, max_size=3)


@st.composite
def texts(draw: st.DrawFn, tools: str) -> str:
    call = objects.map(lambda arguments: write_call(tools, arguments))
    piece = st.sampled_from([*PIECES[tools], *TAGS, *COMMON]) | call
    return "".join(draw(st.lists(piece, max_size=14)))


def write_call(tools: str, arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    if tools == "hermes":
        return f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>'
    if tools == "mistral":
        return f"[TOOL_CALLS]f[ARGS]{text}"
    if tools == "gemma4":
        return f"<|tool_call>call:f{write_gemma4(arguments)}<tool_call|>"
    keywords = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"[time({keywords})]"


def write_gemma4(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{write_gemma4(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(write_gemma4, value)) + "]"
    return json.dumps(value)


contexts = st.builds(
    lambda is_open, is_separate, is_parallel: msgspec.structs.replace(
        AUTO,
        starts_in_reasoning=is_open,
        separate_reasoning=is_separate,
        parallel_tool_calls=is_parallel,
    ),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    starts = [0, *ends[:-1]]
    return [text[start:end] for start, end in zip(starts, ends, strict=True)]


@pytest.mark.parametrize(("tools", "reasoning"), FORMATS, ids=[tools for tools, _ in FORMATS])
@settings(max_examples=100)
@given(data=st.data())
def test_cuts_of_the_text_change_nothing_in_the_parsed_answer(
    tools: str, reasoning: str, data: st.DataObject
) -> None:
    text = data.draw(texts(tools))
    context: AnswerContext = data.draw(contexts)
    places = data.draw(st.lists(st.integers(0, 500), max_size=8))
    form = make_format(tools, reasoning)
    whole = read(form.start(context), text).told
    assert read(form.start(context), *text).told == whole
    assert read(form.start(context), *cut(text, places)).told == whole
    # By readers that take over from one another, through the wire.
    answer, reader = Answer(), form.start(context)
    for piece in cut(text, places):
        answer.take(reader.add(piece))
        reader = form.resume(context, msgspec.msgpack.decode(msgspec.msgpack.encode(reader.state)))
    answer.take(reader.finish())
    assert answer.told == whole


@pytest.mark.parametrize("tools", ["hermes", "mistral", "gemma4", "pythonic"])
@settings(max_examples=80)
@given(arguments=objects)
def test_arguments_come_back_as_they_were(tools: str, arguments: dict[str, Any]) -> None:
    if tools == "gemma4" and '<|"|>' in json.dumps(arguments):
        return  # nothing escapes it
    answer = read(make_format(tools).start(AUTO), *write_call(tools, arguments))
    assert answer.content == ""
    assert [arguments] == [found for _, found in answer.parsed]
