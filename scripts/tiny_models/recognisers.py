"""Makers of tiny models that recognise speech without a decoder: CTC heads and transducers."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sensorium.multimodal.processing.recognisers import load_parakeet_extractor
from tiny_models.building import rescale

_LETTERS = "abcdefghijklmnopqrstuvwxyz'"
_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
_NEVER = -1e4  # the bias of tokens that no trained model writes
_BLANK = 1.0  # that of the blank, which a trained model hears in most frames


def _save(directory: Path, model: Any, *parts: Any) -> None:
    model.save_pretrained(directory)
    for part in parts:
        part.save_pretrained(directory)


@torch.no_grad()
def _favour(bias: torch.Tensor, blank_id: int, never: tuple[int, ...]) -> None:
    bias[list(never)] = _NEVER
    bias[blank_id] = _BLANK


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
    """Make a model that takes samples. Without a mask, its first norm is over the whole sound."""
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
    _favour(model.lm_head.bias, tokenizer.pad_token_id, (1, 2, 3))
    extractor = tf.Wav2Vec2FeatureExtractor(
        feature_size=1, sampling_rate=16_000, do_normalize=True, return_attention_mask=has_mask
    )
    _save(directory, model, extractor, tokenizer)


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
    _make_wave_model(
        directory, "Data2VecAudio", has_mask=True, seed=5, num_conv_pos_embeddings=2
    )


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
    _favour(model.lm_head.bias, tokenizer.pad_token_id, (1, 2, 3))
    extractor = tf.SeamlessM4TFeatureExtractor(
        feature_size=80, num_mel_bins=80, sampling_rate=16_000, stride=2, padding_value=1
    )
    _save(directory, model, extractor, tokenizer)


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
    _favour(model.ctc_head.bias, tokenizer.pad_token_id, (0,))
    _save(directory, model, load_parakeet_extractor()(), tokenizer)


def _make_transducer(directory: Path, name: str, seed: int) -> None:
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
    _favour(model.joint.head.bias, blank_id, (0, tokenizer.pad_token_id))
    model.generation_config.decoder_start_token_id = blank_id
    _save(directory, model, load_parakeet_extractor()(), tokenizer)


def make_parakeet_tdt(directory: Path) -> None:
    _make_transducer(directory, "TDT", seed=8)


def make_parakeet_rnnt(directory: Path) -> None:
    _make_transducer(directory, "RNNT", seed=9)
