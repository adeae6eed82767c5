"""Makers of tiny models that recognise speech without a decoder: CTC heads and transducers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sensorium.multimodal.processing.ctc_transducer import load_parakeet_extractor
from tiny_models.building import rescale

_LETTERS = "abcdefghijklmnopqrstuvwxyz'"
_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
_NEVER = -20.0  # the bias of tokens that no trained model writes
_BLANK = 1.0  # that of the blank, which a trained model finds in most frames
_RNNT_BLANK = 5.0  # an RNN-T advances only by blanks


def _save(directory: Path, model: Any, *parts: Any) -> None:
    model.save_pretrained(directory)
    for part in parts:
        part.save_pretrained(directory)


@torch.no_grad()
def _balance(
    head: Any,
    logits: torch.Tensor,
    *,
    blank_id: int,
    never: tuple[int, ...],
    factor: float = 1.0,
    blank: float = _BLANK,
) -> None:
    """Make all tokens about equally likely, given the logits of some frames: [frames, tokens].

    Otherwise a random model finds the same token everywhere. `factor` widens what is left.
    """
    head.bias.copy_(factor * (head.bias - logits.mean(0)))
    head.weight.mul_(factor)
    head.bias[list(never)] = _NEVER
    head.bias[blank_id] += blank


def _make_noise() -> Any:
    return np.random.default_rng(0).normal(size=48_000).astype(np.float32)


@torch.no_grad()
def _finish(
    directory: Path,
    model: Any,
    head: Any,
    extractor: Any,
    tokenizer: Any,
    never: tuple[int, ...],
    factor: float = 1.0,
) -> None:
    inputs = extractor(_make_noise(), sampling_rate=16_000, return_tensors="pt")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched key_padding_mask")  # in WavLM
        logits = model.eval()(**inputs).logits[0]
    _balance(head, logits, blank_id=tokenizer.pad_token_id, never=never, factor=factor)
    _save(directory, model, extractor, tokenizer)


# ---- wav2vec2 and its relatives


def _make_letters() -> Any:
    """Make the tokenizer of all these models: a letter for each token, and a bar between words."""
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL, "|", *_LETTERS))}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "vocab.json"
        path.write_text(json.dumps(vocabulary))
        return tf.Wav2Vec2CTCTokenizer(str(path))


def _make_wave_model(
    directory: Path, name: str, *, has_mask: bool, seed: int, **changes: Any
) -> None:
    """Make a model that takes samples. Without a mask, its first norm is over the whole clip."""
    tokenizer = _make_letters()
    values = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "conv_dim": (16,) * 7,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
        "feat_extract_norm": "layer" if has_mask else "group",
        "do_stable_layer_norm": has_mask,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = getattr(tf, f"{name}Config")(**{**values, **changes})
    model = rescale(getattr(tf, f"{name}ForCTC")(config), seed=seed)
    extractor = tf.Wav2Vec2FeatureExtractor(
        feature_size=1, sampling_rate=16_000, do_normalize=True, return_attention_mask=has_mask
    )
    _finish(directory, model, model.lm_head, extractor, tokenizer, (1, 2, 3))


def make_wav2vec2(directory: Path) -> None:
    _make_wave_model(directory, "Wav2Vec2", has_mask=False, seed=1)


def make_wav2vec2_layer(directory: Path) -> None:
    """Make a wav2vec2 with norms over single frames, as the large ones have them."""
    _make_wave_model(directory, "Wav2Vec2", has_mask=True, seed=2)


def make_hubert(directory: Path) -> None:
    _make_wave_model(directory, "Hubert", has_mask=True, seed=3)


def make_wavlm(directory: Path) -> None:
    _make_wave_model(directory, "WavLM", has_mask=True, seed=4)


def make_data2vec_audio(directory: Path) -> None:
    _make_wave_model(directory, "Data2VecAudio", has_mask=True, seed=5, num_conv_pos_embeddings=2)


def make_unispeech(directory: Path) -> None:
    _make_wave_model(directory, "UniSpeech", has_mask=True, seed=10)


def make_unispeech_sat(directory: Path) -> None:
    _make_wave_model(directory, "UniSpeechSat", has_mask=True, seed=11)


def make_wav2vec2_conformer(directory: Path) -> None:
    _make_wave_model(
        directory, "Wav2Vec2Conformer", has_mask=True, seed=12, conv_depthwise_kernel_size=7
    )


def make_sew(directory: Path) -> None:
    _make_wave_model(directory, "SEW", has_mask=True, seed=15, conv_dim=(16,) * 13)


def make_wav2vec2_bert(directory: Path) -> None:
    tokenizer = _make_letters()
    config = tf.Wav2Vec2BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        feature_projection_input_dim=160,
        conv_depthwise_kernel_size=7,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = rescale(tf.Wav2Vec2BertForCTC(config), seed=6)
    extractor = tf.SeamlessM4TFeatureExtractor(
        feature_size=80, num_mel_bins=80, sampling_rate=16_000, stride=2, padding_value=1
    )
    _finish(directory, model, model.lm_head, extractor, tokenizer, (1, 2, 3))


# ---- Parakeet


def _make_pieces(*special: str) -> Any:
    """Make a tokenizer of word pieces, in which a bar at the bottom begins a word."""
    letters = [*_LETTERS, ".", ","]
    pieces = [*letters, *(f"▁{letter}" for letter in _LETTERS), "▁the", "▁qu", "ick", "er", "▁fo"]
    vocabulary = {token: index for index, token in enumerate(["<unk>", *pieces, *special])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tf.ParakeetTokenizer(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        extra_special_tokens=[token for token in special if token != "<pad>"],
    )


def _make_parakeet_encoder() -> tf.ParakeetEncoderConfig:
    return tf.ParakeetEncoderConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        subsampling_conv_channels=8,
        num_mel_bins=80,
        conv_kernel_size=5,
        attention_bias=False,
        convolution_bias=False,
        scale_input=False,
    )


def make_parakeet_ctc(directory: Path) -> None:
    tokenizer = _make_pieces("<pad>")
    config = tf.ParakeetCTCConfig(
        vocab_size=len(tokenizer),
        encoder_config=_make_parakeet_encoder(),
        pad_token_id=tokenizer.pad_token_id,
    )
    model = rescale(tf.ParakeetForCTC(config), seed=7)
    extractor = load_parakeet_extractor()()
    _finish(directory, model, model.ctc_head, extractor, tokenizer, (0,), factor=6.0)


def _make_transducer(directory: Path, name: str, *, seed: int, blank: float) -> None:
    tokenizer = _make_pieces("<pad>", "<blank>")
    blank_id = tokenizer.convert_tokens_to_ids("<blank>")
    config = getattr(tf, f"Parakeet{name}Config")(
        vocab_size=len(tokenizer),
        encoder_config=_make_parakeet_encoder(),
        decoder_hidden_size=32,
        num_decoder_layers=2,
        pad_token_id=tokenizer.pad_token_id,
        blank_token_id=blank_id,
    )
    model = rescale(getattr(tf, f"ParakeetFor{name}")(config), seed=seed)
    extractor = load_parakeet_extractor()()
    never = (0, tokenizer.pad_token_id)
    logits = _join_randomly(model, extractor)
    _balance(model.joint.head, logits, blank_id=blank_id, never=never, factor=6.0, blank=blank)
    model.generation_config.decoder_start_token_id = blank_id
    # `generate` would take the duration with the highest logit for a token.
    durations = range(len(tokenizer), logits.shape[-1])
    model.generation_config.suppress_tokens = list(durations) or None
    _save(directory, model, extractor, tokenizer)


@torch.no_grad()
def _join_randomly(model: Any, extractor: Any) -> torch.Tensor:
    """Return the logits of a transducer for frames of noise after random tokens."""
    inputs = extractor(_make_noise(), sampling_rate=16_000, return_tensors="pt")
    encoded = model.eval().get_audio_features(**inputs).pooler_output
    token_ids = torch.randint(model.config.vocab_size, (1, encoded.shape[1]))
    hidden = model.decoder(token_ids)
    logits: torch.Tensor = model.joint(decoder_hidden_states=hidden, encoder_hidden_states=encoded)
    return logits[0]


def make_parakeet_tdt(directory: Path) -> None:
    _make_transducer(directory, "TDT", seed=8, blank=_BLANK)


def make_parakeet_rnnt(directory: Path) -> None:
    _make_transducer(directory, "RNNT", seed=9, blank=_RNNT_BLANK)
