"""Names for items whose hashes came over the wire, so that no client can change what another reads.

A hash from elsewhere is its sender's word, not an identity. An item that comes with its tensors is
named by these as well: whoever sends other tensors under the same hash has another item. A hash
that comes alone stands for the tensors that it first came with in its scope, as a uuid does.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace

from sensorium.engine.inputs.rendered_prompt import RenderedItem
from sensorium.multimodal.hasher import MediaHasher
from sensorium.multimodal.uuids import BoundSource, UuidBindings, UuidScope
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import ProcessedItem


def rename_items(
    entries: Iterable[RenderedItem],
    *,
    hasher: MediaHasher,
    bindings: UuidBindings,
    scope: UuidScope,
) -> list[RenderedItem]:
    """Under names of their own; the `given_hash` of each stays what the caller wrote."""
    digests: dict[int, str] = {}  # of items that several entries share
    renamed = []
    for entry in entries:
        hash_name = hasher.name_external(entry.given_hash, scope.cache_salt)
        kind = f"external {entry.feature.modality}"  # no modality of a uuid
        if entry.item is not None:
            digest = digests.get(id(entry.item)) or _digest(entry.item, hasher)
            digests[id(entry.item)] = digest
            with suppress(RequestError):  # alone, the hash stands for other tensors
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
