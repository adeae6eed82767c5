"""The names of media: hashes of its content, and uuids that clients give.

Equal hashes mean equal source, processing options and processor. The source (a file's bytes, or an
array that was given in process) is digested before anything is decoded. That digest is digested
again together with all that the result of processing depends on. So a source that is processed with
different options has several hashes, and is still read only once.

Every value is framed by its type and length and mappings are sorted, so that no two different
inputs give the same bytes. Types without a canonical form are refused. Hashes are 256 bits of any
algorithm. The algorithm and the version of this format are part of them.

A uuid is a promise of the client, not an identity. It is bound to the source that it first came
with, and only within its scope: the uuids of one client do not affect another. The least recently
used binding is dropped first.
"""

from __future__ import annotations

import hashlib
import importlib.util
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from sensorium.multimodal.cache.shm_store import ShmStore
from sensorium.multimodal.decoding.images import DECODER_ERRORS, load_pixels
from sensorium.multimodal.item_codec import PrecomputedEmbeds, as_bytes
from sensorium.multimodal.media import MediaBytes
from sensorium.types.errors import ModelError, RequestError
from sensorium.types.multimodal import HASH_ALGORITHMS, MultiModalKwargsItem, ProcessedItem
from sensorium.utils.lru import LruCache

_VERSION = b"sensorium-mm-2"
_NUM_DIGITS = 64  # 256 bits
_MAX_DEPTH = 32
_MAX_BITS = 4096  # of a whole number; Python does not print much longer ones
_STRIP_PIXELS = 2**18  # of a PIL image at a time: its memory can't be read in place


class MediaHasher:
    """A maker of hashes that identify media items by their content and how they are processed."""

    def __init__(
        self,
        algorithm: str = "sha256",
        *,
        model_revision: str = "",
        processor_fingerprint: str = "",
    ) -> None:
        self._new = _get_constructor(algorithm)
        self._tag = _VERSION + b"/" + algorithm.encode()
        # In every hash of `name_item`, so that different models never share a processed item.
        self._context = self._digest("context", [model_revision, processor_fingerprint])

    def digest_source(self, media: object) -> str:
        """Return the digest of a media source as it was given, before anything is decoded.

        The digest of a `MediaBytes` is stored in that object and computed once. Embeddings never
        have the digest of other media with the same numbers.
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
        """Return the `mm_hash` of a media item, which is its key in the caches of processed items.

        Items with different salts never have the same one. `decode_options` is None for media that
        the caller gave decoded.
        """
        parts = [self._context, source_digest, modality, decode_options, processor_kwargs]
        return self._digest("item", [*parts, cache_salt])

    def name_external(self, mm_hash: str, cache_salt: str | None) -> str:
        """Return the `mm_hash` for a hash that a client has made; it equals none of `name_item`."""
        return self._digest("external", [mm_hash, cache_salt])

    def name_uuid(
        self, uuid: str, modality: str, cache_salt: str | None, client: str | None = None
    ) -> str:
        """Return a uuid's key in the shared-memory store; `client` is a digest of an API key."""
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
    """Return the fastest hash algorithm for files on a machine such as "x86_64" (see ADR 8)."""
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
        raise RequestError(f"media options are nested more than {_MAX_DEPTH} levels deep")
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
            raise RequestError(f"media options can't hold whole numbers above {_MAX_BITS} bits")
        _frame(digest, type(plain).__name__.encode(), repr(plain).encode())
    else:
        raise RequestError(f"media options can't hold a value of the type {type(value).__name__}")


def _as_plain(value: int | float) -> int | float:
    """Return the number as a plain `int` or `float`, because a subclass may have another `repr`."""
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
        raise RequestError(
            "media can't be a numpy array of Python objects: use an array of numbers"
        )
    _frame(digest, b"array", f"{array.dtype.str}:{array.shape}".encode())
    # Viewed as bytes first, because not every dtype of numpy supports the buffer protocol.
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _frame(digest: Any, kind: bytes, value: bytes | bytearray | memoryview) -> None:
    num_bytes = value.nbytes if isinstance(value, memoryview) else len(value)
    digest.update(struct.pack("<qq", len(kind), num_bytes))
    digest.update(kind)
    digest.update(value)


MAX_UUID_LENGTH = 128
_DIGEST, _IS_ENCODED = "digest", "is_encoded"  # tensors of a binding in a store


class UuidScope(NamedTuple):
    """The scope in which a client's uuid identifies one media source."""

    client: str | None = None  # digest of an API key; None: all clients without a key
    cache_salt: str | None = None  # of the request


_Key = tuple[UuidScope, str, str]  # scope, modality, uuid


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundSource:
    """The media source that a client's uuid refers to, identified by its digest."""

    digest: str
    is_encoded: bool  # it was a file, not pixels or samples in process


class UuidBindings:
    """A thread-safe table of this process, with the media source that each uuid was bound to."""

    def __init__(self, max_entries: int = 65_536) -> None:
        self._sources: LruCache[_Key, BoundSource] = LruCache(max_entries)
        self._lock = Lock()  # between a check and its binding

    def get(self, uuid: str, *, modality: str, scope: UuidScope) -> BoundSource | None:
        """Return the source of the uuid, or None; it becomes the most recently used one."""
        return self._sources.get((scope, modality, uuid))

    def check(self, uuid: str, source: BoundSource, *, modality: str, scope: UuidScope) -> None:
        """Raise `RequestError` if the uuid was first used for another media source in its scope."""
        bound = self.get(uuid, modality=modality, scope=scope)
        _check_same(uuid, modality, source, bound)

    def bind(self, uuid: str, source: BoundSource, *, modality: str, scope: UuidScope) -> None:
        """Bind the uuid to a media source, so that a later request may send the uuid alone.

        Raise `RequestError` if the uuid has another source in this scope. Call this only after the
        source was processed, so that a damaged file does not occupy a uuid.
        """
        key = scope, modality, uuid
        with self._lock:
            _check_same(uuid, modality, source, self._sources.get(key))
            self._sources.put(key, source)


def _check_same(uuid: str, modality: str, source: BoundSource, bound: BoundSource | None) -> None:
    if bound not in (None, source):
        raise RequestError(
            f"uuid {uuid!r} was first used for another {modality}: choose a new uuid"
        )


def check_uuid(uuid: object) -> str | None:
    """Return the uuid that a client sent for a media item, or None if it sent none.

    Raise `RequestError` if the value is not a string of 1 to `MAX_UUID_LENGTH` characters.
    """
    if uuid is None:
        return None
    if not isinstance(uuid, str) or not 0 < len(uuid) <= MAX_UUID_LENGTH:
        raise RequestError(f"must be a string of 1 to {MAX_UUID_LENGTH} characters")
    return uuid


class SharedUuidBindings(UuidBindings):
    """A table of uuid bindings that all frontend processes share.

    Each binding is a small item in the shared-memory store, which may evict it. The source of the
    first frontend that stores a binding for a uuid is the one that counts. A process also keeps the
    bindings that it has made.
    """

    def __init__(self, store: ShmStore, hasher: MediaHasher) -> None:
        super().__init__()
        self._store = store
        self._hasher = hasher

    def get(self, uuid: str, *, modality: str, scope: UuidScope) -> BoundSource | None:
        name = self._name(uuid, modality, scope)
        found = super().get(uuid, modality=modality, scope=scope)
        if found is not None:
            self._store.touch(name)  # so that other processes don't evict what this one uses
            return found
        stored = self._store.copy_item(name)
        return None if stored is None else _read_item(stored)

    def bind(self, uuid: str, source: BoundSource, *, modality: str, scope: UuidScope) -> None:
        found = super().get(uuid, modality=modality, scope=scope)
        _check_same(uuid, modality, source, found)
        name = self._name(uuid, modality, scope)
        reference = self._store.put(_make_item(name, modality, source))
        if reference is not None:  # else the store is full: bound in this process only
            try:
                bound = _read_item(self._store.open(reference))
            finally:
                self._store.release(reference)
            _check_same(uuid, modality, source, bound)
        super().bind(uuid, source, modality=modality, scope=scope)

    def _name(self, uuid: str, modality: str, scope: UuidScope) -> str:
        return self._hasher.name_uuid(uuid, modality, scope.cache_salt, scope.client)


def _make_item(name: str, modality: str, source: BoundSource) -> ProcessedItem:
    digest = torch.tensor(list(source.digest.encode()), dtype=torch.uint8)
    kwargs = {_DIGEST: digest, _IS_ENCODED: torch.tensor(source.is_encoded)}
    return ProcessedItem(modality=modality, mm_hash=name, kwargs=kwargs, layout=None)


def _read_item(kwargs: MultiModalKwargsItem) -> BoundSource:
    digest = bytes(as_bytes(kwargs[_DIGEST]).tolist()).decode()
    return BoundSource(digest=digest, is_encoded=bool(kwargs[_IS_ENCODED].item()))
