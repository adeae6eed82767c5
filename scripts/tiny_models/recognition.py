"""Makers of tiny models that chat about nothing but what is said in a recording."""

from __future__ import annotations

from pathlib import Path

import transformers as tf

from tiny_models.building import (
    CHATML_TOKENS,
    chatml,
    make_tokenizer,
    rescale,
    save,
    text_values,
)


def make_glmasr(directory: Path) -> None:
    tokenizer = make_tokenizer([*CHATML_TOKENS, "<|pad|>"])
    config = tf.GlmAsrConfig(
        audio_config={
            "num_mel_bins": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 128,
            "hidden_size": 32,
            "max_position_embeddings": 200,
        },
        text_config={"model_type": "llama", **text_values(tokenizer)},
        audio_token_id=tokenizer.convert_tokens_to_ids("<|pad|>"),
        tie_word_embeddings=False,  # else a random model echoes
    )
    processor = tf.GlmAsrProcessor(
        tf.WhisperFeatureExtractor(feature_size=80, chunk_length=4),  # 4 s instead of 30
        tokenizer,
        chat_template=chatml(audio="<|pad|>"),
    )
    save(directory, rescale(tf.GlmAsrForConditionalGeneration(config)), processor)


def make_qwen3_asr(directory: Path) -> None:
    names = {
        "audio_token": "<|audio_pad|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    }
    tokenizer = make_tokenizer([*CHATML_TOKENS, *names.values()], extra=names)
    tokenizer.add_tokens(["<asr_text>"])
    config = tf.Qwen3ASRConfig(
        audio_config={
            "num_mel_bins": 80,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "d_model": 32,
            "output_dim": 64,
            "downsample_hidden_size": 16,
        },
        text_config={
            "model_type": "qwen3",
            "head_dim": 16,
            "tie_word_embeddings": False,
            **text_values(tokenizer),
        },
        audio_token_id=tokenizer.convert_tokens_to_ids("<|audio_pad|>"),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    processor = tf.Qwen3ASRProcessor(
        tf.Qwen3ASRFeatureExtractor(feature_size=80),
        tokenizer,
        chat_template=chatml(audio="<|audio_start|><|audio_pad|><|audio_end|>"),
    )
    save(directory, rescale(tf.Qwen3ASRForConditionalGeneration(config)), processor)
