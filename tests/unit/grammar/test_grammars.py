"""Grammars are translated, checked and followed as their callers mean them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sensorium.models  # noqa: F401  (makes torchvision importable, before Transformers)

# isort: split
from transformers import AutoTokenizer

from sensorium.grammar.compiler import GrammarCompiler, Matcher
from sensorium.grammar.tokenizer import make_tokenizer
from sensorium.grammar.translation import make_grammar_after
from sensorium.types.errors import RequestError
from sensorium.types.structured import StructuredOutputsParams

EOS = 2


class Language:
    """A tokenizer with a compiler of grammars over it."""

    def __init__(self, directory: str, **options: Any) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.compiler = GrammarCompiler(
            lambda: self.tokenizer, **{"eos_token_ids": (EOS,), **options}
        )

    def follow(self, params: StructuredOutputsParams, text: str) -> Matcher:
        """Consume a text. Raise `ValueError` if a mask does not allow its next token."""
        matcher = self.compiler.compile(params)
        for token_id in self.tokenizer.encode(text, add_special_tokens=False):
            if token_id not in self.get_allowed(matcher):
                raise ValueError(f"{self.tokenizer.decode([token_id])!r} is not allowed")
            matcher.consume((token_id,))
        return matcher

    def get_allowed(self, matcher: Matcher) -> set[int]:
        mask = self.compiler.make_mask()
        matcher.fill_mask(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        return set(bits.nonzero()[0].tolist())


@pytest.fixture(scope="module", params=["llama", "voxtral"])
def language(request: pytest.FixtureRequest, tiny_model: Callable[[str], str]) -> Language:
    """Transformers' tokenizers, and mistral-common's."""
    return Language(tiny_model(request.param))


GRAMMARS = {
    "json": StructuredOutputsParams(json={"type": "array", "items": {"type": "integer"}}),
    "json text": StructuredOutputsParams(json='{"type": "array"}'),
    "object": StructuredOutputsParams(json_object=True),
    "regex": StructuredOutputsParams(regex=r"a/b\.[0-9]+é"),
    "choice": StructuredOutputsParams(choice=["yes", 'say "no"\n', "é😀", "yes"]),
    "lark": StructuredOutputsParams(grammar='start: "x" /[0-9]+/ ";"'),
    "gbnf": StructuredOutputsParams(grammar='root ::= "x" ("y" | [0-9])+ ";"'),
}
GOOD = [
    ("json", "[1, 22,\n  3]"),
    ("json text", '[{"a": null}]'),
    ("object", '{"a": [true]}'),
    ("regex", "a/b.17é"),
    ("choice", 'say "no"\n'),
    ("choice", "é😀"),
    ("lark", "x12;"),
    ("gbnf", "xy1y;"),
]


@pytest.mark.parametrize(("name", "text"), GOOD)
def test_what_a_grammar_means_is_allowed(language: Language, name: str, text: str) -> None:
    matcher = language.follow(GRAMMARS[name], text)
    assert matcher.error is None
    assert EOS in language.get_allowed(matcher)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json", '["'),
        ("json text", "1"),
        ("object", "["),
        ("regex", "a/bx"),
        ("choice", "maybe"),
        ("lark", "x;"),
        ("gbnf", "z"),
        ("json", "[1,      "),
    ],
)
def test_what_a_grammar_does_not_mean_is_masked(language: Language, name: str, text: str) -> None:
    with pytest.raises(ValueError, match="not allowed"):
        language.follow(GRAMMARS[name], text)


def test_an_end_is_allowed_only_where_the_grammar_may_end(language: Language) -> None:
    begun = language.follow(GRAMMARS["lark"], "x1")
    assert EOS not in language.get_allowed(begun)
    assert not begun.is_complete
    whole = language.follow(GRAMMARS["lark"], "x1;")
    assert whole.is_complete
    assert language.get_allowed(whole) == {EOS}


def test_a_copied_matcher_advances_independently(language: Language) -> None:
    matcher = language.compiler.compile(GRAMMARS["lark"])
    copy = matcher.copy()
    copy.consume(language.tokenizer.encode("x1;", add_special_tokens=False))
    assert copy.is_complete
    assert not matcher.is_complete


def test_a_token_that_is_not_allowed_is_an_error_that_stays(language: Language) -> None:
    matcher = language.compiler.compile(GRAMMARS["choice"])
    matcher.consume(language.tokenizer.encode("zzz", add_special_tokens=False))
    assert matcher.error
    assert not matcher.is_complete


@pytest.mark.parametrize(
    ("params", "name", "reason"),
    [
        (StructuredOutputsParams(json={"type": "bogus"}), "json", "Invalid type"),
        (StructuredOutputsParams(json={"type": "array", "contains": {}}), "json", "contains"),
        (StructuredOutputsParams(json=False), "json", "Unsatisfiable"),
        (StructuredOutputsParams(json="[1"), "json", "not JSON"),
        (StructuredOutputsParams(json="3"), "json", "an object, true or false"),
        (StructuredOutputsParams(json={"x-guidance": 3}), "json", "x-guidance"),
        (StructuredOutputsParams(regex="(?=a)b"), "regex", "look-around"),
        (StructuredOutputsParams(regex=r"[^\s\S]"), "regex", "can't be met"),
        (StructuredOutputsParams(grammar="start: nobody"), "grammar", "unknown name"),
        (StructuredOutputsParams(grammar="root ::= ("), "grammar", "not GBNF"),
        (StructuredOutputsParams(grammar="root ::= nobody"), "grammar", "not GBNF"),
        (StructuredOutputsParams(grammar='x ::= "a"'), "grammar", "not GBNF"),
        (StructuredOutputsParams(regex="\ud800"), "regex", "surrogate"),
        (StructuredOutputsParams(grammar="root ::= " + "(" * 9000), "grammar", "not GBNF"),
        (StructuredOutputsParams(grammar="r ::= " + "a " * 20_000), "grammar", "40006 characters"),
        (StructuredOutputsParams(grammar='start: "a" start'), "grammar", "has no end"),
        (StructuredOutputsParams(choice=["\ud800"]), "choice", "surrogate"),
    ],
)
def test_a_refusal_names_the_field_and_the_reason(
    language: Language, params: StructuredOutputsParams, name: str, reason: str
) -> None:
    for _ in range(2):  # the second time from memory
        with pytest.raises(RequestError) as caught:
            language.compiler.compile(params)
        assert str(caught.value).startswith(f"structured_outputs.{name}")
        assert reason in str(caught.value)


def test_a_tokenizer_that_can_not_be_read_is_a_refusal() -> None:
    with pytest.raises(RequestError, match="can't be used with this model's tokenizer"):
        make_tokenizer(object(), 0, ())


def test_the_tokenizer_is_loaded_with_the_first_grammar_and_once(
    tiny_model: Callable[[str], str],
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("llama"))
    loads: list[int] = []

    def load() -> Any:
        loads.append(1)
        return tokenizer

    compiler = GrammarCompiler(load, eos_token_ids=(EOS,))
    assert not loads
    threads = [
        threading.Thread(target=compiler.compile, args=(params,)) for params in GRAMMARS.values()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1


@pytest.mark.parametrize("vocab_size", [0, 500, 512, 513])
def test_a_mask_has_a_bit_for_every_logit(
    tiny_model: Callable[[str], str], vocab_size: int
) -> None:
    language = Language(tiny_model("llama"), vocab_size=vocab_size)
    matcher = language.compiler.compile(GRAMMARS["choice"])
    assert max(language.get_allowed(matcher)) < len(language.tokenizer)
    assert language.compiler.make_mask().size * 64 >= max(vocab_size, len(language.tokenizer))


def test_a_model_without_an_end_token_can_be_constrained(
    tiny_model: Callable[[str], str],
) -> None:
    language = Language(tiny_model("llama"), eos_token_ids=())
    assert language.follow(GRAMMARS["lark"], "x1;").is_complete
    assert language.compiler.end_mask.any()


@pytest.mark.parametrize(("name", "text"), GOOD)
def test_free_text_comes_first_and_then_the_grammar(
    language: Language, name: str, text: str
) -> None:
    params = make_grammar_after(GRAMMARS[name], "</think>")
    matcher = language.follow(params, f"let me < see\n{{}} </thi\n</think>\n\n{text}")
    assert EOS in language.get_allowed(matcher)
    with pytest.raises(ValueError, match="not allowed"):
        language.follow(params, "hm</think>\n\n#")
    free = language.follow(params, "never mind")
    assert EOS not in language.get_allowed(free)


def test_reasoning_may_end_with_a_special_token(tiny_model: Callable[[str], str]) -> None:
    language = Language(tiny_model("llama"))
    (tag,) = language.tokenizer.encode("<|im_start|>", add_special_tokens=False)
    params = make_grammar_after(GRAMMARS["lark"], "<|im_start|>", token_id=tag)
    assert language.follow(params, "hm <|im_start|>\nx1;").is_complete
    assert tag in language.get_allowed(language.compiler.compile(params))


LONG_CHAINS = {
    "references": StructuredOutputsParams(
        json={
            "$ref": "#/$defs/0",
            "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(7000)}
            | {"7000": {"enum": [1]}},
        }
    ),
    "rules": StructuredOutputsParams(
        grammar="start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(9500)) + 'r9500: "1"'
    ),
    "terminals": StructuredOutputsParams(
        grammar="start: T0\n" + "".join(f"T{i}: T{i + 1}\n" for i in range(9500)) + 'T9500: "1"'
    ),
}


@pytest.mark.parametrize("kind", LONG_CHAINS)
def test_a_long_chain_of_references_ends_no_process(tiny_model: Any, kind: str) -> None:
    language = Language(tiny_model("llama"))
    assert EOS in language.get_allowed(language.follow(LONG_CHAINS[kind], "1"))


def test_long_regular_expressions_are_refused_everywhere(language: Language) -> None:
    long = "a?" * 5000
    with pytest.raises(RequestError, match=r"structured_outputs\.regex: has 10000 characters"):
        StructuredOutputsParams(regex=long)
    for schema in (
        {"type": "string", "pattern": long},
        {"type": "object", "patternProperties": {long: {"type": "integer"}}},
        {"anyOf": [{"type": "string", "pattern": "a?" * 2500}] * 2},
    ):
        with pytest.raises(RequestError, match=r"patterns of \d+ characters in all; at most 8192"):
            language.compiler.compile(StructuredOutputsParams(json=schema))
