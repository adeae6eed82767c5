"""The forms in which a caller may give a prompt; `render.prompts` reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class TextPrompt(TypedDict, total=False):
    """A prompt of text or token ids, with media that is processed here."""

    # Either text, with the model's own marker for each media item, or token ids.
    prompt: str
    prompt_token_ids: Sequence[int]
    # modality -> an item or a list of items, e.g. `{"image": [image, image]}`. An item is an
    # address (`data:`, `https:`, `file:`), the bytes of a file, or a PIL image, array or tensor
    # (pixel values are 0 to 255).
    multi_modal_data: Mapping[str, Any]
    # modality -> the caller's own names for the items in their order, or `None`. An item that was
    # sent under its uuid before may be left out as `None`.
    multi_modal_uuids: Mapping[str, Sequence[str | None]]
    mm_processor_kwargs: Mapping[str, Any]  # for the model's processor, with every item
    media_io_kwargs: Mapping[str, Mapping[str, Any]]  # modality -> options for decoding
    # Whether the tokenizer adds the tokens that begin a text (default: yes). A chat template may
    # have written them.
    add_special_tokens: bool
    cache_salt: str  # requests with different salts share no cache
    uuid_scope: str  # requests with different scopes share no uuids
    priority: int  # a lower one runs first, where the scheduling policy is "priority"


class RenderedPrompt(TypedDict, total=False):
    """A prompt that was expanded, with media that was processed, here or elsewhere."""

    prompt_token_ids: Sequence[int]
    # The next four: modality -> a list with one entry per item.
    mm_hashes: Mapping[str, Sequence[str]]  # the names of the items in every cache
    # A `PlaceholderRange`, or a mapping with `offset`, `length` and `is_embed`.
    mm_placeholders: Mapping[str, Sequence[Any]]
    mm_kwargs: Mapping[str, Sequence[Any]]  # tensors by name, or `None` if they are cached
    # An `ItemLayout`, or `None`. With one, later prompts of text can use the item too.
    mm_layouts: Mapping[str, Sequence[Any]]
    # The hashes come from another machine. Its items must not replace items that others use, so
    # they are renamed, unless the engine was configured to trust the hashes.
    is_external: bool
    cache_salt: str
    uuid_scope: str
    priority: int


Prompt = str | Sequence[int] | TextPrompt | RenderedPrompt
