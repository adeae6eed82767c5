"""Gemma 3 and 4: sliding windows, spans attended in both directions, layers that share keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as tf

from tiny_models.building import (
    HALF,
    gemma_template,
    make_tokenizer,
    rescale,
    save,
    text_values,
    tower_values,
)

_TOKENS = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
# Gemma multiplies embeddings by sqrt(hidden).
_EMBEDDING_STD = 0.02


def _make_tokenizer(names: dict[str, str], *others: str) -> Any:
    tokens = [*_TOKENS, *names.values(), *others]
    return make_tokenizer(tokens, bos="<bos>", eos="<end_of_turn>", pad="<pad>", extra=names)


def make_gemma3(directory: Path) -> None:
    tokenizer = _make_tokenizer(
        {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        }
    )
    text = text_values(
        tokenizer,
        head_dim=16,
        num_hidden_layers=4,
        sliding_window=12,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    config = tf.Gemma3Config(
        text_config=tf.Gemma3TextConfig(**text),
        vision_config=tf.SiglipVisionConfig(**tower_values(image_size=112, vision_use_head=False)),
        mm_tokens_per_image=16,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
    )
    size = {"height": 112, "width": 112}
    processor = tf.Gemma3Processor(
        tf.Gemma3ImageProcessor(size=size, image_mean=HALF, image_std=HALF),
        tokenizer,
        image_seq_length=16,
        chat_template=gemma_template("<start_of_image>"),
    )
    model = rescale(tf.Gemma3ForConditionalGeneration(config), embedding_std=_EMBEDDING_STD)
    save(directory, model, processor, eos_token_id=[tokenizer.eos_token_id, 1])


def make_gemma4(directory: Path) -> None:
    """Vision in both directions, as in the large checkpoints."""
    _make_gemma4(directory, use_bidirectional_attention="vision")


def make_gemma4_causal(directory: Path) -> None:
    """Causal everywhere, as in the small checkpoints."""
    _make_gemma4(directory, use_bidirectional_attention=None)


def _make_gemma4(directory: Path, **changes: Any) -> None:
    tokenizer = _make_tokenizer(
        {
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
            "audio_token": "<|audio|>",
        },
        "<|video|>",
    )
    sizes = {"patch_size": 4, "pooling_kernel_size": 3}
    config = tf.Gemma4Config(
        text_config=_make_gemma4_text(tokenizer, **changes),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "position_embedding_size": 64,
            **sizes,
        },
        audio_config={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "subsampling_conv_channels": [128, 4],  # the first is the number of mel bins
            "output_proj_dims": 48,
        },
        image_token_id=tokenizer.image_token_id,
        audio_token_id=tokenizer.audio_token_id,
        video_token_id=tokenizer.convert_tokens_to_ids("<|video|>"),
        boi_token_id=tokenizer.boi_token_id,
        eoi_token_id=tokenizer.eoi_token_id,
        boa_token_id=tokenizer.boa_token_id,
        eoa_token_index=tokenizer.eoa_token_id,
    )
    model = rescale(tf.Gemma4ForConditionalGeneration(config), embedding_std=_EMBEDDING_STD)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.7)
    processor = tf.Gemma4Processor(
        tf.Gemma4AudioFeatureExtractor(),
        tf.Gemma4ImageProcessor(max_soft_tokens=70, **sizes),
        tokenizer,
        tf.Gemma4VideoProcessor(max_soft_tokens=70, **sizes),
        image_seq_length=70,
        chat_template=gemma_template("<|image|>", "<|video|>", "<|audio|>"),
    )
    save(directory, model, processor, eos_token_id=[tokenizer.eos_token_id, 1])


def _make_gemma4_text(tokenizer: Any, **changes: Any) -> Any:
    return tf.Gemma4TextConfig(
        **text_values(
            tokenizer,
            head_dim=16,
            global_head_dim=32,
            num_hidden_layers=6,
            sliding_window=12,
            num_kv_shared_layers=2,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=len(tokenizer) + 5,
            final_logit_softcapping=30.0,
            **changes,
        )
    )
