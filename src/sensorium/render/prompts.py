"""The typed form of all prompts, `EnginePrompt`, and how a caller's prompt is read into it.

`read_prompt` checks text, token ids or a mapping (`types.request`) once, and raises a
`RequestError` with the path of a wrong field. All later code works with an `EnginePrompt`, and
checks no types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, TypedDict, cast, get_origin, get_type_hints

import numpy as np
import torch

from sensorium.core.admission import check_length
from sensorium.multimodal.media import MediaItem
from sensorium.multimodal.names import check_uuid
from sensorium.types.errors import RequestError, at, map_at
from sensorium.types.multimodal import PlaceholderRange
from sensorium.types.request import Prompt, RenderedPrompt, TextPrompt
from sensorium.types.sampling import SamplingParams

_TEXT_KEYS = frozenset(TextPrompt.__annotations__)
_RENDERED_KEYS = frozenset(RenderedPrompt.__annotations__)
_MEDIA_FIELDS = ("multi_modal_data", "multi_modal_uuids")
_RENDERED_FIELDS = ("mm_hashes", "mm_placeholders", "mm_kwargs", "mm_layouts")


class PromptOptions(TypedDict, total=False):
    """The optional fields of a prompt of any kind; a field that was not given is missing."""

    mm_processor_kwargs: Mapping[str, Any]
    media_io_kwargs: Mapping[str, Any]
    cache_salt: str
    uuid_scope: str
    priority: int
    add_special_tokens: bool


_OPTION_TYPES = {
    name: get_origin(kind) or kind for name, kind in get_type_hints(PromptOptions).items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedMedia:
    """Media items of a prompt that another process has rendered; `engine.inputs` checks them."""

    # modality -> one entry per item
    mm_hashes: Mapping[str, Any]
    mm_placeholders: Mapping[str, Any] = field(default_factory=dict)
    mm_kwargs: Mapping[str, Any] = field(default_factory=dict)
    mm_layouts: Mapping[str, Any] = field(default_factory=dict)
    # The hashes came over the wire, so they must not replace the items of other clients.
    is_external: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePrompt:
    """A caller's prompt after its types were checked: text or token ids, media and options."""

    text: str | None = None
    token_ids: Sequence[int] = ()  # used if there is no text
    media: tuple[MediaItem, ...] = ()  # to be processed here; grouped by modality
    rendered: RenderedMedia | None = None  # in place of `media`
    # The modality and the place of each item in `token_ids`, in their order, if another process has
    # already put the placeholders of `media` there.
    positions: tuple[tuple[str, PlaceholderRange], ...] | None = None
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    media_io_kwargs: Mapping[str, Any] = field(default_factory=dict)  # modality -> options
    add_special_tokens: bool = True
    cache_salt: str | None = None
    uuid_scope: str | None = None
    priority: int = 0


def read_prompt(prompt: Prompt | EnginePrompt, *, max_model_len: int | None = None) -> EnginePrompt:
    """Check a caller's prompt, and return it as an `EnginePrompt`.

    More token ids than `max_model_len` are refused before each of them is checked.
    """
    if isinstance(prompt, EnginePrompt):
        return prompt
    if isinstance(prompt, str):
        return EnginePrompt(text=prompt)
    if not isinstance(prompt, Mapping):
        return EnginePrompt(token_ids=_read_token_ids(prompt, max_model_len))
    fields: Mapping[str, Any] = prompt
    _check_names(fields)
    _check_types(fields, dict.fromkeys((*_MEDIA_FIELDS, *_RENDERED_FIELDS), Mapping))
    _check_types(fields, {"prompt": str, "is_external": bool})
    options = read_options(fields)
    has_ids = "prompt_token_ids" in fields
    return EnginePrompt(
        text=fields.get("prompt"),
        token_ids=_read_token_ids(fields["prompt_token_ids"], max_model_len) if has_ids else (),
        media=_read_media(*(fields.get(name) or {} for name in _MEDIA_FIELDS)),
        rendered=_read_rendered(fields),
        **options,
    )


def read_options(fields: Mapping[str, Any]) -> PromptOptions:
    """Return the optional fields of a prompt that were given, with their types checked."""
    _check_types(fields, _OPTION_TYPES)
    given = {name: fields[name] for name in _OPTION_TYPES if fields.get(name) is not None}
    return cast(PromptOptions, given)


def _check_names(prompt: Mapping[str, Any]) -> None:
    """Raise a `RequestError` unless the fields of a prompt are known and may be given together."""
    unknown = sorted(map(str, set(prompt) - (_TEXT_KEYS | _RENDERED_KEYS)))
    if unknown:
        hint = " (token ids go into 'prompt_token_ids')" if "input_ids" in unknown else ""
        raise RequestError(f"unknown prompt field(s): {', '.join(unknown)}{hint}")
    if ("prompt" in prompt) == ("prompt_token_ids" in prompt):
        raise RequestError("a prompt needs either 'prompt' or 'prompt_token_ids', and not both")
    given = {name for name, value in prompt.items() if value is not None}
    rendered = sorted(given & (_RENDERED_KEYS - _TEXT_KEYS))
    others = sorted(given & (_TEXT_KEYS - _RENDERED_KEYS))
    if rendered and others:
        raise RequestError(
            f"prompt field(s) {', '.join(others)} can't be used with {', '.join(rendered)}, which "
            "belong to a prompt that is already rendered to prompt_token_ids"
        )
    if rendered and "mm_hashes" not in given:
        raise RequestError(f"prompt field(s) {', '.join(rendered)} also need mm_hashes")


def _check_types(fields: Mapping[str, Any], types: Mapping[str, type]) -> None:
    for name, kind in types.items():
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            found = f"{kind.__name__}, not {type(value).__name__}"
            raise RequestError(
                f"must be {'true or false' if kind is bool else found}", path=(name,)
            )


def _read_token_ids(token_ids: object, max_model_len: int | None) -> list[int]:
    ids = token_ids.tolist() if isinstance(token_ids, np.ndarray | torch.Tensor) else token_ids
    if not isinstance(ids, list | tuple):
        raise RequestError(
            f"a prompt must be text, token ids or a mapping, not {type(ids).__name__}"
        )
    if max_model_len is not None:
        check_length(len(ids), max_model_len)
    if set(map(type, ids)) == {int} and min(ids) >= 0:  # a hundred times faster than the loop
        return list(ids)
    for token_id in ids:
        is_integer = isinstance(token_id, Integral) and not isinstance(token_id, bool)
        if not is_integer or token_id < 0:
            raise RequestError(
                f"token ids must be integers >= 0, not {token_id!r}", path=("prompt_token_ids",)
            )
    return [int(token_id) for token_id in ids]


def _read_media(data: Mapping[str, Any], uuids: Mapping[str, Any]) -> tuple[MediaItem, ...]:
    """Return the media items of a prompt, grouped by modality, each with its uuid if it has one.

    Both arguments map a modality to one entry or to a list.
    """
    items: list[MediaItem] = []
    for key in {**data, **uuids}:
        modality = str(key)
        media = _as_items(modality, data.get(key))
        names = _read_uuids(modality, uuids.get(key))
        media = media or [None] * len(names)
        names = names or [None] * len(media)
        if len(names) != len(media):
            raise RequestError(
                f"has {len(names)} uuids for {len(media)} media items: give one for each item",
                path=("multi_modal_uuids", modality),
            )
        for index, (entry, name) in enumerate(zip(media, names, strict=True)):
            path = ("multi_modal_data", modality, index)
            items.append(MediaItem(path=path, modality=modality, media=entry, uuid=name))
    return tuple(items)


def _read_uuids(modality: str, uuids: Any) -> list[str | None]:
    if uuids is None:
        return []
    with at("multi_modal_uuids", modality):
        return map_at(check_uuid, uuids if isinstance(uuids, list | tuple) else [uuids])


def _as_items(modality: str, media: Any) -> list[Any]:
    """Return the media of one modality, which may be one item or several, as a list of items."""
    # A list of frames is one video, and so is a pair of frames and metadata. A pair of audio
    # samples and their rate is one audio item.
    if media is None:
        return []
    is_pair = isinstance(media, tuple) and len(media) == 2 and isinstance(media[1], Mapping | Real)
    if is_pair or not isinstance(media, list | tuple):
        return [media]
    is_frames = modality == "video" and len(media) > 0 and _is_frame(media[0])
    return [media] if is_frames else list(media)


def _is_frame(media: Any) -> bool:
    """Return whether a value is one video frame: an array of 3 dimensions or a PIL image."""
    if media is None or isinstance(media, str | bytes | bytearray | memoryview | list | tuple):
        return False
    return bool(getattr(media, "ndim", 3) == 3)


def _read_rendered(prompt: Mapping[str, Any]) -> RenderedMedia | None:
    if prompt.get("mm_hashes") is None:
        return None
    given = {name: prompt.get(name) or {} for name in _RENDERED_FIELDS}
    return RenderedMedia(**given, is_external=bool(prompt.get("is_external")))


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several prompts as a list.

    A text, a mapping and a list of token ids are one prompt each. Raise a `RequestError` for any
    other type.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, np.ndarray | torch.Tensor):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence):
        raise RequestError(
            "prompts must be text, token ids, mappings or a list of them, not "
            f"{type(prompts).__name__}"
        )
    if len(prompts) > 0 and all(isinstance(entry, Integral) for entry in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Return a list of `SamplingParams`, one for each of `count` prompts.

    A single one is used for all prompts, and `None` means the defaults. Raise a `RequestError` if
    the number of entries is not `count`.
    """
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        raise RequestError(f"sampling params must be SamplingParams, not {type(params).__name__}")
    for entry in params:
        if not isinstance(entry, SamplingParams):
            raise RequestError(
                f"every entry of sampling params must be SamplingParams, not {type(entry).__name__}"
            )
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling params for {count} prompts: give one each")
    return list(params)
