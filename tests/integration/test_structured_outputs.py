"""Answers follow their grammars, whatever the model would rather write.

Random weights have no notion of JSON.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from sensorium import LLM, RequestOutput, SamplingParams
from sensorium.grammar.compiler import GrammarCompiler
from sensorium.types.errors import RequestError
from sensorium.types.structured import StructuredOutputsParams
from tests.integration.random_schemas import make_schema
from tests.support.engine import get_token_ids, make_llm

NUM_SCHEMAS = 200
# Every choice of one with every choice of the others.
TOO_LARGE = {
    "allOf": [
        {"anyOf": [{"properties": {f"{i}-{j}": {"type": "integer"}}} for j in range(8)]}
        for i in range(6)
    ]
}
MIN_COMPLETE_SHARE = 0.9  # the others were cut by max_tokens


def ask(llm: LLM, structured: dict[str, Any] | None, **fields: Any) -> RequestOutput:
    params = SamplingParams(
        **{"temperature": 0.0, "max_tokens": 60, "structured_outputs": structured, **fields}
    )
    (output,) = llm.generate("hello", params, use_tqdm=False, return_errors=True)
    return output


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[[str], str]) -> Iterator[LLM]:
    with make_llm(tiny_model("llama")) as llm:
        yield llm


# ---- two hundred schemas


@pytest.mark.parametrize(
    ("family", "num_schemas"),
    [
        *((family, NUM_SCHEMAS // 4) for family in ("llama", "gemma3", "voxtral")),
        *(
            pytest.param(family, NUM_SCHEMAS, marks=pytest.mark.slow)
            for family in ("llama", "gemma3", "voxtral")
        ),
    ],
)
def test_answers_validate_against_random_schemas(
    tiny_model: Callable[[str], str], family: str, num_schemas: int
) -> None:
    schemas = [make_schema(seed) for seed in range(num_schemas)]
    params = [
        SamplingParams(
            max_tokens=100,
            temperature=0.0 if seed % 2 else 1.0,
            seed=seed,
            structured_outputs=StructuredOutputsParams(json=schema),
        )
        for seed, schema in enumerate(schemas)
    ]
    with make_llm(tiny_model(family), max_num_seqs=64, max_model_len=128) as llm:
        outputs = llm.generate(["Answer:"] * num_schemas, params, use_tqdm=False)
        grammars = make_compiler(llm)
    ends = Counter(str(output.outputs[0].finish_reason) for output in outputs)
    assert set(ends) <= {"stop", "length"}, ends
    assert ends["stop"] >= MIN_COMPLETE_SHARE * num_schemas, ends
    for schema, entry, output in zip(schemas, params, outputs, strict=True):
        completion = output.outputs[0]
        if str(completion.finish_reason) == "stop":
            Draft202012Validator(schema).validate(json.loads(completion.text))
        matcher = grammars.compile(entry.structured_outputs)  # type: ignore[arg-type]
        matcher.consume(completion.token_ids)
        assert matcher.error is None


def make_compiler(llm: LLM) -> GrammarCompiler:
    eos = llm.input_processor.defaults.eos_token_ids
    return GrammarCompiler(llm.get_tokenizer, eos_token_ids=eos)


# ---- each kind, and where it ends


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-c]{2}"}, "[0-9]{3}-[a-c]{2}"),
        ({"choice": ["yes", "no", "per haps"]}, "yes|no|per haps"),
        (
            {"grammar": 'start: "<" /[a-z]/ (";" INT)~2 ">"\nINT: /[0-9]{2}/'},
            "<[a-z](;[0-9]{2}){2}>",
        ),
        ({"grammar": 'root ::= "a" d d\nd ::= [0-9]'}, "a[0-9]{2}"),
    ],
    ids=["regex", "choice", "Lark", "GBNF"],
)
@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 1.0, "seed": 1}, {"ignore_eos": True}, {"min_tokens": 50}],
    ids=["greedy", "sampled", "ignore_eos", "min_tokens"],
)
def test_an_answer_ends_where_its_grammar_does(
    llm: LLM, structured: dict[str, Any], pattern: str, fields: dict[str, Any]
) -> None:
    completion = ask(llm, structured, **fields).outputs[0]
    assert re.fullmatch(pattern, completion.text)
    assert str(completion.finish_reason) == "stop"
    # No token was spent on the end.
    assert completion.token_ids[-1] not in llm.input_processor.defaults.eos_token_ids


def test_an_answer_that_may_end_ends_only_where_that_is_wanted(llm: LLM) -> None:
    """EOS is by far the likeliest, wherever the grammar allows it."""
    eos = llm.input_processor.defaults.eos_token_ids
    fields: dict[str, Any] = {"logit_bias": dict.fromkeys(eos, 100.0), "max_tokens": 20}
    plain = ask(llm, {"regex": "aa[ab]*"}, **fields).outputs[0]
    assert (plain.text, str(plain.finish_reason)) == ("aa", "stop")
    longer = ask(llm, {"regex": "aa[ab]*"}, min_tokens=6, **fields).outputs[0]
    assert (len(longer.token_ids), str(longer.finish_reason)) == (7, "stop")
    endless = ask(llm, {"regex": "aa[ab]*"}, ignore_eos=True, **fields).outputs[0]
    assert (len(endless.token_ids), str(endless.finish_reason)) == (20, "length")
    assert not set(eos) & set(endless.token_ids)


def test_an_answer_of_nothing_ends(llm: LLM) -> None:
    for fields in ({}, {"ignore_eos": True}, {"min_tokens": 5}):
        completion = ask(llm, {"regex": "()"}, **fields).outputs[0]
        assert (completion.text, str(completion.finish_reason)) == ("", "stop")


def test_an_answer_that_never_ends_is_cut(llm: LLM) -> None:
    completion = ask(llm, {"grammar": "start: /[a-d]/ start"}, max_tokens=12).outputs[0]
    assert str(completion.finish_reason) == "length"
    assert re.fullmatch("[a-d]{12,}", completion.text)


def test_streamed_pieces_make_up_the_answer(llm: LLM) -> None:
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=60, structured_outputs={"json": make_schema(4)}
    )
    whole = llm.generate("hello", params, use_tqdm=False)[0].outputs[0].text
    streamed = "".join(d.text for delta in llm.stream("hello", params) for d in delta.deltas)
    assert streamed == whole != ""


# ---- what can't be


@pytest.mark.parametrize(
    "structured",
    [
        {"json": {"type": "string", "minLength": 3, "maxLength": 2}},
        {"json": {"type": "array", "uniqueItems": True}},
        {"json": "{"},
        {"regex": "(a"},
        {"regex": r"[^\s\S]"},
        {"grammar": "start: nobody"},
        {"grammar": 'root ::= "a" ::='},
        {"grammar": 'start: "ab" start'},
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
        {"json": TOO_LARGE},
    ],
    ids=lambda structured: f"{next(iter(structured))}",
)
def test_a_grammar_that_can_not_be_met_is_refused_and_named(
    llm: LLM, structured: dict[str, Any]
) -> None:
    (name,) = structured
    error = ask(llm, structured).error
    assert isinstance(error, RequestError)
    assert str(error).startswith(f"structured_outputs.{name}")
    assert ask(llm, {"choice": ["on"]}).outputs[0].text == "on"


def test_bans_that_leave_the_grammar_nothing_end_that_request_alone(llm: LLM) -> None:
    structured = StructuredOutputsParams(choice=["yes"])
    plain = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    alone = llm.generate("hello", plain, use_tqdm=False)
    banned = SamplingParams(structured_outputs=structured, bad_words=["y"], temperature=0.0)
    other = SamplingParams(structured_outputs=structured, allowed_token_ids=[5], temperature=0.0)
    outputs = llm.generate(
        ["hello"] * 3, [banned, plain, other], use_tqdm=False, return_errors=True
    )
    assert get_token_ids([outputs[1]]) == get_token_ids(alone)
    for output in (outputs[0], outputs[2]):
        assert "structured_outputs" in str(output.error)
