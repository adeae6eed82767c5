"""Runs the encoders for the items of a step, in batches across requests, and holds their outputs.

The core decides when an output is kept and when it is dropped. An item that can't be encoded fails
alone: the other items of its batch are encoded one by one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from sensorium.models.hf_model import HfModel
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import (
    ENCODED,
    PRECOMPUTED,
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
)

logger = logging.getLogger(__name__)
Encode = Callable[[str, Sequence[MultiModalKwargsItem], Sequence[int]], list[torch.Tensor]]


class EncoderCache:
    """A store of the embeddings that encoders have computed; each entry owns its memory."""

    def __init__(self) -> None:
        # Encoder key, made of the item's hash and the request's salt and adapter
        # -> [num_embeds, width].
        self._embeds: dict[str, torch.Tensor] = {}

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._embeds[key]

    def __contains__(self, key: str) -> bool:
        return key in self._embeds

    def __len__(self) -> int:
        return len(self._embeds)

    def add(self, key: str, embeds: torch.Tensor) -> None:
        """Store the embeddings [num_embeds, width] of a media item; a view is copied."""
        # A view of a larger tensor would keep the whole one in memory.
        num_bytes = embeds.numel() * embeds.element_size()
        is_whole = embeds.is_contiguous() and embeds.untyped_storage().nbytes() == num_bytes
        self._embeds[key] = (
            embeds if is_whole else embeds.clone(memory_format=torch.contiguous_format)
        )

    def drop(self, key: str) -> None:
        """Remove the embeddings with this key; there are none if the item could not be encoded."""
        self._embeds.pop(key, None)

    @property
    def num_bytes(self) -> int:
        return sum(embeds.untyped_storage().nbytes() for embeds in self._embeds.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderJob:
    """A media item that has to be encoded, and the key under which its embeddings are stored."""

    key: str
    feature: MultiModalFeatureSpec
    item: MultiModalKwargsItem


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The result of encoding the media items of a step."""

    failed: Mapping[str, str] = field(default_factory=dict)  # encoder key -> reason
    loaded: frozenset[str] = frozenset()  # keys of items for which no encoder was run
    seconds: float = 0.0  # of encoding, by the host's clock


class EncoderStore(Protocol):
    """An interface of stores that keep encoder outputs beyond the cache, by `mm_hash`."""

    def save_encoded(self, mm_hash: str, encoded: torch.Tensor) -> None: ...


class EncoderRunner:
    """A runner of the model's media encoders, which stores their outputs in a cache.

    Media items that arrive with the output of an encoder are not encoded.
    """

    def __init__(
        self,
        hf_model: HfModel,
        cache: EncoderCache,
        encode: Encode | None = None,  # instead of `HfModel.encode`
        # Items with equal keys are encoded together. None: those of the same shapes.
        get_batch_key: Callable[[MultiModalKwargsItem], Hashable] | None = None,
    ) -> None:
        self._hf_model = hf_model
        self._cache = cache
        self._encode_with = encode
        self._get_batch_key = get_batch_key or _get_shapes
        self.store: EncoderStore | None = None  # set when the engine is built and tried
        self.num_encoded = 0  # items that an encoder of this process was run for
        self.num_loaded = 0  # items that arrived with the output of an encoder

    def run(self, jobs: Sequence[EncoderJob]) -> Encoded:
        """Encode media items, and store their embeddings in the cache.

        If there are items, this waits for the device, so the time includes the device's work.
        """
        if not jobs:
            return Encoded()
        began = time.monotonic()
        loaded = frozenset(job.key for job in jobs if self._load(job))
        failed = self._encode_all([job for job in jobs if job.key not in loaded])
        self.num_loaded += len(loaded)
        self.num_encoded += sum(
            job.key not in loaded and job.key not in failed and PRECOMPUTED not in job.item
            for job in jobs
        )
        return Encoded(failed=failed, loaded=loaded, seconds=time.monotonic() - began)

    def _load(self, job: EncoderJob) -> bool:
        """Store the embeddings that an item arrived with; return whether it has any that fit."""
        embeds = job.item.get(ENCODED)
        if embeds is None or len(embeds) != job.feature.mm_position.get_num_embeds():
            return False
        self._cache.add(job.key, self._hf_model.to_model(embeds.clone()))
        return True

    def _get_store(self, job: EncoderJob) -> EncoderStore | None:
        """Return the store if it may keep this item's encoder output, or else None."""
        is_own = job.feature.has_content_hash and PRECOMPUTED not in job.item
        return self.store if is_own else None

    def _encode_all(self, jobs: Sequence[EncoderJob]) -> dict[str, str]:
        batches: dict[Hashable, list[EncoderJob]] = {}
        for job in jobs:
            key = job.feature.modality, self._get_batch_key(job.item)
            batches.setdefault(key, []).append(job)
        failed: dict[str, str] = {}
        for batch, reason in self._run_batches(list(batches.values())):
            if len(batch) == 1:
                failed[batch[0].key] = _explain(batch[0], reason)
                continue
            # Encode one by one, so that only the items at fault fail.
            for [job], own_reason in self._run_batches([[job] for job in batch]):
                failed[job.key] = _explain(job, own_reason)
        return failed

    def _run_batches(
        self, batches: Sequence[Sequence[EncoderJob]]
    ) -> list[tuple[Sequence[EncoderJob], str]]:
        """Encode batches, store what succeeds, and return each failed batch with the reason."""
        encoded: list[tuple[Sequence[EncoderJob], list[torch.Tensor], torch.Tensor]] = []
        failed: list[tuple[Sequence[EncoderJob], str]] = []
        for batch in batches:
            result = self._encode(batch)
            if isinstance(result, str):
                failed.append((batch, result))
            else:
                encoded.append((batch, *result))
        # Read once for all batches, because reading from the device makes the host wait.
        verdicts = torch.stack([verdict for *_, verdict in encoded]).tolist() if encoded else []
        for (batch, embeds, _), is_finite in zip(encoded, verdicts, strict=True):
            if not is_finite:
                failed.append((batch, "some of its embeddings are not finite: NaN or infinite"))
                continue
            for job, item in zip(batch, embeds, strict=True):
                self._cache.add(job.key, item)
                if (store := self._get_store(job)) is not None:
                    store.save_encoded(job.feature.mm_hash, self._cache[job.key])
        return failed

    def _encode(self, jobs: Sequence[EncoderJob]) -> tuple[list[torch.Tensor], torch.Tensor] | str:
        """Return a batch's embeddings and whether all are finite, or the reason why it failed."""
        modality = jobs[0].feature.modality
        try:
            embeds = self._get_embeds(modality, jobs)
            # A NaN in a stored key or value would reach other requests: attention multiplies masked
            # values by zero, and NaN times zero is NaN.
            is_finite = torch.stack([torch.isfinite(item).all() for item in embeds]).all()
        except Exception as error:
            # Models raise all kinds of errors. Caught here, they fail only the requests concerned.
            logger.debug("encoding %d %s item(s) failed", len(jobs), modality, exc_info=True)
            return f"{type(error).__name__}: {error}"
        return embeds, is_finite  # one bool, which is still on the device

    def _get_embeds(self, modality: str, jobs: Sequence[EncoderJob]) -> list[torch.Tensor]:
        num_embeds = [job.feature.mm_position.get_num_embeds() for job in jobs]
        items = [job.item for job in jobs]
        if items[0].keys() == {PRECOMPUTED}:
            pairs = zip(items, num_embeds, strict=True)
            return [self._take_embeds(item[PRECOMPUTED], count) for item, count in pairs]
        encode = self._encode_with or self._hf_model.encode
        return encode(modality, items, num_embeds)

    def _take_embeds(self, embeds: torch.Tensor, num_expected: int) -> torch.Tensor:
        """Return a copy of precomputed embeddings, because a cache may reuse the item's memory."""
        if len(embeds) != num_expected:
            raise RequestError(
                f"the encoder made {len(embeds)} embeddings for an item that has {num_expected} "
                "places in the prompt"
            )
        return self._hf_model.to_model(embeds.clone())


def _explain(job: EncoderJob, reason: str) -> str:
    return f"the {job.feature.modality} could not be encoded: {reason}"


def _get_shapes(item: MultiModalKwargsItem) -> Hashable:
    """Return a key that is equal for media items that can be encoded together without padding.

    With padding, an item's embeddings would depend on other items if the encoder has no mask.
    """
    return tuple((name, tuple(tensor.shape[1:])) for name, tensor in sorted(item.items()))
