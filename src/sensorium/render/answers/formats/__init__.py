"""The formats of answers: a new one is a new module in this folder, and nothing else.

A module names its formats as `CALLS` and `REASONING`: one of each, or a tuple of them. The modules
must be fast to import, because the command line also lists the formats.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

from sensorium.render.answers.syntax import CallFormat, ReasoningFormat

AUTO = "auto"
NONE = "none"


def _find_all(name: str) -> list[Any]:
    """Return what the modules of this folder assign to `name`, sorted by rank and name."""
    found: list[Any] = []
    for module in pkgutil.iter_modules(__path__):
        entry = getattr(import_module(f"{__name__}.{module.name}"), name, ())
        found += entry if isinstance(entry, tuple) else [entry]
    return sorted(found, key=lambda entry: (entry.rank, entry.name))


# In the order of detection: the first format that a model uses is chosen.
CALL_FORMATS: tuple[CallFormat, ...] = tuple(_find_all("CALLS"))
REASONING_FORMATS: tuple[ReasoningFormat, ...] = tuple(_find_all("REASONING"))
TOOL_CALL_PARSERS = (AUTO, NONE, *(entry.name for entry in CALL_FORMATS))
REASONING_PARSERS = (AUTO, NONE, *(entry.name for entry in REASONING_FORMATS))
