"""Translates each kind of structured output into a grammar of llguidance."""

from __future__ import annotations

import json
import re

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from sensorium.grammar.closed_schemas import Schema, close_objects
from sensorium.grammar.finite_schemas import make_finite
from sensorium.types.errors import RequestError
from sensorium.types.structured import MAX_CHARACTERS, StructuredOutputsParams

_JSON, _GRAMMAR = ("structured_outputs", "json"), ("structured_outputs", "grammar")
# A space, or a new line and its indentation, as people and programs write JSON. If any whitespace
# was allowed, some models would fill the context with it.
_WHITESPACE = r"[\x20\x09]|\x0D?\x0A[\x20\x09]{0,32}"
# The whitespace of `json.dumps`, for schemas that are narrowed so that every answer ends.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MAX_GBNF_CHARACTERS = 2**15  # GBNF is parsed in Python, and other threads have to wait
_LARK_START = re.compile(r"^\s*(%llguidance\b|start\s*(\[[^\]]*\])?\s*:)", re.MULTILINE)


def make_grammar(params: StructuredOutputsParams, *, max_string_length: int | None = None) -> str:
    """Return the llguidance grammar for a constraint, as the text that `LLMatcher` takes.

    With `max_string_length`, answers that follow a JSON schema are of bounded length. Raise
    `RequestError` with the path of the field for text that is not JSON or GBNF. Other errors are
    found when the grammar is compiled.
    """
    if params.kind == "regex":
        return str(LLMatcher.grammar_from_regex(params.regex or ""))
    if params.kind in ("json", "json_object"):
        return str(LLMatcher.grammar_from_json_schema(_get_schema(params, max_string_length)))
    return str(LLMatcher.grammar_from_lark(_get_lark(params)))


def prepare_schema(schema: Schema, max_string_length: int | None) -> Schema:
    """Return the JSON schema that answers must follow, which is stricter than the given one.

    Objects are closed, and with `max_string_length` answers are of bounded length. Raise
    `RequestError` if the schema is nested too deeply.
    """
    try:
        closed = close_objects(schema)
        return closed if max_string_length is None else make_finite(closed, max_string_length)
    except RecursionError as error:
        raise RequestError("is nested too deeply: use fewer than 100 levels", path=_JSON) from error


def make_grammar_after(
    params: StructuredOutputsParams,
    end_tag: str,
    *,
    token_id: int | None = None,
    max_string_length: int | None = None,
) -> StructuredOutputsParams:
    """Return a grammar of free text that ends with `end_tag`, and then the grammar of `params`.

    It is for prompts that end inside a model's reasoning: the model first completes the reasoning
    up to `end_tag`, and only the answer after the tag is constrained. Whitespace may precede the
    answer. `token_id` is the tag's, or `None` if the tag is plain text and no special token.
    """
    free = "reasoning" if token_id is None else f"/(.|\\n)*/ <[{token_id}]>"
    rules = [f"start: {free} /[ \\t\\r\\n]{{0,8}}/ answer"]
    if token_id is None:
        rules.append(f"reasoning[lazy]: TEXT {_quote(end_tag)}\nTEXT: /(.|\\n)*/")
    rules.append(f"answer: {_embed(params, max_string_length)}")
    return StructuredOutputsParams(grammar="\n".join(rules))


def _embed(params: StructuredOutputsParams, max_string_length: int | None) -> str:
    """Return a constraint as an expression for the right side of a Lark rule."""
    if params.kind in ("json", "json_object"):
        return f"%json {_get_schema(params, max_string_length)}"
    if params.kind == "regex":
        return f"/{regex_to_lark(params.regex or '', use_ascii='')}/"
    return f"%lark {{\n{_get_lark(params)}\n}}"


def _get_schema(params: StructuredOutputsParams, max_string_length: int | None) -> str:
    """Return the JSON schema of a constraint as text for llguidance, checked and made stricter.

    The whitespace in an answer is limited, unless the schema has its own rules for it in
    "x-guidance". Raise `RequestError` if the text is not a JSON schema.
    """
    try:
        schema = {"type": "object"} if params.json is None else json.loads(str(params.json))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"is not JSON: {error}", path=_JSON) from error
    if schema is True:
        schema = {}
    if isinstance(schema, dict):
        own = schema.get("x-guidance", {})
        if not isinstance(own, dict):
            raise RequestError("has an x-guidance that is not an object", path=_JSON)
        if not own.keys() & {"whitespace_pattern", "whitespace_flexible"}:
            blanks = {"whitespace_pattern": _WHITESPACE} if max_string_length is None else SPACING
            own = {**own, **blanks}
        _check_patterns(schema)
        schema = {**prepare_schema(schema, max_string_length), "x-guidance": own}
    elif schema is not False:
        raise RequestError("must be a JSON schema: an object, true or false", path=_JSON)
    try:
        return json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"is not a JSON schema: {error}", path=_JSON) from error


def _check_patterns(schema: object) -> None:
    """Raise a `RequestError` if the regular expressions in a JSON schema are too long in all.

    They cost as much as a `regex` constraint of the same length, so they have the same limit.
    """
    waiting, num_characters = [schema], 0
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            pattern = value.get("pattern")
            num_characters += len(pattern) if isinstance(pattern, str) else 0
            patterns = value.get("patternProperties")
            num_characters += sum(map(len, patterns)) if isinstance(patterns, dict) else 0
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
    limit = MAX_CHARACTERS["regex"]
    if num_characters > limit:
        raise RequestError(
            f"has patterns of {num_characters} characters in all; at most {limit} are allowed",
            path=_JSON,
        )


def _get_lark(params: StructuredOutputsParams) -> str:
    if params.choice is not None:
        return "start: " + " | ".join(map(_quote, dict.fromkeys(params.choice)))
    text = params.grammar or ""
    return _translate_gbnf(text) if "::=" in text and not _LARK_START.search(text) else text


def _quote(text: str) -> str:
    """Return text as a Lark literal, like JSON; raise `RequestError` for an unpaired surrogate."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise RequestError(
            "has an unpaired surrogate (U+D800 to U+DFFF): remove it",
            path=("structured_outputs", "choice"),
        )
    return json.dumps(text, ensure_ascii=False)


def _translate_gbnf(text: str) -> str:
    if len(text) > _MAX_GBNF_CHARACTERS:
        raise RequestError(
            f"has {len(text)} characters; GBNF may have at most {_MAX_GBNF_CHARACTERS} (in Lark's "
            "notation it may have more)",
            path=_GRAMMAR,
        )
    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # for a missing rule it raises a plain `Exception`
        raise RequestError(f"is not Lark, and not GBNF: {error}", path=_GRAMMAR) from error
