"""Keeps processed media and encoder outputs in stores that outlive the process.

A media item has up to three entries, because its parts are needed at different places:
  layout   the text in a prompt, and the tensors on which positions depend: small or of integers
  tensors  the large floating-point tensors, such as pixels, which only an encoder needs
  encoded  the output of one model's encoder for the item

An item with `encoded` needs no encoder and no large tensors. So the frontend looks for that first,
and the core gets an item with its encoder output (`types.multimodal.ENCODED`). All entries are
named by the hash of the item, which depends on its source, its options, the model's revision and
the salt. The names of `layout` and `tensors` also depend on the processing options and the limits:
if a server has stricter limits after a restart, they also hold for known items. The name of
`encoded` also depends on the weights and their dtype.

Stores are searched in their order, the fastest first. An entry that is found in a later store is
copied to the earlier ones. An invalid entry is removed and counted as damaged, and its item counts
as absent.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import msgspec
import torch

from sensorium.multimodal.cache.interface import ItemHandle
from sensorium.multimodal.item_codec import (
    ALIGNMENT,
    as_buffers,
    decode_block,
    encode_header,
)
from sensorium.multimodal.tiers.heads import HEAD_BYTES, MAX_ENTRY_BYTES
from sensorium.multimodal.tiers.interface import Store, StoreStatistics
from sensorium.multimodal.tiers.writer import BackgroundWriter
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import (
    ENCODED,
    PRECOMPUTED,
    ItemLayout,
    MultiModalKwargsItem,
    ProcessedItem,
)
from sensorium.utils.lru import LruCache

logger = logging.getLogger(__name__)
_SMALL_BYTES = 2**16  # a floating-point tensor up to this size is kept with the layout
_TOUCH_S = 600.0  # an item that is used again and again is marked as used once in this time
_MAX_TOUCHED = 2**16  # items with a time of their last mark
_MARK_BYTES = 2**10  # memory that a waiting mark counts as, so that few wait for a slow store
_VERSION = 2  # of the content of entries
# Items that are looked up at once, of all threads that process media, and how long the next one
# waits for its turn. A slow store would otherwise keep all these threads.
_MAX_LOADS = 8
_TURN_S = 0.05
_MAX_LAYOUT_BYTES = 2**26  # of an entry with a layout: a text, and numbers for each patch
# Entries are kept for hashes of content, and for windows of audio that has one.
_HASH = re.compile(r"[0-9a-f]{64}(@[0-9]+)?")


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """The description of an entry's tensors, and in a `layout` entry also of the item."""

    tensors: bytes  # the header of the block that follows (`item_codec`)
    modality: str = ""
    layout: ItemLayout | None = None
    order: tuple[str, ...] = ()  # the names of all tensors of the item, also of large ones


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Head)


class MediaTiers:
    """The stores behind the caches of one model, for several threads, with a thread that writes.

    `model` and `processing` are texts with all that encoder outputs and other entries depend on in
    addition to their hash. `width` is that of an embedding, or None if it is not known yet.
    """

    def __init__(
        self, stores: Sequence[Store], *, model: str, processing: str, width: int | None = None
    ) -> None:
        self._stores = tuple(stores)
        self._width = width
        self._encoded = f"encoded-{_shorten(model)}"
        self._layout, self._tensors = (
            f"{part}-{_shorten(processing)}" for part in ("layout", "tensors")
        )
        self.writer = BackgroundWriter()
        self._turns = threading.BoundedSemaphore(_MAX_LOADS)
        self._lock = threading.Lock()
        self.num_skipped = 0  # items that were not looked up, because too many others were
        self._touched: LruCache[str, float] = LruCache(_MAX_TOUCHED)  # hash -> when, monotonic

    def load_item(
        self,
        mm_hash: str,
        *,
        takes_encoded: bool,
        check: Callable[[ProcessedItem], None] = lambda _: None,
    ) -> ProcessedItem | None:
        """Return a processed item, or None if the stores lack one of the entries that it needs.

        The result is also None while many other items are looked up, which takes long only if a
        store is slow. With `takes_encoded` the item may have its encoder output in place of its
        large tensors. If `check` raises a `RequestError` for an item, its entries are removed as
        damaged.
        """
        if not self._turns.acquire(timeout=_TURN_S):
            with self._lock:
                self.num_skipped += 1
            return None
        try:
            item = self._load_parts(mm_hash, takes_encoded=takes_encoded)
        finally:
            self._turns.release()
        if item is None:
            return None
        try:
            check(item)
        except RequestError as error:
            logger.warning("a media item from a store makes no sense: %s", error)
            for store in self._stores:
                for part in (self._layout, self._tensors):
                    store.remove(_name(mm_hash, part), is_damaged=True)
            return None
        return item

    def _load_parts(self, mm_hash: str, *, takes_encoded: bool) -> ProcessedItem | None:
        found = self._load(mm_hash, self._layout)
        if found is None or found[0].layout is None:
            return None
        head, small = found
        encoded = None
        if takes_encoded:
            encoded = self.load_encoded(mm_hash, found[0].layout.num_embeds)
        if encoded is not None:
            return _make_item(mm_hash, head, {**small, ENCODED: encoded})
        tensors = dict(small)
        if not tensors.keys() >= set(head.order):
            large = self._load(mm_hash, self._tensors)
            tensors |= {} if large is None else large[1]
        if not tensors.keys() >= set(head.order):
            return None
        return _make_item(mm_hash, head, {name: tensors[name] for name in head.order})

    def load_encoded(self, mm_hash: str, num_embeds: int) -> torch.Tensor | None:
        """Return the encoder output [num_embeds, width] of an item, or None if no store has it.

        An output that the model's encoder can't have made is removed, so that a new one can be
        kept.
        """
        found = self._load(mm_hash, self._encoded)
        if found is None:
            return None
        encoded = found[1].get(ENCODED)
        if encoded is not None and self._is_output(encoded, num_embeds):
            return encoded
        for store in self._stores:
            store.remove(_name(mm_hash, self._encoded), is_damaged=True)
        return None

    def _is_output(self, encoded: torch.Tensor, num_embeds: int) -> bool:
        is_matrix = encoded.ndim == 2 and encoded.is_floating_point()
        if not is_matrix or len(encoded) != num_embeds or not encoded.numel():
            return False
        # A number that is not finite would reach other requests.
        has_width = self._width is None or encoded.shape[1] == self._width
        return has_width and bool(torch.isfinite(encoded).all())

    def note_use(self, mm_hash: str) -> None:
        """Mark an item that was found in memory as used, in the background, once in `_TOUCH_S`."""
        now = time.monotonic()
        last = self._touched.get(mm_hash)
        if not _HASH.fullmatch(mm_hash) or (last is not None and now - last < _TOUCH_S):
            return
        self._touched.put(mm_hash, now)
        for store in self._stores:
            for part in (self._layout, self._tensors, self._encoded):
                self.writer.submit(partial(store.touch, _name(mm_hash, part)), _MARK_BYTES)

    def save_item(
        self,
        item: ItemHandle,
        open_tensors: Callable[[], AbstractContextManager[MultiModalKwargsItem | None]],
        num_bytes: int,
    ) -> None:
        """Write a processed item to the stores, in the thread that writes.

        That thread calls `open_tensors`, which gives the tensors, or None if they are gone.
        `num_bytes` is the memory that stays in use only until the item is written. Items without a
        layout are not written, nor embeddings that a client sent.
        """
        mm_hash, modality, layout = item.mm_hash, item.modality, item.layout
        if not _HASH.fullmatch(mm_hash):
            return

        def write() -> None:
            with open_tensors() as tensors:
                if layout is not None and tensors is not None:
                    self._write_item(mm_hash, modality, layout, tensors)

        self.writer.submit(write, num_bytes)

    def _write_item(
        self,
        mm_hash: str,
        modality: str,
        layout: ItemLayout,
        tensors: MultiModalKwargsItem,
    ) -> None:
        if PRECOMPUTED in tensors or ENCODED in tensors:
            return
        small = {name: each for name, each in tensors.items() if is_small(each)}
        large = {name: each for name, each in tensors.items() if name not in small}
        if large:
            self._put(_name(mm_hash, self._tensors), _encode(large))
        layout_entry = _encode(small, modality=modality, layout=layout, order=tuple(tensors))
        if sum(map(len, layout_entry)) > _MAX_LAYOUT_BYTES - HEAD_BYTES:
            return  # it would not be read
        self._put(_name(mm_hash, self._layout), layout_entry)

    def save_encoded(self, mm_hash: str, encoded: torch.Tensor) -> None:
        """Write an encoder output to the stores, in the thread that writes; it must not change.

        An output on a GPU is copied once the device has computed it. Neither the calling thread
        nor the device waits for that.
        """
        if not _HASH.fullmatch(mm_hash):
            return
        self._width = encoded.shape[-1]  # as this model's encoder has just made it
        is_ready = None
        if encoded.is_cuda:
            is_ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            # The stream of its own device, which need not be the current device of this thread.
            is_ready.record(torch.cuda.current_stream(encoded.device))

        def write() -> None:
            name = _name(mm_hash, self._encoded)
            if not all(store.has(name) for store in self._stores):
                self._put(name, _encode({ENCODED: _copy_to_host(encoded, is_ready)}))

        # An output that waits on a device takes memory that the engine has planned for other uses.
        self.writer.submit(write, encoded.nbytes * (8 if encoded.is_cuda else 1))

    def statistics(self) -> dict[str, StoreStatistics]:
        return {store.level: store.statistics() for store in self._stores}

    def close(self) -> None:
        """Write the entries that wait, within some seconds, and close the stores."""
        self.writer.close()
        for store in self._stores:
            store.close()

    def _put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        for store in self._stores:
            store.put(name, parts)

    def _load(self, mm_hash: str, part: str) -> tuple[_Head, dict[str, torch.Tensor]] | None:
        if not _HASH.fullmatch(mm_hash):
            return None
        name = _name(mm_hash, part)
        max_bytes = _MAX_LAYOUT_BYTES if part == self._layout else MAX_ENTRY_BYTES
        for index, store in enumerate(self._stores):
            content = store.get(name, max_bytes)
            if content is None:
                continue
            entry = _decode(content)
            if entry is None:
                # Removed, because `put` would not replace it by an entry that can be read.
                store.remove(name, is_damaged=True)
                continue
            for earlier in self._stores[:index]:
                put = partial(earlier.put, name, [memoryview(content)])
                self.writer.submit(put, len(content))
            return entry
        return None


def _make_item(mm_hash: str, head: _Head, tensors: MultiModalKwargsItem) -> ProcessedItem:
    return ProcessedItem(
        modality=head.modality, mm_hash=mm_hash, kwargs=tensors, layout=head.layout
    )


def is_small(tensor: torch.Tensor) -> bool:
    """Return True for tensors that stay with an encoder output: of integers, or small ones."""
    return tensor.nbytes <= _SMALL_BYTES or not tensor.is_floating_point()


def _shorten(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _name(mm_hash: str, part: str) -> str:
    return f"{mm_hash}.{part}-v{_VERSION}"


def _encode(
    tensors: MultiModalKwargsItem,
    *,
    modality: str = "",
    layout: ItemLayout | None = None,
    order: tuple[str, ...] = (),
) -> list[bytes | memoryview]:
    head = _encoder.encode(
        _Head(tensors=encode_header(tensors), modality=modality, layout=layout, order=order)
    )
    size = len(head).to_bytes(8, "little")
    padding = bytes(-(len(head) + 8) % ALIGNMENT)
    return [size + head + padding, *as_buffers(tensors)]


def _decode(content: bytearray) -> tuple[_Head, dict[str, torch.Tensor]] | None:
    """Return the head and the tensors of an entry, or None if this version did not write it."""
    size = int.from_bytes(content[:8], "little")
    start = -(-(size + 8) // ALIGNMENT) * ALIGNMENT
    try:
        head = _decoder.decode(memoryview(content)[8 : 8 + size])
        return head, dict(decode_block(head.tensors, memoryview(content)[start:]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, RequestError):
        return None


def _copy_to_host(tensor: torch.Tensor, is_ready: torch.cuda.Event | None) -> torch.Tensor:
    if is_ready is None:
        return tensor
    own_stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(own_stream):
        is_ready.synchronize()
        return tensor.cpu()
