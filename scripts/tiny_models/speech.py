"""Makers of tiny speech models: an encoder of audio, and a decoder that attends to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers as tf

from tiny_models.building import make_tokenizer, rescale, save

LANGUAGES = ("en", "de", "fr", "zh")
_SHORT_S = 3  # windows of 3 s instead of 30
_WINDOW_S = 30
_TIMES_PER_S = 50
_END_FACTOR = 6.0  # of the weights of the end, so that texts end soon
_AFTER_LANGUAGES = ("translate", "transcribe", "startoflm", "startofprev", "nospeech")


def make_whisper(directory: Path) -> None:
    _make_whisper(directory, LANGUAGES)


def make_whisper_en(directory: Path) -> None:
    """Make a Whisper for English alone: it has no tokens for languages and tasks in its prompts."""
    _make_whisper(directory, ("en",), is_multilingual=False)


def make_brief_whisper(directory: Path) -> None:
    """Make a Whisper with windows and positions as many as OpenAI's, which ends its texts soon.

    A text that does not end is tried again because it repeats itself, not because it is unlikely.
    """
    _make_whisper(
        directory,
        LANGUAGES,
        window_s=_WINDOW_S,
        max_positions=448,
        end_factor=_END_FACTOR,
        logprob_threshold=-1e3,
    )


def _make_whisper(
    directory: Path,
    languages: tuple[str, ...],
    *,
    is_multilingual: bool = True,
    window_s: int = _SHORT_S,
    max_positions: int = 56,
    end_factor: float = 1.0,
    **settings: Any,
) -> None:
    """Make a Whisper; `settings` are added to its generation config."""
    tokenizer = _make_whisper_tokenizer(languages, num_times=_TIMES_PER_S * window_s + 1)
    id_of: Any = tokenizer.convert_tokens_to_ids
    end = id_of("<|endoftext|>")
    config = tf.WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=80,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=64,
        d_model=32,
        max_source_positions=_TIMES_PER_S * window_s,
        max_target_positions=max_positions,
        median_filter_width=7,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=id_of("<|startoftranscript|>"),
        # With the embeddings as its output weights, a random model would repeat its last token.
        tie_word_embeddings=False,
    )
    model = rescale(tf.WhisperForConditionalGeneration(config), seed=len(languages))
    model.proj_out.weight.data[end] *= end_factor
    processor = tf.WhisperProcessor(
        tf.WhisperFeatureExtractor(feature_size=80, chunk_length=window_s), tokenizer
    )
    tasks = {name: id_of(f"<|{name}|>") for name in ("translate", "transcribe")}
    ids = {f"<|{language}|>": id_of(f"<|{language}|>") for language in languages}
    save(
        directory,
        model,
        processor,
        is_multilingual=is_multilingual,
        **({"lang_to_id": ids, "task_to_id": tasks} if is_multilingual else {}),
        no_timestamps_token_id=id_of("<|notimestamps|>"),
        prev_sot_token_id=id_of("<|startofprev|>"),
        max_initial_timestamp_index=50,
        suppress_tokens=[5, 9, id_of("<|startoftranscript|>"), id_of("<|nospeech|>")],
        begin_suppress_tokens=[id_of("Ġ"), end],
        alignment_heads=[[0, 1], [1, 0]],
        return_timestamps=False,
        max_length=max_positions,
        **settings,
    )


def _make_whisper_tokenizer(languages: tuple[str, ...], *, num_times: int) -> Any:
    """Make a tokenizer with Whisper's order of tokens: text, then special ones, then times."""
    trained = json.loads(make_tokenizer([]).backend_tokenizer.to_str())["model"]
    tokenizer = tf.WhisperTokenizer(
        vocab={**trained["vocab"], "<|endoftext|>": len(trained["vocab"])},
        merges=[tuple(merge) for merge in trained["merges"]],
    )
    names = ("startoftranscript", *languages, *_AFTER_LANGUAGES, "notimestamps")
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in names]})
    tokenizer.add_tokens(
        [
            tf.AddedToken(f"<|{index * 0.02:.2f}|>", special=False, normalized=False)
            for index in range(num_times)
        ]
    )
    return tokenizer


def make_moonshine(directory: Path) -> None:
    tokenizer = make_tokenizer(["<unk>", "<s>", "</s>"], bos="<s>", eos="</s>", pad="</s>")
    config = tf.MoonshineConfig(
        vocab_size=len(tokenizer) + 5,
        hidden_size=32,
        intermediate_size=64,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=3,
        encoder_num_attention_heads=2,
        decoder_num_attention_heads=4,
        encoder_num_key_value_heads=2,
        decoder_num_key_value_heads=2,
        max_position_embeddings=194,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        decoder_start_token_id=tokenizer.bos_token_id,
        tie_word_embeddings=False,
    )
    model = rescale(tf.MoonshineForConditionalGeneration(config))
    extractor = tf.Wav2Vec2FeatureExtractor(
        feature_size=1, sampling_rate=16_000, do_normalize=False, return_attention_mask=True
    )
    save(directory, model, tf.Wav2Vec2Processor(extractor, tokenizer))
