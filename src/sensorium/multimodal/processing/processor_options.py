"""What a request may say to the model's processor, and how much it may ask of it.

A processor enlarges a picture to whatever it is told; one small picture with a large number beside
it would take all memory of a machine. Names and numbers are checked before anything is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.types.errors import RequestError

# Ours to set: where results go and what comes with them.
_RESERVED = frozenset(
    {
        "text",
        "images",
        "videos",
        "audio",
        "device",
        "raw_speech",
        "video_metadata",
        "load_audio_backend",
        "return_tensors",
        "return_text_replacement_offsets",
        "return_metadata",
        "return_mm_token_type_ids",
    }
)
MAX_EDGE = 8192
MAX_PIXELS = 2**25  # twice the largest picture of the Qwen-VL families
# What else a number may be at most, by a part of its name: some are edges too, each of some means a
# picture of its own. The processor's own value is always allowed.
_MOST = {
    "pinpoints": MAX_EDGE,
    "crops": 64,
    "patches": 64,
    "frames": 2048,
    "tokens": 16_384,
    "length": MAX_PIXELS,
    "multiple": MAX_PIXELS,
    "rate": 2**20,
}
_MOST_OF_OTHERS = 256  # of colours, say
_MAX_DEPTH = 8
_PATH = ("mm_processor_kwargs",)


def check_processor_kwargs(
    processor: MultiModalProcessor, processor_kwargs: Mapping[str, Any]
) -> None:
    """Raise a `RequestError` if an option is not known, or asks for too much."""
    known = processor.option_names
    for name, value in processor_kwargs.items():
        if not isinstance(name, str):
            raise RequestError(f"names are text, not {name!r}", path=_PATH)
        if name in _RESERVED or (known and name not in known):
            takes = ", ".join(sorted(known - _RESERVED))
            raise RequestError(f"unknown option {name!r} (known: {takes})", path=_PATH)
        for path, number in _walk(name, value, depth=0):
            most = _get_most(path, processor)
            if not abs(number) <= most:  # nor is what is no number
                raise RequestError(f"{path} may be {most} at most", path=_PATH)


def _walk(path: str, value: Any, *, depth: int) -> Iterator[tuple[str, float]]:
    """All numbers in a value, with their names."""
    if depth > _MAX_DEPTH:
        raise RequestError(f"{path} is nested too deep", path=_PATH)
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _walk(f"{path}.{key}", entry, depth=depth + 1)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _walk(path, entry, depth=depth + 1)
    elif isinstance(value, Real) and not isinstance(value, bool):  # also numpy's
        yield path, value  # type: ignore[misc]


def _get_most(path: str, processor: MultiModalProcessor) -> float:
    own = processor.get_option_default(path)
    if "pixels" in path:
        return MAX_PIXELS
    if "size" in path:  # some processors count pixels under the name of an edge
        return MAX_PIXELS if own is not None and own > MAX_EDGE else MAX_EDGE
    most = next((most for part, most in _MOST.items() if part in path), _MOST_OF_OTHERS)
    return most if own is None else max(most, own)
