"""Names media by content: equal names mean equal source, processing options and processor.

A name is made in two steps. The source (a file's bytes, or an array that was given in process) is
digested before anything is decoded. The digest is digested again with all that the result of
processing depends on. So one source has as many names as it has ways to be processed, and is read
once.

Every value is framed by its type and length and mappings are sorted, so that no two different
inputs give the same bytes. Types without a canonical form are refused. Names are 256 bits of any
algorithm. The algorithm and the version of this format are part of them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image

from sensorium.multimodal.decoding.images import DECODER_ERRORS, load_pixels
from sensorium.multimodal.item_codec import PrecomputedEmbeds
from sensorium.multimodal.media_item import MediaBytes
from sensorium.types.errors import ModelError, RequestError
from sensorium.types.multimodal import HASH_ALGORITHMS

_VERSION = b"sensorium-mm-2"
_NUM_DIGITS = 64  # 256 bits
_MAX_DEPTH = 32
_MAX_BITS = 4096  # of a whole number; Python writes none of many more
_STRIP_PIXELS = 2**18  # of a PIL image at a time: its memory can't be read in place


class MediaHasher:
    """A maker of names. `model_revision` and `processor_fingerprint` are part of every name."""

    def __init__(
        self,
        algorithm: str = "sha256",
        *,
        model_revision: str = "",
        processor_fingerprint: str = "",
    ) -> None:
        self._new = _get_constructor(algorithm)
        self._tag = _VERSION + b"/" + algorithm.encode()
        self._context = self._digest("context", [model_revision, processor_fingerprint])

    def digest_source(self, media: object) -> str:
        """Return the digest of the source alone. The bytes of `MediaBytes` are digested once.

        Embeddings are never named as a picture or a sound of the same numbers.
        """
        if isinstance(media, PrecomputedEmbeds):
            return self._digest("embeds", media.tensor)
        if not isinstance(media, MediaBytes):
            return self._digest("source", media)
        if media.digest is None:
            media.digest = self._digest("source", media.data)
        return media.digest

    def name_item(
        self,
        source_digest: str,
        *,
        modality: str,
        decode_options: Mapping[str, object] | None,
        processor_kwargs: Mapping[str, object],
        cache_salt: str | None,
    ) -> str:
        """Return the `mm_hash` of an item. `decode_options` are `None` for media that
        came decoded.
        """
        parts = [self._context, source_digest, modality, decode_options, processor_kwargs]
        return self._digest("item", [*parts, cache_salt])

    def name_external(self, mm_hash: str, cache_salt: str | None) -> str:
        """Return another name for a name that was not made here, so that the two never meet."""
        return self._digest("external", [mm_hash, cache_salt])

    def name_uuid(
        self, uuid: str, modality: str, cache_salt: str | None, client: str | None = None
    ) -> str:
        """Return the name under which a store keeps what a client's uuid refers to."""
        clients = [] if client is None else [client]
        return self._digest("uuid", [uuid, modality, cache_salt, *clients])

    def _digest(self, purpose: str, value: object) -> str:
        digest = self._new()
        _frame(digest, b"format", self._tag)
        _frame(digest, b"purpose", purpose.encode())
        _update(digest, value, depth=0)
        text: str = digest.hexdigest()
        return text[:_NUM_DIGITS]


def choose_algorithm(machine: str) -> str:
    """Return the fastest algorithm for files, by measurement (docs/adr/0008-identity.md).

    It is BLAKE3 where that has wide vectors, and SHA-256 where the processor computes it.
    """
    has_blake3 = importlib.util.find_spec("blake3") is not None
    return "blake3" if machine in ("x86_64", "AMD64") and has_blake3 else "sha256"


def _get_constructor(algorithm: str) -> Callable[[], Any]:
    if algorithm not in HASH_ALGORITHMS:
        known = ", ".join(HASH_ALGORITHMS)
        raise ModelError(f"unknown mm_hasher_algorithm {algorithm!r}: use {known}")
    if algorithm == "blake3":
        from blake3 import blake3

        return blake3
    constructor: Callable[[], Any] = getattr(hashlib, algorithm)
    return constructor


def _update(digest: Any, value: object, *, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise RequestError(f"media options are nested more than {_MAX_DEPTH} deep")
    if isinstance(value, Image.Image):
        _update_image(digest, value)
    elif isinstance(value, torch.Tensor):
        _frame(digest, b"torch", f"{value.dtype}:{tuple(value.shape)}".encode())
        plain = value.detach().cpu().resolve_conj().resolve_neg()
        flat = plain.contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    elif isinstance(value, np.ndarray):
        _update_array(digest, value)
    elif isinstance(value, Mapping):
        _frame(digest, b"map", str(len(value)).encode())
        for key in sorted(value, key=lambda key: (type(key).__name__, str(key))):
            _update(digest, key, depth=depth + 1)
            _update(digest, value[key], depth=depth + 1)
    elif isinstance(value, list | tuple):
        _frame(digest, b"list", str(len(value)).encode())
        for item in value:
            _update(digest, item, depth=depth + 1)
    elif isinstance(value, bytes | bytearray | memoryview):
        _frame(digest, b"bytes", value)
    else:
        _update_scalar(digest, value)


def _update_scalar(digest: Any, value: object) -> None:
    if isinstance(value, str):
        _frame(digest, b"str", value.encode("utf-8", "surrogatepass"))
    elif value is None or isinstance(value, bool | int | float):
        plain = value if value is None or isinstance(value, bool) else _as_plain(value)
        if isinstance(plain, int) and plain.bit_length() > _MAX_BITS:
            raise RequestError("media options can't hold a number this large")
        _frame(digest, type(plain).__name__.encode(), repr(plain).encode())
    else:
        raise RequestError(f"media options can't hold a {type(value).__name__}")


def _as_plain(value: int | float) -> int | float:
    """Return a value of the plain type, because subclasses may have another `repr`."""
    return int(value) if isinstance(value, int) else float(value)


def _update_image(digest: Any, image: Image.Image) -> None:
    try:
        load_pixels(image)  # Pillow reads a file when its pixels are needed
    except DECODER_ERRORS as error:
        raise RequestError("the image can't be read: it is damaged or truncated") from error
    _frame(digest, b"image", f"{image.mode}:{image.size}".encode())
    width, height = image.size
    rows = max(1, _STRIP_PIXELS // max(1, width))
    for top in range(0, height, rows):
        strip = image.crop((0, top, width, min(height, top + rows)))
        digest.update(strip.tobytes())
    transparent = image.info.get("transparency")  # a colour that is seen through, in any mode
    if image.palette is not None:
        palette = bytes(image.getpalette(None) or ())
        _update(digest, [image.palette.mode, palette, transparent], depth=0)
    elif transparent is not None:
        _update(digest, [transparent], depth=0)


def _update_array(digest: Any, array: np.ndarray[Any, Any]) -> None:
    if array.dtype.hasobject:
        raise RequestError("media can't be a numpy array of objects")
    _frame(digest, b"array", f"{array.dtype.str}:{array.shape}".encode())
    # As bytes first: not every type of numpy's can be shown as a buffer.
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _frame(digest: Any, kind: bytes, value: bytes | bytearray | memoryview) -> None:
    num_bytes = value.nbytes if isinstance(value, memoryview) else len(value)
    digest.update(struct.pack("<qq", len(kind), num_bytes))
    digest.update(kind)
    digest.update(value)
