"""Runs the model's own Hugging Face processor, one media item a call.

An item's result must not depend on its neighbours: that is what makes it reusable. It is the
tensors that the encoder takes, and the text that stands for the item in an expanded prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sensorium.models  # noqa: F401  (makes torchvision importable, before Transformers' processors)

# isort: split
import torch
from transformers import AutoProcessor, AutoTokenizer, PretrainedConfig

from sensorium.models.adapter import MODALITIES
from sensorium.multimodal.checks import check_media
from sensorium.multimodal.families import PROCESSOR_CALLS
from sensorium.multimodal.hasher import hash_media
from sensorium.multimodal.processor_call import ProcessorCall, call_processor, call_whole
from sensorium.multimodal.tokenizing import tokenize
from sensorium.types.errors import ModelError, RequestError
from sensorium.types.multimodal import MultiModalKwargsItem

_PARTS = {
    "image": ("image_processor",),
    "video": ("video_processor",),
    "audio": ("feature_extractor", "audio_processor"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedItem:
    """`replacement`: what the marker of the item becomes in the prompt."""

    modality: str
    mm_hash: str
    kwargs: MultiModalKwargsItem
    replacement: str


class MultiModalProcessor:
    """Owns the processor and the tokenizer of a model. A model for text alone has only the
    latter.
    """

    def __init__(
        self, model: str, config: PretrainedConfig, *, trust_remote_code: bool = False
    ) -> None:
        self._token_ids = {
            modality: getattr(config, f"{modality}_token_id", None) for modality in MODALITIES
        }
        is_multimodal = any(token_id is not None for token_id in self._token_ids.values())
        try:
            loaded: Any = (AutoProcessor if is_multimodal else AutoTokenizer).from_pretrained(
                model, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # Transformers raises many kinds for what is one fault
            raise ModelError(f"no processor can be loaded from {model!r}: {error}") from error
        self._processor: Any = loaded if is_multimodal else None
        self._call: ProcessorCall = PROCESSOR_CALLS.get(config.model_type, call_processor)
        self.tokenizer: Any = loaded.tokenizer if is_multimodal else loaded
        self.modalities = tuple(m for m in MODALITIES if self._has_modality(m))
        self._fingerprint = "" if self._processor is None else self._processor.to_json_string()

    def _has_modality(self, modality: str) -> bool:
        has_part = any(
            getattr(self._processor, part, None) is not None for part in _PARTS[modality]
        )
        has_marker = getattr(self._processor, f"{modality}_token", None) is not None
        return has_part and has_marker and bool(self.get_token_ids(modality))

    def get_marker(self, modality: str) -> str:
        """What stands for an item of the modality in a prompt."""
        marker: str = getattr(self._processor, f"{modality}_token")
        return marker

    def get_token_ids(self, modality: str) -> tuple[int, ...]:
        """The token whose embedding the encoder's outputs replace; for a video also that of
        pictures, which is what its frames are to some models.
        """
        names = ("video", "image") if modality == "video" else (modality,)
        ids = [self._token_ids[name] for name in names]
        return tuple(int(token_id) for token_id in ids if token_id is not None)

    @property
    def sampling_rate(self) -> int | None:
        """Samples a second that a sound must have; `None` for a model that hears nothing."""
        parts = [getattr(self._processor, part, None) for part in _PARTS["audio"]]
        return next((int(part.sampling_rate) for part in parts if part is not None), None)

    def make_trial_text(self, modality: str | None, text: str) -> str:
        """A prompt with one item: by the chat template, which knows what stands around an item."""
        if modality is None:
            return text
        marker = self.get_marker(modality)
        content = [{"type": modality}, {"type": "text", "text": text}]
        try:
            prompt: str = self._processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
            )
        except Exception:  # there is none, or it wants something else
            return marker + text
        return prompt if prompt.count(marker) == 1 else marker + text

    def call_whole(
        self, text: str, modality: str | None, media: object
    ) -> Mapping[str, torch.Tensor]:
        """All that the model's own call takes, for a prompt with at most one item."""
        if modality is None:
            return {"input_ids": torch.tensor([tokenize(self.tokenizer, text)[0]])}
        checked, metadata = check_media(
            modality, media, sampling_rate=self.sampling_rate, is_scaled_already=False
        )
        return call_whole(self._processor, text, modality, checked, metadata, {})

    def process_item(
        self, modality: str, media: object, processor_kwargs: Mapping[str, object]
    ) -> ProcessedItem:
        """A `RequestError` if it can't be done, whatever is wrong with the item."""
        try:
            checked, metadata = check_media(
                modality,
                media,
                sampling_rate=self.sampling_rate,
                is_scaled_already=processor_kwargs.get("do_rescale") is False,
            )
            options = {
                "modality": modality,
                "kwargs": processor_kwargs,
                "metadata": metadata,
                "processor": self._fingerprint,
            }
            mm_hash = hash_media(checked, options)
            tensors, replacement = self._call(
                self._processor, modality, checked, metadata, processor_kwargs
            )
        except RequestError:
            raise
        except Exception as error:  # damaged files and odd options make processors raise anything
            raise RequestError(f"it could not be processed: {str(error)[:300]}") from error
        return ProcessedItem(
            modality=modality, mm_hash=mm_hash, kwargs=tensors, replacement=replacement
        )
