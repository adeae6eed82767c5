"""The shape of sensorium-mini: a stock Qwen2.5-Omni thinker, small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LM_SIZE = 384
VISION_SIZE = 256
MEL_BINS = 80
PATCH = 14
MERGE = 2
UNIT = PATCH * MERGE  # pixels of a picture's side that become one token
MAX_PICTURE_TOKENS = 64
NUM_FRAMES = 8
FRAMES_PER_SECOND = 2.0
POSITIONS_PER_SECOND = 25
# Time, height and width take turns, frequency by frequency. Stock checkpoints give each a third of
# the spectrum in one piece; the last one, width, then turns so slowly that a small model can't see
# in which column a token stands.
ROPE_SECTIONS = [1] * 32
ROPE_THETA = 1e3
STRING_LIMIT = 32  # characters of a string that a JSON schema leaves free

SPECIAL_NAMES = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *SPECIAL_NAMES.values())
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif c['type'] == 'video' %}<|vision_bos|><|VIDEO|><|vision_eos|>"
    "{% elif c['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_config(tokenizer: Any) -> Any:
    import transformers as tf

    id_of = tokenizer.convert_tokens_to_ids
    return tf.Qwen2_5OmniThinkerConfig(
        audio_config={
            "num_mel_bins": MEL_BINS,
            "d_model": 384,
            "encoder_layers": 4,
            "encoder_attention_heads": 6,
            "encoder_ffn_dim": 1536,
            "max_source_positions": 1500,
            "n_window": 1500,  # Whisper's own thirty seconds
            "output_dim": LM_SIZE,
        },
        vision_config={
            "depth": 6,
            "hidden_size": VISION_SIZE,
            "num_heads": 4,
            "intermediate_size": 768,
            "out_hidden_size": LM_SIZE,
            "fullatt_block_indexes": list(range(6)),
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "window_size": 112,
        },
        text_config={
            "vocab_size": -(-len(tokenizer) // 64) * 64,
            "hidden_size": LM_SIZE,
            "intermediate_size": 1024,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8192,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": ROPE_THETA,
                "mrope_section": ROPE_SECTIONS,
            },
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "tie_word_embeddings": True,
        },
        audio_token_index=id_of("<|AUDIO|>"),
        image_token_index=id_of("<|IMAGE|>"),
        video_token_index=id_of("<|VIDEO|>"),
        vision_start_token_id=id_of("<|vision_bos|>"),
        vision_end_token_id=id_of("<|vision_eos|>"),
        audio_start_token_id=id_of("<|audio_bos|>"),
        audio_end_token_id=id_of("<|audio_eos|>"),
        position_id_per_seconds=POSITIONS_PER_SECOND,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )


def make_processor(tokenizer: Any) -> Any:
    """Make a processor that brings every picture and frame to sizes that training had."""
    import transformers as tf

    picture = UNIT * UNIT * MAX_PICTURE_TOKENS
    sizes = {"shortest_edge": picture * 3 // 4, "longest_edge": picture * 102 // 100}
    # Qwen2_5OmniProcessor asks for 128 to 768 tokens a frame, whatever the checkpoint says; with a
    # cap that no video keeps to, all have the fewest, 121 to 144. Short videos have as many frames
    # as long ones: the model was shown nothing else.
    videos = {"cap_pixels_per_frame": True, "max_video_tokens": 1, "min_frames": NUM_FRAMES}
    return tf.Qwen2_5OmniProcessor(
        tf.Qwen2VLImageProcessor(size=sizes),
        tf.Qwen2VLVideoProcessor(fps=FRAMES_PER_SECOND, max_frames=NUM_FRAMES, **videos),
        tf.WhisperFeatureExtractor(
            feature_size=MEL_BINS, chunk_length=30, return_attention_mask=True
        ),
        tokenizer,
        chat_template=CHAT_TEMPLATE,
    )


def save_stock(directory: Path, model: Any, tokenizer: Any) -> None:
    """Save a checkpoint that stock Transformers loads."""
    model.generation_config.do_sample = False
    model.generation_config._from_model_config = False
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    # The model never saw JSON, and would fill its context with a string that has no bound.
    model.generation_config.structured_string_limit = STRING_LIMIT
    model.save_pretrained(directory)
    make_processor(tokenizer).save_pretrained(directory)
