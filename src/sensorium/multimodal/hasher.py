"""Names media by content: equal names mean equal pixels, samples and processing options.

Every value is framed by its type and length and mappings are sorted, so that no two different
inputs give the same bytes. Types without a canonical form are refused.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image

from sensorium.types.errors import RequestError

_VERSION = b"sensorium-mm-1"


def hash_media(media: object, options: Mapping[str, object]) -> str:
    """64 hexadecimal digits for an item and everything that its processing depends on."""
    digest = hashlib.sha256(_VERSION)
    _update(digest, media)
    _update(digest, options)
    return digest.hexdigest()


def _update(digest: Any, value: object) -> None:
    if isinstance(value, Image.Image):
        _update_image(digest, value)
    elif isinstance(value, torch.Tensor):
        _frame(digest, b"torch", str(value.dtype).encode())
        _update(digest, value.detach().cpu().reshape(-1).view(torch.uint8).numpy())
        _update(digest, list(value.shape))
    elif isinstance(value, np.ndarray):
        _update_array(digest, value)
    elif isinstance(value, Mapping):
        _frame(digest, b"map", str(len(value)).encode())
        for key in sorted(value, key=lambda key: (type(key).__name__, str(key))):
            _update(digest, key)
            _update(digest, value[key])
    elif isinstance(value, list | tuple):
        _frame(digest, b"list", str(len(value)).encode())
        for item in value:
            _update(digest, item)
    elif isinstance(value, bytes):
        _frame(digest, b"bytes", value)
    elif value is None or isinstance(value, bool | int | float | str):
        _frame(digest, type(value).__name__.encode(), repr(value).encode())
    else:
        raise RequestError(f"media options can't hold a {type(value).__name__}")


def _update_image(digest: Any, image: Image.Image) -> None:
    _frame(digest, b"image", f"{image.mode}:{image.size}".encode())
    _update(digest, np.asarray(image))
    if image.palette is not None:
        palette = bytes(image.getpalette(None) or ())
        _update(digest, [image.palette.mode, palette, image.info.get("transparency")])


def _update_array(digest: Any, array: np.ndarray[Any, Any]) -> None:
    if array.dtype.hasobject:
        raise RequestError("media can't be a numpy array of objects")
    _frame(digest, b"array", f"{array.dtype.str}:{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")


def _frame(digest: Any, kind: bytes, value: bytes) -> None:
    digest.update(struct.pack("<qq", len(kind), len(value)))
    digest.update(kind)
    digest.update(value)
