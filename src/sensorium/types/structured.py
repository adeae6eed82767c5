"""What the text of an answer must look like, as the caller says it; names as in vLLM.

Only the words: `sensorium.grammar` knows what they mean, and whether they can be met.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sensorium.types.errors import RequestError

# Compiling takes time and memory that grow faster than the text, expressions' most of all.
_PATH = ("structured_outputs",)  # where it stands among the sampling parameters
MAX_CHARACTERS = {"json": 2**18, "regex": 2**13, "choice": 2**18, "grammar": 2**17}


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of them. `json`: a JSON schema, as an object or as its text (kept as text);
    `json_object`: any JSON object; `regex`: the whole answer matches it; `choice`: the answer is
    one of these texts; `grammar`: a context-free grammar, Lark's or GBNF.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

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
                f"{', '.join(given) or 'none'}",
                path=_PATH,
            )
        self._check_types()

    @property
    def kind(self) -> str:
        """The name of the one that was given."""
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
                raise RequestError("must hold texts that are not empty", path=path)
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
