"""Runs the model's own Hugging Face processor, one media item a call.

An item's result must not depend on its neighbours: that is what makes it reusable. It is the
tensors that the encoder takes, and its layout: what stands for it in an expanded prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import sensorium.models  # noqa: F401  (makes torchvision importable, before Transformers' processors)

# isort: split
import torch
import transformers
from transformers import AutoProcessor, AutoTokenizer, PretrainedConfig

from sensorium.multimodal.limits import MediaLimits
from sensorium.multimodal.processing.checks import Metadata, check_media
from sensorium.multimodal.processing.family_calls import PROCESSOR_CALLS
from sensorium.multimodal.processing.processor_call import ProcessorCall, call_processor, call_whole
from sensorium.multimodal.processing.tokenizing import tokenize, tokenize_fragment
from sensorium.types.errors import ModelError, RequestError
from sensorium.types.multimodal import MODALITIES, ItemLayout, ProcessedItem

_PARTS = {
    "image": ("image_processor",),
    "video": ("video_processor",),
    "audio": ("feature_extractor", "audio_processor"),
}
_OPTION_GROUPS = {"image": "images_kwargs", "video": "videos_kwargs", "audio": "audio_kwargs"}
# Of a layout's text, so that none is read that no item can have: names of tokens, and what stands
# between them.
_MAX_CHARACTERS = 2**12
_MAX_CHARACTERS_PER_EMBED = 2**8
_FAULTS_OF_CODE = (TypeError, AttributeError, NameError, ImportError, AssertionError)


class MultiModalProcessor:
    """Owns the processor and the tokenizer of a model. A model for text alone has only the
    latter.
    """

    def __init__(
        self,
        model: str,
        config: PretrainedConfig,
        *,
        limits: MediaLimits | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self._limits = limits or MediaLimits()
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
        # True where our own code calls the processor's parts, and cuts nothing off.
        self.takes_whole_sounds = config.model_type in PROCESSOR_CALLS
        self.tokenizer: Any = loaded.tokenizer if is_multimodal else loaded
        self.modalities = tuple(m for m in MODALITIES if self._has_modality(m))

    @property
    def fingerprint(self) -> str:
        """All that the processor does with an item, apart from its options."""
        if self._processor is None:
            return ""
        name = type(self._processor).__name__
        return f"{transformers.__version__}/{name}/{self._processor.to_json_string()}"

    @cached_property
    def option_names(self) -> frozenset[str]:
        """What the processor's parts may be told of media; empty if it doesn't say."""
        if self._processor is None:
            return frozenset()
        kinds: Any = getattr(type(self._processor), "valid_processor_kwargs", None)
        own = {} if kinds is None else kinds.__annotations__
        groups = [own.get(_OPTION_GROUPS[modality]) for modality in self.modalities]
        groups += [getattr(part, "valid_kwargs", None) for part in self._get_parts()]
        return frozenset(name for group in groups for name in getattr(group, "__annotations__", ()))

    def get_option_default(self, path: str) -> float | None:
        """A number among the processor's own settings, e.g. of `size.longest_edge`: the largest,
        if its parts have different ones.
        """
        name, _, key = path.partition(".")
        found = [getattr(part, name, None) for part in self._get_parts()]
        values = [getattr(value, key, None) if key else value for value in found]
        return max((v for v in values if isinstance(v, int | float)), default=None)

    def _get_parts(self) -> list[Any]:
        names = [name for parts in _PARTS.values() for name in parts]
        parts = [getattr(self._processor, name, None) for name in names]
        return [part for part in parts if part is not None]

    @property
    def video_processor(self) -> Any:
        """Transformers' own, which knows how many frames it wants; `None` if there is none."""
        return getattr(self._processor, "video_processor", None)

    @property
    def hf_processor(self) -> Any:
        """The model's own processor; `None` for a model of text alone."""
        return self._processor

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

    def make_trial_text(self, modality: str | None, texts: Sequence[str]) -> str:
        """Return a prompt with an item between each two texts.

        It is made by the chat template, where there is one: that has what stands around an item.
        """
        if modality is None:
            return "".join(texts)
        marker = self.get_marker(modality)
        content: list[dict[str, str]] = [{"type": "text", "text": texts[0]}]
        for text in texts[1:]:
            content += [{"type": modality}, {"type": "text", "text": text}]
        try:
            prompt: str = self._processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
            )
        except Exception:  # there is no template, or it wants something else
            return marker.join(texts)
        return prompt if prompt.count(marker) == len(texts) - 1 else marker.join(texts)

    def call_whole(
        self, text: str, modality: str | None, media: Sequence[object]
    ) -> Mapping[str, torch.Tensor]:
        """Return all that the model's own call takes, for a prompt with items of one modality."""
        if modality is None:
            return {"input_ids": torch.tensor([tokenize(self.tokenizer, text)[0]])}
        checked = [self.check_media(modality, item, {}) for item in media]
        items, metadata = [item for item, _ in checked], [known for _, known in checked]
        return call_whole(self._processor, text, modality, items, metadata, {})

    def check_media(
        self, modality: str, media: object, processor_kwargs: Mapping[str, object]
    ) -> tuple[object, Metadata | None]:
        """Media in process in a form that the processor understands."""
        return check_media(
            modality,
            media,
            sampling_rate=self.sampling_rate,
            is_scaled_already=processor_kwargs.get("do_rescale") is False,
            limits=self._limits,
        )

    def process_item(
        self,
        modality: str,
        media: object,
        processor_kwargs: Mapping[str, object],
        *,
        mm_hash: str = "",
    ) -> ProcessedItem:
        """A `RequestError` if it can't be done because of the item or of its options."""
        try:
            checked, metadata = self.check_media(modality, media, processor_kwargs)
            tensors, text = self._call(
                self._processor, modality, checked, metadata, processor_kwargs
            )
        except RequestError:
            raise
        except Exception as error:
            # Odd options make processors raise anything. Without options, an item that was checked
            # can't cause an error of these kinds: the fault is ours, and nobody else's.
            if isinstance(error, _FAULTS_OF_CODE) and not processor_kwargs:
                raise
            raise RequestError(f"it could not be processed: {str(error)[:300]}") from error
        layout = self._make_layout(modality, text)
        return ProcessedItem(modality=modality, mm_hash=mm_hash, kwargs=tensors, layout=layout)

    def count_item(
        self,
        modality: str,
        media: torch.Tensor,
        metadata: Metadata | None,
        processor_kwargs: Mapping[str, object],
    ) -> tuple[int, int]:
        """Return the number of embeddings, and of values in all tensors, that would be made of
        media on any device, also on the meta device. Raises whatever the processor raises.
        """
        tensors, text = self._call(self._processor, modality, media, metadata, processor_kwargs)
        tokens = self.tokenizer.convert_ids_to_tokens(list(self.get_token_ids(modality)))
        num_embeds = next((n for n in map(text.count, tokens) if n), 0)
        return num_embeds, sum(tensor.numel() for tensor in tensors.values())

    def check_layout(self, modality: str, layout: ItemLayout) -> None:
        """A `RequestError` for a layout that no item of this model can have."""
        if len(layout.text) > _MAX_CHARACTERS + _MAX_CHARACTERS_PER_EMBED * layout.num_embeds:
            raise RequestError(
                f"the layout of a {modality} has {len(layout.text)} characters of text, which is "
                f"too much for {layout.num_embeds} embeddings"
            )
        is_own = layout.token_id in self.get_token_ids(modality)
        num_embeds = tokenize_fragment(self.tokenizer, layout.text).count(layout.token_id)
        if not is_own or not 0 < num_embeds == layout.num_embeds:
            raise RequestError(
                f"the layout of a {modality} has {num_embeds} tokens {layout.token_id} in its "
                f"text, and says {layout.num_embeds}"
            )

    def make_plain_layout(self, modality: str, num_embeds: int) -> ItemLayout:
        """Of an item that is nothing but its embeddings in a prompt."""
        return self._make_layout(modality, self.get_marker(modality) * num_embeds)

    def _make_layout(self, modality: str, text: str) -> ItemLayout:
        token_ids = tokenize_fragment(self.tokenizer, text)
        for token_id in self.get_token_ids(modality):
            num_embeds = token_ids.count(token_id)
            if num_embeds:
                return ItemLayout(text=text, token_id=token_id, num_embeds=num_embeds)
        raise RequestError(f"this {modality} is too small: the model sees nothing of it")
