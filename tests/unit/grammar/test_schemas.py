"""Schemas are closed to undeclared keys, and narrowed to answers that end, and nothing else."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from sensorium.grammar.translation import SPACING, prepare_schema
from sensorium.types.errors import RequestError
from tests.integration.random_schemas import make_schema

LIMIT = 32
_END = 256
INTEGER = {"type": "integer"}
PERSON = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
NODE = {
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {
                "v": {"type": "string"},
                "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
            },
            "required": ["v", "next"],
        }
    },
    "$ref": "#/$defs/Node",
}
TREE = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "children": {"type": "array", "items": {"$ref": "#"}},
    },
    "required": ["name", "children"],
}


class _Bytes:
    """A vocabulary of single bytes, so that a text is its own tokens."""

    eos_token_id = _END
    bos_token_id = None
    tokens = [*(bytes([i]) for i in range(256)), b"<end>"]  # noqa: RUF012
    special_token_ids = [_END]  # noqa: RUF012

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


TOKENIZER = LLTokenizer(TokenizerWrapper(_Bytes()))


def compile_schema(schema: Any, limit: int | None) -> LLMatcher:
    prepared = prepare_schema(schema, limit)
    body = prepared if isinstance(prepared, dict) else {"anyOf": [prepared]}
    text = json.dumps({**body, "x-guidance": SPACING})
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_json_schema(text), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def allows(schema: Any, value: Any, limit: int | None = None) -> bool:
    """Return whether the grammar allows an answer, given as its text or as a value."""
    text = value if isinstance(value, str) else json.dumps(value)
    matcher = compile_schema(schema, limit)
    tokens = list(text.encode())
    num_valid = matcher.validate_tokens(tokens)
    matcher.consume_tokens(tokens[:num_valid])
    return num_valid == len(tokens) and matcher.is_accepting()


CLOSED: list[tuple[str, Any, Any, bool]] = [
    ("declared", PERSON, {"a": 1}, True),
    ("undeclared", PERSON, {"a": 1, "b": 2}, False),
    ("allowed by the schema", {**PERSON, "additionalProperties": True}, {"a": 1, "b": 2}, True),
    ("described by it", {**PERSON, "additionalProperties": INTEGER}, {"a": 1, "b": 2}, True),
    ("in a list", {"type": "array", "items": PERSON}, [{"a": 1, "b": 2}], False),
    ("in an alternative", {"anyOf": [PERSON, {"type": "null"}]}, {"a": 1, "b": 2}, False),
    ("in a definition", {"$defs": {"P": PERSON}, "$ref": "#/$defs/P"}, {"a": 1, "b": 2}, False),
    ("no keys at all", {"type": "object"}, {"q": 1}, True),
    ("none declared", {"type": "object", "properties": {}}, {"q": 1}, False),
    ("demanded only", {"type": "object", "properties": {}, "required": ["q"]}, {"q": 1}, True),
    ("a name, not a schema", {"enum": [{"properties": {}, "b": 1}]}, {"properties": {}, "b": 1}, 1),
]
ALL_OF = {
    "$defs": {"P": PERSON},
    "allOf": [
        {"$ref": "#/$defs/P"},
        {"type": "object", "properties": {"b": {"$ref": "#/$defs/P"}}},
    ],
}
ANY_OF = {
    **PERSON,
    "anyOf": [
        {"properties": {"b": {"const": 1}}, "required": ["b"]},
        {"properties": {"c": {"const": 2}}},
    ],
}
BESIDE = {"$defs": {"P": PERSON}, "$ref": "#/$defs/P", "properties": {"b": INTEGER}}
CLOSED += [
    ("allOf: of one part", ALL_OF, {"a": 1}, True),
    ("allOf: of both", ALL_OF, {"a": 1, "b": {"a": 2}}, True),
    ("allOf: of neither", ALL_OF, {"a": 1, "c": 3}, False),
    ("allOf: below", ALL_OF, {"a": 1, "b": {"a": 2, "c": 3}}, False),
    ("anyOf next to keys: the first", ANY_OF, {"a": 1, "b": 1}, True),
    ("anyOf next to keys: the second", ANY_OF, {"a": 1, "c": 2}, True),
    ("anyOf next to keys: neither", ANY_OF, {"a": 1, "d": 2}, False),
    ("$ref next to keys: both", BESIDE, {"b": 2, "a": 1}, True),
    ("$ref next to keys: neither", BESIDE, {"b": 2, "a": 1, "c": 3}, False),
]


@pytest.mark.parametrize(("schema", "value", "expected"), [case[1:] for case in CLOSED])
@pytest.mark.parametrize("limit", [None, LIMIT])
def test_keys_are_allowed_if_the_schema_declares_them(
    schema: Any, value: Any, expected: bool, limit: int | None
) -> None:
    is_free = schema in ({**PERSON, "additionalProperties": e} for e in (True, INTEGER))
    if limit is not None and is_free:
        expected = False  # bounded answers have no free keys in addition to declared ones
    assert allows(schema, value, limit) is bool(expected)


BOUNDED: list[tuple[Any, Any, bool]] = [
    ({"type": "string"}, "x" * LIMIT, True),
    ({"type": "string"}, "x" * (LIMIT + 1), False),
    ({"type": "string"}, "a b\nc", True),
    ({"type": "string"}, "a  b", False),
    ({"type": "string"}, "a\n\nb", False),
    ({"type": "string"}, " a", False),
    ({"type": "string", "maxLength": 50}, "x" * 50, True),
    ({"type": "string", "minLength": 40}, "x" * 40, True),
    ({"type": "string", "minLength": 1}, "a b", True),
    ({"type": "string", "maxLength": 9000}, "x" * 9000, True),
    ({"type": ["string", "null"]}, None, True),
    ({"type": ["string", "null"]}, "x" * (LIMIT + 1), False),
    ({"type": "string", "pattern": "^[a-z]+$"}, "a" * 100, True),
    ({"type": "string", "pattern": "^[a-z]+$"}, "a" * 300, False),
    ({"type": "string", "format": "uuid"}, "7d444840-9dc0-11d1-b245-5ffdce74fad2", True),
    ({"type": "string", "enum": ["x" * 99]}, "x" * 99, True),
    (INTEGER, 10**14, True),
    (INTEGER, 10**15, False),
    ({**INTEGER, "minimum": 10**16}, 10**16, True),
    ({"type": "number"}, 1.125, True),
    ({"type": "number"}, 1.12567, False),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, 0.5, True),
    ({"type": "array", "items": INTEGER}, [1] * 4, True),
    ({"type": "array", "items": INTEGER}, [1] * 5, False),
    ({"type": "array", "items": INTEGER, "minItems": 6}, [1] * 6, True),
    ({"type": "array", "items": INTEGER, "maxItems": 7}, [1] * 7, True),
    ({"type": "array", "items": {"type": "array", "items": INTEGER}}, [[1, 1]], True),
    ({"type": "array", "items": {"type": "array", "items": INTEGER}}, [[1, 1, 1]], False),
    ({"type": "array", "prefixItems": [INTEGER, {"type": "string"}]}, [1, "a"], True),
    ({"type": "object"}, {"a": 1, "b": "c"}, True),
    ({"type": "object"}, {"k" * 17: 1}, False),
    ({"type": "object"}, {k: 1 for k in "abcde"}, False),
    ({"properties": {"x": {"type": "string"}}}, {"x": "a"}, True),
    ({"properties": {"x": {"type": "string"}}}, 3, False),
    ({}, [1, [2]], True),
    ({}, "x" * (LIMIT + 1), False),
    (True, {"a": {"b": "c"}}, True),
    (NODE, {"v": "a", "next": {"v": "b", "next": None}}, True),
    (TREE, {"name": "a", "children": [{"name": "b", "children": []}]}, True),
]


@pytest.mark.parametrize(("schema", "value", "expected"), BOUNDED)
def test_answers_are_bounded_where_the_schema_sets_no_bound(
    schema: Any, value: Any, expected: bool
) -> None:
    assert allows(schema, json.dumps(value), LIMIT) is expected


@pytest.mark.parametrize(("schema", "value"), [case[:2] for case in BOUNDED if not case[2]])
def test_nothing_is_bounded_without_a_limit(schema: Any, value: Any) -> None:
    assert allows(schema, json.dumps(value))


def make_chain(length: int) -> Any:
    return {"v": "a", "next": None if length == 1 else make_chain(length - 1)}


def test_a_definition_may_contain_itself_a_few_times() -> None:
    assert allows(NODE, make_chain(4), LIMIT)
    assert not allows(NODE, make_chain(5), LIMIT)
    assert allows(NODE, make_chain(40))


def test_definitions_that_lead_to_a_recursive_one_are_not_counted() -> None:
    chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(9)}
    schema = {"$defs": {**chain, "d9": NODE["$defs"]["Node"], **NODE["$defs"]}}
    assert allows({**schema, "$ref": "#/$defs/d0"}, make_chain(3), LIMIT)


def write_at_random(matcher: LLMatcher, rng: random.Random, *, most: int) -> str | None:
    """Write bytes that the grammar allows, but end as late as it can; `None` if it never ends."""
    written = bytearray()
    for _ in range(most):
        if matcher.is_stopped():
            return written.decode()
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(mask, bitorder="little").nonzero()[0].tolist()
        others = [token for token in allowed if token < _END]
        if not others:
            return written.decode()
        token = rng.choice(others)
        written.append(token)
        matcher.consume_tokens([token])
    return None


ENDLESS: list[Any] = [
    *({}, True, TREE, NODE, {"type": "object"}, {"type": "array"}, {"type": "number"}),
    {"type": "object", "additionalProperties": {"type": "string"}},
    {"type": "object", "properties": {"s": {"type": "string"}, "n": INTEGER, "l": TREE}},
]


@pytest.mark.parametrize("schema", ENDLESS)
def test_random_tokens_of_a_grammar_end_and_are_valid(schema: Any) -> None:
    for seed in range(3):
        rng = random.Random(seed)
        text = write_at_random(compile_schema(schema, LIMIT), rng, most=40_000)
        assert text is not None
        Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize("seed", range(100))
def test_what_is_allowed_of_a_random_schema_validates_against_it(seed: int) -> None:
    schema = {key: value for key, value in make_schema(seed).items() if key != "x-guidance"}
    text = write_at_random(compile_schema(schema, LIMIT), random.Random(seed), most=40_000)
    assert text is not None
    Draft202012Validator(schema).validate(json.loads(text))


def test_a_schema_that_contains_itself_at_once_is_refused() -> None:
    with pytest.raises(RequestError, match="nested too deeply"):
        prepare_schema({"allOf": [{"$ref": "#"}]}, None)


def test_a_schema_is_not_changed() -> None:
    before = json.dumps(TREE)
    prepare_schema(TREE, LIMIT)
    assert json.dumps(TREE) == before
