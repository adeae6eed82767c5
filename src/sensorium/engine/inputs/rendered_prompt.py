"""Reads rendered prompts: token ids with placeholders for media that was processed elsewhere.

Everything is checked against the model before it reaches a cache: the tensors against those that
the model's processor makes, the placeholders against the tokens.

A hash that came over the wire is only its sender's claim. Such items are renamed, so that no client
can replace the items of another. If an item is sent with its tensors, its name also depends on
them: other tensors under the same hash are another item. A hash that is sent alone stands for the
tensors that it was first sent with in its scope, as a uuid does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from sensorium.multimodal.cache.interface import ProcessorCache
from sensorium.multimodal.names import BoundSource, MediaHasher, UuidBindings, UuidScope
from sensorium.multimodal.pipeline import CachedItem
from sensorium.multimodal.processing.item_spec import ItemSpecs
from sensorium.multimodal.processing.processor import MultiModalProcessor
from sensorium.render.prompts import RenderedMedia
from sensorium.types.errors import FieldPath, MissingMediaError, RequestError, at
from sensorium.types.multimodal import (
    ItemLayout,
    MultiModalFeatureSpec,
    PlaceholderRange,
    ProcessedItem,
)

MAX_HASH_LENGTH = 128
_MAX_LISTED = 8  # hashes in a message; the error object lists all


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedItem:
    """A checked media item of a rendered prompt."""

    path: FieldPath  # of its placeholder, for errors
    given_hash: str  # as the caller wrote it; caches use the name in `feature`
    feature: MultiModalFeatureSpec
    item: ProcessedItem | None  # `None`: the caller expects it to be cached


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemReader:
    """A reader that checks media items that another process has processed, for one model."""

    processor: MultiModalProcessor
    specs: ItemSpecs  # of the tensors that the model's own processor makes

    def read_item(
        self, modality: str, mm_hash: Any, kwargs: Any, layout: Any, num_embeds: int | None = None
    ) -> ProcessedItem:
        """Return a checked media item, made of what another process has sent.

        `num_embeds` is the number of embeddings for which the placeholder has room, or `None` if
        that is not known. Raise a `RequestError` if something does not fit the model.
        """
        own_layout = _as_layout(layout)
        if own_layout is not None:
            if num_embeds is not None and own_layout.num_embeds != num_embeds:
                raise RequestError(
                    f"the layout has {own_layout.num_embeds} embeddings, but the placeholder has "
                    f"room for {num_embeds}"
                )
            self.processor.check_layout(modality, own_layout)
            num_embeds = own_layout.num_embeds
        self.specs.check(modality, kwargs, num_embeds)
        return ProcessedItem(
            modality=modality, mm_hash=_check_hash(mm_hash), kwargs=dict(kwargs), layout=own_layout
        )


_Row = tuple[RenderedItem, list[Any]]  # an item without its tensors; its tensors and its layout


def read_items(
    rendered: RenderedMedia, token_ids: Sequence[int], reader: ItemReader
) -> list[RenderedItem]:
    """Return the checked media items of a rendered prompt, sorted by their offset in the prompt."""
    rows = sorted(_read_places(rendered, reader), key=lambda row: row[0].feature.mm_position.offset)
    _check_tokens([entry for entry, *_ in rows], token_ids, reader.processor)
    items: list[RenderedItem] = []
    for entry, (kwargs, layout) in rows:
        modality, num_embeds = entry.feature.modality, entry.feature.mm_position.get_num_embeds()
        item = None
        if kwargs is not None:
            with at("mm_kwargs", *entry.path[1:]):
                item = reader.read_item(modality, entry.given_hash, kwargs, layout, num_embeds)
        items.append(replace(entry, item=item))
    return _unite(items)


def _read_places(rendered: RenderedMedia, reader: ItemReader) -> Iterator[_Row]:
    hashes = rendered.mm_hashes
    given = {
        "mm_placeholders": rendered.mm_placeholders,
        "mm_kwargs": rendered.mm_kwargs,
        "mm_layouts": rendered.mm_layouts,
    }
    for name, entries in given.items():
        stray = sorted(map(str, set(entries) - set(hashes)))
        if stray:
            raise RequestError(f"has {', '.join(stray)}, which is not in mm_hashes", path=(name,))
    for modality, names in hashes.items():
        if modality not in reader.processor.modalities:
            raise RequestError(f"this model takes no {str(modality)[:50]}, which is in mm_hashes")
        columns = [_as_column("mm_hashes", modality, names, None)]
        columns += [
            _as_column(
                name,
                modality,
                entries.get(modality),
                len(names),
                is_optional=name != "mm_placeholders",
            )
            for name, entries in given.items()
        ]
        for index, (mm_hash, placeholder, *brought) in enumerate(zip(*columns, strict=True)):
            path = ("mm_placeholders", modality, index)
            with at("mm_hashes", modality, index):
                name = _check_hash(mm_hash)
            with at(*path):
                position = _as_range(placeholder)
            feature = MultiModalFeatureSpec(
                modality=modality,
                mm_hash=name,
                mm_position=position,
                # Only our own transcripts use such names, for windows. Other hashes may be wrong.
                has_content_hash="@" in name,
            )
            yield RenderedItem(path=path, given_hash=name, feature=feature, item=None), brought


def _unite(items: Sequence[RenderedItem]) -> list[RenderedItem]:
    """Return the items, each with the tensors that were sent with any item of the same hash.

    Raise a `RequestError` if items with the same hash differ.
    """
    brought: dict[str, RenderedItem] = {}
    for entry in items:
        other = brought.setdefault(entry.feature.mm_hash, entry)
        if other.item is None:
            brought[entry.feature.mm_hash] = entry
        if not _is_alike(entry, other):
            _, modality, index = other.path
            raise RequestError(
                f"has the same hash as {modality} {index}, but differs from that item", entry.path
            )
    return [replace(entry, item=brought[entry.feature.mm_hash].item) for entry in items]


def _is_alike(entry: RenderedItem, other: RenderedItem) -> bool:
    own, its = entry.feature, other.feature
    is_same_kind = own.modality == its.modality
    if not is_same_kind or own.mm_position.get_num_embeds() != its.mm_position.get_num_embeds():
        return False
    if entry is other or entry.item is None or other.item is None:
        return True
    tensors, others = entry.item.kwargs, other.item.kwargs
    layouts = {entry.item.layout, other.item.layout} - {None}
    return len(layouts) <= 1 and all(
        tensors[name] is others[name] or torch.equal(tensors[name], others[name])
        for name in tensors
    )


def _as_column(
    name: str, modality: str, values: Any, count: int | None, *, is_optional: bool = False
) -> Sequence[Any]:
    if values is None and is_optional:
        return [None] * (count or 0)
    if not isinstance(values, list | tuple):
        raise RequestError(f"must be a list, not {type(values).__name__}", path=(name, modality))
    if count is not None and len(values) != count:
        raise RequestError(
            f"has {len(values)} entries, but mm_hashes has {count}", path=(name, modality)
        )
    return values


def _check_hash(mm_hash: object) -> str:
    if not _is_unicode(mm_hash) or not 0 < len(mm_hash) <= MAX_HASH_LENGTH:  # type: ignore[arg-type]
        raise RequestError(f"a hash must be a text of 1 to {MAX_HASH_LENGTH} characters")
    return str(mm_hash)


def _is_unicode(text: object) -> bool:
    return isinstance(text, str) and not any("\ud800" <= c <= "\udfff" for c in text)


def _as_layout(layout: object) -> ItemLayout | None:
    if layout is None:
        return None
    if isinstance(layout, ItemLayout):
        layout = asdict(layout)
    if not isinstance(layout, Mapping) or set(layout) != {"text", "token_id", "num_embeds"}:
        raise RequestError("a layout must have exactly the fields text, token_id and num_embeds")
    text, token_id, num_embeds = layout["text"], layout["token_id"], layout["num_embeds"]
    if not _is_unicode(text) or not _is_count(token_id) or not _is_count(num_embeds):
        raise RequestError(
            "a layout's text must be Unicode, and its token_id and num_embeds must be integers >= 0"
        )
    return ItemLayout(text=text, token_id=token_id, num_embeds=num_embeds)


def _as_range(placeholder: Any) -> PlaceholderRange:
    if isinstance(placeholder, PlaceholderRange):
        if not _is_count(placeholder.offset) or not _is_count(placeholder.length):
            raise RequestError("a placeholder's offset and length must be integers >= 0")
        return placeholder
    if not isinstance(placeholder, Mapping) or not {"offset", "length"} <= set(placeholder):
        raise RequestError("a placeholder must have offset and length, and may have is_embed")
    offset, length = placeholder["offset"], placeholder["length"]
    mask = placeholder.get("is_embed")
    if not _is_count(offset) or not _is_count(length):
        raise RequestError("a placeholder's offset and length must be integers >= 0")
    if isinstance(mask, np.ndarray | torch.Tensor):
        mask = mask.tolist()
    is_mask = isinstance(mask, list | tuple) and all(type(entry) is bool for entry in mask)
    if mask is not None and not is_mask:
        raise RequestError("a placeholder's is_embed must be a list of true and false, or left out")
    return PlaceholderRange(offset, length, None if mask is None else tuple(map(bool, mask)))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_tokens(
    items: Sequence[RenderedItem], token_ids: Sequence[int], processor: MultiModalProcessor
) -> None:
    """Raise a `RequestError` unless the items' placeholders match the prompt's token ids.

    Placeholders must lie within the prompt and must not overlap, and their embeddings must stand at
    all placeholder tokens of the prompt and at no other tokens.
    """
    if processor.outside_audio is not None:
        _check_outside(items, processor.outside_audio.max_positions)
        return
    expected = sum(entry.feature.mm_position.get_num_embeds() for entry in items)
    previous_end = 0
    for entry in items:
        position = entry.feature.mm_position
        if position.offset < previous_end:
            raise RequestError(
                f"begins at token {position.offset}, but the item before it ends at "
                f"{previous_end}: placeholders must not overlap",
                entry.path,
            )
        previous_end = position.end
        if position.end > len(token_ids):
            raise RequestError(
                f"ends at token {position.end}, but the prompt has {len(token_ids)} tokens",
                entry.path,
            )
        own_ids = processor.get_token_ids(entry.feature.modality)
        for start, end in position.extract_embeds_range():
            if not set(token_ids[start:end]) <= set(own_ids):
                raise RequestError(
                    f"has embeddings at tokens {start} to {end} (exclusive), but not all of them "
                    "are placeholder tokens of its modality in prompt_token_ids",
                    entry.path,
                )
    every_id = {i for modality in processor.modalities for i in processor.get_token_ids(modality)}
    found = sum(token_id in every_id for token_id in token_ids)
    if found != expected:
        raise RequestError(
            f"has {found} placeholder tokens for media, but mm_placeholders cover {expected}",
            path=("prompt",),
        )


def _check_outside(items: Sequence[RenderedItem], max_positions: int) -> None:
    """Raise a `RequestError` unless there is one audio item, at offset 0 and not too long."""
    if len(items) != 1:
        raise RequestError(f"this model needs exactly one audio item, not {len(items)}")
    position = items[0].feature.mm_position
    if position.offset or position.is_embed or not 0 < position.length <= max_positions:
        raise RequestError(
            f"an audio item of this model has the offset 0 and from 1 to {max_positions} positions",
            items[0].path,
        )


def rename_items(
    entries: Iterable[RenderedItem],
    *,
    hasher: MediaHasher,
    bindings: UuidBindings,
    scope: UuidScope,
) -> list[RenderedItem]:
    """Return the items under names made of their hash, the cache salt and their tensors."""
    digests: dict[int, str] = {}  # id of an item, which several entries may share -> its digest
    renamed = []
    for entry in entries:
        hash_name = hasher.name_external(entry.given_hash, scope.cache_salt)
        kind = f"external {entry.feature.modality}"  # differs from the modalities of uuids
        if entry.item is not None:
            digest = digests.get(id(entry.item)) or _digest(entry.item, hasher)
            digests[id(entry.item)] = digest
            with suppress(RequestError):  # the hash is bound to other tensors already
                source = BoundSource(digest=digest, is_encoded=False)
                bindings.bind(hash_name, source, modality=kind, scope=scope)
        else:
            source_found = bindings.get(hash_name, modality=kind, scope=scope)
            digest = "" if source_found is None else source_found.digest
        name = hasher.name_external(f"{hash_name}/{digest}", scope.cache_salt)
        renamed.append(
            replace(
                entry,
                feature=replace(entry.feature, mm_hash=name),
                item=None if entry.item is None else replace(entry.item, mm_hash=name),
            )
        )
    return renamed


def _digest(item: ProcessedItem, hasher: MediaHasher) -> str:
    layout = None if item.layout is None else asdict(item.layout)
    return hasher.digest_source({"tensors": item.kwargs, "layout": layout})


def take_items(
    cache: ProcessorCache, entries: Sequence[RenderedItem], items: list[CachedItem]
) -> None:
    """Look up a rendered prompt's media items in the cache, and append their handles to `items`.

    Items that came with tensors are stored if the cache lacks them. Raise a `MissingMediaError` if
    items came without tensors and are not cached, and a `RequestError` if a cached item does not
    fit its placeholder. Also after an error, the caller must release the handles that were
    appended.
    """
    missing: dict[str, None] = {}
    for entry in entries:
        handle = cache.get_and_update_item(entry.feature.mm_hash, entry.item, needs_layout=False)
        if handle is None:
            missing[entry.given_hash] = None
            continue
        items.append(
            CachedItem(
                handle=handle, path=entry.path, brought=entry.item, given_hash=entry.given_hash
            )
        )
        if handle.modality != entry.feature.modality:
            raise RequestError(
                f"its hash belongs to another item, of modality {handle.modality}", entry.path
            )
        num_embeds = entry.feature.mm_position.get_num_embeds()
        if handle.layout is not None and handle.layout.num_embeds != num_embeds:
            raise RequestError(
                f"its hash belongs to a cached item of {handle.layout.num_embeds} embeddings, but "
                f"the placeholder has room for {num_embeds}",
                entry.path,
            )
    if missing:
        first = ", ".join(list(missing)[:_MAX_LISTED])
        more = ", …" if len(missing) > _MAX_LISTED else ""
        raise MissingMediaError(
            f"{len(missing)} media item(s) came without tensors and are not in the cache, so also "
            f"send their tensors: {first}{more}",
            tuple(missing),
        )
