"""Prompts as another server would render them, made with the processor of this engine."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

from sensorium import LLM
from sensorium.types.multimodal import ItemLayout, MultiModalKwargsItem, PlaceholderRange
from tests.integration.media_steps import process, release

_numbers = count()


def make_hash() -> str:
    """Return a hash that is in no cache."""
    return f"rendered-elsewhere-{next(_numbers)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A prompt with images, as another frontend would have rendered it."""

    token_ids: tuple[int, ...]
    own_hashes: list[str]  # the hashes that this engine's frontend gives the images
    ranges: list[PlaceholderRange]
    kwargs: list[MultiModalKwargsItem]
    layouts: list[ItemLayout]

    def make_prompt(self, *hashes: str, **changes: Any) -> dict[str, Any]:
        prompt = {
            "prompt_token_ids": self.token_ids,
            "mm_hashes": {"image": list(hashes)},
            "mm_placeholders": {"image": self.ranges},
            "mm_kwargs": {"image": self.kwargs},
        }
        return {**prompt, **changes}


def render(llm: LLM, prompt: Any) -> Rendered:
    processed = process(llm, prompt, skip_mm_cache=True)
    handles = [item.handle for item in processed.items]
    rendered = Rendered(
        token_ids=processed.request.prompt_token_ids,
        own_hashes=[handle.mm_hash for handle in handles],
        ranges=[feature.mm_position for feature in processed.request.mm_features],
        kwargs=[
            {name: tensor.clone() for name, tensor in (handle.kwargs or {}).items()}
            for handle in handles
        ],
        layouts=[handle.layout for handle in handles if handle.layout is not None],
    )
    release(llm, processed, readonly=True)
    llm.media_parts.caches.readonly.clear_cache()
    return rendered
