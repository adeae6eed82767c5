"""Checks of prompts and their fields, which come before anything is done with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from sensorium.core.admission import check_length
from sensorium.multimodal.media_item import MediaItem
from sensorium.multimodal.uuid_bindings import check_uuid
from sensorium.types.errors import RequestError, at
from sensorium.types.prompts import Prompt, RenderedPrompt, TextPrompt
from sensorium.types.sampling import SamplingParams

_TEXT_KEYS = frozenset(TextPrompt.__annotations__)
_RENDERED_KEYS = frozenset(RenderedPrompt.__annotations__)
_FIELD_TYPES: dict[str, type] = {
    "prompt": str,
    "multi_modal_data": Mapping,
    "multi_modal_uuids": Mapping,
    "mm_processor_kwargs": Mapping,
    "media_io_kwargs": Mapping,
    "mm_kwargs": Mapping,
    "mm_hashes": Mapping,
    "mm_placeholders": Mapping,
    "mm_layouts": Mapping,
    "cache_salt": str,
    "uuid_scope": str,
    "priority": int,
}


def normalise(prompt: Prompt, *, max_model_len: int | None = None) -> dict[str, Any]:
    """`max_model_len`: token ids that can't fit are refused before they are looked at."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not isinstance(prompt, Mapping):
        return {"prompt_token_ids": check_token_ids(prompt, max_model_len)}
    unknown = sorted(map(str, set(prompt) - (_TEXT_KEYS | _RENDERED_KEYS)))
    if unknown:
        hint = " (token ids go into 'prompt_token_ids')" if "input_ids" in unknown else ""
        raise RequestError(f"unknown prompt field(s): {', '.join(unknown)}{hint}")
    if ("prompt" in prompt) == ("prompt_token_ids" in prompt):
        raise RequestError("a prompt needs either 'prompt' or 'prompt_token_ids'")
    for name, kind in _FIELD_TYPES.items():
        value = prompt.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise RequestError(f"must be {kind.__name__}, not {type(value).__name__}", path=(name,))
    for name in ("add_special_tokens", "is_external"):
        if not isinstance(prompt.get(name), bool | None):
            raise RequestError("must be true or false", path=(name,))
    _check_kind(prompt)
    fields: dict[str, Any] = {**prompt}
    if "prompt_token_ids" in fields:
        fields["prompt_token_ids"] = check_token_ids(fields["prompt_token_ids"], max_model_len)
    return fields


def _check_kind(prompt: Mapping[str, Any]) -> None:
    """A prompt has media, or was rendered with media: not both."""
    given = {name for name, value in prompt.items() if value is not None}
    rendered = sorted(given & (_RENDERED_KEYS - _TEXT_KEYS))
    if not rendered:
        return
    others = sorted(given & (_TEXT_KEYS - _RENDERED_KEYS))
    if others:
        raise RequestError(
            f"prompt field(s) {', '.join(others)} can't stand beside {', '.join(rendered)}: these "
            "belong to a rendered prompt, of prompt_token_ids"
        )
    if "mm_hashes" not in given:
        raise RequestError(f"prompt field(s) {', '.join(rendered)} need mm_hashes")


def check_token_ids(token_ids: Sequence[int], max_model_len: int | None = None) -> list[int]:
    ids = token_ids.tolist() if isinstance(token_ids, np.ndarray | torch.Tensor) else token_ids
    if not isinstance(ids, list | tuple):
        raise RequestError(f"a prompt is text, token ids or a mapping, not {type(ids).__name__}")
    if max_model_len is not None:
        check_length(len(ids), max_model_len)
    if set(map(type, ids)) == {int} and min(ids) >= 0:  # in a hundredth of the time
        return list(ids)
    for token_id in ids:
        is_integer = isinstance(token_id, Integral) and not isinstance(token_id, bool)
        if not is_integer or token_id < 0:
            raise RequestError(
                f"token ids are integers >= 0, not {token_id!r}", path=("prompt_token_ids",)
            )
    return [int(token_id) for token_id in ids]


def get_media_items(fields: Mapping[str, Any]) -> list[MediaItem]:
    """The items of a prompt in the order of its modalities, each with its uuid."""
    data = fields.get("multi_modal_data") or {}
    uuids = fields.get("multi_modal_uuids") or {}
    items: list[MediaItem] = []
    for modality in {**data, **uuids}:
        media = _as_list(modality, data.get(modality))
        names = _as_uuids(modality, uuids.get(modality))
        media = media or [None] * len(names)
        names = names or [None] * len(media)
        if len(names) != len(media):
            raise RequestError(
                f"{len(names)} uuids for {len(media)} items",
                path=("multi_modal_uuids", str(modality)),
            )
        items.extend(
            MediaItem(
                path=("multi_modal_data", str(modality), index),
                modality=str(modality),
                media=entry,
                uuid=name,
            )
            for index, (entry, name) in enumerate(zip(media, names, strict=True))
        )
    return items


def _as_uuids(modality: str, uuids: Any) -> list[str | None]:
    if uuids is None:
        return []
    entries = uuids if isinstance(uuids, list | tuple) else [uuids]
    names: list[str | None] = []
    for index, entry in enumerate(entries):
        with at("multi_modal_uuids", str(modality), index):
            names.append(check_uuid(entry))
    return names


def _as_list(modality: str, media: Any) -> list[Any]:
    """One item or a list of them. A list of frames is one video; so is a pair with metadata, and a
    pair of samples and their rate is one sound.
    """
    if media is None:
        return []
    if isinstance(media, tuple) and len(media) == 2 and isinstance(media[1], Mapping | Real):
        return [media]
    if not isinstance(media, list | tuple):
        return [media]
    is_frames = modality == "video" and len(media) > 0 and _is_frame(media[0])
    return [media] if is_frames else list(media)


def _is_frame(media: Any) -> bool:
    """An array of two or three dimensions or a PIL image: not a file, an address or a clip."""
    if media is None or isinstance(media, str | bytes | bytearray | memoryview | list | tuple):
        return False
    return bool(getattr(media, "ndim", 3) == 3)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts of a call as a list.

    One prompt is text, a mapping or a list of token ids; anything else is many.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, np.ndarray | torch.Tensor):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts are text, token ids, mappings or a list of them, not {type(prompts).__name__}"
        )
    if len(prompts) > 0 and all(isinstance(entry, Integral) for entry in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Return the sampling parameters of a call, one for each of its `count` prompts."""
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        raise RequestError(f"sampling params are SamplingParams, not {type(params).__name__}")
    for entry in params:
        if not isinstance(entry, SamplingParams):
            raise RequestError(f"sampling params are SamplingParams, not {type(entry).__name__}")
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling params for {count} prompts")
    return list(params)
