"""LLaVA and its relatives, Idefics, and others that turn pictures into tiles of equal size."""

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
    tower_values,
)

_TILES = [[56 * a, 56 * b] for a in (1, 2, 3) for b in (1, 2, 3)]
_SQUARE = {"height": 56, "width": 56}


def _make_clip_tower() -> Any:
    return tf.CLIPVisionConfig(**tower_values(num_hidden_layers=3, projection_dim=32))


def make_llava(directory: Path) -> None:
    tokenizer = make_tokenizer([*CHATML_TOKENS, "<image>"], extra={"image_token": "<image>"})
    config = tf.LlavaConfig(
        vision_config=_make_clip_tower(),
        text_config=tf.LlamaConfig(**text_values(tokenizer)),
        image_token_id=tokenizer.image_token_id,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    processor = tf.LlavaProcessor(
        tf.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size=_SQUARE),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chatml("<image>\n"),
    )
    save(directory, rescale(tf.LlavaForConditionalGeneration(config)), processor)


def make_llava_next(directory: Path) -> None:
    tokenizer = make_tokenizer([*CHATML_TOKENS, "<image>"], extra={"image_token": "<image>"})
    config = tf.LlavaNextConfig(
        vision_config=_make_clip_tower(),
        text_config=tf.LlamaConfig(**text_values(tokenizer)),
        image_token_id=tokenizer.image_token_id,
        image_grid_pinpoints=_TILES,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    processor = tf.LlavaNextProcessor(
        tf.LlavaNextImageProcessor(
            size={"shortest_edge": 56}, crop_size=_SQUARE, image_grid_pinpoints=_TILES
        ),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chatml("<image>\n"),
    )
    save(directory, rescale(tf.LlavaNextForConditionalGeneration(config)), processor)


def make_llava_onevision(directory: Path) -> None:
    tokenizer = make_tokenizer(
        [*CHATML_TOKENS, "<image>", "<video>"],
        extra={"image_token": "<image>", "video_token": "<video>"},
    )
    config = tf.LlavaOnevisionConfig(
        vision_config=tf.SiglipVisionConfig(**tower_values(vision_use_head=False)),
        text_config=tf.Qwen2Config(**text_values(tokenizer)),
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.video_token_id,
        image_grid_pinpoints=_TILES,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
    )
    processor = tf.LlavaOnevisionProcessor(
        tf.LlavaOnevisionImageProcessor(size=_SQUARE, image_grid_pinpoints=_TILES),
        tokenizer,
        tf.LlavaOnevisionVideoProcessor(size=_SQUARE),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=chatml("<image>\n", "<video>\n"),
    )
    save(directory, rescale(tf.LlavaOnevisionForConditionalGeneration(config)), processor)


def _make_idefics_tokenizer() -> Any:
    names = {
        "fake_image_token": "<fake_token_around_image>",
        "image_token": "<image>",
        "end_of_utterance_token": "<end_of_utterance>",
        "global_image_token": "<global-img>",
    }
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    return make_tokenizer([*CHATML_TOKENS, *names.values(), "<video>", *tiles], extra=names)


def _idefics_values(tokenizer: Any) -> dict[str, Any]:
    return {
        "vision_config": tower_values(),
        "text_config": {"model_type": "llama", **text_values(tokenizer)},
        "image_token_id": tokenizer.image_token_id,
        "scale_factor": 2,
        "pad_token_id": tokenizer.pad_token_id,
    }


_IDEFICS_SIZES = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}


def make_idefics3(directory: Path) -> None:
    tokenizer = _make_idefics_tokenizer()
    processor = tf.Idefics3Processor(
        tf.Idefics3ImageProcessor(**_IDEFICS_SIZES),
        tokenizer,
        image_seq_len=4,
        chat_template=chatml("<image>"),
    )
    config = tf.Idefics3Config(**_idefics_values(tokenizer))
    save(directory, rescale(tf.Idefics3ForConditionalGeneration(config)), processor)


def make_smolvlm(directory: Path) -> None:
    tokenizer = _make_idefics_tokenizer()
    processor = tf.SmolVLMProcessor(
        tf.SmolVLMImageProcessor(**_IDEFICS_SIZES),
        tokenizer,
        tf.SmolVLMVideoProcessor(**_IDEFICS_SIZES),
        image_seq_len=4,
        chat_template=chatml("<image>", "<video>"),
    )
    config = tf.SmolVLMConfig(**_idefics_values(tokenizer))
    save(directory, rescale(tf.SmolVLMForConditionalGeneration(config)), processor)


def make_internvl(directory: Path) -> None:
    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = make_tokenizer([*CHATML_TOKENS, *names.values()], extra=names)
    config = tf.InternVLConfig(
        vision_config={**tower_values(image_size=[56, 56], patch_size=[14, 14])},
        text_config=tf.Qwen2Config(**text_values(tokenizer)),
        image_token_id=tokenizer.context_image_token_id,
        downsample_ratio=0.5,
        tie_word_embeddings=False,  # a tied model only echoes
    )
    processor = tf.InternVLProcessor(
        tf.GotOcr2ImageProcessor(size=_SQUARE, max_patches=4, image_mean=HALF, image_std=HALF),
        tokenizer,
        tf.InternVLVideoProcessor(size=_SQUARE),
        image_seq_length=4,
        chat_template=chatml("<IMG_CONTEXT>\n", "<video>\n"),
    )
    save(directory, rescale(tf.InternVLForConditionalGeneration(config)), processor)


def _cohere_values(tokenizer: Any) -> dict[str, Any]:
    """A decoder with windows and a scale for logits, which the models around it don't apply."""
    text = text_values(
        tokenizer,
        num_hidden_layers=4,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention"] * 2,
        logit_scale=0.25,
    )
    return {
        "vision_config": tf.SiglipVisionConfig(**tower_values(vision_use_head=False)),
        "text_config": tf.Cohere2Config(**text),
        "downsample_factor": 2,
        "tie_word_embeddings": False,  # a tied model only echoes
    }


def make_aya_vision(directory: Path) -> None:
    names = ["<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>"]
    tokenizer = make_tokenizer([*CHATML_TOKENS, *names, "TILE", "TILE_GLOBAL"])
    config = tf.AyaVisionConfig(
        **_cohere_values(tokenizer),
        image_token_index=tokenizer.convert_tokens_to_ids("<|IMG_PATCH|>"),
    )
    processor = tf.AyaVisionProcessor(
        tf.GotOcr2ImageProcessor(size=_SQUARE, max_patches=4, image_mean=HALF, image_std=HALF),
        tokenizer,
        patch_size=14,
        img_size=56,
        downsample_factor=2,
        chat_template=chatml("<image>"),
    )
    save(directory, rescale(tf.AyaVisionForConditionalGeneration(config)), processor)


def make_cohere2_vision(directory: Path) -> None:
    names = {
        "boi_token": "<|START_OF_IMG|>",
        "eoi_token": "<|END_OF_IMG|>",
        "image_token": "<|IMG_PATCH|>",
        "img_line_break_token": "<|IMG_LINE_BREAK|>",
    }
    tokenizer = make_tokenizer([*CHATML_TOKENS, *names.values()], extra=names)
    config = tf.Cohere2VisionConfig(
        **_cohere_values(tokenizer),
        alignment_intermediate_size=64,
        image_token_id=tokenizer.image_token_id,
    )
    processor = tf.Cohere2VisionProcessor(
        tf.Cohere2VisionImageProcessor(
            size=_SQUARE, max_patches=4, patch_size=2, image_mean=HALF, image_std=HALF
        ),
        tokenizer,
        chat_template=chatml("<|IMG_PATCH|>"),
    )
    save(directory, rescale(tf.Cohere2VisionForConditionalGeneration(config)), processor)
