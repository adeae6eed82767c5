"""Makes random JSON schemas from seeds, with every keyword that a grammar can follow.

Their values are bounded, so that a model with random weights comes to an end.
"""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
_WORDS = ("id", "n", "ö", "k", 'a"b', "x", "y", "0")
_COMPACT = {"whitespace_flexible": False}


def make_schema(seed: int) -> Schema:
    """Return a schema. Three of four allow no spaces, which a random model might write forever."""
    maker = _Maker(random.Random(seed))
    schema = maker.make(depth=0)
    options = {} if seed % 4 == 0 else {"x-guidance": _COMPACT}
    return {**options, **({"$defs": maker.defs} if maker.defs else {}), **schema}


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.defs: dict[str, Schema] = {}

    def make(self, depth: int) -> Schema:
        leaves = [self._integer, self._string, self._pattern, self._enum, self._const]
        if self._rng.random() < 0.3:
            leaves.append(self._number)  # rare, because a model may write digits without end
        if depth >= 2:
            return self._rng.choice(leaves)()
        nests = [self._object, self._object, self._array, self._tuple, self._any_of, self._ref]
        if depth == 0:
            return self._rng.choice([*nests, self._map, self._list_of_pairs])(depth)
        return self._rng.choice([*(lambda _, leaf=leaf: leaf() for leaf in leaves), *nests])(depth)

    # ---- leaves

    def _integer(self) -> Schema:
        low = self._rng.randint(-50, 50)
        schema: Schema = {"type": "integer", "minimum": low, "maximum": low + 40}
        if self._rng.random() < 0.3:
            schema["multipleOf"] = self._rng.choice((2, 5, 7))
        if self._rng.random() < 0.3:
            schema["exclusiveMaximum"] = schema.pop("maximum") + 1
        return schema

    def _number(self) -> Schema:
        low = self._rng.choice((-1.5, 0, 0.25, 10))
        return {"type": "number", "minimum": low, "exclusiveMaximum": low + 2.75}

    def _string(self) -> Schema:
        shortest = self._rng.randint(0, 3)
        return {"type": "string", "minLength": shortest, "maxLength": shortest + 2}

    def _pattern(self) -> Schema:
        patterns = ("^[a-f]{2,4}$", "^(ab|c)d{1,3}$", r"^\d{2}-[A-Z]$", "^x?y?$")
        if self._rng.random() < 0.2:
            return {"type": "string", "format": self._rng.choice(("date", "ipv4"))}
        return {"type": "string", "pattern": self._rng.choice(patterns)}

    def _enum(self) -> Schema:
        values: list[Any] = ["r", "a\nb", 3, -0.5, None, True, ["x", 1], {"k": "v"}]
        return {"enum": self._rng.sample(values, self._rng.randint(1, 4))}

    def _const(self) -> Schema:
        return {"const": self._rng.choice(("a b", 7, None, False, {"d": [1, {"e": 2}]}))}

    # ---- schemas that contain others

    def _object(self, depth: int) -> Schema:
        names = self._rng.sample(_WORDS, self._rng.randint(0, 3))
        properties = {name: self.make(depth + 1) for name in names}
        required = [name for name in names if self._rng.random() < 0.6]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    def _map(self, depth: int) -> Schema:
        return {
            "type": "object",
            "patternProperties": {"^[a-c]{1,3}$": self.make(depth + 1)},
            "additionalProperties": False,
            "maxProperties": 2,
        }

    def _array(self, depth: int) -> Schema:
        least = self._rng.randint(0, 2)
        return {
            "type": "array",
            "items": self.make(depth + 1),
            "minItems": least,
            "maxItems": least + 2,
        }

    def _tuple(self, depth: int) -> Schema:
        items = [self.make(depth + 1) for _ in range(self._rng.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def _list_of_pairs(self, depth: int) -> Schema:
        pair = {
            "type": "object",
            "properties": {"key": self._string(), "value": self.make(depth + 2)},
            "required": ["key", "value"],
            "additionalProperties": False,
        }
        return {"type": "array", "items": pair, "minItems": 1, "maxItems": 2}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.make(depth + 1) for _ in range(self._rng.randint(2, 3))]}

    def _ref(self, depth: int) -> Schema:
        """Return a reference to one of three definitions. The last one contains itself.

        A model that follows it ends by chance.
        """
        name = f"def{self._rng.randint(0, 2)}"
        if name not in self.defs:
            self.defs[name] = {}  # the definition may refer to itself while it is made
            self.defs[name] = self._make_definition(name, depth)
        return {"$ref": f"#/$defs/{name}"}

    def _make_definition(self, name: str, depth: int) -> Schema:
        if name != "def2":
            return self._object(depth + 2)
        link = {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"$ref": "#/$defs/def2"}]}
        return {
            "type": "object",
            "properties": {"value": self._integer(), "next": link},
            "required": ["value", "next"],
            "additionalProperties": False,
        }
