"""What a caller may give as a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class TextPrompt(TypedDict, total=False):
    """`prompt` is text with the model's own marker for each media item, or else `prompt_token_ids`.

    `multi_modal_data`: an item or a list of items by modality, e.g. `{"image": [image, image]}`;
    pixel values are 0 to 255. `mm_processor_kwargs` go to the model's processor with every item.
    `multi_modal_uuids`: the caller's own names of the items, or `None`, in the order of the items.
    `media_io_kwargs`: options for decoding, by modality. `add_special_tokens`: whether the
    tokenizer adds those that begin a text (default: yes); a chat template may have written them.
    Requests with different `cache_salt` share no cache. A lower `priority` runs first, where the
    scheduling policy is "priority".
    """

    prompt: str
    prompt_token_ids: Sequence[int]
    multi_modal_data: Mapping[str, Any]
    multi_modal_uuids: Mapping[str, Sequence[str | None]]
    media_io_kwargs: Mapping[str, Mapping[str, Any]]
    mm_processor_kwargs: Mapping[str, Any]
    add_special_tokens: bool
    cache_salt: str
    priority: int


Prompt = str | Sequence[int] | TextPrompt
