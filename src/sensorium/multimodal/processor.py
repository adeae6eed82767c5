"""Runs the model's own Hugging Face processor, one media item a call.

An item's result must not depend on its neighbours: that is what makes it reusable. It is the
tensors that the encoder takes, and the text that stands for the item in an expanded prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer, PretrainedConfig

from sensorium.models.adapter import MODALITIES
from sensorium.multimodal.hasher import hash_media
from sensorium.types.errors import ModelError, RequestError
from sensorium.types.multimodal import MultiModalKwargsItem

# What a processor call returns about the text; all else belongs to the item.
_TEXT_KEYS = frozenset(
    {
        "input_ids",
        "attention_mask",
        "token_type_ids",
        "mm_token_type_ids",
        "text_replacement_offsets",
    }
)
_ARGUMENTS = {"image": "images", "video": "videos", "audio": "audio"}
_PARTS = {
    "image": ("image_processor",),
    "video": ("video_processor",),
    "audio": ("feature_extractor", "audio_processor"),
}
_NUM_DIMENSIONS = {"image": (2, 3), "video": (4,), "audio": (1, 2)}


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
        self.tokenizer: Any = loaded.tokenizer if is_multimodal else loaded
        self.modalities = tuple(m for m in MODALITIES if self._has_modality(m))
        self._fingerprint = "" if self._processor is None else self._processor.to_json_string()

    def _has_modality(self, modality: str) -> bool:
        has_part = any(
            getattr(self._processor, part, None) is not None for part in _PARTS[modality]
        )
        has_marker = getattr(self._processor, f"{modality}_token", None) is not None
        return has_part and has_marker and self._token_ids[modality] is not None

    def get_marker(self, modality: str) -> str:
        """What stands for an item of the modality in a prompt."""
        marker: str = getattr(self._processor, f"{modality}_token")
        return marker

    def get_token_id(self, modality: str) -> int:
        """The token whose embedding the encoder's outputs replace."""
        token_id = self._token_ids[modality]
        if token_id is None:
            raise ModelError(f"this model takes no {modality}")
        return int(token_id)

    def process_item(
        self, modality: str, media: object, processor_kwargs: Mapping[str, object]
    ) -> ProcessedItem:
        """A `RequestError` if it can't be done, whatever is wrong with the item."""
        try:
            media = _check_media(modality, media)
            if modality != "audio":
                _check_pixels(media, processor_kwargs)
            return self._process(modality, media, processor_kwargs)
        except RequestError:
            raise
        except Exception as error:  # damaged files and odd options make processors raise anything
            raise RequestError(f"it could not be processed: {str(error)[:300]}") from error

    def _process(
        self, modality: str, media: object, processor_kwargs: Mapping[str, object]
    ) -> ProcessedItem:
        options = {"modality": modality, "kwargs": processor_kwargs, "processor": self._fingerprint}
        mm_hash = hash_media(media, options)
        extra = dict(processor_kwargs)
        if modality == "video":
            # Frames that were given are the frames to use.
            extra.setdefault("do_sample_frames", False)
        output = self._processor(
            text=[self.get_marker(modality)],
            return_tensors="pt",
            return_text_replacement_offsets=True,
            **{_ARGUMENTS[modality]: [media]},
            **extra,
        )
        return ProcessedItem(
            modality=modality,
            mm_hash=mm_hash,
            kwargs=_get_tensors(output),
            replacement=output["text_replacement_offsets"][0][0]["replacement"],
        )


def _get_tensors(output: Mapping[str, object]) -> MultiModalKwargsItem:
    return {
        name: value
        for name, value in output.items()
        if name not in _TEXT_KEYS and isinstance(value, torch.Tensor)
    }


def _check_media(modality: str, media: object) -> object:
    """Media in process: PIL images, arrays and tensors. Paths and addresses are not followed
    here.
    """
    if isinstance(media, Image.Image) and modality == "image":
        return media if media.mode == "RGB" else media.convert("RGB")
    if modality == "video" and isinstance(media, list | tuple) and media:
        frames = [np.asarray(_check_media("image", frame)) for frame in media]
        sizes = sorted({frame.shape for frame in frames})
        if len(sizes) > 1:
            raise RequestError(f"frames of different sizes: {', '.join(map(str, sizes))}")
        media = np.stack(frames)
    if not isinstance(media, np.ndarray | torch.Tensor):
        kinds = (
            "a PIL image, a numpy array or a torch tensor" if modality == "image" else "an array"
        )
        raise RequestError(f"expected {kinds}, not {type(media).__name__}")
    if media.ndim not in _NUM_DIMENSIONS[modality] or 0 in media.shape:
        counts = " or ".join(map(str, _NUM_DIMENSIONS[modality]))
        raise RequestError(
            f"expected {counts} non-empty dimensions, not shape {tuple(media.shape)}"
        )
    if isinstance(media, np.ndarray):
        # Flipped views and foreign byte orders have no tensor form.
        media = np.ascontiguousarray(media, dtype=media.dtype.newbyteorder("="))
    if modality == "image" and media.ndim == 2:
        if isinstance(media, np.ndarray):
            return np.stack([media] * 3, axis=-1)
        return torch.stack([media] * 3)
    return media


def _check_pixels(media: object, processor_kwargs: Mapping[str, object]) -> None:
    """Processors divide by 255: values from 0 to 1 would be seen as black, without a word."""
    if not isinstance(media, np.ndarray | torch.Tensor):
        return
    kind = str(media.dtype)
    is_scaled = "float" in kind and 0 < float(media.max()) <= 1
    if "bool" in kind or (is_scaled and processor_kwargs.get("do_rescale") is not False):
        raise RequestError(
            f"pixel values go from 0 to 255, not from 0 to 1 ({kind}); for values that are scaled "
            "already say mm_processor_kwargs={'do_rescale': False}"
        )
