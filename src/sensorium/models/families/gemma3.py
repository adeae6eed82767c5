"""Adapts Gemma 3, in which the embeddings of an image attend to each other in both directions."""

from __future__ import annotations

from sensorium.models.adapter import ModelAdapter


class Gemma3Adapter(ModelAdapter):
    bidirectional_modalities = frozenset({"image"})
