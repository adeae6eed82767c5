"""What the list of families has of each of them."""

from __future__ import annotations

from dataclasses import dataclass

from sensorium.models.adapter import ModelAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`modalities`: what it takes besides text. `embeds`: those of them whose items are nothing but
    their embeddings in a prompt, so that these may come computed. `limits`: what a user may run
    into.
    """

    model_type: str
    name: str
    modalities: tuple[str, ...] = ()
    embeds: tuple[str, ...] = ()
    adapter: type[ModelAdapter] = ModelAdapter
    special: str = ""
    limits: str = ""
