"""What carries processed media from a frontend to the core, and the core's answer.

A request travels as metadata; beside it goes a `Transfer` with tensors, references or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sensorium.types.multimodal import MultiModalKwargsItem


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmReference:
    """Where an item lies in the shared-memory store: entry `slot` in its `generation`."""

    slot: int
    generation: int


Payload = MultiModalKwargsItem | ShmReference


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorUpdate:
    """What the core's half of the mirrored cache must do, in this order: forget `evictions`, keep
    the payloads of `inserts`.

    `epoch` is the life of the core that the frontend believes to talk to; `sequence` counts the
    messages of that life, from 0.
    """

    epoch: int
    sequence: int
    inserts: tuple[str, ...] = ()
    evictions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Payloads by `mm_hash`; what is not among them the core is believed to have."""

    payloads: Mapping[str, Payload] = field(default_factory=dict)
    update: MirrorUpdate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingItems:
    """The core's answer to a request whose media it lacks: send these. The request was not taken.

    `epoch` is the core's own; a frontend that believed in another one starts anew with it. In that
    case the hashes are all those of the request, and there may be none: its message was not
    applied, and is to be made again. `num_applied` counts the messages of its epoch that the core
    had applied when it gave this answer.
    """

    mm_hashes: tuple[str, ...]
    epoch: int
    num_applied: int = 0
