"""Reads the JSON files of a checkpoint, and the names of its weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from sensorium.types.errors import ModelError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MAX_NAME_BYTES = 255  # as in most file systems


def get_weight_names(directory: Path) -> tuple[str, ...]:
    """Return the names of a checkpoint's weight files, even if the files are missing.

    Raise `ModelError` if its index of weights can't be read, or has names that can't be of weights.
    """
    index = directory / WEIGHTS_INDEX
    if (directory / WEIGHTS).is_file() or not index.is_file():
        return (WEIGHTS,)
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelError(f"{index} is not an index of weights: its weight_map names no files")
    for name in names.values():
        if not _is_weights_name(name):
            raise ModelError(
                f"{index} is not an index of weights: {str(name)[:200]!r} is not the name of a "
                "safetensors file in the same directory"
            )
    return tuple(sorted(set(names.values())))


def _is_weights_name(name: object) -> bool:
    """Return True for the name of a safetensors file inside the checkpoint's directory."""
    if not isinstance(name, str) or not name.isprintable():
        return False
    path = PurePosixPath(name)
    return (
        path.suffix == Path(WEIGHTS).suffix
        and not path.is_absolute()
        and ".." not in path.parts
        and len(name.encode()) <= _MAX_NAME_BYTES
    )


def check_presence(model: str, directory: Path, names: Iterable[str]) -> None:
    """Raise a `ModelError` that names `model` if one of these weight files is missing."""
    names = tuple(names)
    missing = [name for name in names if not (directory / name).is_file()]
    if missing == [WEIGHTS]:
        raise ModelError(f"there are no weights in {str(directory)!r}{_get_hint(directory)}")
    if missing:
        raise ModelError(
            f"the weights of {model!r} are not complete: "
            f"{len(missing)} of {len(names)} files are missing, for example {missing[0]}"
        )


def _get_hint(directory: Path) -> str:
    """Return the end of the error text for missing weights, with a hint if there are pickles."""
    pickles = [path.name for pattern in _PICKLES for path in sorted(directory.glob(pattern))]
    if not pickles:
        return f": {WEIGHTS} or {WEIGHTS_INDEX} is needed"
    return (
        f" but {pickles[0]}: only safetensors are loaded, because pickles can run code. "
        "Transformers' `save_pretrained` converts them"
    )


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file, or an empty one if the file does not exist.

    Raise `ModelError` if the file can't be read, is not JSON, or not an object.
    """
    if not path.is_file():
        return {}
    try:
        content = parse_json(path.read_text())
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content


def parse_json(content: str | bytes) -> Any:
    """Return the value of a JSON text; raise `ValueError` if it is no JSON or nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
