"""Writes grammars in llguidance's dialect of Lark: rules, texts, special tokens, JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sensorium.grammar.translation import SPACING, prepare_schema

Schema = Mapping[str, Any] | bool


class Lark:
    """A builder that collects the rules of a grammar in llguidance's dialect of Lark."""

    def __init__(
        self, special_tokens: Mapping[str, int], *, max_string_length: int | None = None
    ) -> None:
        self._special_tokens = special_tokens  # text -> id; a grammar can only name the id
        self.max_string_length = max_string_length  # of strings that a schema leaves free
        self._rules: dict[str, str] = {}

    def write(self) -> str:
        return "".join(f"{name}: {body}\n" for name, body in self._rules.items())

    def add(self, name: str, body: str) -> str:
        """Add or replace the rule of this name, and return the name for other rules to use."""
        self._rules[name] = body
        return name

    def add_new(self, prefix: str, body: str) -> str:
        """Add a rule under a new name that begins with `prefix`, and return that name."""
        return self.add(f"{prefix}_{len(self._rules)}", body)

    def write_text(self, text: str) -> str:
        """Return an expression for exactly this text, or for the special token with this text."""
        if text in self._special_tokens:
            return f"<[{self._special_tokens[text]}]>"
        return json.dumps(text, ensure_ascii=False) if text else ""

    def write_tag(self, tag: str) -> str:
        """Return a grammar expression for a tag that may begin with a special token."""
        found = max((t for t in self._special_tokens if tag.startswith(t)), key=len, default="")
        return " ".join(filter(None, (self.write_text(found), self.write_text(tag[len(found) :]))))

    def add_until(self, prefix: str, end: str) -> str:
        """Add a rule for any text up to the first `end`, which is included, and return its name."""
        if end in self._special_tokens:
            return self.add_new(prefix, f"/(.|\\n)*/ {self.write_text(end)}")
        pattern = "".join(c if c.isalnum() else f"\\x{ord(c):02x}" for c in end)
        name = f"{prefix}_{len(self._rules)}"
        self.add(f"{name}[lazy]", f"/(.|\\n)*{pattern}/")
        return name

    def write_json(self, schema: Schema, *, is_lenient: bool = False) -> str:
        """Return a grammar expression for a JSON value that follows the schema.

        With `is_lenient`, schema keywords that the grammar compiler does not support are ignored.
        """
        options = {**SPACING, "lenient": is_lenient}
        prepared = prepare_schema(schema, self.max_string_length)
        body = prepared if isinstance(prepared, Mapping) else {} if prepared else {"not": {}}
        return "%json " + json.dumps({**body, "x-guidance": options})

    def add_ordered(
        self, prefix: str, entries: Sequence[tuple[str, bool]], *, separator: str
    ) -> str:
        """Return a grammar expression for entries in a fixed order, with separators between them.

        An entry is an expression and whether it is required. Rules that the result needs are added
        under names that begin with `prefix`.
        """
        between = self.write_text(separator)
        rest = ""  # an expression for the entries after this one
        first = ""  # the same if there was no entry before
        for body, is_required in reversed(entries):
            after = f"{body} {rest}"
            if is_required:
                first, rest = after, f"{between} {after}"
            else:
                first = self.add_new(prefix, f"{after} | {first}" if first else f"({after})?")
                rest = f"({between} {body})? {rest}"
            rest = self.add_new(prefix, rest)
        return first
