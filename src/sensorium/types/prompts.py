"""What a caller may give as a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class TextPrompt(TypedDict, total=False):
    """`prompt` is text with the model's own marker for each media item, or else `prompt_token_ids`.

    `multi_modal_data`: an item or a list of items by modality, e.g. `{"image": [image, image]}`;
    pixel values are 0 to 255. `mm_processor_kwargs` go to the model's processor with every item.
    Requests with different `cache_salt` share no cache. A lower `priority` runs first, where the
    scheduling policy is "priority".
    """

    prompt: str
    prompt_token_ids: Sequence[int]
    multi_modal_data: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]
    cache_salt: str
    priority: int


Prompt = str | Sequence[int] | TextPrompt
