"""Makes tiny random models of unlisted types. The engine can run only some of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers as tf

from tiny_models.building import (
    CHATML_TOKENS,
    HALF,
    chatml,
    gemma_template,
    make_tokenizer,
    rescale,
    save,
    text_values,
    tower_values,
)


def make_vipllava(directory: Path) -> str:
    """Make a model for images of an unlisted type that needs no code of its own."""
    tokenizer = make_tokenizer([*CHATML_TOKENS, "<image>"], extra={"image_token": "<image>"})
    config = tf.VipLlavaConfig(
        vision_config={"model_type": "clip_vision_model", **tower_values()},
        text_config={"model_type": "llama", **text_values(tokenizer)},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layers=[-2, -1],
        image_seq_length=16,
    )
    size = {"height": 56, "width": 56}
    processor = tf.LlavaProcessor(
        tf.CLIPImageProcessor(size=size, crop_size=size, image_mean=HALF, image_std=HALF),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chatml("<image>"),
    )
    save(directory, rescale(tf.VipLlavaForConditionalGeneration(config)), processor)
    return str(directory)


def make_vibevoice_asr(directory: Path) -> str:
    """Make a model that adds random numbers to its audio input, so that no two runs are equal."""
    tokens = ["<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"]
    tokenizer = make_tokenizer([*CHATML_TOKENS, *tokens])
    id_of = tokenizer.convert_tokens_to_ids
    encoder = {
        "model_type": "vibevoice_acoustic_tokenizer_encoder",
        "num_filters": 4,
        "hidden_size": 16,
        "depths": (1,) * 7,
        "layer_scale_init_value": 0.5,
    }
    config = tf.VibeVoiceAsrConfig(
        acoustic_tokenizer_encoder_config=dict(encoder),
        semantic_tokenizer_encoder_config=dict(encoder),
        text_config={"model_type": "qwen2", **text_values(tokenizer)},
        audio_token_id=id_of("<|box_start|>"),
        audio_bos_token_id=id_of("<|object_ref_start|>"),
        audio_eos_token_id=id_of("<|object_ref_end|>"),
    )
    processor = tf.VibeVoiceAsrProcessor(
        tf.VibeVoiceAcousticTokenizerFeatureExtractor(),
        tokenizer,
        chat_template=chatml(audio="<|object_ref_start|><|box_start|><|object_ref_end|>"),
    )
    save(directory, rescale(tf.VibeVoiceAsrForConditionalGeneration(config)), processor)
    return str(directory)


def make_gemma4_unified(directory: Path) -> str:
    """Make a model that attends to pictures in both directions, as Gemma 4 does."""
    names = {
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "audio_token": "<|audio|>",
        "video_token": "<|video|>",
    }
    base = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
    tokenizer = make_tokenizer(
        [*base, *names.values()], bos="<bos>", eos="<end_of_turn>", pad="<pad>", extra=names
    )
    sizes = {"patch_size": 4, "pooling_kernel_size": 3}
    text: dict[str, Any] = text_values(
        tokenizer,
        head_dim=16,
        global_head_dim=32,
        num_hidden_layers=4,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention"] * 2,
        use_bidirectional_attention="vision",
    )
    config = tf.Gemma4UnifiedConfig(
        text_config=text,
        vision_config={"mm_embed_dim": 64, "mm_posemb_size": 64, "output_proj_dims": 64, **sizes},
        audio_config={"audio_embed_dim": 640},
        image_token_id=tokenizer.image_token_id,
        audio_token_id=tokenizer.audio_token_id,
        video_token_id=tokenizer.video_token_id,
        boi_token_id=tokenizer.boi_token_id,
        eoi_token_id=tokenizer.eoi_token_id,
        boa_token_id=tokenizer.boa_token_id,
        eoa_token_index=tokenizer.eoa_token_id,
    )
    processor = tf.Gemma4UnifiedProcessor(
        tf.Gemma4UnifiedAudioFeatureExtractor(),
        tf.Gemma4UnifiedImageProcessor(max_soft_tokens=70, **sizes),
        tokenizer,
        tf.Gemma4UnifiedVideoProcessor(max_soft_tokens=70, **sizes),
        image_seq_length=70,
        chat_template=gemma_template("<|image|>", "<|video|>", "<|audio|>"),
    )
    model = rescale(tf.Gemma4UnifiedForConditionalGeneration(config), embedding_std=0.02)
    save(directory, model, processor)
    return str(directory)


def make_paligemma(directory: Path) -> str:
    """Make a model that attends to its prompt in both directions, or not, as its attention likes.

    The embeddings, which are also its head, are so small that its answers are far from certain.
    Then its log-probabilities differ by as little as those of a model that rounds coarsely.
    """
    tokenizer = make_tokenizer(
        ["<pad>", "<eos>", "<bos>", "<image>", *(f"<loc{index:04}>" for index in range(4))],
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        extra={"image_token": "<image>"},
    )
    image_processor = tf.SiglipImageProcessor(size={"height": 56, "width": 56})
    image_processor.image_seq_length = 16
    processor = tf.PaliGemmaProcessor(image_processor, tokenizer)
    text = text_values(tokenizer, head_dim=16, vocab_size=len(tokenizer) + 1100)
    config = tf.PaliGemmaConfig(
        text_config={"model_type": "gemma", **text},
        vision_config={"model_type": "siglip_vision_model", **tower_values(vision_use_head=False)},
        image_token_id=processor.image_token_id,
        projection_dim=64,
    )
    model = rescale(tf.PaliGemmaForConditionalGeneration(config), embedding_std=0.03)
    save(directory, model, processor)
    return str(directory)


def make_granite_speech(directory: Path) -> str:
    """Make a model with an encoder that does not mask padded audio. It needs torchaudio."""
    tokenizer = make_tokenizer([*CHATML_TOKENS, "<|audio|>"], extra={"audio_token": "<|audio|>"})
    text = text_values(tokenizer)
    config = tf.GraniteSpeechConfig(
        encoder_config={
            "num_layers": 2,
            "hidden_dim": 32,
            "feedforward_mult": 2,
            "num_heads": 2,
            "output_dim": 42,
            "context_size": 20,
            "max_pos_emb": 32,
            "conv_kernel_size": 5,
        },
        projector_config={
            "model_type": "blip_2_qformer",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "encoder_hidden_size": 32,
            "cross_attention_frequency": 1,
        },
        text_config={"model_type": "granite", **text},
        audio_token_index=tokenizer.audio_token_id,
        has_lora_adapter=False,
        tie_word_embeddings=False,  # else a random model echoes
    )
    processor = tf.GraniteSpeechProcessor(
        tf.GraniteSpeechFeatureExtractor(), tokenizer, chat_template=chatml(audio="<|audio|>")
    )
    save(directory, rescale(tf.GraniteSpeechForConditionalGeneration(config)), processor)
    return str(directory)


def make_phi4_multimodal(directory: Path) -> str:
    """Make a model of pictures and audio. Its config has other names for their tokens than most."""
    tokenizer = make_tokenizer([*CHATML_TOKENS, "<|image|>", "<|audio|>"])
    id_of = tokenizer.convert_tokens_to_ids
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
    }
    config = tf.Phi4MultimodalConfig(
        **text_values(tokenizer),
        vision_config={
            **sizes,
            "num_hidden_layers": 2,
            "image_size": 56,
            "crop_size": 56,
            "image_token_id": id_of("<|image|>"),
        },
        audio_config={
            **sizes,
            "num_blocks": 2,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
            "audio_token_id": id_of("<|audio|>"),
        },
    )
    save(directory, rescale(tf.Phi4MultimodalForCausalLM(config)), tokenizer)
    return str(directory)
