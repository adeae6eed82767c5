"""Media items of a request: their places in the prompt, their hashes, and how the core gets them.

A request is sent to the core as metadata, with a `Transfer` that has for each item its tensors, a
reference to shared memory, or nothing. The core may answer with `MissingItems`.

Ranges are half-open. Everything that is needed in each step costs O(1), or O(log n) in the number
of items of a request.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from sensorium.types.errors import RequestError

if TYPE_CHECKING:
    import torch

# name of a model's argument -> tensor, as the processor returned them for one item.
MultiModalKwargsItem = Mapping[str, "torch.Tensor"]
# The name of the only tensor of an item that a client sent as precomputed embeddings.
PRECOMPUTED = "embeds"
# The name of the tensor with the output of our own encoder, in an item that needs no encoding. The
# item may also have its small tensors, because positions depend on them.
ENCODED = "encoder_output"
TIERS = ("disk", "remote")  # where copies of media are kept that outlive the process
# The outcomes of an item for the remote encoder: the encoder encoded it, or refused it as bad; or
# the encoder had no room or could not be reached, and the engine encoded it, or the request failed.
REMOTE_ENCODER_OUTCOMES = ("encoded", "refused", "fallback", "failed")
MODALITIES = ("image", "video", "audio")
HASH_ALGORITHMS = ("sha256", "blake3", "sha512")  # for the hashes of media
# The stages of one media item, in their order. In `wait` another request was processing it, in
# `load` it was looked for in a tier that outlives the process, and in `apart` a remote encoder
# decoded, processed and encoded it.
ITEM_STAGES = ("fetch", "hash", "wait", "load", "apart", "decode", "process")
ItemTimes = Mapping[str, float]  # stage -> seconds, for the stages that took place


@dataclass(frozen=True, slots=True)
class PlaceholderRange:
    """The range of prompt tokens that one media item takes, from `offset` to `offset + length`."""

    offset: int
    length: int
    # Which of the positions are replaced by encoder embeddings; None means all of them.
    is_embed: tuple[bool, ...] | None = None
    # The next two are derived: neither compared nor sent.
    end: int = field(init=False, compare=False, repr=False)
    # embeds_cumsum[i] = number of embeddings among the first i + 1 positions. A list, because the
    # scheduler reads it in every step and indexing a tensor costs microseconds.
    embeds_cumsum: list[int] | None = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 0:
            raise RequestError(
                f"a placeholder needs offset and length >= 0, not {self.offset} and {self.length}"
            )
        mask = self.is_embed
        if mask is not None and not isinstance(mask, tuple):
            mask = tuple(map(bool, mask))
            object.__setattr__(self, "is_embed", mask)
        if mask and len(mask) != self.length:
            raise RequestError(
                f"is_embed has {len(mask)} entries for a placeholder of {self.length} positions: "
                "it needs one entry per position"
            )
        object.__setattr__(self, "end", self.offset + self.length)
        object.__setattr__(
            self, "embeds_cumsum", None if mask is None else list(accumulate(mask, initial=0))[1:]
        )

    def get_num_embeds(self) -> int:
        """Return how many positions are replaced by embeddings from the encoder."""
        if self.embeds_cumsum is None:
            return self.length
        return self.embeds_cumsum[-1] if self.embeds_cumsum else 0

    def get_embeds_indices_in_range(self, start: int, end: int) -> tuple[int, int]:
        """Return the range of the item's embeddings for the positions from `start` to `end`.

        The positions are relative to `offset`. The result indexes the encoder's output.
        """
        cumsum = self.embeds_cumsum
        if cumsum is None:
            return start, end
        if not cumsum:
            return 0, 0
        return (cumsum[start - 1] if start > 0 else 0), (cumsum[end - 1] if end > 0 else 0)

    def extract_embeds_range(self) -> list[tuple[int, int]]:
        """Return the ranges of absolute prompt positions that are replaced by embeddings."""
        if self.is_embed is None:
            return [(self.offset, self.end)] if self.length else []
        spans = []
        position = self.offset
        for is_embed, run in groupby(self.is_embed):
            length = sum(1 for _ in run)
            if is_embed:
                spans.append((position, position + length))
            position += length
        return spans


def as_runs(is_embed: Sequence[bool] | None) -> tuple[int, ...] | None:
    """Return the lengths of a mask's runs of equal values, or `None` for a mask that is all True.

    The first length is that of a run of False: `(2, 3)` stands for FFTTT, and `(0, 2)` for TT.
    """
    if is_embed is None:
        return None
    runs = [len(list(run)) for _, run in groupby(is_embed)]
    return (0, *runs) if is_embed and is_embed[0] else tuple(runs)


def as_mask(runs: Sequence[int] | None) -> tuple[bool, ...] | None:
    """Return the mask that `as_runs` turned into run lengths; `None` stays `None`."""
    if runs is None:
        return None
    return tuple(bool(index % 2) for index, length in enumerate(runs) for _ in range(length))


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemLayout:
    """The text that replaces the marker of a media item in a prompt."""

    text: str
    token_id: int  # the token in the text that stands for one embedding
    num_embeds: int  # how often this token occurs in the text


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedItem:
    """A media item after its processor has run: the tensors for the model, and its layout."""

    modality: str
    mm_hash: str
    kwargs: MultiModalKwargsItem
    layout: ItemLayout | None  # None: the item came with a prompt that was already expanded


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiModalFeatureSpec:
    """The metadata of a media item in a request; its tensors are sent separately, by `mm_hash`."""

    modality: str
    mm_hash: str
    mm_position: PlaceholderRange
    # True: this engine has hashed the item's content, so that equal hashes always mean equal
    # tensors. A caller that sends tensors with a hash of its own may use it twice by mistake.
    has_content_hash: bool = False


_offset_of = attrgetter("mm_position.offset")
_end_of = attrgetter("mm_position.end")


def get_mm_features_in_window(
    mm_features: Sequence[MultiModalFeatureSpec],
    start: int,
    end: int,
    *,
    is_encoder_decoder: bool = False,
) -> tuple[int, int]:
    """Return the range of `mm_features` that overlaps the prompt positions from `start` to `end`.

    The items must be sorted and must not overlap. With an encoder-decoder model every item has
    offset 0 and takes no positions in the prompt; then the range begins at 0.
    """
    lo = 0 if is_encoder_decoder else bisect_right(mm_features, start, key=_end_of)
    return lo, bisect_left(mm_features, end, lo=lo, key=_offset_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmReference:
    """A reference to an item in the shared-memory store, which an eviction makes invalid."""

    slot: int
    generation: int  # a number that changes when the slot is used again after an eviction


Payload = MultiModalKwargsItem | ShmReference


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorUpdate:
    """The changes that a frontend orders in the core's mirrored cache: evictions, then inserts."""

    epoch: int  # the id of one life of the core's cache, which a clearing ends
    sequence: int  # the number of this message in that epoch, from 0
    inserts: tuple[str, ...] = ()  # items to keep, with payloads in the same transfer
    evictions: tuple[str, ...] = ()  # items to drop


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The media that is sent to the core with one request, and changes to the core's cache."""

    # mm_hash -> payload. The frontend expects the core to have the other items of the request.
    payloads: Mapping[str, Payload] = field(default_factory=dict)
    update: MirrorUpdate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingItems:
    """The core's answer to a request that it refuses because it lacks some of the media.

    The frontend sends the request again with the items in `mm_hashes`. If `epoch` differs from the
    frontend's, the core's media cache is empty now, and the core has not applied the frontend's
    last message. Then `mm_hashes` has all media of the request, and the frontend adopts the epoch.
    """

    mm_hashes: tuple[str, ...]  # the items to send
    epoch: int  # the core's: the id of the present life of its media cache
    num_applied: int = 0  # the messages of this epoch that the core has applied
