"""What every recipe needs: a tokenizer, sensitive weights, chat templates, a folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_CORPUS = [
    "the quick brown fox jumps over the lazy dog. what is in this picture? "
    "describe the image\n\n please\n",
    "user assistant system hello world audio transcribe this sound, "
    "count the objects and name colors 0123456789",
] * 20
_CONTENT = (
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}%IMAGE%{% elif c['type'] == 'video' %}%VIDEO%"
    "{% elif c['type'] == 'audio' %}%AUDIO%"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}"
)
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n" + _CONTENT + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m['role'] }}\n"
    + _CONTENT
    + "<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HALF = [0.5] * 3


def chatml(image: str = "", video: str = "", audio: str = "") -> str:
    return _fill(_CHATML, image, video, audio)


def gemma_template(image: str = "", video: str = "", audio: str = "") -> str:
    return _fill(_GEMMA, image, video, audio)


def _fill(template: str, image: str, video: str, audio: str) -> str:
    filled = template.replace("%IMAGE%", image)
    return filled.replace("%VIDEO%", video).replace("%AUDIO%", audio)


def make_tokenizer(
    special: list[str],
    *,
    eos: str = "<|im_end|>",
    pad: str = "<|endoftext|>",
    bos: str | None = None,
    extra: dict[str, str] | None = None,
) -> Any:
    """Make a tokenizer; `extra` maps attributes such as `image_token` to special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max(420, 380 + len(special)),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    names = {"extra_special_tokens": extra} if extra else {}
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad, **names
    )


@torch.no_grad()
def rescale(model: Any, *, embedding_std: float = 1.0, seed: int = 0) -> Any:
    """Give matrices a standard deviation of 1/sqrt(inputs).

    Signals then neither vanish nor saturate.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "position_embedding_table" in name:
            continue  # Gemma 4 has ones there, which its random pictures need
        if parameter.ndim >= 2:
            is_embedding = "embed_tokens" in name or "pos_embed" in name
            std = embedding_std if is_embedding else 1 / math.sqrt(parameter[0].numel())
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        elif name.endswith("bias"):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.tie_weights()
    return model


def save(directory: Path, model: Any, processor: Any, **generation: Any) -> None:
    model.generation_config.do_sample = False
    # Otherwise `generate` builds it anew from config.json and loses what was set here.
    model.generation_config._from_model_config = False
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)


def text_values(tokenizer: Any, **changes: Any) -> dict[str, Any]:
    """The decoder that most of the models have."""
    values = {
        "vocab_size": len(tokenizer) + 5,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    return {**values, **changes}


def tower_values(**changes: Any) -> dict[str, Any]:
    """The vision tower that most of the models have."""
    values = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    }
    return {**values, **changes}
