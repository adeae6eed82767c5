"""Makes a model of sensorium-mini's architecture and size with random weights, offline.

    python scripts/make_stand_in.py build/stand-in
    python -m training.pack build/stand-in build/packed-stand-in

It answers at random. What ships the real one (packing, expansion, start) can be tried with it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers as tf

from sensorium.models.torchvision_shim import ensure_torchvision

ensure_torchvision()

from tiny_models.building import CHATML_TOKENS, chatml, make_tokenizer, rescale, save  # noqa: E402
from tiny_models.qwen import make_sizes  # noqa: E402

_NAMES = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
_TEXT = {
    "vocab_size": 2048,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
}
_VISION = {
    "depth": 6,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_heads": 4,
    "patch_size": 14,
    "out_hidden_size": 384,
    "fullatt_block_indexes": [0, 1, 2, 3, 4, 5],
}
_AUDIO = {
    "num_mel_bins": 80,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "d_model": 384,
    "max_source_positions": 1500,
    "n_window": 1500,
    "output_dim": 384,
}


def make_stand_in(directory: Path, *, is_small: bool = False) -> None:
    """`is_small`: one layer of each kind, for tests."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer([*CHATML_TOKENS, *_NAMES.values()], extra=_NAMES)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in _NAMES.items()}
    special = {
        f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "eos")
    }
    depth = {"num_hidden_layers": 1} if is_small else {}
    config = tf.Qwen2_5OmniThinkerConfig(
        audio_config={**_AUDIO, **({"encoder_layers": 1} if is_small else {})},
        vision_config={
            **_VISION,
            **({"depth": 1, "fullatt_block_indexes": [0]} if is_small else {}),
        },
        text_config={**_TEXT, **special, **depth, "bos_token_id": None},
        audio_token_index=ids["audio_token"],
        image_token_index=ids["image_token"],
        video_token_index=ids["video_token"],
        vision_start_token_id=ids["vision_bos_token"],
        vision_end_token_id=ids["vision_eos_token"],
        audio_start_token_id=ids["audio_bos_token"],
        audio_end_token_id=ids["audio_eos_token"],
        position_id_per_seconds=25,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    processor = tf.Qwen2_5OmniProcessor(
        tf.Qwen2VLImageProcessor(size=make_sizes(28)),
        tf.Qwen2VLVideoProcessor(size=make_sizes(28)),
        tf.WhisperFeatureExtractor(feature_size=80, chunk_length=30, return_attention_mask=True),
        tokenizer,
        chat_template=chatml(
            "<|vision_bos|><|IMAGE|><|vision_eos|>",
            "<|vision_bos|><|VIDEO|><|vision_eos|>",
            "<|audio_bos|><|AUDIO|><|audio_eos|>",
        ),
    )
    save(directory, rescale(tf.Qwen2_5OmniThinkerForConditionalGeneration(config)), processor)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a random model as large as sensorium-mini.")
    parser.add_argument("directory", type=Path, help="where to put it")
    arguments = parser.parse_args()
    tf.utils.logging.disable_progress_bar()
    make_stand_in(arguments.directory)


if __name__ == "__main__":
    main()
