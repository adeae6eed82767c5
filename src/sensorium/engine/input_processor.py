"""From what a caller gives to a request that the core can run, with the tensors of its media
beside it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch

from sensorium.multimodal.placeholders import expand_text, expand_token_ids
from sensorium.multimodal.processor import MultiModalProcessor, ProcessedItem
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import MultiModalKwargsItem
from sensorium.types.prompts import Prompt, TextPrompt
from sensorium.types.request import EngineCoreRequest
from sensorium.types.sampling import GenerationDefaults, SamplingParams

_PROMPT_KEYS = frozenset(TextPrompt.__annotations__)
_FIELD_TYPES: dict[str, type] = {
    "prompt": str,
    "multi_modal_data": Mapping,
    "mm_processor_kwargs": Mapping,
    "cache_salt": str,
    "priority": int,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedRequest:
    """`payloads`: processed tensors by `mm_hash`. `prompt`: the text, if text was given."""

    request: EngineCoreRequest
    payloads: Mapping[str, MultiModalKwargsItem]
    prompt: str | None


class InputProcessor:
    """Owns nothing but the source of seeds for requests that have none."""

    def __init__(
        self,
        processor: MultiModalProcessor,
        *,
        defaults: GenerationDefaults,
        limit_mm_per_prompt: Mapping[str, int],
        seed: int,
    ) -> None:
        self.processor = processor
        self.defaults = defaults
        self._limits = dict(limit_mm_per_prompt)
        self._seeds = random.Random(seed)

    def process(self, request_id: str, prompt: Prompt, params: SamplingParams) -> ProcessedRequest:
        """Raises a `RequestError` that names what is wrong with the prompt."""
        fields = _normalise(prompt)
        text, token_ids = fields.get("prompt"), fields.get("prompt_token_ids")
        items = self._process_items(fields)
        if text is not None:
            expanded_ids, features = expand_text(
                self.processor,
                text,
                items,
                add_special_tokens=fields.get("add_special_tokens") is not False,
            )
        else:
            expanded_ids, features = expand_token_ids(self.processor, token_ids or (), items)
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=tuple(expanded_ids),
            sampling_params=params.resolve(self.defaults, seed=self._seeds.getrandbits(63)),
            mm_features=tuple(features),
            eos_token_ids=self.defaults.eos_token_ids,
            bans=self.defaults.bans.add(self._get_bad_sequences(params.bad_words)),
            cache_salt=fields.get("cache_salt"),
            priority=fields.get("priority") or 0,
        )
        payloads = {item.mm_hash: item.kwargs for item in items}
        return ProcessedRequest(request=request, payloads=payloads, prompt=text)

    def _get_bad_sequences(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word at the beginning of a text and behind a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word.lstrip(), " " + word.lstrip()):
                encoded = self.processor.tokenizer(text, add_special_tokens=False)
                if not encoded["input_ids"]:
                    raise RequestError(f"bad_words: the tokenizer has no tokens for {word!r}")
                found[tuple(encoded["input_ids"])] = None
        return tuple(found)

    def _process_items(self, fields: TextPrompt) -> list[ProcessedItem]:
        processor_kwargs = fields.get("mm_processor_kwargs") or {}
        items = []
        for modality, media in (fields.get("multi_modal_data") or {}).items():
            entries = _as_list(modality, media)
            self._check_count(modality, len(entries))
            for index, entry in enumerate(entries):
                try:
                    item = self.processor.process_item(modality, entry, processor_kwargs)
                except RequestError as error:
                    raise RequestError(f"{modality} {index}: {error}") from error
                items.append(item)
        return items

    def _check_count(self, modality: str, count: int) -> None:
        if count and modality not in self.processor.modalities:
            takes = ", ".join(self.processor.modalities) or "text only"
            raise RequestError(f"this model takes no {modality} (it takes: {takes})")
        limit = self._limits.get(modality)
        if limit is not None and count > limit:
            raise RequestError(
                f"{count} {modality} items, but limit_mm_per_prompt allows {limit} in one prompt"
            )


def _normalise(prompt: Prompt) -> TextPrompt:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not isinstance(prompt, Mapping):
        return {"prompt_token_ids": _check_token_ids(prompt)}
    unknown = sorted(map(str, set(prompt) - _PROMPT_KEYS))
    if unknown:
        hint = " (token ids go into 'prompt_token_ids')" if "input_ids" in unknown else ""
        raise RequestError(f"unknown prompt field(s): {', '.join(unknown)}{hint}")
    if ("prompt" in prompt) == ("prompt_token_ids" in prompt):
        raise RequestError("a prompt needs either 'prompt' or 'prompt_token_ids'")
    for name, kind in _FIELD_TYPES.items():
        value = prompt.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise RequestError(
                f"prompt field {name!r} must be {kind.__name__}, not {type(value).__name__}"
            )
    fields: TextPrompt = {**prompt}
    if "prompt_token_ids" in prompt:
        fields["prompt_token_ids"] = _check_token_ids(prompt["prompt_token_ids"])
    return fields


def _check_token_ids(token_ids: Sequence[int]) -> list[int]:
    ids = token_ids.tolist() if isinstance(token_ids, np.ndarray | torch.Tensor) else token_ids
    if not isinstance(ids, list | tuple):
        raise RequestError(f"a prompt is text, token ids or a mapping, not {type(ids).__name__}")
    for token_id in ids:
        is_integer = isinstance(token_id, Integral) and not isinstance(token_id, bool)
        if not is_integer or token_id < 0:
            raise RequestError(f"token ids are integers >= 0, not {token_id!r}")
    return [int(token_id) for token_id in ids]


def _as_list(modality: str, media: Any) -> list[Any]:
    """One item or a list of them. A list of frames is one video; so is a pair with metadata, and a
    pair of samples and their rate is one sound.
    """
    if media is None:
        return []
    if isinstance(media, tuple) and len(media) == 2 and isinstance(media[1], Mapping | Integral):
        return [media]
    if not isinstance(media, list | tuple):
        return [media]
    is_frames = modality == "video" and media and getattr(media[0], "ndim", 3) == 3
    is_frames = is_frames and not isinstance(media[0], list | tuple)
    return [media] if is_frames else list(media)
