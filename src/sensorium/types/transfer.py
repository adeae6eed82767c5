"""The values that carry processed media from a frontend to the core, and the core's answer.

A request is sent as metadata. A `Transfer` is sent with it, which has tensors, references to shared
memory, or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sensorium.types.multimodal import MultiModalKwargsItem


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmReference:
    """The place of an item in the shared-memory store."""

    slot: int
    generation: int  # a number that changes when the slot is used again after an eviction


Payload = MultiModalKwargsItem | ShmReference


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorUpdate:
    """The changes for the core's half of the mirrored cache, which makes the evictions first."""

    epoch: int  # the life of the core that the frontend believes to be connected to
    sequence: int  # the number of this message in that life, from 0
    inserts: tuple[str, ...] = ()  # items to keep, with payloads in the same transfer
    evictions: tuple[str, ...] = ()  # items to forget


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The media that is sent with one request."""

    # mm_hash -> payload. The frontend expects the core to have the other items of the request.
    payloads: Mapping[str, Payload] = field(default_factory=dict)
    update: MirrorUpdate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingItems:
    """The core's answer to a request that it did not take because it lacks media.

    If the frontend has another epoch than the core, it starts anew with the core's epoch. Then
    `mm_hashes` are all hashes of the request, which may be none. The message was not applied, and
    has to be made again.
    """

    mm_hashes: tuple[str, ...]  # the items to send
    epoch: int  # the core's own
    num_applied: int = 0  # the messages of this epoch that the core has applied
