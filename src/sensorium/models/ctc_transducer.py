"""Runs speech models without a decoder of tokens: an encoder with a CTC head or a transducer.

A CTC head names a token or nothing ("blank") for each frame of the encoder. A transducer (RNN-T,
TDT) walks through the frames and emits tokens at some of them. Either way, the result for an audio
item is a small table instead of embeddings. The encoder cache keeps it, and a request ends in the
step in which its table is there.

The tables, in float32:
  CTC: for each frame, the likeliest token and its log-probability.
  Transducers: for each token, its id, log-probability, first frame and number of frames.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.auto.modeling_auto import MODEL_FOR_CTC_MAPPING_NAMES

from sensorium.layers.kv_layout import LayerSpec
from sensorium.models.hf_model import HfModel
from sensorium.models.long_context import ContextLimit
from sensorium.models.media_batches import check_num_embeds
from sensorium.models.seams.fusion import Fusion
from sensorium.types.model_kind import NO_DECODER
from sensorium.types.multimodal import MultiModalKwargsItem

logger = logging.getLogger(__name__)
PIECE_S = 30  # the longest audio that is encoded at once
MASK = "attention_mask"
# A request has one token that stands for nothing, and ends with another one.
CONTEXT = 2
NUM_COLUMNS = 4  # of the widest table
_TRANSDUCERS = ("ParakeetForRNNT", "ParakeetForTDT")
_LENGTH_STEPS = 4  # lengths in a batch differ by a factor below 2 ** (1 / this)
# The lengths of audio for a trial, in samples and in rows of features. They make odd and even
# numbers of frames, because a model may join two of them.
_TRIAL_SAMPLES = (6_000, 6_320, 6_640, 10_000)
_TRIAL_ROWS = (40, 47, 56, 80)
_MOST_DIFFERENCE = 1e-4  # of results with and without padding, relative, by rounding in float32
_FEATURE_SIZES = ("feature_projection_input_dim", "num_mel_bins", "input_dim")


def is_ctc_transducer(config: PretrainedConfig) -> bool:
    name = (config.architectures or [""])[0]
    return name in _TRANSDUCERS or name in MODEL_FOR_CTC_MAPPING_NAMES.values()


def is_transducer(config: PretrainedConfig) -> bool:
    return (config.architectures or [""])[0] in _TRANSDUCERS


def get_blank_id(config: PretrainedConfig) -> int:
    """Return the token that stands for a frame without a token."""
    blank = getattr(config, "blank_token_id", None)
    return int(config.pad_token_id if blank is None else blank)


def count_frames(model_class: Any, config: PretrainedConfig, num_inputs: int) -> int:
    """Return how many frames the encoder makes of `num_inputs` samples or spectrogram frames."""
    # The functions of the class for this need only the config of a model.
    model, lengths = SimpleNamespace(config=config), torch.tensor(num_inputs)
    if hasattr(model_class, "_get_subsampling_output_length"):
        return int(model_class._get_subsampling_output_length(model, lengths))
    return int(model_class._get_feat_extract_output_lengths(model, lengths))


class CtcTransducerModel(HfModel):
    """A speech model that finds all tokens of an audio item while encoding it.

    Of `HfModel`, only the methods for encoders and for building an engine can be called.
    """

    kind = NO_DECODER

    def __init__(self, model: PreTrainedModel) -> None:
        # The base class would look for a decoder, and none of its parts are needed here.
        self.model = model
        self.config = self.text_config = model.config
        self.own_attention_name = model.config._attn_implementation
        self.fusion = Fusion()
        self.long_after = None
        self.has_mrope = False
        self.vocab_size = int(model.config.vocab_size)
        self.blank_id = get_blank_id(model.config)
        self._input_name: str = model.main_input_name
        self._can_pad = self._probe_padding()

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def probe_layers(self) -> tuple[LayerSpec, ...]:
        """Return no layers: nothing is kept in a KV cache."""
        return ()

    def find_context_limit(self, _layers: Sequence[LayerSpec]) -> ContextLimit | None:
        return None

    def fuse(self) -> None:
        """Leave the model unchanged: the kernels are made for decoders."""

    def get_batch_key(self, item: MultiModalKwargsItem) -> Hashable:
        """Return a key that is equal for audio items that may be encoded together."""
        # Items of about the same length, or of exactly the same if padding would change results.
        size = item[self._input_name].shape[1]
        has_padding = self._can_pad and MASK in item
        return math.ceil(_LENGTH_STEPS * math.log2(size)) if has_padding else (size,)

    @torch.inference_mode()
    def _probe_padding(self) -> bool:
        """Return whether padding leaves results unchanged: some models ignore part of the mask."""
        sizes = _TRIAL_SAMPLES
        rows: tuple[int, ...] = ()
        if self._input_name != "input_values":
            encoder = getattr(self.config, "encoder_config", self.config)
            found = [getattr(encoder, name, None) for name in _FEATURE_SIZES]
            sizes, rows = _TRIAL_ROWS, tuple(size for size in found if size is not None)[:1]
        generator = torch.Generator().manual_seed(0)
        items = [
            {
                self._input_name: torch.randn(1, size, *rows, generator=generator),
                MASK: torch.ones(1, size, dtype=torch.bool),
            }
            for size in sizes
        ]
        try:
            alone = [self._run_encoder(self._pad([item]))[0].float() for item in items]
            together = self._run_encoder(self._pad(items)).float()
        except Exception:  # models raise all kinds of errors: encode equal lengths only
            logger.warning(
                "only audio of equal length is encoded together, which is slower: a trial with "
                "padding failed",
                exc_info=True,
            )
            return False
        # In doubt nothing is padded, which costs only time.
        most = max(_MOST_DIFFERENCE, 2 * torch.finfo(self.dtype).eps)
        pairs = zip(together, alone, strict=True)
        return all(
            bool((found[: len(own)] - own).square().mean() <= most**2 * own.square().mean())
            for found, own in pairs
        )

    def _run_encoder(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logits of a CTC model, or the encoded frames of a transducer."""
        inputs = self.send_batch(batch)
        if is_transducer(self.config):
            encoded: torch.Tensor = self.model.get_audio_features(**inputs).pooler_output
            return encoded
        logits: torch.Tensor = self.model(**inputs).logits
        return logits

    def encode(
        self, _modality: str, items: Sequence[MultiModalKwargsItem], num_embeds: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the table of each audio item (see the module), given their numbers of frames."""
        output = self._run_encoder(self._pad(items))
        check_num_embeds([min(output.shape[1], most) for most in num_embeds], num_embeds)
        if is_transducer(self.config):
            return self._transduce(output, num_embeds, list(map(self._count_steps, items)))
        scores = output.float()
        best, token_ids = scores.max(-1)
        table = torch.stack([token_ids.float(), best - scores.logsumexp(-1)], dim=-1)
        return [rows[:number] for rows, number in zip(table, num_embeds, strict=True)]

    def _pad(self, items: Sequence[MultiModalKwargsItem]) -> dict[str, torch.Tensor]:
        """Return the inputs of several items, each padded with zeros to the longest."""
        names = [name for name in (self._input_name, MASK) if name in items[0]]
        size = max(item[self._input_name].shape[1] for item in items)
        batch = {}
        for name in names:
            rows = [item[name] for item in items]
            padded = rows[0].new_zeros(len(rows), size, *rows[0].shape[2:])
            for place, row in zip(padded, rows, strict=True):
                place[: row.shape[1]] = row[0]
            batch[name] = padded
        return batch

    # ---- transducers

    def _count_steps(self, item: MultiModalKwargsItem) -> int:
        """Return the number of steps after which `generate` stops, even if frames are left.

        If the generation config sets no limit, there is room for `max_symbols_per_step` tokens in
        each frame, with frames of padding included. One of these tokens is the start token.
        """
        config = self.model.generation_config
        if config.max_new_tokens is not None:
            return int(config.max_new_tokens)
        most = config.max_length
        if most is None:
            num_rows = item[self._input_name].shape[1]
            most = count_frames(type(self.model), self.config, num_rows)
            most *= self.config.max_symbols_per_step
        return int(most) - 1

    def _transduce(
        self, encoded: torch.Tensor, num_frames: Sequence[int], num_steps: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the table of each item, found by a walk through its frames [items, frames, width].

        At each step the model names a token or nothing for the current frame, given the tokens
        before it, and how many frames to advance. An item ends after `num_frames` frames, or after
        `num_steps` steps. This is `generate` for items of different lengths, with the probabilities
        that `generate` does not return.
        """
        rows = torch.arange(len(encoded), device=encoded.device)
        ends, most_steps = torch.tensor([num_frames, num_steps], device=encoded.device)
        walk = _Walk(self.config, ends, most_steps)
        token_ids, cache = self._get_first_ids(rows), None
        while walk.has_frames_left:
            frames = encoded[rows, walk.frames.clamp(max=encoded.shape[1] - 1), None]
            output = self.model(
                encoder_outputs=BaseModelOutputWithPooling(pooler_output=frames),
                decoder_input_ids=token_ids[:, None],
                decoder_cache=cache,
                use_decoder_cache=True,
            )
            cache = output.decoder_cache
            token_ids = walk.take(output.logits[:, -1].float())
        return walk.make_tables()

    def _get_first_ids(self, rows: torch.Tensor) -> torch.Tensor:
        first = getattr(self.model.generation_config, "decoder_start_token_id", None)
        return torch.full_like(rows, self.blank_id if first is None else int(first))


class _Walk:
    """A transducer's walk through several items: its frame in each, and the tokens found so far."""

    def __init__(
        self, config: PretrainedConfig, ends: torch.Tensor, most_steps: torch.Tensor
    ) -> None:
        self.frames = torch.zeros_like(ends)
        self._ends = ends
        self._most_steps = most_steps  # a TDT may emit tokens without ever advancing
        self._is_within = ends > 0
        self._blank_id = get_blank_id(config)
        self._vocab_size = int(config.vocab_size)
        durations = getattr(config, "durations", None)
        # How many frames a TDT can advance. An RNN-T advances by one, after a blank or too many
        # symbols.
        self._durations = None if durations is None else torch.tensor(durations, device=ends.device)
        self._max_symbols = int(config.max_symbols_per_step)
        self._num_symbols = torch.zeros_like(self.frames)  # that an RNN-T has emitted at its frame
        self._found: list[torch.Tensor] = []  # for each step: [items, columns]
        self._is_kept: list[torch.Tensor] = []

    @property
    def has_frames_left(self) -> bool:
        return bool(self._is_within.any())

    def take(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose the tokens of a step, advance in each item, and return the tokens."""
        scores = logits[:, : self._vocab_size]
        best, token_ids = scores.max(-1)
        is_blank = token_ids == self._blank_id
        steps = self._get_steps(logits[:, self._vocab_size :], is_blank)
        columns = (token_ids, best - scores.logsumexp(-1), self.frames, steps)
        self._found.append(torch.stack([column.float() for column in columns], dim=-1))
        self._is_kept.append(self._is_within & ~is_blank)
        self.frames = self.frames + torch.where(self._is_within, steps, 0)
        self._is_within = (self.frames < self._ends) & (len(self._found) < self._most_steps)
        return token_ids

    def _get_steps(self, logits: torch.Tensor, is_blank: torch.Tensor) -> torch.Tensor:
        """Return how many frames to advance in each item, given the logits of the durations."""
        if self._durations is not None:
            steps = self._durations[logits.argmax(-1)]
            return torch.where(is_blank, steps.clamp(min=1), steps)
        self._num_symbols = torch.where(is_blank, 0, self._num_symbols + 1)
        advances = is_blank | (self._num_symbols >= self._max_symbols)
        self._num_symbols = torch.where(advances, 0, self._num_symbols)
        return advances.long()

    def make_tables(self) -> list[torch.Tensor]:
        """Return the table of each item: [tokens, columns]."""
        found, is_kept = torch.stack(self._found, dim=1), torch.stack(self._is_kept, dim=1)
        return [rows[kept] for rows, kept in zip(found, is_kept, strict=True)]
