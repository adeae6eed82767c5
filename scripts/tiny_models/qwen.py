"""The Qwen-VL families: pictures of any size, positions in three dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers as tf

from tiny_models.building import (
    CHATML_TOKENS,
    HALF,
    chatml,
    make_tokenizer,
    rescale,
    save,
    text_values,
)

_TOKENS = [
    *CHATML_TOKENS,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
_TEMPLATE = chatml(
    "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
)
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
}
WINDOWED_VISION = {**_VISION, "window_size": 56, "fullatt_block_indexes": [1]}


def make_sizes(side: int) -> dict[str, int]:
    """From 2 to 64 embeddings, one for each square of `side` pixels."""
    return {"shortest_edge": side * side * 2, "longest_edge": side * side * 64}


def _get_ids(tokenizer: Any) -> dict[str, int]:
    id_of = tokenizer.convert_tokens_to_ids
    return {
        "image_token_id": id_of("<|image_pad|>"),
        "video_token_id": id_of("<|video_pad|>"),
        "vision_start_token_id": id_of("<|vision_start|>"),
        "vision_end_token_id": id_of("<|vision_end|>"),
    }


def make_qwen2_vl(directory: Path) -> None:
    tokenizer = make_tokenizer(_TOKENS)
    config = tf.Qwen2VLConfig(
        text_config=text_values(tokenizer, rope_parameters=_ROPE),
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 64,
            "num_heads": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "mlp_ratio": 2,
        },
        **_get_ids(tokenizer),
    )
    processor = tf.Qwen2VLProcessor(
        tf.Qwen2VLImageProcessor(size=make_sizes(28)),
        tokenizer,
        tf.Qwen2VLVideoProcessor(size=make_sizes(28)),
        chat_template=_TEMPLATE,
    )
    save(directory, rescale(tf.Qwen2VLForConditionalGeneration(config)), processor)


def make_qwen2_5_vl(directory: Path) -> None:
    tokenizer = make_tokenizer(_TOKENS)
    config = tf.Qwen2_5_VLConfig(
        text_config=text_values(tokenizer, rope_parameters=_ROPE),
        vision_config=WINDOWED_VISION,
        **_get_ids(tokenizer),
    )
    processor = tf.Qwen2_5_VLProcessor(
        tf.Qwen2VLImageProcessor(size=make_sizes(28)),
        tokenizer,
        tf.Qwen2VLVideoProcessor(size=make_sizes(28)),
        chat_template=_TEMPLATE,
    )
    save(directory, rescale(tf.Qwen2_5_VLForConditionalGeneration(config)), processor)


_DEEPSTACK_VISION = {
    **_VISION,
    "depth": 4,
    "patch_size": 16,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1, 2],
}


def make_qwen3_vl(directory: Path) -> None:
    tokenizer = make_tokenizer(_TOKENS)
    config = tf.Qwen3VLConfig(
        text_config=_make_qwen3_text(tokenizer),
        vision_config=_DEEPSTACK_VISION,
        **_get_ids(tokenizer),
    )
    model = rescale(tf.Qwen3VLForConditionalGeneration(config))
    save(directory, model, _make_qwen3_processor(tokenizer))


def make_qwen3_vl_moe(directory: Path) -> None:
    tokenizer = make_tokenizer(_TOKENS)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    config = tf.Qwen3VLMoeConfig(
        text_config=_make_qwen3_text(tokenizer, **experts),
        vision_config=_DEEPSTACK_VISION,
        **_get_ids(tokenizer),
    )
    model = rescale(tf.Qwen3VLMoeForConditionalGeneration(config))
    save(directory, model, _make_qwen3_processor(tokenizer))


def _make_qwen3_text(tokenizer: Any, **changes: Any) -> dict[str, Any]:
    rope = {**_ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    return text_values(tokenizer, head_dim=16, num_hidden_layers=4, rope_parameters=rope, **changes)


def _make_qwen3_processor(tokenizer: Any) -> Any:
    return tf.Qwen3VLProcessor(
        tf.Qwen2VLImageProcessor(
            size=make_sizes(32), patch_size=16, image_mean=HALF, image_std=HALF
        ),
        tokenizer,
        tf.Qwen3VLVideoProcessor(size=make_sizes(32)),
        chat_template=_TEMPLATE,
    )


def make_glm4v(directory: Path) -> None:
    names = {"image_token": "<|image|>", "video_token": "<|video|>"}
    borders = ["<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"]
    tokenizer = make_tokenizer([*CHATML_TOKENS, *names.values(), *borders], extra=names)
    id_of = tokenizer.convert_tokens_to_ids
    config = tf.Glm4vConfig(
        text_config=text_values(tokenizer, rope_parameters={**_ROPE, "mrope_section": [2, 3, 3]}),
        vision_config={**_VISION, "num_heads": 2, "image_size": 112},
        image_token_id=id_of("<|image|>"),
        video_token_id=id_of("<|video|>"),
        image_start_token_id=id_of("<|begin_of_image|>"),
        image_end_token_id=id_of("<|end_of_image|>"),
        video_start_token_id=id_of("<|begin_of_video|>"),
        video_end_token_id=id_of("<|end_of_video|>"),
    )
    template = chatml(
        "<|begin_of_image|><|image|><|end_of_image|>", "<|begin_of_video|><|video|><|end_of_video|>"
    )
    processor = tf.Glm4vProcessor(
        tf.Glm4vImageProcessor(size=make_sizes(28)),
        tokenizer,
        tf.Glm4vVideoProcessor(size=make_sizes(28)),
        chat_template=template,
    )
    save(directory, rescale(tf.Glm4vForConditionalGeneration(config)), processor)
