"""Makes tiny random models with tokenizer, processor and chat template, offline.

    python scripts/make_tiny_models.py build/tiny-models [family ...]

Weights are scaled so that the models are sensitive to their inputs: with the usual initialisation a
random model only echoes, and a wrong mask, position or embedding would not change its tokens.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sensorium.models.torchvision_shim import ensure_torchvision

ensure_torchvision()

_CORPUS = [
    "the quick brown fox jumps over the lazy dog. what is in this picture? "
    "describe the image\n\n please\n",
    "user assistant system hello world audio transcribe this sound, "
    "count the objects and name colors 0123456789",
] * 20
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}%IMAGE%{% elif c['type'] == 'video' %}%VIDEO%"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<start_of_image>"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def make_tokenizer(
    special: list[str],
    *,
    eos: str,
    pad: str,
    bos: str | None = None,
    extra: dict[str, str] | None = None,
) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
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
    """Matrices get a standard deviation of 1/sqrt(inputs), so that signals neither vanish nor
    saturate.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
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


def make_llama(directory: Path) -> None:
    tokenizer = make_tokenizer(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], eos="<|im_end|>", pad="<|endoftext|>"
    )
    tokenizer.chat_template = _CHATML.replace("%IMAGE%", "").replace("%VIDEO%", "")
    config = tf.LlamaConfig(**text_values(tokenizer, tie_word_embeddings=False))
    save(directory, rescale(tf.LlamaForCausalLM(config)), tokenizer)


def make_llava(directory: Path) -> None:
    tokenizer = make_tokenizer(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>"],
        eos="<|im_end|>",
        pad="<|endoftext|>",
        extra={"image_token": "<image>"},
    )
    config = tf.LlavaConfig(
        vision_config=tf.CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=2,
            image_size=56,
            patch_size=14,
            projection_dim=32,
        ),
        text_config=tf.LlamaConfig(**text_values(tokenizer)),
        image_token_id=tokenizer.image_token_id,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    processor = tf.LlavaProcessor(
        tf.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_CHATML.replace("%IMAGE%", "<image>\n"),
    )
    save(directory, rescale(tf.LlavaForConditionalGeneration(config)), processor)


def make_qwen2_5_vl(directory: Path) -> None:
    tokenizer = make_tokenizer(
        [
            "<|endoftext|>",
            "<|im_start|>",
            "<|im_end|>",
            "<|vision_start|>",
            "<|vision_end|>",
            "<|vision_pad|>",
            "<|image_pad|>",
            "<|video_pad|>",
        ],
        eos="<|im_end|>",
        pad="<|endoftext|>",
    )
    id_of = tokenizer.convert_tokens_to_ids
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = tf.Qwen2_5_VLConfig(
        text_config=text_values(tokenizer, rope_parameters=rope),
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "window_size": 56,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
        },
        image_token_id=id_of("<|image_pad|>"),
        video_token_id=id_of("<|video_pad|>"),
        vision_start_token_id=id_of("<|vision_start|>"),
        vision_end_token_id=id_of("<|vision_end|>"),
    )
    size = {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 64}
    template = _CHATML.replace("%IMAGE%", "<|vision_start|><|image_pad|><|vision_end|>")
    processor = tf.Qwen2_5_VLProcessor(
        tf.Qwen2VLImageProcessor(size=size),
        tokenizer,
        tf.Qwen2VLVideoProcessor(size=size),
        chat_template=template.replace("%VIDEO%", "<|vision_start|><|video_pad|><|vision_end|>"),
    )
    save(directory, rescale(tf.Qwen2_5_VLForConditionalGeneration(config)), processor)


def make_gemma3(directory: Path) -> None:
    tokenizer = make_tokenizer(
        [
            "<pad>",
            "<eos>",
            "<bos>",
            "<start_of_turn>",
            "<end_of_turn>",
            "<start_of_image>",
            "<end_of_image>",
            "<image_soft_token>",
        ],
        bos="<bos>",
        eos="<end_of_turn>",
        pad="<pad>",
        extra={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
    )
    config = tf.Gemma3Config(
        text_config=tf.Gemma3TextConfig(
            **text_values(
                tokenizer,
                head_dim=16,
                num_hidden_layers=4,
                sliding_window=12,
                query_pre_attn_scalar=16,
                layer_types=["sliding_attention", "full_attention"] * 2,
            )
        ),
        vision_config=tf.SiglipVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=112,
            patch_size=14,
            vision_use_head=False,
        ),
        mm_tokens_per_image=16,
        boi_token_index=tokenizer.boi_token_id,
        eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
    )
    half = [0.5] * 3
    processor = tf.Gemma3Processor(
        tf.Gemma3ImageProcessor(
            size={"height": 112, "width": 112}, image_mean=half, image_std=half
        ),
        tokenizer,
        image_seq_length=16,
        chat_template=_GEMMA,
    )
    # Gemma multiplies embeddings by sqrt(hidden).
    model = rescale(tf.Gemma3ForConditionalGeneration(config), embedding_std=0.02)
    save(directory, model, processor, eos_token_id=[tokenizer.eos_token_id, 1])


FAMILIES: dict[str, Callable[[Path], None]] = {
    "llama": make_llama,
    "llava": make_llava,
    "qwen2_5_vl": make_qwen2_5_vl,
    "gemma3": make_gemma3,
}


def make_family(name: str, parent: Path) -> Path:
    """The directory of a family's model below `parent`, made if it isn't there."""
    directory = parent / name
    if not (directory / "config.json").exists():
        torch.manual_seed(0)
        unfinished = parent / f".{name}.unfinished"
        FAMILIES[name](unfinished)
        unfinished.rename(directory)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description="Make tiny random models.")
    parser.add_argument("directory", type=Path, help="where to put them, one folder each")
    parser.add_argument(
        "families", nargs="*", metavar="family", help=f"default: all of {', '.join(FAMILIES)}"
    )
    arguments = parser.parse_args()
    for name in arguments.families or FAMILIES:
        if name not in FAMILIES:
            parser.error(f"unknown family {name!r}: choose from {', '.join(FAMILIES)}")
        print(f"{name:12s} {make_family(name, arguments.directory)}", flush=True)


if __name__ == "__main__":
    main()
