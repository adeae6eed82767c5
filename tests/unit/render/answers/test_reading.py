"""What each format reads of whole answers, good and broken."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from sensorium.render.answers.answer import AnswerContext, AnswerDelta
from sensorium.render.answers.syntax import MAX_HELD
from sensorium.types.errors import RequestError
from tests.unit.render.answers.reading import AUTO, TIME, WEATHER, make_format, read

PARIS = ("get_weather", {"city": "Paris"})


def check(name: str, text: str, *, content: str = "", calls: Any = (), **context: Any) -> None:
    reader = make_format(name).start(msgspec.structs.replace(AUTO, **context))
    answer = read(reader, text)
    assert (answer.content, answer.parsed) == (content, list(calls))


GOOD = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]',
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>',
    "pythonic": "[get_weather(city='Paris')]",
}


@pytest.mark.parametrize("tools", GOOD)
def test_an_answer_of_one_call_has_no_content(tools: str) -> None:
    check(tools, GOOD[tools], calls=[PARIS])
    check(tools, f"\n {GOOD[tools]}\n", calls=[PARIS])


@pytest.mark.parametrize("tools", GOOD)
def test_calls_are_text_where_they_are_not_read(tools: str) -> None:
    check(tools, GOOD[tools], content=GOOD[tools], tool_choice="none")
    check(tools, GOOD[tools], content=GOOD[tools], tools=())
    check("none", GOOD[tools], content=GOOD[tools])


@pytest.mark.parametrize("tools", ["hermes", "mistral", "gemma4"])
def test_content_stands_around_calls(tools: str) -> None:
    text = f"Let me see. \n{GOOD[tools]}\n{GOOD[tools]}\n\nThat's it. "
    check(tools, text, content="Let me see.\n\nThat's it. ", calls=[PARIS, PARIS])


@pytest.mark.parametrize("tools", ["hermes", "mistral", "gemma4"])
def test_without_parallel_calls_only_one_is_returned(tools: str) -> None:
    check(tools, GOOD[tools] * 3, calls=[PARIS], parallel_tool_calls=False)


@pytest.mark.parametrize(
    ("tools", "text", "calls"),
    [
        (
            "hermes",
            '<tool_call>{"arguments": {"a": [1]}, "name": "f"}</tool_call>',
            ("f", {"a": [1]}),
        ),
        ("hermes", '<tool_call>{"name": "f", "id": 1, "arguments": {}}</tool_call>', ("f", {})),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "id": {}}</tool_call>', ("f", {})),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("f", {})),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', ("f", {})),
        ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', ("f", {"a": 1})),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\n\t"}}', ("f", {"a": "\n\t"})),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "\\"</tool_call>}"}}</tool_call>',
            ("f", {"a": '"</tool_call>}'}),
        ),
        ("mistral", '[TOOL_CALLS] f[ARGS] {"a": {"b": "}"}}', ("f", {"a": {"b": "}"}})),
        ("mistral", '[TOOL_CALLS]f{"a": 1}', ("f", {"a": 1})),
        ("mistral", '[TOOL_CALLS] [{"arguments": {}, "name": "f", "id": "x"}]', ("f", {})),
        ("gemma4", "<|tool_call>call:f{}<tool_call|>", ("f", {})),
        ("gemma4", "<|tool_call>call:a.b-c{ x : -1.5e3 , }<tool_call|>", ("a.b-c", {"x": -1500.0})),
        (
            "gemma4",
            '<|tool_call>call:f{a:[],b:{},c:[[1],{d:<|"|><|"|>}],<|"|>e:f<|"|>:None}<tool_call|>',
            ("f", {"a": [], "b": {}, "c": [[1], {"d": ""}], "e:f": None}),
        ),
        (
            "gemma4",
            '<|tool_call>call:f{a:<|"|>{"x": [1,\n<|<b>]}\\<|"|>,b:"c\\"}",d:New York}<tool_call|>',
            ("f", {"a": '{"x": [1,\n<|<b>]}\\', "b": 'c"}', "d": "New York"}),
        ),
        ("gemma4", "<|tool_call>call:f{a:[1,2}<tool_call|>", None),
        ("pythonic", "[time()]", ("time", {})),
        (
            "pythonic",
            '[time(a="\\u00e9\\/", b=(1, -2.5), c={"d": true, "e": None}, f=\'"]\')]',
            ("time", {"a": "é/", "b": [1, -2.5], "c": {"d": True, "e": None}, "f": '"]'}),
        ),
        ("pythonic", "```tool_code\ntime(a=1)\n```", ("time", {"a": 1})),
        ("pythonic", "```tool_code\nprint(time(a=1))\n```", ("time", {"a": 1})),
    ],
)
def test_call_formats_of_models_are_parsed(tools: str, text: str, calls: Any) -> None:
    reader = make_format(tools).start(AUTO)
    answer = read(reader, text)
    assert answer.content == ""
    if calls is not None:
        assert answer.parsed == [calls]


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", "a <tool_call>\n no object"),
        ("hermes", '<tool_call>\n{"name": "f", "argum'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f" "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"x": </tool_call>'),
        ("hermes", "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
        ("hermes", "</tool_call> <tool_cal <tool_callx>"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS] [1, 2]"),
        ("mistral", "[TOOL_CALLS]no name here{}"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "argu'),
        ("gemma4", "<|tool_call>"),
        ("gemma4", "<|tool_call>f{}<tool_call|>"),
        ("gemma4", "<|tool_call>call:a b{}<tool_call|>"),
        ("gemma4", "<|tool_call>call:f"),
        ("pythonic", "["),
        ("pythonic", "[1, 2, 3] are numbers"),
        ("pythonic", "[time(] and more"),
        ("pythonic", "[time(1)]"),
        ("pythonic", "[time(**x)]"),
        ("pythonic", "[time(a=open('x'))]"),
        ("pythonic", "[time(a=float)]"),
        ("pythonic", "[unknown(a=1)]"),
        ("pythonic", "[time(a=1), 3]"),
        ("pythonic", "[time(a={1: 2})]"),
        ("pythonic", "[time(a=b'x')]"),
        ("pythonic", "so: [time()]"),
        ("pythonic", "```tool_code\nimport os\n```"),
        ("pythonic", "```tool_code\ntime(a=1)"),
    ],
)
def test_text_that_is_no_call_stays_content(tools: str, text: str) -> None:
    check(tools, text, content=text)


@pytest.mark.parametrize(
    ("tools", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', '{"a": "b'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": </tool_call>Hi', '{"a": '),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": [1', '{"a": [1'),
        ("gemma4", '<|tool_call>call:f{a:<|"|>x<|', '{"a": "x'),
        ("gemma4", "<|tool_call>call:f{a:1,b<tool_call|>Hi", '{"a": 1'),
        ("gemma4", '<|tool_call>call:f{a:<|"|>x<|"|>b:2}Hi', '{"a": "x"'),
    ],
)
def test_arguments_may_be_broken_off(tools: str, text: str, arguments: str) -> None:
    answer = read(make_format(tools).start(AUTO), text)
    assert answer.told[2] == [("f", arguments)]
    if "Hi" in text:
        assert answer.content.endswith("Hi")


def test_arguments_are_streamed_as_they_arrive() -> None:
    reader = make_format("hermes").start(AUTO)
    assert reader.add('<tool_call>{"name": "f", "arguments": ') == AnswerDelta()
    first = reader.add('{"city": "Par').tool_calls
    second = reader.add('is", "x').tool_calls
    assert [(call.index, call.name, call.arguments) for call in first + second] == [
        (0, "f", '{"city": "Par'),
        (0, None, 'is", "x'),
    ]
    assert first[0].id is not None
    assert second[0].id is None


def test_call_ids_have_the_form_that_models_expect() -> None:
    for tools, pattern in (("hermes", r"call_[0-9a-f]{24}"), ("mistral", r"[A-Za-z0-9]{9}")):
        answer = read(make_format(tools).start(AUTO), GOOD[tools])
        assert re.fullmatch(pattern, answer.calls[0]["id"])
    own = read(make_format("mistral").start(AUTO), "[TOOL_CALLS]f[CALL_ID]abc123xyz[ARGS]{}")
    assert own.calls[0]["id"] == "abc123xyz"


@pytest.mark.parametrize(
    ("reasoning", "text", "expected"),
    [
        ("qwen3", "<think>\na <b>\n</think>\n\nHi\n", ("a <b>", "Hi\n")),
        ("qwen3", "\n<think></think>Hi", ("", "Hi")),
        ("qwen3", "Hi <think>no</think>", ("", "Hi <think>no</think>")),
        ("qwen3", "<think>cut off", ("cut off", "")),
        ("qwen3", "<think>a</think>b</think>", ("a", "b</think>")),
        ("mistral", "[THINK]a[/THINK]b[THINK]c[/THINK] d", ("ac", "b d")),
        ("gemma4", "<|channel>thought\na\n<channel|>b", ("a", "b")),
        ("gemma4", "<|channel>other\na", ("", "<|channel>other\na")),
        ("none", "<think>a</think>b", ("", "<think>a</think>b")),
    ],
)
def test_reasoning_is_separated_from_content(
    reasoning: str, text: str, expected: tuple[str, str]
) -> None:
    answer = read(make_format("none", reasoning).start(AnswerContext()), text)
    assert (answer.reasoning, answer.content) == expected


def test_an_answer_may_start_inside_reasoning() -> None:
    form = make_format("hermes", "qwen3")
    context = msgspec.structs.replace(AUTO, starts_in_reasoning=True)
    for text in ("a <tool_call>\n</think>\nb", "<think>\na <tool_call></think>b"):
        answer = read(form.start(context), text)
        assert answer.told == ("a <tool_call>", "b", [])


def test_reasoning_that_is_not_parsed_stays_in_the_content() -> None:
    context = AnswerContext(separate_reasoning=False)
    text = "<think>\na\n</think>\n\nb"
    assert read(make_format("none", "qwen3").start(context), text).told == ("", text, [])


def test_the_prompt_shows_whether_reasoning_is_open() -> None:
    for reasoning, opened, closed in (
        ("qwen3", "<|im_start|>assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n"),
        ("qwen3", "<think>", "What does <think> mean?\nassistant\n"),
        ("mistral", "[/INST][THINK]", "[/INST]"),
        ("gemma4", "<|turn>model\n<|channel>thought\n", "<|channel>thought\n<channel|>"),
        ("deepseek_r1", "assistant:", "assistant: <think>\n\n</think>"),
    ):
        form = make_format("none", reasoning)
        assert form.opens_reasoning("x" * 100 + opened)
        assert not form.opens_reasoning("x" * 100 + closed)
    assert not make_format().opens_reasoning("<think>")


@pytest.mark.parametrize(
    ("tools", "head"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": "'),
        ("hermes", '<tool_call>{"name": "'),
        ("hermes", "<tool_call>"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS]["),
        ("mistral", '[TOOL_CALLS][{"a": "'),
        ("gemma4", "<|tool_call>call:"),
        ("gemma4", "<|tool_call>call:f{"),
        ("gemma4", "<|tool_call>call:f{a:"),
        ("gemma4", '<|tool_call>call:f{a:<|"|>'),
        ("pythonic", "[time("),
        ("pythonic", "```tool_code"),
        ("hermes", ""),
    ],
)
@pytest.mark.parametrize("filler", ["x", " ", "[", "<"])
def test_the_state_of_a_reader_does_not_grow(tools: str, head: str, filler: str) -> None:
    reader = make_format(tools, "qwen3").start(AUTO)
    answer = reader.add(head + filler * 3 * MAX_HELD)
    assert len(msgspec.msgpack.encode(reader.state)) < MAX_HELD + 2000
    told = answer.content + "".join(call.arguments for call in answer.tool_calls)
    told += (rest := reader.finish()).content + "".join(c.arguments for c in rest.tool_calls)
    if not reader.num_tool_calls and filler != " ":
        assert told == head + filler * 3 * MAX_HELD


def test_a_state_of_another_kind_is_refused() -> None:
    hermes, gemma4 = make_format("hermes", "qwen3"), make_format("gemma4")
    reader = hermes.start(AUTO)
    reader.add('<tool_call>{"name": "f", "arguments": {')
    state = msgspec.json.decode(msgspec.json.encode(reader.state))
    assert hermes.resume(AUTO, state).add("}}").tool_calls[0].arguments == "}"
    bad: list[Any] = [
        None,
        [],
        "x",
        {**state, "section": "x"},
        {**state, "section": "content"},
        {**state, "call": None},
        {**state, "space": " " * 65},
        {**state, "num_calls": -1},
        {**state, "call": {**state["call"], "type": "y"}},
        {**state, "call": {**state["call"], "call": {"scan": {"depth": -1}}}},
        {"section": "call", "call": {"type": "gemma4", "place": "value"}},
    ]
    for entry in bad:
        with pytest.raises(RequestError, match=r"state that|another tool-call"):
            hermes.resume(AUTO, entry)
    for form, context in ((gemma4, AUTO), (hermes, AnswerContext(tools=(WEATHER, TIME)))):
        with pytest.raises(RequestError, match=r"state that|another tool-call"):
            form.resume(context, state)
    with pytest.raises(RequestError, match=r"state that|another tool-call"):
        gemma4.resume(AUTO, {"section": "reasoning"})


def test_blanks_before_a_name_are_not_held_for_long() -> None:
    reader = make_format("pythonic").start(AUTO)
    assert reader.add("[" + " " * 400).content.startswith("[ ")
