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


def make_llama(directory: Path) -> None:
    tokenizer = make_tokenizer(CHATML_TOKENS)
    tokenizer.chat_template = chatml()
    config = tf.LlamaConfig(**text_values(tokenizer, tie_word_embeddings=False))
    save(directory, rescale(tf.LlamaForCausalLM(config)), tokenizer)
