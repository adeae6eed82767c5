"""Sensorium: multimodal LLM inference in which everything is perceived once."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sensorium.types.errors import (
    CapacityError,
    InvariantError,
    MediaFetchError,
    MissingMediaError,
    ModelError,
    RequestError,
)
from sensorium.types.outputs import CompletionDelta, CompletionOutput, RequestDelta, RequestOutput
from sensorium.types.sampling import SamplingParams

if TYPE_CHECKING:
    from sensorium.engine.llm import LLM
    from sensorium.multimodal.media import MediaLimits

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CapacityError",
    "CompletionDelta",
    "CompletionOutput",
    "InvariantError",
    "MediaFetchError",
    "MediaLimits",
    "MissingMediaError",
    "ModelError",
    "RequestDelta",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
]
# Classes that are imported late: name -> module
_LATE = {"LLM": "sensorium.engine.llm", "MediaLimits": "sensorium.multimodal.media"}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Return a class that is imported at its first use, because importing torch takes seconds."""
    if name not in _LATE:
        raise AttributeError(f"module 'sensorium' has no attribute {name!r}")
    return getattr(import_module(_LATE[name]), name)
