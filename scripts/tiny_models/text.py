"""Decoders for text alone."""

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

PHI3_BORDER = 48  # the most tokens of a sequence that is computed with short factors


def make_llama(directory: Path) -> None:
    tokenizer = make_tokenizer(CHATML_TOKENS)
    tokenizer.chat_template = chatml()
    config = tf.LlamaConfig(**text_values(tokenizer, tie_word_embeddings=False))
    save(directory, rescale(tf.LlamaForCausalLM(config)), tokenizer)


def make_phi3(directory: Path) -> None:
    """Short and long rotary factors that differ much, and a border that requests cross."""
    tokenizer = make_tokenizer(CHATML_TOKENS)
    tokenizer.chat_template = chatml()
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1, 4.0],
        "long_factor": [1.0, 1.7, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0],
    }
    config = tf.Phi3Config(
        **text_values(tokenizer, original_max_position_embeddings=PHI3_BORDER, rope_parameters=rope)
    )
    save(directory, rescale(tf.Phi3ForCausalLM(config)), tokenizer)
