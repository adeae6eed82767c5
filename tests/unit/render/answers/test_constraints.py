"""Calls that are demanded are made, whatever a model would rather write.

A walk through the grammar is read as calls with arguments that follow the tools' schemas.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jsonschema
import llguidance
import llguidance.hf
import llguidance.numpy as masks
import numpy as np
import pytest
from transformers import AutoTokenizer

from sensorium.engine.outputs.text_reader import Detokenizer
from sensorium.render.answers.answer import AnswerContext
from sensorium.render.answers.format import make_answer_format
from sensorium.types.errors import RequestError
from tests.unit.render.answers.reading import TIME, WEATHER, Answer, make_tool, read

BOOK = make_tool(
    "book",
    {
        "type": "object",
        "properties": {
            "kind": {"enum": ["a<b", 'with "quotes"', 3, None, True]},
            "when": {"$ref": "#/$defs/day"},
            "guests": {
                "type": "array",
                "items": {"type": ["string", "null"], "maxLength": 5},
                "minItems": 1,
                "maxItems": 3,
            },
            "price": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 9}, {"const": "free"}]},
        },
        "required": ["when", "kind"],
        "additionalProperties": False,
        "$defs": {
            "day": {
                "type": "object",
                "properties": {
                    "day": {"type": "integer", "minimum": 1, "maximum": 31},
                    "is_sure": {"type": "boolean"},
                },
                "required": ["day"],
                "additionalProperties": False,
            }
        },
    },
    strict=True,
)
FREE = make_tool("free", None)
TOOLS = (WEATHER, TIME, BOOK, FREE)
SPECIAL = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
}
_MAX_TOKENS = 2000


def make_tokenizer(path: str, special: tuple[str, ...]) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(path)
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


@lru_cache(maxsize=1)
def get_words(tokenizer: Any) -> Any:
    return llguidance.hf.from_tokenizer(tokenizer, n_vocab=len(tokenizer))


def walk(tokenizer: Any, grammar: str, rng: random.Random) -> list[int] | None:
    """Draw tokens from what is allowed, up to the end; return `None` if that is too far.

    Ends and special tokens are drawn as often as all others together: chance alone would never end
    a text.
    """
    words = get_words(tokenizer)
    matcher = llguidance.LLMatcher(words, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.get_error(), f"{matcher.get_error()}\n{grammar}"
    mask = masks.allocate_token_bitmask(1, words.vocab_size)
    ending = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    ending |= set(tokenizer.convert_tokens_to_ids([*'"}])<|'])) - {None}
    token_ids: list[int] = []
    for _ in range(_MAX_TOKENS):
        masks.fill_next_token_bitmask(matcher, mask, 0)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: words.vocab_size]
        allowed = np.nonzero(bits)[0].tolist()
        first = [token_id for token_id in allowed if token_id in ending]
        token_id = rng.choice(first if first and rng.random() < 0.5 else allowed)
        if token_id == tokenizer.eos_token_id:
            return token_ids
        assert matcher.consume_token(token_id)
        token_ids.append(token_id)
        if matcher.is_stopped():
            return token_ids
    return None


def write(tokenizer: Any, token_ids: list[int], kept: tuple[int, ...]) -> str:
    detokenizer = Detokenizer(tokenizer, kept_special_token_ids=kept)
    return "".join(map(detokenizer.add, token_ids)) + detokenizer.finish()


def check_calls(answer: Answer, tools: tuple[dict[str, Any], ...]) -> None:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    for name, arguments in answer.parsed:
        assert isinstance(arguments, dict)
        jsonschema.validate(arguments, schemas[name] or {})


@pytest.mark.parametrize("is_special", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", ["hermes", "mistral", "gemma4", "pythonic", "none"])
def test_random_walks_are_calls_that_follow_the_schemas(
    tiny_model: Callable[[str], str], name: str, is_special: bool
) -> None:
    tokenizer = make_tokenizer(tiny_model("llama"), SPECIAL.get(name, ()) if is_special else ())
    template = "[ARGS]" if is_special else ""  # the newer of Mistral's formats
    form = make_answer_format(tokenizer, template, tool_call_parser=name, reasoning_parser="none")
    context = AnswerContext(tools=TOOLS, tool_choice="required")
    constraint = form.make_constraint(context)
    assert constraint is not None
    assert constraint.grammar is not None
    rng = random.Random(f"{name}{is_special}")
    names: set[str] = set()
    num_ended = 0
    for _ in range(25):
        token_ids = walk(tokenizer, constraint.grammar, rng)
        if token_ids is None:
            continue
        num_ended += 1
        text = write(tokenizer, token_ids, form.kept_special_token_ids)
        answer = read(form.start(context), *text)
        assert answer.calls, text
        assert (answer.content, answer.reasoning) == ("", "")
        check_calls(answer, TOOLS)
        names |= {call["name"] for call in answer.calls}
    if not is_special and name == "gemma4":  # chance hardly ever spells what ends its texts
        assert num_ended >= 3
        return
    assert num_ended >= 10
    assert names >= {"time", "book", "free", "get_weather"}


def test_a_named_tool_is_called_once_and_no_other(tiny_model: Callable[[str], str]) -> None:
    tokenizer = make_tokenizer(tiny_model("llama"), ())
    form = make_answer_format(tokenizer, "", tool_call_parser="hermes")
    rng = random.Random(1)
    for choice, is_parallel in (({"name": "time"}, True), ("required", False)):
        context = AnswerContext(
            tools=(TIME, WEATHER), tool_choice=choice, parallel_tool_calls=is_parallel
        )
        constraint = form.make_constraint(context)
        assert constraint is not None
        assert constraint.grammar is not None
        for _ in range(5):
            token_ids = walk(tokenizer, constraint.grammar, rng) or []
            text = write(tokenizer, token_ids, ())
            assert text.count("<tool_call>") == 1
            if is_parallel:
                assert read(form.start(context), text).parsed == [("time", {})]


@pytest.mark.parametrize(
    ("reasoning", "special"), [("qwen3", ()), ("gemma4", SPECIAL["gemma4"])], ids=["text", "tokens"]
)
@pytest.mark.parametrize("is_open", [True, False])
def test_reasoning_may_come_before_a_demanded_call(
    tiny_model: Callable[[str], str], reasoning: str, special: tuple[str, ...], is_open: bool
) -> None:
    tokenizer = make_tokenizer(tiny_model("llama"), special)
    form = make_answer_format(tokenizer, "", tool_call_parser="hermes", reasoning_parser=reasoning)
    context = AnswerContext(tools=(TIME,), tool_choice="required", starts_in_reasoning=is_open)
    constraint = form.make_constraint(context)
    assert constraint is not None
    assert constraint.grammar is not None
    opening, closing = {
        "qwen3": ("<think>", "</think>"),
        "gemma4": ("<|channel>thought\n", "<channel|>"),
    }[reasoning]
    call = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    words = get_words(tokenizer)
    grammar = llguidance.LLMatcher.grammar_from_lark(constraint.grammar)
    for text, is_taken in (
        (f"{'' if is_open else opening}so <what>{closing}\n\n{call}", True),
        (call, not is_open),
        (f"Hello {call}", False),
    ):
        matcher = llguidance.LLMatcher(words, grammar)
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        taken = matcher.consume_tokens(token_ids) and matcher.is_accepting()
        assert taken == is_taken, (text, matcher.get_error())
        if is_taken:
            answer = read(
                form.start(context), write(tokenizer, token_ids, form.kept_special_token_ids)
            )
            assert answer.parsed == [("time", {})]
            assert answer.reasoning == ("so <what>" if "what" in text else "")
            assert answer.content == ""


def test_no_call_is_demanded_unless_asked_for(tiny_model: Callable[[str], str]) -> None:
    form = make_answer_format(make_tokenizer(tiny_model("llama"), ()), "")
    for context in (
        AnswerContext(tools=TOOLS, tool_choice="auto"),
        AnswerContext(tools=TOOLS, tool_choice="none"),
        AnswerContext(tool_choice="required"),
    ):
        assert form.make_constraint(context) is None


def test_tools_that_can_not_be_demanded_are_named(tiny_model: Callable[[str], str]) -> None:
    tokenizer = make_tokenizer(tiny_model("llama"), ())
    huge = make_tool("f", {"properties": {f"p{i}": {"type": "string"} for i in range(20_000)}})
    form = make_answer_format(tokenizer, "", tool_call_parser="hermes")
    with pytest.raises(RequestError, match=r"^tools: are too large"):
        form.make_constraint(AnswerContext(tools=(huge,), tool_choice="required"))
    form = make_answer_format(tokenizer, "", tool_call_parser="pythonic")
    for tool, path in (
        (make_tool("my-tool"), r"tools\[0\].function.name: "),
        (make_tool("class"), r"tools\[0\].function.name: "),
        (make_tool("f", {"properties": {"a-b": {}}}), r"tools\[0\].function.parameters: has 'a-b'"),
        (
            make_tool("f", {"properties": {"from": {}}}),
            r"tools\[0\].function.parameters: has 'from",
        ),
    ):
        with pytest.raises(RequestError, match=path):
            form.make_constraint(AnswerContext(tools=(tool,), tool_choice="required"))


def test_an_enum_of_null_does_not_hide_a_constant(tiny_model: Callable[[str], str]) -> None:
    form = make_answer_format(
        make_tokenizer(tiny_model("llama"), ()), "", tool_call_parser="gemma4"
    )
    tool = make_tool("f", {"properties": {"a": {"const": 7, "enum": None}}, "required": ["a"]})
    constraint = form.make_constraint(AnswerContext(tools=(tool,), tool_choice="required"))
    assert constraint is not None
    assert '"7"' in str(constraint.grammar)
