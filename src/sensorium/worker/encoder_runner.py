"""Runs the encoders for the items of a step, in batches across requests; one bad item fails
alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
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
        by_modality: dict[str, list[EncoderJob]] = {}
        for job in jobs:
            by_modality.setdefault(job.feature.modality, []).append(job)
        failed: dict[str, str] = {}
        for modality, batch in by_modality.items():
            if self._try_batch(modality, batch) is None:
                continue
            for job in batch:
                if (reason := self._try_batch(modality, [job])) is not None:
                    failed[job.key] = f"the {modality} could not be encoded: {reason}"
        return failed

    def _try_batch(self, modality: str, jobs: Sequence[EncoderJob]) -> str | None:
        """Encode and store a batch; the reason if it fails, and then nothing is stored."""
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
        except (
            Exception
        ) as error:  # the boundary at which one request's media may fail, whatever the model raises
            logger.debug("encoding %d %s item(s) failed", len(jobs), modality, exc_info=True)
            return f"{type(error).__name__}: {error}"
        for job, item in zip(jobs, embeds, strict=True):
            self._cache.add(job.key, item)
        return None
