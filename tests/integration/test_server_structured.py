"""Structured outputs over HTTP, as the `openai` client asks for them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openai import BadRequestError, OpenAI

from tests.integration.random_schemas import make_schema
from tests.support.clients import MODEL
from tests.support.server import ServerProcess

pytestmark = pytest.mark.xdist_group("server")
MESSAGES: Any = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", 1]}},
    "required": ["n", "b"],
    "additionalProperties": False,
}
JSON_SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
}


@pytest.fixture(scope="module")
def client(omni_server: ServerProcess) -> Iterator[OpenAI]:
    with omni_server.make_client() as client:
        yield client


def ask(client: OpenAI, *, stream: bool = False, **fields: Any) -> tuple[str, str]:
    """The text, and why it ended."""
    options: dict[str, Any] = {"temperature": 1.0, "seed": 2, "max_tokens": 250, **fields}
    made: Any = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=stream, **options
    )
    if not stream:
        return made.choices[0].message.content, made.choices[0].finish_reason
    choices = [chunk.choices[0] for chunk in made if chunk.choices]
    return "".join(c.delta.content or "" for c in choices), choices[-1].finish_reason


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_response_format_gives_json(client: OpenAI, stream: bool) -> None:
    text, reason = ask(client, stream=stream, response_format=JSON_SCHEMA)
    assert reason == "stop"
    Draft202012Validator(SCHEMA).validate(json.loads(text))
    # Whether a random model comes to the end of any object is luck: that it can't leave it is not.
    text, reason = ask(client, stream=stream, response_format={"type": "json_object"})
    assert text.startswith("{")
    if reason == "stop":
        assert isinstance(json.loads(text), dict)
    assert ask(client, max_tokens=3, response_format={"type": "text"})[1] == "length"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[0-9]{2}[ab]"}, "[0-9]{2}[ab]"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"guided_grammar": 'root ::= "go " [0-9]'}, "go [0-9]"),
        ({"guided_json": {"const": [1]}}, r"\s*\[\s*1\s*\]\s*"),
        ({"guided_json": '{"const": 5}'}, "5"),
        ({"structured_outputs": {"choice": ["up"]}}, "up"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_other_fields_for_structured_outputs_are_followed(
    client: OpenAI, fields: dict[str, Any], pattern: str, stream: bool
) -> None:
    text, reason = ask(client, stream=stream, extra_body=fields)
    assert (bool(re.fullmatch(pattern, text)), reason) == (True, "stop"), text


def test_completions_may_have_structured_outputs(client: OpenAI) -> None:
    made = client.completions.create(
        model=MODEL,
        prompt=["hello", "you"],
        n=2,
        max_tokens=200,
        seed=1,
        extra_body={"response_format": JSON_SCHEMA},
    )
    assert len(made.choices) == 4
    for choice in made.choices:
        assert choice.finish_reason == "stop"
        Draft202012Validator(SCHEMA).validate(json.loads(choice.text))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"guided_grammar": "start: nobody"}, "guided_grammar"),
        ({"guided_choice": [""]}, "guided_choice[0]"),
        ({"structured_outputs": {"json": False}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": r"[^\s\S]"}}, "structured_outputs.regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_an_impossible_constraint_is_a_400_that_names_the_field(
    client: OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        ask(client, extra_body=fields)
    assert caught.value.param == param
    assert caught.value.message.count(param.partition("[")[0]) >= 1
    assert ask(client, extra_body={"guided_choice": ["on"]}) == ("on", "stop")


def test_requests_with_and_without_grammars_are_answered_together(client: OpenAI) -> None:
    from concurrent.futures import ThreadPoolExecutor

    free = {"temperature": 0.0, "max_tokens": 20}
    alone = ask(client, **free)
    schemas = [make_schema(seed) for seed in range(1, 9)]
    with ThreadPoolExecutor(12) as threads:
        constrained = [
            threads.submit(ask, client, extra_body={"guided_json": schema}) for schema in schemas
        ]
        others = [threads.submit(ask, client, **free) for _ in range(4)]
        assert {other.result() for other in others} == {alone}
        for schema, answer in zip(schemas, constrained, strict=True):
            text, reason = answer.result()
            if reason == "stop":
                Draft202012Validator(schema).validate(json.loads(text))
