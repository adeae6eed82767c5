"""Makers of tiny models that take audio."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers as tf

from tiny_models.building import (
    CHATML_TOKENS,
    chatml,
    make_tokenizer,
    rescale,
    save,
    text_values,
)
from tiny_models.qwen import WINDOWED_VISION, make_sizes

_WHISPER = {
    "num_mel_bins": 80,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "d_model": 32,
}
_AUDIO_TOKENS = ["<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"]
_AUDIO_MARKER = "<|audio_bos|><|AUDIO|><|audio_eos|>"


def make_qwen2_audio(directory: Path) -> None:
    tokenizer = make_tokenizer([*CHATML_TOKENS, *_AUDIO_TOKENS])
    config = tf.Qwen2AudioConfig(
        audio_config={**_WHISPER, "max_source_positions": 150},
        text_config={"model_type": "qwen2", **text_values(tokenizer)},
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    processor = tf.Qwen2AudioProcessor(
        tf.WhisperFeatureExtractor(feature_size=80, chunk_length=3),  # 3 s instead of 30
        tokenizer,
        chat_template=chatml(audio=_AUDIO_MARKER + "\n"),
    )
    save(directory, rescale(tf.Qwen2AudioForConditionalGeneration(config)), processor)


def make_audioflamingo3(directory: Path) -> None:
    tokenizer = make_tokenizer([*CHATML_TOKENS, "<sound>"])
    config = tf.AudioFlamingo3Config(
        audio_config={
            "num_mel_bins": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "hidden_size": 32,
            "max_source_positions": 150,
        },
        text_config={"model_type": "qwen2", **text_values(tokenizer)},
        audio_token_id=tokenizer.convert_tokens_to_ids("<sound>"),
    )
    processor = tf.AudioFlamingo3Processor(
        tf.WhisperFeatureExtractor(feature_size=80, chunk_length=3),
        tokenizer,
        chat_template=chatml(audio="<sound>"),
    )
    save(directory, rescale(tf.AudioFlamingo3ForConditionalGeneration(config)), processor)


def make_qwen2_5_omni(directory: Path) -> None:
    names = {
        "image_token": "<|IMAGE|>",
        "audio_token": "<|AUDIO|>",
        "video_token": "<|VIDEO|>",
        "vision_bos_token": "<|vision_bos|>",
        "vision_eos_token": "<|vision_eos|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
    }
    tokenizer = make_tokenizer([*CHATML_TOKENS, *names.values()], extra=names)
    id_of = tokenizer.convert_tokens_to_ids
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = tf.Qwen2_5OmniThinkerConfig(
        audio_config={**_WHISPER, "max_source_positions": 1500, "n_window": 20, "output_dim": 64},
        vision_config=WINDOWED_VISION,
        text_config=text_values(tokenizer, rope_parameters=rope),
        audio_token_index=id_of("<|AUDIO|>"),
        image_token_index=id_of("<|IMAGE|>"),
        video_token_index=id_of("<|VIDEO|>"),
        vision_start_token_id=id_of("<|vision_bos|>"),
        vision_end_token_id=id_of("<|vision_eos|>"),
        audio_start_token_id=id_of("<|audio_bos|>"),
        audio_end_token_id=id_of("<|audio_eos|>"),
        position_id_per_seconds=25,
        pad_token_id=tokenizer.pad_token_id,
    )
    processor = tf.Qwen2_5OmniProcessor(
        tf.Qwen2VLImageProcessor(size=make_sizes(28)),
        tf.Qwen2VLVideoProcessor(size=make_sizes(28)),
        tf.WhisperFeatureExtractor(feature_size=80, chunk_length=30, return_attention_mask=True),
        tokenizer,
        chat_template=chatml(
            "<|vision_bos|><|IMAGE|><|vision_eos|>",
            "<|vision_bos|><|VIDEO|><|vision_eos|>",
            _AUDIO_MARKER,
        ),
    )
    model = rescale(tf.Qwen2_5OmniThinkerForConditionalGeneration(config))
    save(directory, model, processor)


def make_voxtral(directory: Path) -> None:
    with TemporaryDirectory() as folder:
        _write_tekken(Path(folder) / "tekken.json")
        tokenizer = tf.MistralCommonBackend.from_pretrained(folder)
        processor = tf.VoxtralProcessor(tf.WhisperFeatureExtractor(feature_size=80), tokenizer)
        model = rescale(tf.VoxtralForConditionalGeneration(_make_voxtral_config(tokenizer)))
        save(directory, model, processor, pad_token_id=11)  # copies the file of the tokenizer


def _make_voxtral_config(tokenizer: Any) -> Any:
    return tf.VoxtralConfig(
        audio_config={
            "num_mel_bins": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 128,
            "hidden_size": 32,
            "max_source_positions": 1500,
        },
        text_config={
            "model_type": "llama",
            **text_values(tokenizer, vocab_size=tokenizer.vocab_size, head_dim=16),
        },
        audio_token_id=24,
    )


_LOUDNESS = 100.0
_CONTRAST = 2.0  # of the matrices of the encoder


def make_voxtral_realtime(directory: Path) -> None:
    with TemporaryDirectory() as folder:
        _write_tekken(Path(folder) / "tekken.json", _STREAMING)
        tokenizer = tf.MistralCommonBackend.from_pretrained(folder)
        processor = tf.VoxtralRealtimeProcessor(
            tf.VoxtralRealtimeFeatureExtractor(feature_size=80), tokenizer
        )
        config = tf.VoxtralRealtimeConfig(
            audio_config={
                "num_mel_bins": 80,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "head_dim": 16,
                "intermediate_size": 64,
                "hidden_size": 32,
                "max_position_embeddings": 1500,
                "sliding_window": 40,
            },
            text_config={
                "model_type": "voxtral_realtime_text",
                **text_values(tokenizer, vocab_size=tokenizer.vocab_size, head_dim=16),
                "sliding_window": 24,
            },
            default_num_delay_tokens=6,
        )
        model = rescale(tf.VoxtralRealtimeForConditionalGeneration(config))
        # The audio has to outweigh the token that it is added to, and clips have to differ.
        model.model.multi_modal_projector.linear_2.weight.data *= _LOUDNESS
        for parameter in model.model.audio_tower.layers.parameters():
            parameter.data *= _CONTRAST if parameter.ndim == 2 else 1.0
        save(directory, model, processor, pad_token_id=11)


_NUM_CONTROL_TOKENS = 1000
_CONTROL_TOKENS = {
    0: "<unk>",
    1: "<s>",
    2: "</s>",
    3: "[INST]",
    4: "[/INST]",
    5: "[AVAILABLE_TOOLS]",
    6: "[/AVAILABLE_TOOLS]",
    7: "[TOOL_RESULTS]",
    8: "[/TOOL_RESULTS]",
    9: "[TOOL_CALLS]",
    10: "[IMG]",
    11: "<pad>",
    12: "[IMG_BREAK]",
    13: "[IMG_END]",
    14: "[PREFIX]",
    15: "[MIDDLE]",
    16: "[SUFFIX]",
    17: "[SYSTEM_PROMPT]",
    18: "[/SYSTEM_PROMPT]",
    19: "[TOOL_CONTENT]",
    20: "[ARGS]",
    21: "[CALL_ID]",
    22: "[THINK]",
    23: "[/THINK]",
    24: "[AUDIO]",
    25: "[BEGIN_AUDIO]",
    32: "[STREAMING_PAD]",
    33: "[STREAMING_WORD]",
    34: "[TRANSCRIBE]",
}


_WINDOWED: dict[str, Any] = {"chunk_length_s": 30.0}
_STREAMING: dict[str, Any] = {
    "transcription_format": "streaming",
    "transcription_delay_ms": 480.0,
    "streaming_look_ahead_ms": 2.5,
    "streaming_look_back_ms": 52.5,
    "streaming_n_left_pad_tokens": 8,
}


def _write_tekken(path: Path, audio: dict[str, Any] = _WINDOWED) -> None:
    """Write a small Tekken vocabulary, with some values of its config for audio.

    It has the control tokens and the first words of the vocabulary in mistral-common.
    """
    import mistral_common

    source = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    content: dict[str, Any] = json.loads(source.read_text())
    content["vocab"] = content["vocab"][:1000]
    content["config"] |= {"default_vocab_size": _NUM_CONTROL_TOKENS + 1000, "version": "v7"}
    content["special_tokens"] = [
        {
            "rank": rank,
            "token_str": _CONTROL_TOKENS.get(rank, f"<SPECIAL_{rank}>"),
            "is_control": True,
        }
        for rank in range(_NUM_CONTROL_TOKENS)
    ]
    for name in ("multimodal", "image"):
        content.pop(name, None)
    content["audio"] = {
        "sampling_rate": 16000,
        "frame_rate": 12.5,
        **audio,
        "audio_encoding_config": {"num_mel_bins": 80, "hop_length": 160, "window_size": 400},
    }
    path.write_text(json.dumps(content))
