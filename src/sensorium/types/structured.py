"""The constraints that a caller may put on the text of an answer, with the names of vLLM.

Only types and lengths are checked here. `sensorium.grammar` interprets the constraints, and refuses
those that can't be met.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sensorium.types.errors import RequestError

_PATH = ("structured_outputs",)  # the field's name among the sampling parameters
# Compiling takes time and memory that grow faster than the text, for regular expressions most of
# all.
MAX_CHARACTERS = {"json": 2**18, "regex": 2**13, "choice": 2**18, "grammar": 2**17}


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint on the text of an answer; exactly one of the fields must be given."""

    json: str | Mapping[str, Any] | bool | None = None  # a JSON schema; it is kept as text
    json_object: bool | None = None  # the answer is any JSON object
    regex: str | None = None  # an expression that the whole answer matches
    choice: Sequence[str] | None = None  # the answer is one of these texts
    grammar: str | None = None  # a context-free grammar in Lark's form or GBNF

    def __post_init__(self) -> None:
        if isinstance(self.json, Mapping | bool):
            object.__setattr__(self, "json", _write_schema(self.json))
        if isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice))
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if len(given) != 1:
            raise RequestError(
                "exactly one of json, json_object, regex, choice and grammar is needed, not "
                f"{', '.join(given) or 'none of them'}",
                path=_PATH,
            )
        self._check_types()

    @property
    def kind(self) -> str:
        """The name of the only field that was given, such as "json" or "regex"."""
        return next(f.name for f in fields(self) if getattr(self, f.name) is not None)

    def _check_types(self) -> None:
        for name in ("json", "regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise RequestError("must be text that is not empty", path=(*_PATH, name))
            _check_length(name, len(value or ""))
        if self.json_object is not None and self.json_object is not True:
            raise RequestError("must be true or false", path=(*_PATH, "json_object"))
        if self.choice is not None:
            path = (*_PATH, "choice")
            if not isinstance(self.choice, tuple) or not self.choice:
                raise RequestError("must be a list that is not empty", path=path)
            if not all(isinstance(entry, str) and entry for entry in self.choice):
                raise RequestError("must contain only texts that are not empty", path=path)
            _check_length("choice", sum(map(len, self.choice)))


def _check_length(name: str, num_characters: int) -> None:
    limit = MAX_CHARACTERS[name]
    if num_characters > limit:
        raise RequestError(
            f"has {num_characters} characters; at most {limit} are allowed", path=(*_PATH, name)
        )


def _write_schema(schema: Mapping[str, Any] | bool) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"is not a JSON schema: {error}", path=(*_PATH, "json")) from error
