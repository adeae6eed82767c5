"""Runs the model's own Hugging Face processor, with one media item in each call.

The result is the tensors that the encoder takes, and the layout: the text that stands for the item
in an expanded prompt. An item's result must not depend on other items, so that it can be cached.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import sensorium.models  # noqa: F401  (makes torchvision importable, before Transformers' processors)

# isort: split
import torch
import transformers
from transformers import AutoProcessor, AutoTokenizer, PretrainedConfig

from sensorium.checkpoints.first_look import check_files
from sensorium.models.families import find_model_class
from sensorium.models.loading import get_model_class
from sensorium.multimodal.media import MediaLimits
from sensorium.multimodal.processing.audio import AudioProcessor
from sensorium.multimodal.processing.checks import Metadata, check_media
from sensorium.multimodal.processing.ctc_transducer import (
    CtcTransducerParts,
    CtcTransducerProcessor,
)
from sensorium.multimodal.processing.streaming_audio import StreamingAudioProcessor
from sensorium.types.errors import ModelError, RequestError
from sensorium.types.model_kind import CROSS, NO_DECODER, STREAMING, ModelKind
from sensorium.types.multimodal import MODALITIES, ItemLayout, MultiModalKwargsItem, ProcessedItem

# Returns the token that a character belongs to; `None` if the tokenizer dropped it.
FindToken = Callable[[int], int | None]
# The audio processors of the kinds of models that have audio outside their prompt.
_AUDIO_PROCESSORS: dict[ModelKind, type[AudioProcessor]] = {
    CROSS: AudioProcessor,
    NO_DECODER: CtcTransducerProcessor,
    STREAMING: StreamingAudioProcessor,
}


def tokenize(
    tokenizer: Any, text: str, *, add_special_tokens: bool = True
) -> tuple[list[int], FindToken]:
    """Return a text's token ids, and a function from a character's index to its token's index."""
    if getattr(tokenizer, "is_fast", False):
        # Masks are not needed. Making their lists element by element would hold Python's lock.
        encoding = tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        return list(encoding["input_ids"]), encoding.char_to_token
    return _tokenize_in_pieces(tokenizer, text)


def tokenize_fragment(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text, without special tokens at its start or end."""
    if getattr(tokenizer, "is_fast", False):
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return [token_id for _, ids in _split(tokenizer, text) for token_id in ids]


def _tokenize_in_pieces(tokenizer: Any, text: str) -> tuple[list[int], FindToken]:
    """Tokenize a text with a tokenizer that would read control tokens as plain text (Mistral's).

    The text is split at its control tokens. The returned function is exact only for these; for a
    character of a piece between them it gives the first token of that piece.
    """
    token_ids: list[int] = []
    if not text.startswith(tokenizer.bos_token):
        token_ids.append(tokenizer.bos_token_id)
    starts, tokens = [], []
    for start, ids in _split(tokenizer, text):
        starts.append(start)
        tokens.append(len(token_ids))
        token_ids.extend(ids)
    return token_ids, lambda character: tokens[bisect_right(starts, character) - 1]


def _split(tokenizer: Any, text: str) -> list[tuple[int, list[int]]]:
    """Split a text at control tokens; return each piece's first character and token ids."""
    pattern, id_of = _get_control_tokens(tokenizer)
    pieces = []
    start = 0
    for piece in pattern.split(text):
        if piece in id_of:
            pieces.append((start, [id_of[piece]]))
        elif piece:
            pieces.append((start, list(tokenizer.encode(piece, add_special_tokens=False))))
        start += len(piece)
    return pieces


@lru_cache(maxsize=8)
def _get_control_tokens(tokenizer: Any) -> tuple[re.Pattern[str], dict[str, int]]:
    tokens = tokenizer.all_special_tokens
    id_of = dict(zip(tokens, tokenizer.convert_tokens_to_ids(tokens), strict=True))
    return re.compile(f"({'|'.join(map(re.escape, tokens))})"), id_of


# The keys under which a processor returns data about the text. All others belong to the item.
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
_OPTION_GROUPS = {"image": "images_kwargs", "video": "videos_kwargs", "audio": "audio_kwargs"}
# Bounds on the text of a layout, which consists of names of tokens and what comes between them.
# Longer texts are refused before they are tokenised.
_MAX_CHARACTERS = 2**12
_MAX_CHARACTERS_PER_EMBED = 2**8
_FAULTS_OF_CODE = (TypeError, AttributeError, NameError, ImportError, AssertionError)
_FRAMES_PER_EMBED = 8  # of Voxtral: two by the encoder's convolution, four by its projector
ProcessorResult = tuple[MultiModalKwargsItem, str]  # tensors, and what a marker becomes in a prompt


def call_voxtral(
    processor: Any, audio: object, processor_kwargs: Mapping[str, object]
) -> ProcessorResult:
    """Return the tensors of audio for Voxtral, and its text in a prompt.

    Voxtral's own processor takes only whole conversations, so this calls its parts. Audio is padded
    to whole windows of the encoder, and each window becomes the same number of embeddings. Raise
    `RequestError` if there are any options.
    """
    if processor_kwargs:
        raise RequestError(
            f"Voxtral's processor takes no options, but was given: {', '.join(processor_kwargs)}"
        )
    extractor = processor.feature_extractor
    features = extractor(
        audio,
        sampling_rate=extractor.sampling_rate,
        padding=True,
        truncation=False,
        pad_to_multiple_of=extractor.n_samples,
        return_tensors="pt",
    )["input_features"]
    windows = features.reshape(extractor.feature_size, -1, extractor.nb_max_frames).transpose(0, 1)
    num_embeds = len(windows) * extractor.nb_max_frames // _FRAMES_PER_EMBED
    return {"input_features": windows.contiguous()}, processor.audio_token * num_embeds


# Model type -> a function that processes audio in place of the model's own processor.
PROCESSOR_CALLS: dict[str, Callable[[Any, object, Mapping[str, object]], ProcessorResult]] = {
    "voxtral": call_voxtral
}


def _get_tensors(output: Mapping[str, object]) -> MultiModalKwargsItem:
    """Return the encoder's tensors in a processor's output; lists of numbers become tensors."""
    tensors = {}
    for name, value in output.items():
        if name in _TEXT_KEYS:
            continue
        if isinstance(value, list) and value and isinstance(value[0], int | float):
            value = torch.tensor(value)
        if isinstance(value, torch.Tensor):
            tensors[name] = value
    return tensors


class MultiModalProcessor:
    """The tokenizer of a model, and its Hugging Face processor unless it is text-only.

    It processes one media item at a time. Calls are not thread-safe.
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
        self.kind = find_model_class(config).kind
        audios = _AUDIO_PROCESSORS.get(self.kind)
        is_multimodal = audios is not None or any(i is not None for i in self._token_ids.values())
        kind: Any = AutoProcessor if is_multimodal else AutoTokenizer
        kind = CtcTransducerParts if self.kind.decoder == "none" else kind
        check_files(model, needs_processor=is_multimodal)
        try:
            loaded: Any = kind.from_pretrained(model, trust_remote_code=trust_remote_code)
        except Exception as error:  # Transformers raises errors of many kinds
            raise ModelError(f"no processor can be loaded from {model!r}: {error}") from error
        self.hf_processor: Any = loaded if is_multimodal else None
        # Our function in place of the processor, if the model needs one. It cuts no audio off.
        self._call_own = PROCESSOR_CALLS.get(config.model_type)
        self.tokenizer: Any = loaded.tokenizer if is_multimodal else loaded
        # For models that have audio outside their prompt, where no marker stands for it.
        self.outside_audio: AudioProcessor | None = None
        if audios is not None:
            model_class = get_model_class(model, config, trust_remote_code=trust_remote_code)
            self.outside_audio = audios(model_class, config, loaded)
        self.takes_whole_audio = self._call_own is not None or audios is not None
        self.modalities = tuple(m for m in MODALITIES if self._has_modality(m))

    @property
    def streaming_audio(self) -> StreamingAudioProcessor | None:
        """Return the processor of audio that may still be arriving, if the model takes any."""
        audio = self.outside_audio
        return audio if isinstance(audio, StreamingAudioProcessor) else None

    @property
    def fingerprint(self) -> str:
        """Return a text that changes whenever the processor's results for an item may change."""
        if self.hf_processor is None:
            return ""
        name = type(self.hf_processor).__name__
        return f"{transformers.__version__}/{name}/{self.hf_processor.to_json_string()}"

    @cached_property
    def option_names(self) -> frozenset[str]:
        """Return the processor's options for media; empty if it does not declare them."""
        if self.hf_processor is None:
            return frozenset()
        kinds: Any = getattr(type(self.hf_processor), "valid_processor_kwargs", None)
        own = {} if kinds is None else kinds.__annotations__
        groups = [own.get(_OPTION_GROUPS[modality]) for modality in self.modalities]
        groups += [getattr(part, "valid_kwargs", None) for part in self._get_parts(*MODALITIES)]
        return frozenset(name for group in groups for name in getattr(group, "__annotations__", ()))

    def get_option_default(self, path: str) -> float | None:
        """Return a number from the processor's own settings, or `None` if it has none of this name.

        `path` is a name such as `size.longest_edge`. If parts of the processor have different
        values, the largest one is returned.
        """
        name, _, key = path.partition(".")
        found = [getattr(part, name, None) for part in self._get_parts(*MODALITIES)]
        values = [getattr(value, key, None) if key else value for value in found]
        return max((v for v in values if isinstance(v, int | float)), default=None)

    def _get_parts(self, *modalities: str) -> list[Any]:
        names = [name for modality in modalities for name in _PARTS[modality]]
        parts = [getattr(self.hf_processor, name, None) for name in names]
        return [part for part in parts if part is not None]

    @property
    def video_processor(self) -> Any:
        """Return the part of the Transformers processor that handles videos, or `None`."""
        return getattr(self.hf_processor, "video_processor", None)

    def _has_modality(self, modality: str) -> bool:
        if self.outside_audio is not None:
            return modality == "audio"
        has_marker = getattr(self.hf_processor, f"{modality}_token", None) is not None
        return has_marker and bool(self._get_parts(modality) and self.get_token_ids(modality))

    @property
    def markers(self) -> dict[str, str]:
        """Return the marker of each modality that has one, such as `<image>`."""
        modalities = self.modalities if self.outside_audio is None else ()
        return {modality: self.get_marker(modality) for modality in modalities}

    def get_marker(self, modality: str) -> str:
        return str(getattr(self.hf_processor, f"{modality}_token"))

    def get_token_ids(self, modality: str) -> tuple[int, ...]:
        """Return the ids of the placeholder tokens that encoder outputs replace.

        For a video they include the token of images, because some models treat frames as images.
        """
        names = ("video", "image") if modality == "video" else (modality,)
        ids = [self._token_ids[name] for name in names]
        return tuple(int(token_id) for token_id in ids if token_id is not None)

    @property
    def sampling_rate(self) -> int | None:
        """Return the sampling rate in Hz that the model needs, or `None` if it takes no audio."""
        return next((int(part.sampling_rate) for part in self._get_parts("audio")), None)

    def make_trial_text(self, modality: str | None, texts: Sequence[str]) -> str:
        """Return a prompt for trials: the texts, with a media item's marker between each two.

        With the modality `None` the texts are only joined. The chat template writes the prompt if
        it can, because it adds the tokens that belong around an item.
        """
        if modality is None:
            return "".join(texts)
        marker = self.get_marker(modality)
        content: list[dict[str, str]] = [{"type": "text", "text": texts[0]}]
        for text in texts[1:]:
            content += [{"type": modality}, {"type": "text", "text": text}]
        try:
            prompt: str = self.hf_processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
            )
        except Exception:  # there is no template, or it can't render this message
            return marker.join(texts)
        return prompt if prompt.count(marker) == len(texts) - 1 else marker.join(texts)

    def call_whole(
        self, text: str, modality: str | None, media: Sequence[object]
    ) -> Mapping[str, torch.Tensor]:
        """Return all inputs of the model for a prompt with several media items of one modality.

        This is the plain call of Transformers' processor for trials. If `modality` is `None`, only
        the text is tokenized.
        """
        if modality is None:
            return {"input_ids": torch.tensor([tokenize(self.tokenizer, text)[0]])}
        checked = [self.check_media(modality, item, {}) for item in media]
        items, metadata = [item for item, _ in checked], [known for _, known in checked]
        return self._call_hf(text, modality, items, metadata, {})

    def _call_hf(
        self,
        text: str,
        modality: str,
        media: Sequence[object],
        metadata: Sequence[Mapping[str, object] | None],
        processor_kwargs: Mapping[str, object],
    ) -> Mapping[str, Any]:
        """Return the processor's output for a prompt with one marker for each media item."""
        options = dict(processor_kwargs)
        if modality == "audio":
            options.setdefault("sampling_rate", self.sampling_rate)
        if modality == "video":
            options.setdefault("do_sample_frames", False)  # all given frames are used
            if None not in metadata:
                options["video_metadata"] = [[dict(entry or {}) for entry in metadata]]
        items = [list(media)] if modality == "video" else list(media)
        output: Mapping[str, Any] = self.hf_processor(
            text=[text], return_tensors="pt", **{_ARGUMENTS[modality]: items}, **options
        )
        return output

    def _call(
        self,
        modality: str,
        media: object,
        metadata: Mapping[str, object] | None,
        processor_kwargs: Mapping[str, object],
    ) -> ProcessorResult:
        """Process one media item, and return its tensors and the text that replaces its marker."""
        if self._call_own is not None:
            return self._call_own(self.hf_processor, media, processor_kwargs)
        options = {**processor_kwargs, "return_text_replacement_offsets": True}
        output = self._call_hf(self.get_marker(modality), modality, [media], [metadata], options)
        return _get_tensors(output), self._get_replacement(modality, output)

    def _get_replacement(self, modality: str, output: Mapping[str, Any]) -> str:
        """Return the text that replaces the marker of a media item in a prompt.

        `output` is the processor's, for a prompt that is only the marker. If the processor does not
        return this text, it is derived from the token ids, which must be repetitions of the marker.
        Raise `ModelError` if they are not, and `RequestError` if there are none.
        """
        if "text_replacement_offsets" in output:
            return str(output["text_replacement_offsets"][0][0]["replacement"])
        marker = self.get_marker(modality)
        expanded = output["input_ids"][0].tolist()
        if not expanded:
            raise RequestError(
                f"this {modality} is too short or too small: the processor makes no tokens of it"
            )
        if set(expanded) != {self.tokenizer.convert_tokens_to_ids(marker)}:
            kind = type(self.hf_processor).__name__
            raise ModelError(
                f"{kind} does not return the text that replaces the marker of {modality} in prompts"
            )
        return marker * len(expanded)

    def check_media(
        self, modality: str, media: object, processor_kwargs: Mapping[str, object]
    ) -> tuple[object, Metadata | None]:
        """Return checked media in a form for the processor, and a video's metadata or `None`."""
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
        """Process a decoded item, or raise `RequestError` if it or its options are at fault."""
        try:
            checked, metadata = self.check_media(modality, media, processor_kwargs)
            tensors, layout = self._process(modality, checked, metadata, processor_kwargs)
        except RequestError:
            raise
        except Exception as error:
            # Odd options make processors raise errors of any kind. Without options, errors of these
            # kinds are bugs, because the item itself was checked.
            if isinstance(error, _FAULTS_OF_CODE) and not processor_kwargs:
                raise
            raise RequestError(f"the media could not be processed: {str(error)[:300]}") from error
        return ProcessedItem(modality=modality, mm_hash=mm_hash, kwargs=tensors, layout=layout)

    def _process(
        self,
        modality: str,
        media: object,
        metadata: Mapping[str, object] | None,
        processor_kwargs: Mapping[str, object],
    ) -> tuple[MultiModalKwargsItem, ItemLayout]:
        if self.outside_audio is None:
            tensors, text = self._call(modality, media, metadata, processor_kwargs)
            return tensors, self._make_layout(modality, text)
        if processor_kwargs:
            names = ", ".join(processor_kwargs)
            raise RequestError(f"this model's processor takes no options, but was given: {names}")
        return self.outside_audio.process(media)  # type: ignore[arg-type]

    def count_item(
        self,
        modality: str,
        media: torch.Tensor,
        metadata: Metadata | None,
        processor_kwargs: Mapping[str, object],
    ) -> tuple[int, int]:
        """Return how many embeddings an item becomes, and how many values its tensors have.

        `media` may be on PyTorch's meta device. All errors of the processor are raised unchanged.
        """
        tensors, text = self._call(modality, media, metadata, processor_kwargs)
        tokens = self.tokenizer.convert_ids_to_tokens(list(self.get_token_ids(modality)))
        num_embeds = next((n for n in map(text.count, tokens) if n), 0)
        return num_embeds, sum(tensor.numel() for tensor in tensors.values())

    def check_layout(self, modality: str, layout: ItemLayout) -> None:
        """Raise `RequestError` if no item of this modality can have this layout."""
        if self.outside_audio is not None:
            self.outside_audio.check_layout(layout)
            return
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
                f"text, but num_embeds is {layout.num_embeds}"
            )

    def make_plain_layout(self, modality: str, num_embeds: int) -> ItemLayout:
        """Return the layout of an item that appears in a prompt as placeholder tokens alone."""
        return self._make_layout(modality, self.get_marker(modality) * num_embeds)

    def _make_layout(self, modality: str, text: str) -> ItemLayout:
        token_ids = tokenize_fragment(self.tokenizer, text)
        for token_id in self.get_token_ids(modality):
            num_embeds = token_ids.count(token_id)
            if num_embeds:
                return ItemLayout(text=text, token_id=token_id, num_embeds=num_embeds)
        raise RequestError(f"this {modality} is too small: it becomes no embeddings of the model")
