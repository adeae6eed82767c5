"""What a caller may give as a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class TextPrompt(TypedDict, total=False):
    """`prompt` is text with the model's own marker for each media item, or else `prompt_token_ids`.

    `multi_modal_data`: an item or a list of items by modality, e.g. `{"image": [image, image]}`. An
    item is an address (`data:`, `https:`, `file:`), the bytes of a file, or a PIL image, array or
    tensor (pixel values are 0 to 255). `multi_modal_uuids`: the caller's own names for the items,
    or `None`, in their order; an item that was sent under its uuid before may be left out as
    `None`. `mm_processor_kwargs` go to the model's processor with every item; `media_io_kwargs` are
    options for decoding, by modality. `add_special_tokens`: whether the tokenizer adds those that
    begin a text (default: yes); a chat template may have written them.
    Requests with different `cache_salt` share no cache, and those with different `uuid_scope` no
    uuids. A lower `priority` runs first, where the scheduling policy is "priority".
    """

    prompt: str
    prompt_token_ids: Sequence[int]
    multi_modal_data: Mapping[str, Any]
    multi_modal_uuids: Mapping[str, Sequence[str | None]]
    mm_processor_kwargs: Mapping[str, Any]
    media_io_kwargs: Mapping[str, Mapping[str, Any]]
    add_special_tokens: bool
    cache_salt: str
    uuid_scope: str
    priority: int


class RenderedPrompt(TypedDict, total=False):
    """A prompt that was expanded and whose media was processed, here or elsewhere.

    By modality, each a list with one entry per item: `mm_hashes`, which name the items at every
    cache; `mm_placeholders` (a `PlaceholderRange`, or a mapping with `offset`, `length` and
    `is_embed`); `mm_kwargs`: the tensors by name, or `None` for what the cache has. `mm_layouts`
    (an `ItemLayout`, or `None`) let later prompts of text use the items too. `is_external`: the
    hashes are somebody else's word, who may not name what others read: they are renamed, unless
    the engine was told to trust them.
    """

    prompt_token_ids: Sequence[int]
    mm_hashes: Mapping[str, Sequence[str]]
    mm_placeholders: Mapping[str, Sequence[Any]]
    mm_kwargs: Mapping[str, Sequence[Any]]
    mm_layouts: Mapping[str, Sequence[Any]]
    is_external: bool
    cache_salt: str
    uuid_scope: str
    priority: int


Prompt = str | Sequence[int] | TextPrompt | RenderedPrompt
