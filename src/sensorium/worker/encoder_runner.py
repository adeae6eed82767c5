"""Runs the encoders for the items of a step, in batches across requests; one bad item fails
alone.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from sensorium.models.adapter import ModelAdapter
from sensorium.types.multimodal import MultiModalFeatureSpec, MultiModalKwargsItem
from sensorium.worker.encoder_cache import EncoderCache

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderJob:
    key: str
    feature: MultiModalFeatureSpec
    item: MultiModalKwargsItem


class EncoderRunner:
    def __init__(self, adapter: ModelAdapter, cache: EncoderCache) -> None:
        self._adapter = adapter
        self._cache = cache

    def run(self, jobs: Sequence[EncoderJob]) -> dict[str, str]:
        """Fill the cache; the keys that could not be encoded, with the reason."""
        batches: dict[Hashable, list[EncoderJob]] = {}
        for job in jobs:
            batches.setdefault(_get_batch_key(job), []).append(job)
        failed: dict[str, str] = {}
        for batch in batches.values():
            failed.update(self._run_batch(batch))
        return failed

    def _run_batch(self, batch: Sequence[EncoderJob]) -> dict[str, str]:
        """All at once; if that fails, one by one, to find out whose fault it is."""
        reason = self._try_batch(batch)
        if reason is None:
            return {}
        if len(batch) == 1:
            job = batch[0]
            return {job.key: f"the {job.feature.modality} could not be encoded: {reason}"}
        failed: dict[str, str] = {}
        for job in batch:
            failed.update(self._run_batch([job]))
        return failed

    def _try_batch(self, jobs: Sequence[EncoderJob]) -> str | None:
        """Encode and store a batch; the reason if it fails, and then nothing is stored."""
        modality = jobs[0].feature.modality
        try:
            embeds = self._adapter.encode(
                modality,
                [job.item for job in jobs],
                [job.feature.mm_position.get_num_embeds() for job in jobs],
            )
            # A NaN in a stored key or value would reach other requests: attention multiplies masked
            # values by zero.
            if not bool(torch.stack([torch.isfinite(item).all() for item in embeds]).all()):
                return "its embeddings are not finite numbers"
        except Exception as error:
            # The boundary at which one request's media may fail, whatever the model raises.
            logger.debug("encoding %d %s item(s) failed", len(jobs), modality, exc_info=True)
            return f"{type(error).__name__}: {error}"
        for job, item in zip(jobs, embeds, strict=True):
            self._cache.add(job.key, item)
        return None


def _get_batch_key(job: EncoderJob) -> Hashable:
    """Items of one key can be concatenated as they are. Padding would let an item's embeddings
    depend on its neighbours, where an encoder has no mask for it.
    """
    shapes = tuple((name, tuple(tensor.shape[1:])) for name, tensor in sorted(job.item.items()))
    return job.feature.modality, shapes
