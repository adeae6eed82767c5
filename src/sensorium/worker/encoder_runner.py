"""Runs the encoders for the items of a step, in batches across requests, and holds their outputs.

The core decides when an output is kept and when it is dropped. An item that can't be encoded fails
alone: the others of its batch are encoded one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from sensorium.models.adapter import ModelAdapter
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import PRECOMPUTED, MultiModalFeatureSpec, MultiModalKwargsItem

logger = logging.getLogger(__name__)


class EncoderCache:
    """A map from encoder keys to embeddings, in which every entry owns its memory.

    A view would keep alive the whole batch that it was cut from.
    """

    def __init__(self) -> None:
        self._embeds: dict[str, torch.Tensor] = {}  # key -> [num_embeds, width]

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._embeds[key]

    def __contains__(self, key: str) -> bool:
        return key in self._embeds

    def __len__(self) -> int:
        return len(self._embeds)

    def add(self, key: str, embeds: torch.Tensor) -> None:
        """Store embeddings [num_embeds, width]; a view of a larger tensor is copied."""
        num_bytes = embeds.numel() * embeds.element_size()
        is_whole = embeds.is_contiguous() and embeds.untyped_storage().nbytes() == num_bytes
        self._embeds[key] = (
            embeds if is_whole else embeds.clone(memory_format=torch.contiguous_format)
        )

    def drop(self, key: str) -> None:
        """Remove an entry. The key may be missing, because its encoding may have failed."""
        self._embeds.pop(key, None)

    @property
    def num_bytes(self) -> int:
        return sum(embeds.untyped_storage().nbytes() for embeds in self._embeds.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderJob:
    """One media item to encode, with the key of its output."""

    key: str
    feature: MultiModalFeatureSpec
    item: MultiModalKwargsItem


class EncoderRunner:
    """A runner of encoders that stores their outputs in the cache."""

    def __init__(self, adapter: ModelAdapter, cache: EncoderCache) -> None:
        self._adapter = adapter
        self._cache = cache

    def run(self, jobs: Sequence[EncoderJob]) -> dict[str, str]:
        """Encode jobs into the cache. Return the keys that failed, each with the reason."""
        batches: dict[Hashable, list[EncoderJob]] = {}
        for job in jobs:
            batches.setdefault(_get_batch_key(job), []).append(job)
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
        """Encode and store each batch as a whole. Return those that failed, with the reason.

        Whether the numbers are finite is read from the device once, for all batches together.
        """
        encoded: list[tuple[Sequence[EncoderJob], list[torch.Tensor], torch.Tensor]] = []
        failed: list[tuple[Sequence[EncoderJob], str]] = []
        for batch in batches:
            result = self._encode(batch)
            if isinstance(result, str):
                failed.append((batch, result))
            else:
                encoded.append((batch, *result))
        verdicts = torch.stack([verdict for *_, verdict in encoded]).tolist() if encoded else []
        for (batch, embeds, _), is_finite in zip(encoded, verdicts, strict=True):
            if not is_finite:
                failed.append((batch, "its embeddings are not finite numbers"))
                continue
            for job, item in zip(batch, embeds, strict=True):
                self._cache.add(job.key, item)
        return failed

    def _encode(self, jobs: Sequence[EncoderJob]) -> tuple[list[torch.Tensor], torch.Tensor] | str:
        """Return the embeddings of a batch, or the reason why it can't be encoded.

        The second tensor has one bool, whether all numbers are finite. It is not read yet.
        """
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
        return embeds, is_finite

    def _get_embeds(self, modality: str, jobs: Sequence[EncoderJob]) -> list[torch.Tensor]:
        num_embeds = [job.feature.mm_position.get_num_embeds() for job in jobs]
        items = [job.item for job in jobs]
        if items[0].keys() == {PRECOMPUTED}:
            pairs = zip(items, num_embeds, strict=True)
            return [self._take_embeds(item[PRECOMPUTED], count) for item, count in pairs]
        return self._adapter.encode(modality, items, num_embeds)

    def _take_embeds(self, embeds: torch.Tensor, num_expected: int) -> torch.Tensor:
        """Return a copy of precomputed embeddings, in the model's type and on its device.

        The item's own memory may belong to a cache that uses it again.
        """
        if len(embeds) != num_expected:
            raise RequestError(f"{len(embeds)} embeddings for placeholders of {num_expected}")
        return self._adapter.to_model(embeds.clone())


def _explain(job: EncoderJob, reason: str) -> str:
    return f"the {job.feature.modality} could not be encoded: {reason}"


def _get_batch_key(job: EncoderJob) -> Hashable:
    """Return a key that is equal for items that can be concatenated without padding.

    With padding, an item's embeddings would depend on its neighbours if the encoder has no mask.
    """
    shapes = tuple((name, tuple(tensor.shape[1:])) for name, tensor in sorted(job.item.items()))
    return job.feature.modality, shapes
