"""Which format a model has: by its name, its template, its vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from sensorium.render.answers.format import make_answer_format
from sensorium.render.answers.formats import REASONING_PARSERS, TOOL_CALL_PARSERS
from sensorium.types.errors import RequestError
from tests.unit.render.answers.reading import AUTO, read

CALLS = {
    "hermes": '<tool_call>{"name": "time", "arguments": {}}</tool_call>',
    "mistral": "[TOOL_CALLS]time[ARGS]{}",
    "gemma4": "<|tool_call>call:time{}<tool_call|>",
    "pythonic": "[time()]",
}
THOUGHTS = {
    "qwen3": "<think>so</think>",
    "mistral": "[THINK]so[/THINK]",
    "gemma4": "<|channel>thought\nso<channel|>",
}


def make_tokenizer(*special: str) -> Any:
    entries = {100 + i: SimpleNamespace(content=t, special=True) for i, t in enumerate(special)}
    entries[7] = SimpleNamespace(content="[TOOL_CALLS]", special=False)
    return SimpleNamespace(added_tokens_decoder=entries)


def find_formats(form: Any) -> tuple[list[str], list[str]]:
    """Return the formats that read anything of the text."""
    calls = [name for name, text in CALLS.items() if read(form.start(AUTO), text).calls]
    thoughts = [name for name, text in THOUGHTS.items() if read(form.start(AUTO), text).reasoning]
    return calls, thoughts


@pytest.mark.parametrize(
    ("template", "special", "calls", "thoughts"),
    [
        ("", (), [], []),
        ("… <tool_call>\n{…} </tool_call>", (), ["hermes"], []),
        ("<tool_call>\n<function=x>", (), [], []),
        ("<tool_call> <think>", (), ["hermes"], ["qwen3"]),
        ("{{ content.split('</think>') }}", (), [], ["qwen3"]),
        ("[TOOL_CALLS] [THINK]", (), ["mistral"], ["mistral"]),
        ("", ("<|tool_call>", "<|channel>"), ["gemma4"], ["gemma4"]),
        ("<|tool_call>call: <|channel>", (), ["gemma4"], ["gemma4"]),
        ("```tool_code", (), ["pythonic"], []),
    ],
)
def test_the_answer_format_is_found_in_the_chat_template(
    template: str, special: tuple[str, ...], calls: list[str], thoughts: list[str]
) -> None:
    form = make_answer_format(make_tokenizer(*special), template)
    assert find_formats(form) == (calls, thoughts)


def test_deepseek_answers_start_inside_reasoning() -> None:
    form = make_answer_format(make_tokenizer(), "<\uff5cAssistant\uff5c>… </think>")
    assert form.opens_reasoning("<\uff5cAssistant\uff5c>")


@pytest.mark.parametrize("name", [name for name in TOOL_CALL_PARSERS if name != "auto"])
def test_a_named_parser_overrides_the_template(name: str) -> None:
    form = make_answer_format(
        make_tokenizer(), "<tool_call> <think>", tool_call_parser=name, reasoning_parser="none"
    )
    assert find_formats(form) == ([] if name == "none" else [name], [])


@pytest.mark.parametrize("name", [name for name in REASONING_PARSERS if name != "auto"])
def test_reasoning_parsers_can_be_named(name: str) -> None:
    form = make_answer_format(make_tokenizer(), "", reasoning_parser=name)
    expected = {"none": [], "deepseek_r1": ["qwen3"]}.get(name, [name])
    assert find_formats(form)[1] == expected


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    for flag, name in (("tool_call_parser", "hermes"), ("reasoning_parser", "deepseek_r1")):
        with pytest.raises(RequestError, match=rf"^{flag} must be one of .*{name}.*, not 'x'"):
            make_answer_format(make_tokenizer(), "", **{flag: "x"})  # type: ignore[arg-type]


def test_tags_that_are_special_tokens_are_kept_in_the_text() -> None:
    special = ("<eos>", "<tool_call>", "</think>")
    form = make_answer_format(make_tokenizer(*special), "<tool_call> <think>")
    assert sorted(form.kept_special_token_ids) == [101, 102]
    assert form.kept_special_token_ids == tuple(dict.fromkeys(form.kept_special_token_ids))


def test_mistrals_own_tokenizer_is_known(tiny_model: Callable[[str], str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("voxtral"))
    form = make_answer_format(tokenizer, "")
    assert form.shows_tools
    assert find_formats(form) == (["mistral"], [])
    ids = dict(zip(("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), (9, 20, 21), strict=True))
    assert set(form.kept_special_token_ids) == set(ids.values())
    assert tokenizer.decode([ids["[TOOL_CALLS]"]]) == "[TOOL_CALLS]"
